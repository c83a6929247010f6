"""Blockwise e4m3 quantization: each block of a tensor (128x128 of a weight, 128 elements of a token) has a scale.

With one scale per block, an outlier harms only its own block. 128x128 blocks are the layout that vLLM's FP8 linears,
DeepGEMM and the DeepSeek-V3 checkpoints share (arXiv 2412.19437, section 3.3). The result is torchao's
`Float8Tensor`: `qdata` holds the codes, and `scale` the FP32 numbers that dequantize them by multiplication.

    quantize_weight, quantize_activation    return a new `Float8Tensor`
    quantize_into                           writes codes and scales into an engine's tensors, returns their checksums
    dequantize_weight                       returns codes times scales

On a GPU with e4m3 instructions kernels/block_kernels.py quantizes 128x128 blocks and groups of 128 elements, and reads
a tensor once. Everything else is quantized by `_quantize_by_torch`, which gives the same bytes. Hosts without a GPU
may have no Triton, so the functions that call the kernels import them.

torchao's own `Float8Tensor.from_hp` computes the scale in the input's dtype, turns an all-zero block into NaN, refuses
ragged shapes, has no power-of-two scales, and needs 8.5 times the weight in temporary memory. On aligned weights with
fp32 scales it gives the same bytes for `w.float()` and `hp_value_lb=1e-12`: tests/quantization/test_blockwise.py.

Shape letters: N out-features, K in-features, `...` any leading dims (experts), n x k blocks.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.formats import (
    ACTIVATION_AMAX_FLOOR,
    BLOCK,
    WEIGHT_AMAX_FLOOR,
    ScaleFormat,
    check_scale_format,
)

from .digest import digest, digests, same_kinds
from .e4m3 import E4M3, E8M0, casts_in_hardware, saturating_cast_, scale_from_amax


_ELEMENTS_AT_ONCE = 2**19  # elements quantized at once on CPU, which needs 11 bytes of temporary memory for each


def quantize_weight(
    weight: torch.Tensor,
    scale_format: ScaleFormat = "pow2",
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    amax_floor: float = WEIGHT_AMAX_FLOOR,
    amax: torch.Tensor | None = None,
    name: str = "weight",
    check_finite: bool = True,
) -> Float8Tensor:
    """Quantize a weight in blocks.

    Args:
        weight: `[..., N, K]` in BF16, FP16 or FP32. Blocks at the edge count as padded with zeros.
        scale_format: `"pow2"` or `"fp32"`; see `trl_fp8.quantization.codec.e4m3`.
        block: Rows and columns that share a scale.
        amax_floor: Smallest amax that a scale is made from.
        amax: One amax for all blocks, 0-d. None: each block has its own.
        name: Name of the weight in an error.
        check_finite: Raise if the weight holds NaN or infinities. On CUDA this waits for the device.

    Returns:
        A `Float8Tensor` with `qdata` `[..., N, K]` and fp32 `scale` `[..., n, k]`, both new storage. Temporary
        memory: an fp32 copy of the (padded) weight on CPU, none on a GPU with 128x128 blocks.

    Raises:
        ValueError: `weight` has fewer than two dims or is not floating point, `scale_format` is unknown, or the
            weight is not finite; the message names the weight and its first bad block.
    """
    if weight.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}: block quantization needs at least two dims [N, K].")
    tensor = _quantize(weight, block, name, scale_format, amax_floor, amax)
    if not check_finite:
        return tensor
    # NaN and infinity survive the maximum and the division by 448, so checking the few scales checks all elements
    bad = ~torch.isfinite(tensor.scale)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} holds NaN or infinite values ({int(bad.sum())} of {bad.numel()} blocks, the first at block "
            f"index {first} of {block[0]}x{block[1]} blocks): it cannot be quantized. Look at the last optimizer "
            "step: a lower learning rate, gradient clipping (max_grad_norm) or another dtype are the usual remedies."
        )
    return tensor


def quantize_activation(
    activation: torch.Tensor,
    scale_format: ScaleFormat = "pow2",
    *,
    group: int = BLOCK,
    amax_floor: float = ACTIVATION_AMAX_FLOOR,
    reciprocal: bool = False,
) -> Float8Tensor:
    """Quantize activations in groups along the last dim, as vLLM does before an FP8 linear.

    Args:
        activation: `[..., K]`, floating point. The last group of a row counts as padded with zeros.
        scale_format, amax_floor, reciprocal: Rounding of the engine's kernel, see `formats.ActivationScaling`.
        group: Number of elements that share a scale.

    Returns:
        A `Float8Tensor` with `qdata` `[..., K]` and fp32 `scale` `[..., k]`. A NaN makes its whole group NaN.
    """
    return _quantize(activation, (group,), "activation", scale_format, amax_floor, reciprocal=reciprocal)


class Destination(NamedTuple):
    """A weight, or this rank's part of a weight, and the tensors that receive its codes and scales."""

    weight: torch.Tensor  # `[..., N, K]`, floating point; rounded to BF16 before it is quantized
    codes: torch.Tensor  # e4m3, of the weight's shape, any strides
    scale: torch.Tensor  # `[..., n, k]`, fp32, or e8m0 for powers of two; any strides
    amax: torch.Tensor | None = None  # one amax for all blocks, 0-d; None: each block has its own
    # If `weight` is a part: how many rows of codes, and how many rows of scales, the whole weight has before this
    # part. The rows of all leading dims count. The checksums of the part take these numbers as `digest(first_row=)`
    rows_before: tuple[int, int] = (0, 0)


