"""Where in an engine each checkpoint tensor lives: which rows and columns of which parameter, on this rank.

An engine describes itself as a `Layout`; a sync cuts the same piece out of what is sent and of what is held.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from trl_fp8.quantization.digest import Table


@dataclass(frozen=True)
class Span:
    """Elements `start .. start + size` of one dim."""

    start: int
    size: int
    whole: int | None = None  # how many there have to be

    def blocks(self, block: int) -> "Span":
        """The same span counted in blocks of so many elements (of a scale)."""
        return Span(self.start // block, -(-self.size // block), self.whole and -(-self.whole // block))


@dataclass(frozen=True)
class Spans:
    """Several spans of one dim, which an engine holds one after the other."""

    parts: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def blocks(self, block: int) -> "Spans":
        """As `Span.blocks`."""
        return Spans(tuple(part.blocks(block) for part in self.parts))


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor's part in one engine parameter."""

    name: str  # of the checkpoint tensor
    module: nn.Module
    attribute: str  # of `module`: the engine parameter
    dtype: torch.dtype  # of the engine parameter
    sent: tuple[Span | Spans | None, ...] = ()  # by dim, what of the checkpoint tensor this rank holds; None: all
    held: tuple[Span | None, ...] = ()  # for each dim, where in the engine parameter it is; None: everywhere
    halved: bool = False  # dim 1 is two halves, the gate's rows and the up projection's, each a dim in `sent`
    transposed: bool = False  # the engine parameter is `[K, N]` where the checkpoint tensor is `[N, K]`

    @property
    def parameter(self) -> torch.Tensor:
        """The engine parameter, looked up anew: a sync writes, and is compared with, what the engine reads."""
        return getattr(self.module, self.attribute)

    def of_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a checkpoint tensor, or of its scales; a view, or a copy of several spans. `ValueError`
        if it is of another size.
        """
        return self._cut(tensor, self.sent)

    def of_engine(self) -> torch.Tensor:
        """The same part where the engine holds it; a view."""
        parameter = self.parameter.detach()
        return self._cut(parameter.t() if self.transposed else parameter, self.held)

    def _cut(self, tensor: torch.Tensor, spans: tuple[Span | Spans | None, ...]) -> torch.Tensor:
        tensor = tensor.unflatten(1, (2, -1)) if self.halved else tensor
        for dim, span in enumerate(spans):
            parts = span.parts if isinstance(span, Spans) else [span] if span else []
            if cuts := [self._narrowed(tensor, dim, part) for part in parts]:
                tensor = torch.cat(cuts, dim) if len(cuts) > 1 else cuts[0]
        return tensor

    def _narrowed(self, tensor: torch.Tensor, dim: int, span: Span) -> torch.Tensor:
        if span.whole not in (None, tensor.shape[dim]):
            raise ValueError(
                f"{self.name} has {tensor.shape[dim]} elements in dim {dim} where the engine has its part of "
                f"{span.whole}. Was the model resized after its folder or the engine was made? Save it with "
                "save_pretrained, and start from there."
            )
        return tensor if span.size == tensor.shape[dim] else tensor.narrow(dim, span.start, span.size)


class Layout:
    """Every parameter of an engine on this rank.

    Attributes:
        pieces: Where each checkpoint tensor is, by name.
        names: The same names, in order.
    """

    def __init__(self, pieces: Iterable[Piece]):
        self.pieces = {piece.name: piece for piece in pieces}
        self.names = tuple(self.pieces)
        self._places: list[tuple] | None = None
        self._held: dict[str, torch.Tensor] = {}

    def part(self, names: Collection[str]) -> "Layout":
        """Those of the pieces that are among `names`."""
        return Layout(piece for name, piece in self.pieces.items() if name in names)

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """Each piece as the engine holds it, `Piece.of_engine`, by name."""
        self._look()
        return self._held

    def sums(self) -> torch.Tensor:
        """Checksum `[n]` of each piece as it is now, on the device."""
        self._look()
        return self._table.sums()

    def _look(self) -> None:
        """Make views, and the table of their addresses, where a parameter is not where it was."""
        parameters = [piece.parameter for piece in self.pieces.values()]
        places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in parameters]
        if places != self._places:
            self._held = {name: piece.of_engine() for name, piece in self.pieces.items()}
            self._table, self._places = Table(list(self._held.values())), places
