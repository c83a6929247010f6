"""Gathers a policy of which each rank has some rows, in the form in which an engine holds it.

    FP8 weight, shards of whole blocks    each rank quantizes its rows to where the engine holds them; codes and scales
                                          are gathered there: one byte for each number
    any other that is sharded by rows     each rank rounds its rows as the engine does (BF16); those are gathered
    other shards                          `full_tensor`, in the policy's dtype

Which way a parameter goes follows from shapes, layout and the number of ranks: the same on all of them. A rank on
which something fails goes on gathering, whatever it holds, so that no other waits for it, and raises at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_gather_into_tensor, all_reduce
from torch.distributed.tensor import DTensor, Shard

from trl_fp8.quantization.blockwise import Destination, quantize_into
from trl_fp8.recipe.recipe import FP8Recipe

from .pieces import Layout


@dataclass(frozen=True)
class Rows:
    """`count` rows over `ranks`, as FSDP2 deals them: the last ranks have fewer, or none."""

    count: int
    ranks: int

    @property
    def each(self) -> int:
        """Of each rank but the last ones."""
        return -(-self.count // self.ranks)

    @property
    def padded(self) -> int:
        """What a gather takes, which wants equally many of each rank."""
        return self.each * self.ranks

    def of(self, rank: int) -> slice:
        """Which are this rank's; may be none."""
        return slice(*(min(self.each * number, self.count) for number in (rank, rank + 1)))


def rows_of_codes(shape: Sequence[int], ranks: int, block: tuple[int, int] | None) -> tuple[Rows, Rows] | None:
    """(rows of codes, rows of scales) of a weight `shape` that ranks can quantize in parts; None: shards split blocks.

    Rows are those of the first dim, experts in a weight `[E, N, K]`.
    """
    rows = Rows(shape[0], ranks)
    if len(shape) > 2:
        return rows, rows
    if block is None or rows.each % block[0]:
        return None
    return rows, Rows(-(-rows.count // block[0]), ranks)


class WrittenCodes(NamedTuple):
    """An FP8 weight that the engine holds already."""

    own: Destination | None  # the rows that this rank quantized; None if it has none
    sums: torch.Tensor  # int64 `[2]`: checksums of their codes and scales; of all ranks' once all has been gathered


def gathered(
    parameters: Sequence[tuple[str, torch.Tensor]], recipe: FP8Recipe, layout: Layout, device: torch.device
) -> Iterator[tuple[str, torch.Tensor | WrittenCodes]]:
    """Each of the policy's `(checkpoint name, parameter)`: whole, on `device`, until the next one is asked for.

    A collective, to be exhausted also if the consumer failed. Waits for the device once, before the first.

    Raises:
        RuntimeError: There is no memory to gather in, on any rank: before anything is gathered.
        Exception: What failed on this rank: after everything was gathered.
    """
    mesh = next((parameter.device_mesh for _, parameter in parameters if _is_in_rows(parameter)), None)
    ours = {name: p for name, p in parameters if _is_in_rows(p) and p.device_mesh == mesh}
    plans = {name: _plan(name, parameter, recipe, layout) for name, parameter in ours.items()}
    buffers = _buffers(list(plans.values()), device, mesh.get_group()) if plans else []
    codes = [name for name, plan in plans.items() if len(plan) == 2]
    sums = dict(zip(codes, all_sums := torch.zeros(len(codes), 2, dtype=torch.int64, device=device), strict=True))
    failure = None
    for name, parameter in parameters:
        if name not in plans:
            parameter = parameter.detach().to(device)
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            continue
        plan, rank, own = plans[name], mesh.get_local_rank(), None
        wholes = [part.whole(buffer) for part, buffer in zip(plan, buffers, strict=False)]
        try:
            local = parameter.detach().to_local().to(device)
            to = [whole[part.rows.of(rank)] for part, whole in zip(plan, wholes, strict=True)]
            if name not in sums:
                to[0].copy_(local)
            elif local.numel():
                own = Destination(local, *to, rows_before=tuple(part.rows_before(rank) for part in plan))
                options = recipe.scale_format, recipe.format.weight_block, recipe.format.weight_amax_floor
                sums[name].copy_(quantize_into([own], *options)[0])
        except Exception as error:
            failure = failure or error
        for part, whole in zip(plan, wholes, strict=True):
            mine = whole.unflatten(0, (-1, part.rows.each))[rank]
            all_gather_into_tensor(whole.view(torch.uint8), mine.view(torch.uint8), group=mesh.get_group())
            if part.held is not None and whole is not part.held:
                part.held.copy_(whole[: part.rows.count])
        yield name, WrittenCodes(own, sums[name]) if name in sums else wholes[0][: len(parameter)]
    if codes:
        all_reduce(all_sums, group=mesh.get_group())  # wraps modulo 2**64, as the checksums do
    if failure is not None:
        raise failure


def _is_in_rows(parameter: torch.Tensor) -> bool:
    """It is sharded by rows over all ranks; not over several dims of a mesh, as with replicas (HSDP)."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1 and parameter.placements == (Shard(0),)


class _Part(NamedTuple):
    """One tensor that is gathered."""

    rows: Rows
    row: torch.Size  # shape of one
    dtype: torch.dtype
    held: torch.Tensor | None = None  # where it ends; None: in the buffer, for the consumer

    @property
    def in_place(self) -> bool:
        return self.held is not None and self.held.is_contiguous() and self.rows.count == self.rows.padded

    @property
    def bytes(self) -> int:
        """Of the buffer."""
        return 0 if self.in_place else self.rows.padded * self.row.numel() * self.dtype.itemsize

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """What is gathered, `[rows.padded, *row]`."""
        return self.held if self.in_place else buffer[: self.bytes].view(self.dtype).view(-1, *self.row)

    def rows_before(self, rank: int) -> int:
        """As in `Destination`."""
        return self.rows.of(rank).start * self.row[:-1].numel()


def _plan(name: str, parameter: DTensor, recipe: FP8Recipe, layout: Layout) -> list[_Part]:
    """Codes and scales, in the engine; or the values."""
    shape, ranks, held = parameter.shape, parameter.device_mesh.size(), layout.held
    is_fp8, piece = name in recipe.fp8_tensors, layout.pieces.get(recipe.engine_name(name))
    block = recipe.format.weight_block if is_fp8 and recipe.tensor_parallel_size == 1 else None
    if block and piece and (rows := rows_of_codes(shape, ranks, block)):
        both = held[recipe.engine_name(name)], held[recipe.scale_name(name)]
        both = [t.view(len(t), -1, t.shape[-1]) if t.dim() == 4 else t for t in both]  # gate and up of all experts
        return [_Part(part, t.shape[1:], t.dtype, t) for part, t in zip(rows, both, strict=True)]
    dtype = torch.bfloat16 if is_fp8 else piece.dtype if piece else parameter.dtype
    return [_Part(Rows(shape[0], ranks), shape[1:], dtype)]


def _buffers(plans: list[list[_Part]], device: torch.device, group: ProcessGroup) -> list[torch.Tensor]:
    """Room for the largest of all first parts, and of all second ones; without it `RuntimeError` on every rank."""
    sizes = [max(part.bytes for part in parts if part) for parts in zip_longest(*plans)]
    failure = None
    try:
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except RuntimeError as error:
        failure = error
    failed = torch.tensor(float(failure is not None), device=device)
    all_reduce(failed, ReduceOp.MAX, group)
    if failed:
        raise failure or RuntimeError("another rank has no memory to gather the policy in; its log says why.")
    return buffers
