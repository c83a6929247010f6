"""Places of checkpoint tensors in an engine: which rows and columns of which parameter, on this rank.

An engine is described by a `Layout` of `Piece`s. For each piece a sync takes this rank's part of the checkpoint
tensor, and copies it to its place, a view of the engine's parameter.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from trl_fp8.quantization.codec.digest import Table
from trl_fp8.recipe.messages import listed


@dataclass(frozen=True)
class Span:
    """Elements `start .. start + size - 1` of one dim."""

    start: int
    size: int
    whole: int | None = None  # the size that the dim must have; None: any size

    def blocks(self, block: int) -> "Span":
        """Return the span of these elements' scales, each for `block` elements. `start` is a multiple of `block`."""
        whole = None if self.whole is None else -(-self.whole // block)  # -(-a // b) rounds up
        return Span(self.start // block, -(-self.size // block), whole)

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.narrow(dim, self.start, self.size)


@dataclass(frozen=True)
class Joined:
    """One span in each of several consecutive parts of a dim, such as q, k and v in one checkpoint tensor."""

    parts: tuple[Span, ...]  # each counts from the start of its part; `whole` is the size of the part

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def whole(self) -> int:
        return sum(part.whole for part in self.parts)

    def blocks(self, block: int) -> "Joined":
        return Joined(tuple(part.blocks(block) for part in self.parts))

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the spans side by side. They have no common stride, so this is a copy."""
        wholes = tensor.split([part.whole for part in self.parts], dim)
        return torch.cat([part.of(whole, dim) for part, whole in zip(self.parts, wholes, strict=True)], dim)


@dataclass(frozen=True)
class Piece:
    """This rank's part of one checkpoint tensor, and its place in one engine parameter."""

    name: str  # the engine's name of the checkpoint tensor; several pieces may lie in one engine parameter
    module: nn.Module
    attribute: str  # name of the engine parameter in `module`
    dtype: torch.dtype  # dtype of the engine parameter
    # This rank's span of each dim of the checkpoint tensor. None, or a missing entry, stands for the whole dim
    sent: tuple[Span | Joined | None, ...] = ()
    # The span of each dim of the engine parameter in which this rank's part lies. None, or a missing entry, as above
    in_engine: tuple[Span | None, ...] = ()
    # (dim, count): this dim consists of `count` equal parts, such as gate and up, and this rank has the same span of
    # each part. Before the spans are cut, this dim of both tensors is viewed as two dims [count, size / count], and
    # `sent` and `in_engine` have an entry for each of the two. Example: vllm/layout.py
    equal: tuple[int, int] | None = None
    transposed: bool = False  # whether the engine parameter is `[..., K, N]` and the checkpoint tensor `[..., N, K]`
    # Whether the checkpoint tensor is `[..., K, N]` and the engine parameter `[..., N, K]`. `sent` then refers to
    # `[..., N, K]`
    sent_transposed: bool = False
    # Whether this rank holds zeros instead of a bias: ranks add up their outputs, so only one may hold the bias
    zero: bool = False
    # Computes the tensor from other tensors that a sync has sent. None: a sync sends this tensor itself
    derived: Callable[[], torch.Tensor] | None = None

    @property
    def is_copied(self) -> bool:
        """Return whether `of_sent` makes a copy, because this rank's part consists of several spans."""
        return any(isinstance(span, Joined) and span.size != span.whole for span in self.sent)

    @property
    def parameter(self) -> torch.Tensor:
        """Return the engine parameter. It is looked up each time, because the engine may have replaced it."""
        return getattr(self.module, self.attribute)

    def of_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a checkpoint tensor: a view unless `is_copied` or `zero`.

        Raises `ValueError` if the checkpoint tensor has another size than the engine expects.
        """
        if self.sent_transposed:
            tensor = tensor.mT
        part = self._cut(tensor, self.sent)
        return torch.zeros_like(part) if self.zero else part

    def place(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Copy this rank's `part` to its place in the checkpoint tensor `whole`: the inverse of `of_sent`."""
        for dim, joined in enumerate(self.sent):
            # A `Joined` part is no view of `whole`, so each of its spans is placed by itself, with its start counted
            # from the start of the whole dim
            if isinstance(joined, Joined) and joined.size != joined.whole:
                start_in_whole = start_in_part = 0
                for span in joined.parts:
                    in_whole = Span(start_in_whole + span.start, span.size, joined.whole)
                    single = replace(self, sent=(*self.sent[:dim], in_whole, *self.sent[dim + 1 :]))
                    single.place(whole, part.narrow(dim, start_in_part, span.size))
                    start_in_whole += span.whole
                    start_in_part += span.size
                return
        if self.sent_transposed:
            whole = whole.mT
        self._cut(whole, self.sent).copy_(part)

    def of_engine(self) -> torch.Tensor:
        """Return the part in the engine parameter, as a view."""
        parameter = self.parameter.detach()
        if self.transposed:
            parameter = parameter.mT
        return self._cut(parameter, self.in_engine)

    def _cut(self, tensor: torch.Tensor, spans: tuple[Span | Joined | None, ...]) -> torch.Tensor:
        """Return the elements of a tensor that lie in the spans of all dims; `tensor` itself if nothing is cut off."""
        if self.equal is not None:
            dim, count = self.equal
            tensor = tensor.unflatten(dim, (count, -1))
        for dim, span in enumerate(spans):
            if span is None:
                continue
            if span.whole not in (None, tensor.shape[dim]):
                raise ValueError(
                    f"{self.name} has size {tensor.shape[dim]} in dim {dim}, and the engine expects {span.whole}. "
                    "Was the model resized after it was saved, or after the engine was started? Save it with "
                    "save_pretrained, and start from there."
                )
            if span.size != tensor.shape[dim]:
                tensor = span.of(tensor, dim)
        return tensor


class Layout:
    """All pieces of an engine on this rank."""

    blame = ""  # appended to errors that name tensors; engine/vllm_server/staged_engine.py names the server here

    def __init__(self, pieces: Iterable[Piece]):
        pieces = list(pieces)
        self.pieces = {piece.name: piece for piece in pieces}
        self.names = tuple(self.pieces)
        # Of several pieces with one name `self.pieces` has only the last
        twice = [piece.name for piece in pieces if self.pieces[piece.name] is not piece]
        if twice:
            raise RuntimeError(f"several tensors of an engine have one name: {listed(twice)}.")
        # Tensors that are not sent but computed from others
        self.derived = tuple(piece for piece in self.pieces.values() if piece.derived is not None)
        self._held: dict[str, torch.Tensor] = {}  # name -> `Piece.of_engine`
        self._places: list[tuple] | None = None  # address and form of each parameter when `_held` was made

    def part(self, names: Collection[str]) -> "Layout":
        """Return the layout of the pieces in `names`."""
        return Layout(piece for name, piece in self.pieces.items() if name in names)

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """Return name -> the tensor that the engine holds (`Piece.of_engine`)."""
        self._refresh()
        return self._held

    def sums(self) -> torch.Tensor:
        """Return the checksums `[n]` of the engine's current tensors, on the device, in the order of `names`."""
        self._refresh()
        return self._table.sums()

    def changed(self, seal: Sequence[int]) -> list[str]:
        """Return the names of the tensors whose checksums differ from those in `seal`. Waits for the device once."""
        sums = self.sums().tolist()
        return [name for name, sealed, now in zip(self.names, seal, sums, strict=True) if now != sealed]

    def _refresh(self) -> None:
        """Rebuild the views in `_held` and the table of their addresses if a parameter was moved or replaced.

        An old view of a replaced parameter still holds what was sent, so its checksum would prove nothing. Comparing
        addresses costs far less than making hundreds of views anew.
        """
        parameters = [piece.parameter for piece in self.pieces.values()]
        places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in parameters]
        if places != self._places:
            self._places = places
            self._held = {name: piece.of_engine() for name, piece in self.pieces.items()}
            self._table = Table(list(self._held.values()))
