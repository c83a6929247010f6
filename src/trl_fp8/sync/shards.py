"""Gathers a policy whose rows are spread over ranks, in the form in which an engine holds it.

    FP8 weight, shards of whole blocks    each rank quantizes its rows into the engine's own tensors, where codes and
                                          scales are then gathered: one byte for each number
    any other, shards in order            each rank rounds its part as the engine does (BF16); those are gathered
    other shards                          `full_tensor`, in the policy's dtype

Shapes, layout and the number of ranks decide which of these a parameter takes: all ranks decide the same. A rank on
which something fails goes on gathering, even with wrong data, so that no other rank waits for it, and raises at the
end. Inside another library's gather it cannot go on: a failure there is a `GatherFailed`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_gather_into_tensor, all_reduce, get_rank, get_world_size
from torch.distributed.tensor import DTensor, Shard

from trl_fp8.quantization.codec.blockwise import Destination, quantize_into
from trl_fp8.quantization.codec.weights import as_blocks, joined_halves
from trl_fp8.quantization.formats import FormatSpec
from trl_fp8.recipe.recipe import FP8Recipe

from .pieces import Layout


@dataclass(frozen=True)
class Rows:
    """`count` rows over `ranks`, as FSDP2 deals them: the last ranks have fewer, or none."""

    count: int
    ranks: int

    @property
    def each(self) -> int:
        """Return the rows of each rank; the last ranks may have fewer."""
        return -(-self.count // self.ranks)

    @property
    def padded(self) -> int:
        """Return the rows that a gather takes: the parts of the last ranks are padded to the size of the others."""
        return self.each * self.ranks

    def of(self, rank: int) -> slice:
        """Return the rows of one rank; may be none."""
        return slice(min(self.each * rank, self.count), min(self.each * (rank + 1), self.count))


def rows_of_codes(shape: Sequence[int], ranks: int, spec: FormatSpec) -> tuple[Rows, Rows] | None:
    """Return how ranks share the rows (first dim) of a weight's codes and of its scales, if each can quantize a part.

    None if they cannot, because shards split blocks, or because rows of scales are no whole words, of which checksums
    of parts would add up to that of the whole.
    """
    rows, block = Rows(shape[0], ranks), spec.weight_block
    if block is None or len(shape) < 2 or spec.scale_shape(shape)[-1] * spec.scale_bytes % 4:
        return None
    if len(shape) > 2:
        return rows, rows
    if rows.each % block[0]:
        return None
    return rows, Rows(-(-rows.count // block[0]), ranks)


class Sharded(NamedTuple):
    """This rank's part of a parameter whose rows, or elements, are dealt over a group in order."""

    local: torch.Tensor  # with the parameter's number of dims, or flat
    whole: torch.Size  # shape of the parameter
    group: ProcessGroup

    @property
    def shape(self) -> torch.Size:
        """Return the shape of all parts together."""
        return self.whole if self.local.dim() == len(self.whole) else torch.Size([self.whole.numel()])

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "Sharded | None":
        """Return this rank's part; None if the parameter is whole or sharded in another way (HSDP, TP, on disk)."""
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            in_order = mesh.ndim == 1 and parameter.placements == (Shard(0),)
            return cls(parameter.detach().to_local(), parameter.shape, mesh.get_group()) if in_order else None
        part = getattr(parameter, "ds_tensor", None)  # ZeRO-3 (DeepSpeed 0.19): flat, all of one size
        if part is None:
            return None
        shape, group = parameter.ds_shape, parameter.ds_process_group
        start, ranks = get_rank(group) * len(part), get_world_size(group)
        if len(part) != Rows(shape.numel(), ranks).each or not part.is_floating_point():
            return None
        if len(shape) > 1 and shape[0] % ranks == 0:  # the flat parts are whole rows
            return cls(part.view(-1, *shape[1:]), shape, group)
        return cls(part[: max(shape.numel() - start, 0)], shape, group)  # the last ranks' parts are padded


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter that FSDP2 or ZeRO-3 shards; all of it if it is not sharded.

    ZeRO-3 (DeepSpeed 0.19) keeps it beside an empty tensor.
    """
    part = getattr(parameter, "ds_tensor", parameter).detach()
    return part.to_local() if isinstance(part, DTensor) else part


class GatherFailed(RuntimeError):
    """Another library's gather broke off on this rank, and the other ranks are still in it. This rank has to end: they
    would take its next collective for the rest of that gather.
    """


@contextmanager
def gathering() -> Iterator[None]:
    """Turn errors of other libraries' gathers inside the block into `GatherFailed`."""
    try:
        yield
    except RuntimeError as error:
        raise GatherFailed(f"gathering the policy broke off on this rank, and the others wait: {error}") from error


class WrittenCodes(NamedTuple):
    """An FP8 weight that the engine holds already."""

    own: Destination | None  # the rows that this rank quantized; None if it has none
    sums: torch.Tensor  # int64 `[2]`: checksums of `own`'s codes and scales; after the last gather, of all ranks'


