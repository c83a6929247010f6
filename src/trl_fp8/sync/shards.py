"""Gathers a policy whose rows are spread over ranks, in the form in which an engine holds it.

    FP8 weight, shards of whole blocks    each rank quantizes its rows into the engine's own tensors, where codes and
                                          scales are then gathered: one byte for each number
    other weight, shards in order         each rank rounds its part to the engine's dtype (BF16); the rounded parts
                                          are gathered
    shards in another order               PyTorch's `full_tensor`, in the policy's dtype

Shapes, layout and the number of ranks decide which of these ways a parameter takes, so all ranks decide the same. A
rank on which something fails continues to gather, even with wrong data, so that no other rank waits for it. It raises
at the end. Inside another library's gather it cannot continue: a failure there is a `GatherFailed`.
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
    """Distribution of `count` rows over `ranks`, as FSDP2 shards them: the last ranks have fewer rows, or none."""

    count: int
    ranks: int

    @property
    def per_rank(self) -> int:
        """Return the number of rows of a rank; the last ranks may have fewer."""
        return -(-self.count // self.ranks)

    @property
    def padded(self) -> int:
        """Return the number of rows in a gather, which pads the last ranks' parts to the size of the others."""
        return self.per_rank * self.ranks

    def of(self, rank: int) -> slice:
        """Return the rows of one rank as a slice, which may be empty."""
        return slice(min(self.per_rank * rank, self.count), min(self.per_rank * (rank + 1), self.count))


