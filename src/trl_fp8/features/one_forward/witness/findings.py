"""Result of a comparison of the policy with its engine: what differs, and how near the rest came."""

from torch import Tensor

from . import bounds


class Findings:
    """In the order in which they are made.

    Attributes:
        differences: Module -> the quantity that differs and what both sides have. The first one of a module is kept,
            because later ones may follow from it.
        excesses: Kind of module -> the largest error over its bound.
        compared: Number of comparisons.
    """

    def __init__(self):
        self.differences: dict[str, str] = {}
        self.excesses: dict[str, float] = {}
        self.compared = 0

    def lines(self) -> list[str]:
        return [f"{module}: {quantity}" for module, quantity in self.differences.items()]

    def values(
        self, kind: str, module: str, found: Tensor, own: Tensor, bound: Tensor, quantity: str = "output"
    ) -> bool:
        """Compare two outputs; `bound`: see `bounds.excess`. False if rounding does not explain the error."""
        excess = bounds.excess(found, own, bound)
        self.excesses[kind] = max(excess, self.excesses.get(kind, 0.0))
        relative = ((found.double() - own.double()).norm() / own.double().norm().clamp_min(1e-30)).item()
        apart = f"error {relative:.2g} of its size, {excess:.1f} times what rounding explains"
        return self.require(excess <= 1, module, f"{quantity} ({apart})")

    def same(self, module: str, quantity: str, own: float | None, engine: float | None) -> bool:
        """Compare two numbers up to the rounding of FP32; None or 0 where there is none."""
        close = abs((own or 0) - (engine or 0)) <= 1e-6 * abs(own or 0)
        words = ("none" if not value else f"{value:.6g}" for value in (own, engine))
        return self.require(close, module, "{} (the policy's {}, the engine's {})".format(quantity, *words))

    def require(self, same: bool, module: str, quantity: str) -> bool:
        """Note whether something is the same on both sides."""
        self.compared += 1
        if not same:
            self.differences.setdefault(module, quantity)
        return same