def quantize_into(
    destinations: Sequence[Destination], scale_format: ScaleFormat, block: tuple[int, int] | None, amax_floor: float
) -> torch.Tensor:
    """Quantize weights straight into their destinations. Does not synchronize with the device.

    Args:
        destinations: All on one device.
        scale_format, amax_floor: As for `quantize_weight`.
        block: Rows and columns that share a scale. None: each weight has one scale, made from `Destination.amax`.

    Returns:
        int64 `[n, 2]`: checksums (`digest`) of each weight's codes and scales. They are made from the computed values,
        not read back from the destinations. On CPU small weights of one shape are quantized together, and a large
        weight in parts, so that temporary copies have about `_ELEMENTS_AT_ONCE` elements.
    """
    if not destinations:
        return torch.zeros(0, 2, dtype=torch.int64)
    device = destinations[0].weight.device
    if device.type != "cpu":
        if block == (BLOCK, BLOCK) and casts_in_hardware(device):
            return _quantize_by_kernel(destinations, scale_format, amax_floor)
        return torch.cat([_quantize_batch([each], scale_format, block, amax_floor) for each in destinations])
    kinds = []  # weights of equal kinds are quantized together
    for index, each in enumerate(destinations):
        # Weights that are quantized together cannot have an amax each, so the index makes such a weight a kind of its
        # own
        amax_kind = None if each.amax is None else index
        kinds.append((each.weight.shape, each.weight.dtype, each.rows_before, amax_kind))
    limits = [_ELEMENTS_AT_ONCE // each.weight.numel() for each in destinations]  # of weights in a batch
    sums = torch.empty(len(destinations), 2, dtype=torch.int64)
    for indices in same_kinds(kinds, limits):
        batch = [destinations[index] for index in indices]
        sums[indices] = _quantize_batch(batch, scale_format, block, amax_floor)
    return sums


def _quantize_by_kernel(
    destinations: Sequence[Destination], scale_format: ScaleFormat, amax_floor: float
) -> torch.Tensor:
    from trl_fp8.quantization.kernels.block_kernels import quantize_blocks

    sums = torch.zeros(len(destinations), 2, dtype=torch.int64, device=destinations[0].weight.device)
    for each, sums_of_weight in zip(destinations, sums, strict=True):
        quantize_blocks(
            each.weight.detach(),
            square=True,
            scale_format=scale_format,
            amax_floor=amax_floor,
            round_to_bf16=True,
            into=(each.codes, each.scale),
            sums=sums_of_weight,
            first_rows=each.rows_before,
        )
        # Autograd does not see what a kernel writes. So raise the version of the tensors, as torch's own writes do.
        # A backward through the old values is then an error; otherwise it would silently use the new weight
        torch.autograd.graph.increment_version([each.codes, each.scale])
    return sums


def _quantize_batch(
    batch: list[Destination], scale_format: ScaleFormat, block: tuple[int, int] | None, amax_floor: float
) -> torch.Tensor:
    """Quantize G weights of one shape and amax. Return the checksums `[G, 2]`."""
    first = batch[0]
    rows_before, scales_before = first.rows_before
    if len(batch) == 1 and first.weight.numel() > _ELEMENTS_AT_ONCE and first.weight.device.type == "cpu":
        return _quantize_in_parts(first, scale_format, block, amax_floor).unsqueeze(0)
    stacked = torch.stack([each.weight.detach() for each in batch]).to(torch.bfloat16)
    block = block or tuple(stacked.shape[-2:])
    codes, scale = _quantize_by_torch(stacked, block, scale_format, amax_floor, amax=first.amax)
    scale = scale.to(first.scale.dtype)
    # The destinations are views of different engine parameters; one call copies to all of them
    torch._foreach_copy_([each.codes for each in batch], list(codes.unbind()))
    scale_sums = digests(scale, scales_before)
    scales = [each.scale for each in batch]
    if scale.dtype == E8M0:  # CUDA's copy of many tensors does not support this dtype, so copy bytes
        scales = [each.view(torch.uint8) for each in scales]
        scale = scale.view(torch.uint8)
    torch._foreach_copy_(scales, list(scale.unbind()))
    return torch.stack([digests(codes, rows_before), scale_sums], 1)


def _quantize_in_parts(
    destination: Destination, scale_format: ScaleFormat, block: tuple[int, int] | None, amax_floor: float
) -> torch.Tensor:
    """Quantize one large weight on CPU, with a temporary copy of one part at a time. Return its checksums `[2]`."""
    rows_before, scales_before = destination.rows_before
    code_sum = 0  # the checksums of the parts' codes add up to the checksum of all codes
    # There are few scales, so they are collected here, and then written and summed up at once
    scale = torch.empty_like(destination.scale, memory_format=torch.contiguous_format)
    for part_index, scale_index, row in _row_parts(destination.weight.shape, block):
        part = destination.weight[part_index].detach().to(torch.bfloat16)
        part_block = block or tuple(part.shape[-2:])
        codes, part_scale = _quantize_by_torch(part, part_block, scale_format, amax_floor, amax=destination.amax)
        destination.codes[part_index].copy_(codes)
        scale[scale_index] = part_scale
        code_sum = code_sum + digest(codes, first_row=rows_before + row)
    destination.scale.copy_(scale)
    return torch.stack([code_sum, digest(scale, first_row=scales_before)])


def _row_parts(shape: torch.Size, block: tuple[int, int] | None) -> Iterator[tuple[tuple, tuple, int]]:
    """Split a weight `[..., N, K]` into parts of about `_ELEMENTS_AT_ONCE` elements, made of whole blocks.

    Yield for each part: its index in the weight, the index of its scales in all scales, and the number of its first
    row, counted over all leading dims.
    """
    *lead_shape, rows, columns = shape
    height = block[0] if block else 1  # rows of a block
    blocks_of_part = _ELEMENTS_AT_ONCE // columns // height
    rows_of_part = max(1, blocks_of_part) * height
    for matrix, lead in enumerate(product(*map(range, lead_shape))):
        for start in range(0, rows, rows_of_part):
            end = min(start + rows_of_part, rows)
            if block is None:  # all parts share the one scale
                scale_rows = slice(None)
            else:
                scale_rows = slice(start // height, -(-end // height))
            yield (*lead, slice(start, end)), (*lead, scale_rows), matrix * rows + start


def dequantize_weight(tensor: Float8Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `qdata * scale` of a quantized weight or activation, computed in fp32 and rounded once to `dtype`.

    `dtype` is by default the dtype that was quantized. In BF16 the result is exact if scales are powers of two.
    """
    dtype = dtype or tensor.dtype
    # `block_size` has an entry for each dim, 1 for leading dims. Blocks begin at the first dim with a larger entry. If
    # every entry is 1, a block is one column
    dims_of_blocks = [dim for dim, size in enumerate(tensor.block_size) if size > 1]
    first_dim = dims_of_blocks[0] if dims_of_blocks else -1
    blocks = tuple(tensor.block_size[first_dim:])
    if casts_in_hardware(tensor.qdata.device) and set(blocks) == {BLOCK}:
        from trl_fp8.quantization.kernels.block_kernels import dequantize_blocks

        return dequantize_blocks(tensor.qdata, tensor.scale, square=len(blocks) == 2, dtype=dtype)
    values, view, _ = _padded_blocks(tensor.qdata, blocks)
    view.mul_(_expandable(tensor.scale.float(), len(blocks)))  # changes `values`, too
    return _crop(values, tensor.qdata.shape).to(dtype)


def first_rows(codes: Float8Tensor, count: int) -> Float8Tensor:
    """Return a view of the first `count` rows of a quantized weight, or of all its rows if it has fewer."""
    *lead, block_rows, block_columns = codes.block_size
    scale_rows = -(-count // block_rows)
    block_size = [*lead, min(block_rows, count), block_columns]
    qdata = codes.qdata[..., :count, :]
    scale = codes.scale[..., :scale_rows, :]
    return Float8Tensor(qdata, scale, block_size=block_size, dtype=codes.dtype)


def _quantize(
    values: torch.Tensor,
    blocks: tuple[int, ...],
    name: str,
    scale_format: ScaleFormat,
    amax_floor: float,
    amax: torch.Tensor | None = None,
    reciprocal: bool = False,
) -> Float8Tensor:
    """Quantize `values` with one scale for each block of the size `blocks`, (rows, columns) or (columns,). Use the GPU
    kernel if it supports these arguments.
    """
    check_scale_format(scale_format)
    if not values.is_floating_point() or values.dtype == E4M3:
        raise ValueError(f"{name} has dtype {values.dtype}: expected an unquantized floating point tensor.")
    if casts_in_hardware(values.device) and set(blocks) == {BLOCK} and amax is None and not reciprocal:
        from trl_fp8.quantization.kernels.block_kernels import quantize_blocks

        square = len(blocks) == 2
        qdata, scale = quantize_blocks(values.detach(), square, scale_format, amax_floor)
    else:
        qdata, scale = _quantize_by_torch(values.detach(), blocks, scale_format, amax_floor, amax, reciprocal)
    block_size = [1] * (values.dim() - len(blocks)) + list(blocks)
    return Float8Tensor(qdata, scale, block_size=block_size, dtype=values.dtype)


def _quantize_by_torch(
    values: torch.Tensor,
    blocks: tuple[int, ...],
    scale_format: ScaleFormat,
    amax_floor: float,
    amax: torch.Tensor | None = None,
    reciprocal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales, equal to those that kernels/block_kernels.py computes on a GPU."""
    # 1. Make an FP32 copy, padded to whole blocks and viewed by blocks: `[..., n, N / n, k, K / k]`
    scaled, view, inside = _padded_blocks(values, blocks)
    # 2. Find the largest magnitude of each block, `[..., n, k]`. Two reductions are used, because `view.abs()` would
    # make a second copy. NaN passes through maximum and amax into the scale
    if amax is None:
        amax = torch.maximum(view.amax(inside), -view.amin(inside))
    else:
        counts_of_blocks = [size for dim, size in enumerate(view.shape, -view.dim()) if dim not in inside]
        amax = amax.expand(counts_of_blocks)
    # 3. Compute the scales in FP32. torchao computes them in the dtype of the values; BF16 would round them to 8 bits
    scale = scale_from_amax(amax, scale_format, amax_floor)
    # 4. Compute the codes in the copy itself. Some engine kernels divide by the scale, others multiply by its rounded
    # reciprocal. If an element lies next to a tie of two codes, the two ways may give different codes
    divisor = _expandable(scale, len(blocks))
    if reciprocal:
        view.mul_(divisor.reciprocal())
    else:
        view.div_(divisor)
    return saturating_cast_(_crop(scaled, values.shape)).contiguous(), scale


def _padded_blocks(
    values: torch.Tensor, blocks: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return an fp32 copy of `values`, padded to whole blocks; its view by blocks `[..., n, N / n, k, K / k]`; and the
    dims of this view that are inside a block, as negative numbers (-3, -1).
    """
    lead = values.shape[: -len(blocks)]
    tail = values.shape[-len(blocks) :]
    padded_tail: list[int] = []  # [N, K], each rounded up to whole blocks
    tail_by_blocks: list[int] = []  # [n, N / n, k, K / k] of the padded copy
    for size, block in zip(tail, blocks, strict=True):
        count = -(-size // block)
        padded_tail.append(count * block)
        tail_by_blocks += [count, block]
    # Padding is zero, which changes no amax, so a ragged block gets the scale of its own elements. If there is no
    # padding, the copy need not be filled with zeros, which would cost a pass
    allocate = torch.empty if padded_tail == list(tail) else torch.zeros
    copy = allocate((*lead, *padded_tail), dtype=torch.float32, device=values.device)
    _crop(copy, values.shape).copy_(values)
    inside = (-1,) if len(blocks) == 1 else (-3, -1)
    return copy, copy.view(*lead, *tail_by_blocks), inside


def _expandable(scale: torch.Tensor, block_dims: int) -> torch.Tensor:
    """Return scales `[..., n, k]` as `[..., n, 1, k, 1]` (or `[..., k]` as `[..., k, 1]`), which broadcast against a
    view by blocks.
    """
    scale = scale.unsqueeze(-1)
    return scale.unsqueeze(-3) if block_dims == 2 else scale


def _crop(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a view of `values` without padding, in `shape`."""
    if values.shape == shape:
        return values
    return values[tuple(slice(size) for size in shape)]
