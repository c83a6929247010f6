"""Blockwise e4m3 quantization: each block of a tensor (128x128 of a weight, 128 elements of a token) has a scale.

With one scale per block, an outlier harms only its own block. 128x128 blocks are the layout that vLLM's FP8 linears,
DeepGEMM and the DeepSeek-V3 checkpoints share (arXiv 2412.19437, section 3.3). The result is torchao's
`Float8Tensor`: `qdata` holds the codes, and `scale` the FP32 numbers that dequantize them by multiplication.

torchao's own `Float8Tensor.from_hp` computes the scale in the input's dtype, turns an all-zero block into NaN, refuses
ragged shapes, has no power-of-two scales, and needs 8.5 times the weight in temporary memory. On aligned weights with
fp32 scales it gives the same bytes for `w.float()` and `hp_value_lb=1e-12`: tests/quantization/test_blockwise.py.

On a GPU with e4m3 instructions kernels/block_kernels.py quantizes 128x128 blocks and groups of 128, and reads a tensor
once. Hosts without a GPU may have no Triton, so the kernels are imported where they are called.

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
    # NaN and infinity survive the maximum and the division by 448, so checking the few scales checks all elements
    if check_finite and (bad := ~torch.isfinite(tensor.scale)).any():
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
    """A weight, or this rank's part of a weight, and the tensors that it is quantized into."""

    weight: torch.Tensor  # `[..., N, K]`, floating point; it is rounded to BF16 first
    codes: torch.Tensor  # e4m3, of the weight's shape, any strides
    scale: torch.Tensor  # `[..., n, k]`, fp32, or e8m0 for powers of two; any strides
    amax: torch.Tensor | None = None  # as in `quantize_weight`
    # Number of rows of codes, and of scales, before this part in the whole weight. Leading dims count as rows. They
    # are the `first_row` of the checksums (`digest`)
    rows_before: tuple[int, int] = (0, 0)


