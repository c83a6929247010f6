"""Writes a policy into an engine's own tensors.

    FP8 weight     this rank's part is rounded to BF16 and quantized: codes and scales into the engine's tensors
    FP8 codes      this rank's part of codes and scales is copied
    other weight   this rank's part is copied, which rounds it to the engine's dtype
    buffer         copied
    derived        computed from the tensors just written, as vLLM does after a load: two parts of MLA's kv_b_proj,
                   and MXFP8's scales as a kernel reads them

`write` sorts tensors by kind into two queues (`_queue_quantized`, `_queue_copy`), and `_flush` writes the queued ones.

The writer keeps a checksum of everything that it computes, and the audit compares the checksums with the engine's
tensors. Writing does not synchronize with the device. There are no intermediate copies, except of a tensor parallel
rank's part of a fused q, k and v. vLLM's own loader would gather the shards of a fused layer, copy them and process
the layer again.
"""

from collections.abc import Callable, Iterable

import torch
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.codec.blockwise import Destination, dequantize_weight, first_rows, quantize_into
from trl_fp8.quantization.codec.digest import digests_of_sent
from trl_fp8.quantization.codec.weights import as_blocks, common_amax, dead_scale, extremes, held_weight, stored_scale
from trl_fp8.recipe.recipe import FP8Recipe

from .pieces import Layout
from .policy_checks import not_finite
from .shards import WrittenCodes
from .weight_stream import NamedTensor, by_scale


# (checkpoint name, full tensor). An FP8 weight may be a `Float8Tensor`, or `WrittenCodes` if the engine has it already
SentTensor = tuple[str, torch.Tensor | WrittenCodes]
SAMPLED_WEIGHTS = 8  # about how many weights have their quantization error measured
SAMPLED_ROWS = 128  # rows of such a weight that are measured


