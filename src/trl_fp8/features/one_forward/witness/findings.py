"""What a comparison of the policy with its engine came to: what differs, and how near the rest came."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """What the engine computes otherwise."""

    module: str  # checkpoint name
    quantity: str  # of that module, and what both sides have

    def __str__(self) -> str:
        return f"{self.module}: {self.quantity}"


@dataclass(frozen=True)
class Agreement:
    """How near the outputs of one kind of module came."""

    module: str  # the one with the largest `excess`
    excess: float  # error over its bound
    relative: float  # norm of the error over that of the output


class Findings:
    """In the order in which they are made. What differs first in a module is kept, for the rest may follow from it.

    Attributes:
        differences: By module.
        agreements: By kind of module, those that differ among them.
        compared: Number of comparisons.
    """

    def __init__(self):
        self.differences: dict[str, Difference] = {}
        self.agreements: dict[str, Agreement] = {}
        self.compared = 0

    def values(self, kind: str, module: str, quantity: str, found: Tensor, own: Tensor, excess: float) -> bool:
        """Note two outputs whose error is `excess` times its bound; False if rounding does not explain it."""
        relative = ((found.double() - own.double()).norm() / own.double().norm().clamp_min(1e-30)).item()
        if kind not in self.agreements or excess > self.agreements[kind].excess:
            self.agreements[kind] = Agreement(module, excess, relative)
        apart = f"error {relative:.2g} of its size, {excess:.1f} times what rounding explains"
        return self.require(excess <= 1, module, f"{quantity} ({apart})")

    def same(self, module: str, quantity: str, own: float | None, engine: float | None) -> bool:
        """Note two numbers, None or 0 where there is none; equal up to the rounding of FP32."""
        close = abs((own or 0) - (engine or 0)) <= 1e-6 * abs(own or 0)
        words = ("none" if not value else f"{value:.6g}" for value in (own, engine))
        return self.require(close, module, "{} (the policy's {}, the engine's {})".format(quantity, *words))

    def require(self, same: bool, module: str, quantity: str) -> bool:
        """Note whether something is the same on both sides."""
        self.compared += 1
        if not same:
            self.differences.setdefault(module, Difference(module, quantity))
        return same