def quantize_into(
    destinations: Sequence[Destination], scale_format: ScaleFormat, block: tuple[int, int] | None, amax_floor: float
) -> torch.Tensor:
    """Quantize weights straight into their destinations. Does not synchronize with the device.

    Args:
        destinations: All on one device.
        scale_format, amax_floor: As for `quantize_weight`.
        block: Rows and columns that share a scale; None: one scale per weight, from its `amax`.

    Returns:
        int64 `[n, 2]`: checksums (`digest`) of each weight's codes and scales, made from the computed values and not
        from the stored ones. On CPU small weights of one shape are quantized together and large ones in parts, so
        temporary copies have about `_ELEMENTS_AT_ONCE` elements.
    """
    if not destinations:
        return torch.zeros(0, 2, dtype=torch.int64)
    device = destinations[0].weight.device
    if device.type != "cpu":
        if block == (BLOCK, BLOCK) and casts_in_hardware(device):
            return _quantize_by_kernel(destinations, scale_format, amax_floor)
        return torch.cat([_quantize_batch([each], scale_format, block, amax_floor) for each in destinations])
    kinds = []  # weights of equal kinds are quantized together
    for index, (weight, _, _, amax, rows_before) in enumerate(destinations):
        own_amax = None if amax is None else index  # a stack has one amax, so a weight with its own is not stacked
        kinds.append((weight.shape, weight.dtype, rows_before, own_amax))
    sums = torch.empty(len(destinations), 2, dtype=torch.int64)
    for batch in same_kinds(kinds, [_ELEMENTS_AT_ONCE // each.weight.numel() for each in destinations]):
        sums[batch] = _quantize_batch([destinations[index] for index in batch], scale_format, block, amax_floor)
    return sums


def _quantize_by_kernel(
    destinations: Sequence[Destination], scale_format: ScaleFormat, amax_floor: float
) -> torch.Tensor:
    from trl_fp8.quantization.kernels.block_kernels import quantize_blocks

    sums = torch.zeros(len(destinations), 2, dtype=torch.int64, device=destinations[0].weight.device)
    for (weight, codes, scale, _, rows), row in zip(destinations, sums, strict=True):
        options = {"round_to_bf16": True, "into": (codes, scale), "sums": row, "first_rows": rows}
        quantize_blocks(weight.detach(), True, scale_format, amax_floor, **options)
        # Autograd does not see what a kernel writes. With a higher version, as after torch's own writes, a backward
        # through the old values is an error. Otherwise the backward would silently use the new weight
        torch.autograd.graph.increment_version([codes, scale])
    return sums


def _quantize_batch(
    batch: list[Destination], scale_format: ScaleFormat, block: tuple[int, int] | None, amax_floor: float
) -> torch.Tensor:
    """Quantize G weights of one shape, or one large weight in parts. Return the checksums `[G, 2]`."""
    first = batch[0]
    options = scale_format, amax_floor, first.amax
    rows_before, scales_before = first.rows_before
    if len(batch) == 1 and first.weight.numel() > _ELEMENTS_AT_ONCE and first.weight.device.type == "cpu":
        # Only one part is copied at a time. Checksums of the parts' codes add up to that of all codes. Scales are few:
        # they are collected, then written and summed at once
        scale = torch.empty_like(first.scale, memory_format=torch.contiguous_format)
        sums = 0
        for where, scales_where, row in _row_parts(first.weight.shape, block):
            part = first.weight[where].detach().to(torch.bfloat16)
            codes, part_scale = _quantize_by_torch(part, block or tuple(part.shape[-2:]), *options)
            first.codes[where].copy_(codes)
            scale[scales_where] = part_scale
            sums = sums + digest(codes, first_row=rows_before + row)
        first.scale.copy_(scale)
        return torch.stack([sums, digest(scale, first_row=scales_before)])[None]
    stacked = torch.stack([each.weight.detach() for each in batch]).to(torch.bfloat16)
    codes, scale = _quantize_by_torch(stacked, block or tuple(stacked.shape[-2:]), *options)
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


def _row_parts(shape: torch.Size, block: tuple[int, int] | None) -> Iterator[tuple[tuple, tuple, int]]:
    """Yield for each part of a weight `[..., N, K]`, made of whole blocks: its index in the weight, the index of its
    scales in all scales, and the number of its first row.
    """
    height = block[0] if block else 1
    count = max(height, _ELEMENTS_AT_ONCE // shape[-1] // height * height)
    for lead in product(*map(range, shape[:-2])):
        rows_before = sum(index * shape[dim + 1 : -1].numel() for dim, index in enumerate(lead))
        for start in range(0, shape[-2], count):
            rows = slice(start, start + count)
            scales = slice(start // height, -(-min(start + count, shape[-2]) // height)) if block else slice(None)
            yield (*lead, rows), (*lead, scales), rows_before + start


def dequantize_weight(tensor: Float8Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `qdata * scale` of a quantized weight or activation, computed in fp32 and rounded once to `dtype`.

    `dtype` is by default the dtype that was quantized. In BF16 the result is exact if scales are powers of two.
    """
    # Dims before the first one with a block size above 1 are leading dims. 1x1 blocks count as blocks of one column
    first = next((dim for dim, size in enumerate(tensor.block_size) if size > 1), -1)
    blocks = tuple(tensor.block_size[first:])
    if casts_in_hardware(tensor.qdata.device) and set(blocks) == {BLOCK}:
        from trl_fp8.quantization.kernels.block_kernels import dequantize_blocks

        return dequantize_blocks(tensor.qdata, tensor.scale, len(blocks) == 2, dtype or tensor.dtype)
    values, view, _ = _padded_blocks(tensor.qdata, blocks)
    view.mul_(_expandable(tensor.scale.float(), len(blocks)))
    return _crop(values, tensor.qdata.shape).to(dtype or tensor.dtype)


def first_rows(codes: Float8Tensor, count: int) -> Float8Tensor:
    """Return a view of the first `count` rows of a quantized weight; of all N rows if `count` is larger."""
    *lead, rows, columns = codes.block_size
    parts = codes.qdata[..., :count, :], codes.scale[..., : -(-count // rows), :]
    return Float8Tensor(*parts, block_size=[*lead, min(rows, count), columns], dtype=codes.dtype)


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

        qdata, scale = quantize_blocks(values.detach(), len(blocks) == 2, scale_format, amax_floor)
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
    # 1. An FP32 copy, padded to whole blocks and viewed by blocks: `[..., n, N / n, k, K / k]`
    scaled, view, inside = _padded_blocks(values, blocks)
    # 2. The largest magnitude of each block. Two reductions, because `view.abs()` would make a second copy. NaN passes
    # through maximum and amax into the scale
    if amax is None:
        amax = torch.maximum(view.amax(inside), -view.amin(inside))
    else:
        blocks_shape = [size for dim, size in enumerate(view.shape) if dim - view.dim() not in inside]
        amax = amax.expand(blocks_shape)
    # 3. The scale, in FP32. In the dtype of the values, as torchao computes it, BF16 would round it to 8 bits
    scale = scale_from_amax(amax, scale_format, amax_floor)
    # 4. Codes, computed in the copy itself. Some engine kernels divide by the scale, others multiply by its rounded
    # reciprocal. Next to a tie of two codes, the two ways may give different codes
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
    lead, tail = values.shape[: -len(blocks)], values.shape[-len(blocks) :]
    padded = [-(-size // block) * block for size, block in zip(tail, blocks, strict=True)]
    # Padding is zero, which changes no amax, so a ragged block gets the scale of its own elements. Without padding use
    # `empty`, because filling costs a pass
    allocate = torch.empty if padded == list(tail) else torch.zeros
    copy = allocate((*lead, *padded), dtype=torch.float32, device=values.device)
    _crop(copy, values.shape).copy_(values)
    interleaved = [part for size, block in zip(padded, blocks, strict=True) for part in (size // block, block)]
    return copy, copy.view(*lead, *interleaved), tuple(range(-2 * len(blocks) + 1, 0, 2))


def _expandable(scale: torch.Tensor, block_dims: int) -> torch.Tensor:
    """Return scales `[..., n, k]` as `[..., n, 1, k, 1]` (or `[..., k]` as `[..., k, 1]`), which broadcast against a
    view by blocks.
    """
    return scale[(..., *[slice(None), None] * block_dims)]


def _crop(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return values[tuple(slice(size) for size in shape)] if values.shape != shape else values