class Writer:
    """One write of a policy, or of those of its tensors that are in `layout`."""

    def __init__(self, layout: Layout, recipe: FP8Recipe, *, one_by_one: bool = False):
        """Start a write. With `one_by_one` each tensor is written before the source yields the next one.

        This is necessary if the source changes a tensor when it yields the next one, because it unmerges an adapter or
        gathers the next parameter into the same memory.
        """
        self._layout = layout
        self._pieces = layout.pieces
        self._held = layout.held  # name in the engine -> the engine's tensor
        self._recipe = recipe
        self._one_by_one = one_by_one
        self._weights: list[tuple[str, Destination]] = []  # queue of FP8 weights that are not written yet
        self._copies: list[tuple[str, torch.Tensor]] = []  # queue of other tensors that are not written yet
        self.sums: dict[str, torch.Tensor] = {}  # name in the engine -> checksum of what was written, on the device
        self.finite: dict[str, torch.Tensor] = {}  # name of a tensor that was copied -> whether all of it is finite
        self.unknown: list[str] = []  # names of sent tensors that the engine does not have
        self.fp8_weights = 0  # number of FP8 weights
        every = max(1, len(recipe.fp8_tensors) // SAMPLED_WEIGHTS)
        # Names of the weights whose quantization error is measured. Sorting makes them the same on all ranks
        self._sampled = frozenset(sorted(recipe.fp8_tensors)[::every])
        self._errors: list[torch.Tensor] = []  # `[2]` for each sampled weight: sums of squares of error and weight

    def write(self, parameters: Iterable[SentTensor], buffers: Iterable[NamedTensor] = ()) -> None:
        """Write a policy's parameters, in model order, and buffers; `RuntimeError` if FP8 weights are missing.

        `WrittenCodes` are in the engine already, and only their checksums are kept. `sums` refers to these tensors and
        has no copies, because the source changes them in place: they are checksums of this rank's part, until the
        source, at its end, adds up the checksums of all ranks.
        """
        expected = [name for name in self._recipe.fp8_tensors if self._recipe.engine_name(name) in self._pieces]
        # 1. Parameters. Unless `one_by_one`, they are queued here and written together below, because hundreds of
        # launches for small tensors would take longer than the copies. A group has the FP8 weights that share one
        # scale, or a single parameter
        for group in by_scale(parameters, self._recipe, expected, copy=self._one_by_one):
            first_name, first = next(iter(group.items()))  # all members of a group are of one kind
            if isinstance(first, WrittenCodes):  # the only member of its group
                self._count(first_name, first.own_rows, first.sums)
            elif isinstance(first, Float8Tensor):
                for name, codes in group.items():
                    stored = codes.qdata, stored_scale(codes, self._recipe.format)
                    for engine_name, tensor in zip(self._names(name), stored, strict=True):
                        self._queue_copy(engine_name, tensor)
                    self.fp8_weights += 1
            elif first_name in self._recipe.fp8_tensors:
                self._queue_quantized(group)
            else:  # the only member of its group
                self._queue_copy(self._recipe.engine_name(first_name), first)
            if self._one_by_one:
                self._flush()
        # 2. Buffers
        for name, buffer in buffers:
            self._queue_copy(self._recipe.engine_name(name), buffer)
        self._flush()
        # 3. Tensors that are derived from those just written. One at a time, because all of them together would take
        # the memory of many weights
        for piece in self._layout.derived:
            self._queue_copy(piece.name, piece.derived())
            self._flush()

    def inspect(self, reduce_max: Callable[[torch.Tensor], None] | None = None) -> tuple[float, dict[str, int]]:
        """Return `SyncReport.weight_relative_error` and `.dead_blocks`. Waits for the device once, or twice if there
        are dead blocks.

        `ValueError` names the tensors that are not finite. `reduce_max` replaces a tensor by its maximum over ranks,
        so that all ranks raise or none does.
        """
        # 1. A flag for each copied tensor and each FP8 weight: 1 if it is not finite. For an FP8 weight it is enough
        # to read the few scales, because a scale of a block with NaN or infinity is not finite either
        recipe = self._recipe
        fp8_weights = [name for name in sorted(recipe.fp8_tensors) if recipe.scale_name(name) in self._held]
        scales = [self._held[recipe.scale_name(name)] for name in fp8_weights]
        names = [*self.finite, *fp8_weights]
        flags_of_kinds = []
        if self.finite:
            flags_of_kinds.append(~torch.stack(list(self.finite.values())))
        smallest = torch.zeros(0)  # the smallest scale of each FP8 weight
        if scales:
            smallest, largest = extremes(scales)
            flags_of_kinds.append(~largest.isfinite())
        flags = torch.cat(flags_of_kinds).float()
        if reduce_max is not None:
            reduce_max(flags)
        # 2. One transfer to the host, which waits for the device
        squares = torch.stack(self._errors).sum(0) if self._errors else flags.new_zeros(2)
        numbers = torch.cat([squares, flags, smallest.to(flags.device)]).tolist()
        squared_error, squared_weight = numbers[:2]
        end_of_flags = 2 + len(names)
        is_bad = numbers[2:end_of_flags]
        least_scales = numbers[end_of_flags:]
        bad = [name for name, flag in zip(names, is_bad, strict=True) if flag]
        if bad:
            raise ValueError(not_finite(bad, len(names), "The engine refuses to generate until a sync ends."))
        # 3. Dead blocks: blocks that are as good as zero. They are counted only in weights whose smallest scale is the
        # scale of such a block. Most weights have none
        limit = dead_scale(recipe.format, recipe.scale_format)
        dead = {}
        for name, scale, least in zip(fp8_weights, scales, least_scales, strict=True):
            if least <= limit:
                dead[name] = (as_blocks(scale).float() <= limit).sum()
        counts = torch.stack(list(dead.values())).tolist() if dead else []
        relative_error = (squared_error / squared_weight) ** 0.5 if squared_weight else 0.0
        return relative_error, dict(zip(dead, counts, strict=True))

    def _names(self, name: str) -> tuple[str, str]:
        """Return the names of an FP8 weight's codes and scales in the engine."""
        return self._recipe.engine_name(name), self._recipe.scale_name(name)

    def _queue_quantized(self, weights: dict[str, torch.Tensor]) -> None:
        """Queue FP8 weights that share a scale, or one weight that shares its scale with no other."""
        # The maximum over whole weights, not over this rank's part, because all ranks have to compute the same scale
        amax = common_amax(list(weights.values()), self._recipe.format)
        for name, weight in weights.items():
            codes_name, scale_name = self._names(name)
            unknown = [each for each in (codes_name, scale_name) if each not in self._pieces]
            if unknown:
                self.unknown += unknown
                continue
            part = self._pieces[codes_name].of_sent(weight)
            scale = as_blocks(self._held[scale_name])
            self._weights.append((name, Destination(part, self._held[codes_name], scale, amax)))
            if self._pieces[codes_name].is_copied:  # write it now, because copies of all weights would not fit
                self._flush()

    def _queue_copy(self, name: str, tensor: torch.Tensor) -> None:
        """Queue a tensor to be copied, by its name in the engine."""
        if name not in self._pieces:
            self.unknown.append(name)
            return
        part = self._pieces[name].of_sent(tensor.detach())
        # Shapes may differ by dims of size 1: the one scale of a whole weight is 0-d, a bias may be one row
        self._copies.append((name, part.view_as(self._held[name])))
        if self._pieces[name].is_copied:
            self._flush()

    def _flush(self) -> None:
        """Write the queued tensors in place, into the tensors that the engine's kernels read."""
        recipe = self._recipe
        if self._weights:
            options = recipe.scale_format, recipe.format.weight_block, recipe.format.weight_amax_floor
            sums_of_weights = quantize_into([destination for _, destination in self._weights], *options)
            for (name, destination), sums in zip(self._weights, sums_of_weights.unbind(), strict=True):
                self._count(name, destination, sums)
        if self._copies:
            names = [name for name, _ in self._copies]
            tensors = [tensor for _, tensor in self._copies]
            # One launch for all tensors, which rounds to the engine's dtype as it copies
            torch._foreach_copy_([self._held[name] for name in names], tensors)
            # Checksums of what should have been written: `digests_of_sent` rounds the sent tensors by a computation of
            # its own. Checksums of the engine's tensors would match them even after a wrong write
            sums_of_copies, finite = digests_of_sent(tensors, [self._pieces[name].dtype for name in names])
            self.sums.update(zip(names, sums_of_copies.unbind(), strict=True))
            self.finite.update(zip(names, finite.unbind(), strict=True))
        self._weights = []
        self._copies = []

    def _count(self, name: str, written: Destination | None, sums: torch.Tensor) -> None:
        """Count an FP8 weight, keep its checksums `[2]`, and measure the error of this rank's part, if it has one."""
        self.sums.update(zip(self._names(name), sums.unbind(), strict=True))
        self.fp8_weights += 1
        if written is not None and name in self._sampled:
            self._errors.append(self._error_of(written))

    def _error_of(self, destination: Destination) -> torch.Tensor:
        """Return the sums of squares of error and weight, fp32 `[2]`, over the first rows (of the first expert)."""
        first_matrix = (0,) * (destination.weight.dim() - 2)  # index of the first expert; () for a plain weight
        codes = destination.codes[first_matrix]
        scale = destination.scale[first_matrix]
        quantized = first_rows(held_weight(codes, scale, self._recipe.format), SAMPLED_ROWS)
        weight = destination.weight[first_matrix].detach()
        rows = weight[: quantized.shape[-2]].to(torch.bfloat16).float()  # rounded to BF16, as they were quantized
        error = rows - dequantize_weight(quantized, torch.float32)
        return torch.stack([error.square().sum(), rows.square().sum()])