def rows_of_codes(shape: Sequence[int], ranks: int, spec: FormatSpec) -> tuple[Rows, Rows] | None:
    """Return how the rows (first dim) of a weight's codes and of its scales are distributed if each rank quantizes its
    own rows. Return None if ranks cannot do that, because

    - shards split blocks, or
    - a row of scales is no whole number of 4-byte words: checksums of parts would not add up to that of the whole.
    """
    rows, block = Rows(shape[0], ranks), spec.weight_block
    if block is None or len(shape) < 2 or spec.scale_shape(shape)[-1] * spec.scale_bytes % 4:
        return None
    if len(shape) > 2:
        return rows, rows
    if rows.per_rank % block[0]:
        return None
    return rows, Rows(-(-rows.count // block[0]), ranks)


class Sharded(NamedTuple):
    """This rank's part of a parameter whose rows or elements are distributed over a group of ranks in order."""

    local: torch.Tensor  # whole rows, with the parameter's number of dims; or elements, flat
    whole: torch.Size  # shape of the parameter
    group: ProcessGroup

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the parts of all ranks together: `whole`, or flat if `local` is flat."""
        return self.whole if self.local.dim() == len(self.whole) else torch.Size([self.whole.numel()])

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "Sharded | None":
        """Return this rank's part. None if the parameter is whole, or sharded in another way (HSDP, TP, on disk)."""
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            in_order = mesh.ndim == 1 and parameter.placements == (Shard(0),)
            return cls(parameter.detach().to_local(), parameter.shape, mesh.get_group()) if in_order else None
        part = getattr(parameter, "ds_tensor", None)  # ZeRO-3 (DeepSpeed 0.19): flat parts of equal size
        if part is None:
            return None
        shape, group = parameter.ds_shape, parameter.ds_process_group
        start, ranks = get_rank(group) * len(part), get_world_size(group)
        if len(part) != Rows(shape.numel(), ranks).per_rank or not part.is_floating_point():
            return None
        if len(shape) > 1 and shape[0] % ranks == 0:  # the flat parts are whole rows
            return cls(part.view(-1, *shape[1:]), shape, group)
        return cls(part[: max(shape.numel() - start, 0)], shape, group)  # without the padding of the last ranks


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter that FSDP2 or ZeRO-3 shards; the whole parameter if it is not sharded.

    With ZeRO-3 (DeepSpeed 0.19) the parameter is empty, and its attribute `ds_tensor` holds the part.
    """
    part = getattr(parameter, "ds_tensor", parameter).detach()
    return part.to_local() if isinstance(part, DTensor) else part


class GatherFailed(RuntimeError):
    """Another library's gather failed on this rank, and the other ranks are still in it.

    This rank has to end, because the others would take its next collective for the rest of that gather.
    """


@contextmanager
def gathering() -> Iterator[None]:
    """Turn errors of other libraries' gathers inside the block into `GatherFailed`."""
    try:
        yield
    except RuntimeError as error:
        raise GatherFailed(f"gathering the policy broke off on this rank, and the others wait: {error}") from error


class WrittenCodes(NamedTuple):
    """An FP8 weight that is in the engine already, because ranks quantized their rows into it."""

    own_rows: Destination | None  # the rows that this rank quantized; None if it has no rows
    # int64 `[2]`: checksums of the codes and of the scales in `own_rows`. After the last gather: of all ranks' rows
    sums: torch.Tensor


def gathered(
    parameters: Sequence[tuple[str, torch.Tensor]], recipe: FP8Recipe, layout: Layout, device: torch.device
) -> Iterator[tuple[str, torch.Tensor | WrittenCodes]]:
    """Yield `(checkpoint name, whole parameter)` on `device`. A parameter is valid until the next one is yielded.

    A collective: exhaust it even if the consumer failed. Waits for the device once, before the first parameter.

    Raises:
        RuntimeError: Some rank has no memory to gather in. Raised on all ranks before anything is gathered.
        GatherFailed: A gather of PyTorch's failed on this rank.
        Exception: Any other failure on this rank. Raised after everything was gathered.
    """
    # 1. Plan which parameters are gathered here, and where to. PyTorch gathers parameters that are sharded in another
    # order, or over another group of ranks than the first sharded parameter
    parts = {name: Sharded.of(parameter) for name, parameter in parameters}
    group = next((part.group for part in parts.values() if part is not None), None)
    sharded = {name: part for name, part in parts.items() if part is not None and part.group == group}
    plans = {name: _plan(name, part, recipe, layout) for name, part in sharded.items()}
    # 2. Allocate buffers for the largest parameter. All parameters use them, because each is consumed before the next
    # one is gathered
    buffers, all_sums = _allocated(list(plans.values()), device, group) if plans else ([], None)
    sums_left = iter(all_sums) if plans else None
    failure = None
    # 3. Gather one parameter after the other. Errors are raised at the end, because other ranks are in the same
    # gathers
    for name, parameter in parameters:
        if name not in plans:
            with gathering():
                parameter = parameter.detach().to(device)
                parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, parameter
            continue
        plan = plans[name]
        own_rows = None
        wholes = [part.whole(buffer) for part, buffer in zip(plan, buffers, strict=False)]
        sums = next(sums_left) if len(plan) == 2 else None  # a plan of 2 gathers codes and scales
        try:
            own_rows = _write_own(sharded[name], plan, wholes, sums, recipe)
        except Exception as error:
            failure = failure or error
        with gathering():
            for part, whole in zip(plan, wholes, strict=True):
                part.gather(whole, group)
        if sums is None:
            yield name, wholes[0][: plan[0].rows.count].view(sharded[name].whole)
        else:
            yield name, WrittenCodes(own_rows, sums)
    # 4. Sum the checksums of all ranks' parts, which gives those of whole weights: both wrap modulo 2**64
    if plans:
        with gathering():
            all_reduce(all_sums, group=group)
    if failure is not None:
        raise failure


class _Gather(NamedTuple):
    """One tensor that is gathered."""

    rows: Rows
    row: torch.Size  # shape of one row
    dtype: torch.dtype
    target: torch.Tensor | None = None  # the engine's tensor for the result; None: the consumer reads the buffer

    @property
    def in_place(self) -> bool:
        return self.target is not None and self.target.is_contiguous() and self.rows.count == self.rows.padded

    @property
    def buffer_bytes(self) -> int:
        return 0 if self.in_place else self.rows.padded * self.row.numel() * self.dtype.itemsize

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor to gather into, `[rows.padded, *row]`: `target` if possible, else part of `buffer`."""
        return self.target if self.in_place else buffer[: self.buffer_bytes].view(self.dtype).view(-1, *self.row)

    def gather(self, whole: torch.Tensor, group: ProcessGroup) -> None:
        """Fill `whole`, which has this rank's rows already, with all rows, and copy it to `target` if necessary."""
        data = whole.view(-1).view(torch.uint8)  # as bytes, which every backend can gather
        own = data.view(get_world_size(group), -1)[get_rank(group)]
        all_gather_into_tensor(data, own, group=group)
        if self.target is not None and not self.in_place:
            self.target.copy_(whole[: self.rows.count])


def _plan(name: str, parameter: Sharded, recipe: FP8Recipe, layout: Layout) -> list[_Gather]:
    """Return the gathers of a parameter: two for codes and scales into the engine's tensors, or one for its values."""
    shape, ranks = parameter.shape, get_world_size(parameter.group)
    piece = layout.pieces.get(recipe.engine_name(name))
    dtype = piece.dtype if piece else parameter.local.dtype
    if name in recipe.fp8_tensors:
        dtype = torch.bfloat16  # in which the values are gathered if ranks cannot quantize their own rows
        # With tensor parallelism an engine holds only a part of a weight, so whole rows cannot be gathered into it
        rows = rows_of_codes(shape, ranks, recipe.format) if recipe.tensor_parallel_size == 1 else None
        if piece and rows:
            # `of_engine` in place of `Layout.held`, which would look up all parameters for each weight
            pieces = piece, layout.pieces[recipe.scale_name(name)]
            gathers = []
            for rows_of, each in zip(rows, pieces, strict=True):
                target = joined_halves(each.of_engine())  # a view: without tensor parallelism each half is whole
                gathers.append(_Gather(rows_of, target.shape[1:], target.dtype, target))
            return gathers
    return [_Gather(Rows(shape[0], ranks), shape[1:], dtype)]


def _write_own(
    part: Sharded, plan: list[_Gather], wholes: list[torch.Tensor], sums: torch.Tensor | None, recipe: FP8Recipe
) -> Destination | None:
    """Write this rank's rows of a parameter into the tensors that are gathered. Return `WrittenCodes.own_rows`."""
    rank = get_rank(part.group)
    local = part.local.to(wholes[0].device)
    own_parts = [whole[gather.rows.of(rank)] for gather, whole in zip(plan, wholes, strict=True)]
    if sums is None:
        own_parts[0].copy_(local)
        return None
    # A checksum counts the rows of all dims but the last: an expert of `[E, N, K]` has N rows
    before = tuple(gather.rows.of(rank).start * gather.row[:-1].numel() for gather in plan)
    own = Destination(local, own_parts[0], as_blocks(own_parts[1]), rows_before=before)
    options = recipe.scale_format, recipe.format.weight_block, recipe.format.weight_amax_floor
    if local.numel():
        sums.copy_(quantize_into([own], *options)[0])
    return own if local.numel() else None


def _allocated(
    plans: list[list[_Gather]], device: torch.device, group: ProcessGroup
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return buffers and zeros `[n, 2]` for the checksums of the n weights that are gathered as codes and scales.

    One buffer serves the first gathers of all plans, the other the second ones. Each fits its largest gather.

    Raises `RuntimeError` on all ranks if any rank lacks the memory.
    """
    sizes = [max(part.buffer_bytes for part in parts if part) for parts in zip_longest(*plans)]
    failure = None
    failed = torch.zeros((), device=device)  # allocated before memory may run out, because the reduction needs it
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
