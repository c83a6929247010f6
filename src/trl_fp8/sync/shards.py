"""Gathers a policy whose rows are spread over ranks, in the form in which an engine holds it.

`gathered` yields one whole parameter after the other. For each parameter `Sharded.of` finds this rank's part, `_plan`
chooses a way, `_write_own` writes this rank's part, and `_Gather.gather` adds the parts of the other ranks. The ways:

    FP8 weight, shards of whole blocks    each rank quantizes its rows into the engine's own tensors, where codes and
                                          scales are then gathered: one byte for each number
    other weight, shards in order         each rank rounds its part to the engine's dtype (BF16); the rounded parts
                                          are gathered
    shards in another order               PyTorch's `full_tensor`, in the policy's dtype

Shapes, layout and the number of ranks decide which of these ways a parameter takes, so all ranks decide the same. A
rank on which something fails continues to gather, even with wrong data, so that no other rank waits for it. This rank
raises its error at the end. Inside another library's gather a rank cannot continue: a failure there is a
`GatherFailed`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        return -(-self.count // self.ranks)  # -(-a // b) rounds up

    @property
    def padded(self) -> int:
        """Return the number of rows in a gather, which pads the last ranks' parts to the size of the others."""
        return self.per_rank * self.ranks

    def of(self, rank: int) -> slice:
        """Return the rows of one rank as a slice, which may be empty."""
        start = min(self.per_rank * rank, self.count)
        end = min(self.per_rank * (rank + 1), self.count)
        return slice(start, end)


