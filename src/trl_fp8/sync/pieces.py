"""Places of checkpoint tensors in an engine: rows and columns of a parameter, on this rank.

An engine describes itself as a `Layout`; a sync cuts the same piece out of the tensor sent and of the parameter.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trl_fp8.quantization.codec.digest import Table
from trl_fp8.recipe.messages import listed


@dataclass(frozen=True)
class Span:
    """Elements `start .. start + size` of one dim."""

    start: int
    size: int
    whole: int | None = None  # required size of the dim; None: any

    def blocks(self, block: int) -> "Span":
        """Return the span of the scales, one for each `block` elements."""
        return Span(self.start // block, -(-self.size // block), self.whole and -(-self.whole // block))

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.narrow(dim, self.start, self.size)


@dataclass(frozen=True)
class Joined:
    """Spans in consecutive parts of one dim, such as q, k and v in one checkpoint tensor."""

    parts: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def whole(self) -> int:
        return sum(part.whole for part in self.parts)

    def blocks(self, block: int) -> "Joined":
        return Joined(tuple(part.blocks(block) for part in self.parts))

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a copy, as the spans of several parts have no common stride."""
        wholes = tensor.split([part.whole for part in self.parts], dim)
        return torch.cat([part.of(whole, dim) for part, whole in zip(self.parts, wholes, strict=True)], dim)


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor's part in one engine parameter."""

    name: str  # of the checkpoint tensor
    module: nn.Module
    attribute: str  # of `module`: the engine parameter
    dtype: torch.dtype  # of the engine parameter
    # For each dim, this rank's span of the checkpoint tensor; None: all
    sent: tuple[Span | Joined | None, ...] = ()
    in_engine: tuple[Span | None, ...] = ()  # for each dim, its span in the engine parameter; None: all
    # (dim, count): this dim has `count` equal parts, such as gate and up; `sent` and `in_engine` see two dims
    equal: tuple[int, int] | None = None
    transposed: bool = False  # the engine parameter is `[..., K, N]` where what is sent is `[..., N, K]`
    sent_transposed: bool = False  # the other way round; `sent` counts dims as the engine does
    zero: bool = False  # this rank holds zeros instead
    derived: Callable[[], torch.Tensor] | None = None  # computes it from what the engine was sent; None: it is sent

    @property
    def is_copied(self) -> bool:
        """Return whether `of_sent` copies, because this rank's part is not one view."""
        return any(isinstance(span, Joined) and span.size != span.whole for span in self.sent)

    @property
    def parameter(self) -> torch.Tensor:
        """Return the engine parameter, looked up anew: syncs and audits need the one that the engine reads now."""
        return getattr(self.module, self.attribute)

    def of_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a checkpoint tensor, or of its scales; a view unless `is_copied`, or zeros.

        `ValueError` if it is of another size.
        """
        part = self._cut(tensor.mT if self.sent_transposed else tensor, self.sent)
        return torch.zeros_like(part) if self.zero else part

    def of_engine(self) -> torch.Tensor:
        """Return the same part where the engine holds it; a view."""
        parameter = self.parameter.detach()
        return self._cut(parameter.mT if self.transposed else parameter, self.in_engine)

    def _cut(self, tensor: torch.Tensor, spans: tuple[Span | Joined | None, ...]) -> torch.Tensor:
        if self.equal is not None:
            dim, count = self.equal
            tensor = tensor.unflatten(dim, (count, -1))
        for dim, span in enumerate(spans):
            if span is not None:
                if span.whole not in (None, tensor.shape[dim]):
                    raise ValueError(
                        f"{self.name} has {tensor.shape[dim]} elements in dim {dim} where the engine has its part of "
                        f"{span.whole}. Was the model resized after its folder or the engine was made? Save it with "
                        "save_pretrained, and start from there."
                    )
                if span.size != tensor.shape[dim]:
                    tensor = span.of(tensor, dim)
        return tensor


class Layout:
    """Every parameter of an engine on this rank."""

    def __init__(self, pieces: Iterable[Piece]):
        pieces = list(pieces)
        self.pieces = {piece.name: piece for piece in pieces}
        self.names = tuple(self.pieces)
        twice = [piece.name for piece in pieces if self.pieces[piece.name] is not piece]
        if twice:
            raise RuntimeError(f"several tensors of an engine have one name: {listed(twice)}.")
        # Tensors that no policy has: they are computed from others
        self.derived = tuple(piece for piece in self.pieces.values() if piece.derived is not None)
        self._places: list[tuple] | None = None
        self._held: dict[str, torch.Tensor] = {}

    def part(self, names: Collection[str]) -> "Layout":
        """Return the layout of the pieces in `names`."""
        return Layout(piece for name, piece in self.pieces.items() if name in names)

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """Return each piece as the engine holds it, `Piece.of_engine`, by name."""
        self._look()
        return self._held

    def sums(self) -> torch.Tensor:
        """Return the checksum `[n]` of each piece as it is now, on the device."""
        self._look()
        return self._table.sums()

    def changed(self, seal: Sequence[int]) -> list[str]:
        """Return the names of the pieces whose checksums are no longer those of `seal`. Waits for the device once."""
        return [name for name, a, b in zip(self.names, seal, self.sums().tolist(), strict=True) if a != b]

    def _look(self) -> None:
        """Rebuild the views, and the table of their addresses, if a parameter has moved.

        A view of a replaced parameter would still hold what was sent, and prove nothing. Comparing addresses costs far
        less than cutting hundreds of pieces.
        """
        parameters = [piece.parameter for piece in self.pieces.values()]
        places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in parameters]
        if places != self._places:
            self._held = {name: piece.of_engine() for name, piece in self.pieces.items()}
            self._table, self._places = Table(list(self._held.values())), places