def gathered(
    parameters: Sequence[tuple[str, torch.Tensor]], recipe: FP8Recipe, layout: Layout, device: torch.device
) -> Iterator[tuple[str, torch.Tensor | WrittenCodes]]:
    """Yield each `(checkpoint name, whole parameter)` on `device`; it is valid until the next one is asked for.

    A collective: exhaust it even if the consumer failed. Waits for the device once, before the first parameter.

    Raises:
        RuntimeError: Some rank has no memory to gather in. On all ranks, before anything is gathered.
        GatherFailed: A gather that PyTorch makes failed on this rank.
        Exception: Whatever else failed on this rank. Raised after everything was gathered.
    """
    # 1. What is gathered here, and where to. Parameters of another group than the first one's are left to PyTorch
    parts = {name: Sharded.of(parameter) for name, parameter in parameters}
    group = next((part.group for part in parts.values() if part is not None), None)
    found = {name: part for name, part in parts.items() if part is not None and part.group == group}
    plans = {name: _plan(name, part, recipe, layout) for name, part in found.items()}
    # 2. Buffers for the largest of them, which all share: each is consumed before the next one is gathered
    buffers, all_sums = _room(list(plans.values()), device, group) if plans else ([], None)
    sums_left = iter(all_sums) if plans else None
    failure = None
    # 3. One parameter after the other. Errors are raised at the end: the other ranks are in the same gathers
    for name, parameter in parameters:
        if name not in plans:
            with gathering():
                parameter = parameter.detach().to(device)
                parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, parameter
            continue
        plan = plans[name]
        own = None
        wholes = [part.whole(buffer) for part, buffer in zip(plan, buffers, strict=False)]
        sums = next(sums_left) if len(plan) == 2 else None  # 2: codes and scales
        try:
            own = _write_own(found[name], plan, wholes, sums, recipe)
        except Exception as error:
            failure = failure or error
        for part, whole in zip(plan, wholes, strict=True):
            part.gather(whole, group)
        if sums is None:
            yield name, wholes[0][: plan[0].rows.count].view(found[name].whole)
        else:
            yield name, WrittenCodes(own, sums)
    # 4. Checksums of parts add up to that of the whole. int64 sums wrap modulo 2**64, as checksums do
    if plans:
        all_reduce(all_sums, group=group)
    if failure is not None:
        raise failure


class _Gather(NamedTuple):
    """One tensor that is gathered."""

    rows: Rows
    row: torch.Size  # shape of one
    dtype: torch.dtype
    target: torch.Tensor | None = None  # where the result goes; None: it stays in the buffer, for the consumer

    @property
    def in_place(self) -> bool:
        return self.target is not None and self.target.is_contiguous() and self.rows.count == self.rows.padded

    @property
    def buffer_bytes(self) -> int:
        return 0 if self.in_place else self.rows.padded * self.row.numel() * self.dtype.itemsize

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor that it is gathered into, `[rows.padded, *row]`: in place, or in `buffer`."""
        return self.target if self.in_place else buffer[: self.buffer_bytes].view(self.dtype).view(-1, *self.row)

    def gather(self, whole: torch.Tensor, group: ProcessGroup) -> None:
        """Fill `whole`, in which this rank's rows are already, and `target`."""
        data = whole.view(-1).view(torch.uint8)  # as bytes, which every backend gathers
        own = data.view(get_world_size(group), -1)[get_rank(group)]
        all_gather_into_tensor(data, own, group=group)
        if self.target is not None and not self.in_place:
            self.target.copy_(whole[: self.rows.count])


def _plan(name: str, parameter: Sharded, recipe: FP8Recipe, layout: Layout) -> list[_Gather]:
    """Return what is gathered of a parameter: codes and scales into the engine's tensors, or the values."""
    shape, ranks = parameter.shape, get_world_size(parameter.group)
    piece = layout.pieces.get(recipe.engine_name(name))
    dtype = piece.dtype if piece else parameter.local.dtype
    if name in recipe.fp8_tensors:
        dtype = torch.bfloat16  # unless each rank can quantize its rows
        rows = rows_of_codes(shape, ranks, recipe.format) if recipe.tensor_parallel_size == 1 else None
        if piece and rows:
            # Only these two pieces: `Layout.held` would look up all parameters, for each weight
            both = piece.of_engine(), layout.pieces[recipe.scale_name(name)].of_engine()
            both = map(joined_halves, both)  # views: without tensor parallelism each half is whole
            return [_Gather(part, t.shape[1:], t.dtype, t) for part, t in zip(rows, both, strict=True)]
    return [_Gather(Rows(shape[0], ranks), shape[1:], dtype)]


def _write_own(
    part: Sharded, plan: list[_Gather], wholes: list[torch.Tensor], sums: torch.Tensor | None, recipe: FP8Recipe
) -> Destination | None:
    """Write this rank's part of a parameter to where it is gathered. Returns `WrittenCodes.own`."""
    rank = get_rank(part.group)
    local = part.local.to(wholes[0].device)
    mine = [whole[one.rows.of(rank)] for one, whole in zip(plan, wholes, strict=True)]
    if sums is None:
        mine[0].copy_(local)
        return None
    # Rows of all dims but the last: an expert of `[E, N, K]` is N of them
    before = tuple(one.rows.of(rank).start * one.row[:-1].numel() for one in plan)
    own = Destination(local, mine[0], as_blocks(mine[1]), rows_before=before)
    options = recipe.scale_format, recipe.format.weight_block, recipe.format.weight_amax_floor
    if local.numel():
        sums.copy_(quantize_into([own], *options)[0])
    return own if local.numel() else None


def _room(
    plans: list[list[_Gather]], device: torch.device, group: ProcessGroup
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a buffer for the plans' first tensors and one for their second, each of the largest's size, and room for
    checksums `[n, 2]` of the n weights gathered as codes. `RuntimeError` on all ranks if one has no memory for them.
    """
    sizes = [max(part.buffer_bytes for part in parts if part) for parts in zip_longest(*plans)]
    failure = None
    failed = torch.zeros((), device=device)  # before memory may run out: the reduction below needs it
    try:
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        sums = torch.zeros(sum(len(plan) == 2 for plan in plans), 2, dtype=torch.int64, device=device)
    except RuntimeError as error:
        failure = error
        failed.fill_(1)
    all_reduce(failed, ReduceOp.MAX, group)
    if failed:
        raise failure or RuntimeError("another rank has no memory to gather the policy in; its log says why.")
    return buffers, sums