def rows_of_codes(shape: Sequence[int], ranks: int, spec: FormatSpec) -> tuple[Rows, Rows] | None:
    """Return how the rows (first dim) of a weight's codes and of its scales are distributed if each rank quantizes its
    own rows. Return None if ranks cannot do that, because

    - the whole weight has one scale, or
    - shards split blocks, or
    - a row of scales is no whole number of 4-byte words: checksums of parts would not add up to that of the whole.
    """
    block = spec.weight_block
    if block is None or len(shape) < 2:
        return None
    bytes_of_scale_row = spec.scale_shape(shape)[-1] * spec.scale_bytes
    if bytes_of_scale_row % 4:
        return None
    rows = Rows(shape[0], ranks)
    if len(shape) > 2:  # a row is a whole expert, with all of its codes and scales
        return rows, rows
    rows_of_block = block[0]
    if rows.per_rank % rows_of_block:
        return None
    rows_of_scales = Rows(-(-rows.count // rows_of_block), ranks)
    return rows, rows_of_scales


class Sharded(NamedTuple):
    """This rank's part of a parameter whose rows or elements are distributed over a group of ranks in order."""

    local: torch.Tensor  # whole rows, with the parameter's number of dims; or elements, flat
    whole: torch.Size  # shape of the parameter
    group: ProcessGroup

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the parts of all ranks together: `whole`, or flat if `local` is flat."""
        if self.local.dim() == len(self.whole):
            return self.whole
        return torch.Size([self.whole.numel()])

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "Sharded | None":
        """Return this rank's part. None if the parameter is whole, or sharded in another way (HSDP, TP, on disk)."""
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if mesh.ndim != 1 or parameter.placements != (Shard(0),):
                return None
            return cls(parameter.detach().to_local(), parameter.shape, mesh.get_group())
        part = getattr(parameter, "ds_tensor", None)  # ZeRO-3 (DeepSpeed 0.19): flat parts of equal size
        if part is None:
            return None
        shape = parameter.ds_shape
        group = parameter.ds_process_group
        ranks = get_world_size(group)
        elements = Rows(shape.numel(), ranks)
        if len(part) != elements.per_rank or not part.is_floating_point():
            return None
        if len(shape) > 1 and shape[0] % ranks == 0:  # the flat parts are whole rows
            return cls(part.view(-1, *shape[1:]), shape, group)
        # DeepSpeed pads the parts of the last ranks at their ends
        own_elements = elements.of(get_rank(group))
        return cls(part[: own_elements.stop - own_elements.start], shape, group)


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
    # int64 `[2]`: checksums of the codes and of the scales in `own_rows`. After the last gather `gathered` replaces
    # them by the checksums of all ranks' rows
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
    group = None
    sharded: dict[str, Sharded] = {}
    plans: dict[str, list[_Gather]] = {}
    for name, parameter in parameters:
        part = Sharded.of(parameter)
        if part is None:
            continue
        if group is None:
            group = part.group
        if part.group == group:
            sharded[name] = part
            plans[name] = _plan(name, part, recipe, layout)
    # 2. Allocate buffers for the largest parameter. All parameters use them, because each parameter is consumed before
    # the next one is gathered
    if plans:
        buffers, all_sums = _allocated(list(plans.values()), device, group)
        sums_left = iter(all_sums)  # views `[2]` of its rows
    failure = None
    # 3. Gather one parameter after the other. Errors are raised at the end, because other ranks are in the same
    # gathers
    for name, parameter in parameters:
        if name not in plans:
            with gathering():
                parameter = parameter.detach().to(device)
                if isinstance(parameter, DTensor):
                    parameter = parameter.full_tensor()
            yield name, parameter
            continue
        plan = plans[name]
        # A plan of one gather uses only the first buffer
        wholes = [gather.whole(buffer) for gather, buffer in zip(plan, buffers, strict=False)]
        sums = None
        if len(plan) == 2:  # codes and scales
            sums = next(sums_left)
        own_rows = None
        try:
            own_rows = _write_own(sharded[name], plan, wholes, sums, recipe)
        except Exception as error:
            failure = failure or error
        with gathering():
            for gather, whole in zip(plan, wholes, strict=True):
                gather.gather(whole, group)
        if sums is None:
            without_padding = wholes[0][: plan[0].rows.count]
            yield name, without_padding.view(sharded[name].whole)
        else:
            yield name, WrittenCodes(own_rows, sums)
    # 4. Add up the checksums of all ranks' parts. The sums are the checksums of whole weights: both wrap modulo 2**64
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
        """Return whether the parts can be gathered in `target` itself, which has no room for padding."""
        return self.target is not None and self.target.is_contiguous() and self.rows.count == self.rows.padded

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes that `whole` needs in a buffer."""
        if self.in_place:
            return 0
        return self.rows.padded * self.row.numel() * self.dtype.itemsize

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor to gather into, `[rows.padded, *row]`: `target` if possible, else part of `buffer`."""
        if self.in_place:
            return self.target
        return buffer[: self.buffer_bytes].view(self.dtype).view(-1, *self.row)

    def gather(self, whole: torch.Tensor, group: ProcessGroup) -> None:
        """Fill `whole`, which has this rank's rows already, with all rows, and copy it to `target` if necessary."""
        data = whole.view(-1).view(torch.uint8)  # as bytes, which every backend can gather
        own = data.view(get_world_size(group), -1)[get_rank(group)]
        all_gather_into_tensor(data, own, group=group)
        if self.target is not None and not self.in_place:
            self.target.copy_(whole[: self.rows.count])


def _plan(name: str, parameter: Sharded, recipe: FP8Recipe, layout: Layout) -> list[_Gather]:
    """Return the gathers of a parameter: two for codes and scales into the engine's tensors, or one for its values."""
    shape = parameter.shape
    ranks = get_world_size(parameter.group)
    rows_of_values = Rows(shape[0], ranks)
    piece = layout.pieces.get(recipe.engine_name(name))  # None: an audit will say that the engine lacks the parameter
    if name not in recipe.fp8_tensors:
        dtype = piece.dtype if piece else parameter.local.dtype
        return [_Gather(rows_of_values, shape[1:], dtype)]
    rows = None
    # With tensor parallelism an engine holds only a part of a weight, so whole rows cannot be gathered into it
    if piece and recipe.tensor_parallel_size == 1:
        rows = rows_of_codes(shape, ranks, recipe.format)
    if rows is None:  # gather the values, which the writer then quantizes
        return [_Gather(rows_of_values, shape[1:], torch.bfloat16)]
    gathers = []
    pieces = piece, layout.pieces[recipe.scale_name(name)]
    for rows_of_piece, each in zip(rows, pieces, strict=True):
        # `of_engine` and not `Layout.held`, which would look up all parameters for each weight
        target = joined_halves(each.of_engine())  # a view: without tensor parallelism each half is whole
        gathers.append(_Gather(rows_of_piece, target.shape[1:], target.dtype, target))
    return gathers


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
    if not local.numel():
        return None
    # A checksum counts the rows of all dims except the last: an expert of `[E, N, K]` has N rows
    before = tuple(gather.rows.of(rank).start * gather.row[:-1].numel() for gather in plan)
    codes, scale = own_parts
    own = Destination(local, codes, as_blocks(scale), rows_before=before)
    options = recipe.scale_format, recipe.format.weight_block, recipe.format.weight_amax_floor
    [own_sums] = quantize_into([own], *options)
    sums.copy_(own_sums)
    return own


def _allocated(
    plans: list[list[_Gather]], device: torch.device, group: ProcessGroup
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return buffers and zeros `[n, 2]` for the checksums of the n weights that are gathered as codes and scales.

    One buffer serves the first gathers of all plans, the other the second ones. Each fits its largest gather.

    Raises `RuntimeError` on all ranks if any rank lacks the memory.
    """
    first_bytes = max(plan[0].buffer_bytes for plan in plans)
    plans_of_codes = [plan for plan in plans if len(plan) == 2]  # codes and scales
    second_bytes = max((plan[1].buffer_bytes for plan in plans_of_codes), default=0)
    failure = None
    failed = torch.zeros((), device=device)  # allocated before memory may run out, because the reduction needs it
    try:
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in (first_bytes, second_bytes)]
        sums = torch.zeros(len(plans_of_codes), 2, dtype=torch.int64, device=device)
    except RuntimeError as error:
        failure = error
        failed.fill_(1)
    all_reduce(failed, ReduceOp.MAX, group)
    if failed:
        raise failure or RuntimeError("another rank has no memory to gather the policy in; its log says why.")
    return buffers, sums
