"""Where in an engine each checkpoint tensor lives: which rows and columns of which parameter, on this rank.

An engine describes itself as a `Layout` (for vLLM: engine/vllm/layout.py). Whoever compares what was sent with what is
held cuts the same piece out of both.
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
    """One checkpoint tensor's part in one engine parameter.

    Attributes:
        name: Name of the checkpoint tensor.
        module, attribute: The engine parameter. Looked up at every use, since vLLM may replace it.
        dtype: Its dtype.
        sent: For each dim, which part of the checkpoint tensor this rank holds (None: all of it).
        held: For each dim, where in the engine parameter it is (None: everywhere).
        halved: Whether dim 1 is two halves, the gate's rows and the up projection's, each with a dim of its
            own in `sent`.
        transposed: The engine parameter is `[K, N]` where the checkpoint tensor is `[N, K]`.
    """

    name: str
    module: nn.Module
    attribute: str
    dtype: torch.dtype
    sent: tuple[Span | None, ...] = ()
    held: tuple[Span | None, ...] = ()
    halved: bool = False
    transposed: bool = False

    @property
    def parameter(self) -> torch.Tensor:
        return getattr(self.module, self.attribute)

    def of_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return _cut(self._view(tensor), self.sent)

    def of_engine(self) -> torch.Tensor:
        return _cut(self._view(self.parameter.t() if self.transposed else self.parameter), self.held)

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(1, (2, -1)) if self.halved else tensor


@dataclass(frozen=True)
class Layout:
    """Every parameter of an engine.

    Attributes:
        pieces: Checkpoint name -> where it is.
        unreadable: Checkpoint name (of all experts of a layer: `...mlp.experts`) -> why it cannot be read back.
    """

    pieces: dict[str, Piece]
    unreadable: dict[str, str]

    def unreadable_name(self, name: str) -> str | None:
        """The entry of `unreadable` that a checkpoint tensor falls under, if any."""
        head, experts, _ = name.partition(".experts.")
        key = f"{head}.experts" if experts else name
        return key if key in self.unreadable else None


def _cut(tensor: torch.Tensor, spans: tuple[Span | None, ...]) -> torch.Tensor:
    for dim, span in enumerate(spans):
        if span is not None:
            tensor = tensor.narrow(dim, span.start, span.size)
    return tensor
