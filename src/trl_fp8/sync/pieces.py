"""Where in an engine each checkpoint tensor lives: which rows and columns of which parameter, on this rank.

An engine describes itself as a `Layout`; the ledger cuts the same piece out of what was sent and of what is held.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Span:
    """Elements `start .. start + size` of one dim."""

    start: int
    size: int

    def blocks(self, block: int) -> "Span":
        """The same span counted in blocks of so many elements (of a scale)."""
        return Span(self.start // block, -(-self.size // block))


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor's part in one engine parameter."""

    name: str  # of the checkpoint tensor
    module: nn.Module
    attribute: str  # of `module`: the engine parameter, looked up at every use, since vLLM may replace it
    dtype: torch.dtype  # of the engine parameter
    sent: tuple[Span | None, ...] = ()  # for each dim, what of the checkpoint tensor this rank holds; None: all
    held: tuple[Span | None, ...] = ()  # for each dim, where in the engine parameter it is; None: everywhere
    halved: bool = False  # dim 1 is two halves, the gate's rows and the up projection's, each a dim in `sent`
    transposed: bool = False  # the engine parameter is `[K, N]` where the checkpoint tensor is `[N, K]`

    def of_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._cut(tensor, self.sent)

    def of_engine(self) -> torch.Tensor:
        parameter = getattr(self.module, self.attribute)
        return self._cut(parameter.t() if self.transposed else parameter, self.held)

    def _cut(self, tensor: torch.Tensor, spans: tuple[Span | None, ...]) -> torch.Tensor:
        tensor = tensor.unflatten(1, (2, -1)) if self.halved else tensor
        for dim, span in enumerate(spans):
            if span is not None:
                tensor = tensor.narrow(dim, span.start, span.size)
        return tensor


@dataclass(frozen=True)
class Layout:
    """Every parameter of an engine, by checkpoint name."""

    pieces: dict[str, Piece]  # where it is
    unreadable: dict[str, str]  # why it cannot be read back; all experts of a layer are `...mlp.experts`

    def unreadable_name(self, name: str) -> str | None:
        """The entry of `unreadable` that a checkpoint tensor falls under, if any."""
        head, experts, _ = name.partition(".experts.")
        key = f"{head}.experts" if experts else name
        return key if key in self.unreadable else None
