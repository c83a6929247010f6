"""Triton kernels over q, k or v of one layer: their magnitudes, and their round trip through an FP8 cache.

torch would launch up to 18 kernels for magnitudes and seven for a round trip, most over the whole tensor. These
kernels read the tensor once, in the strides in which attention gets it. Results equal those of codec/kv_scales.py and
codec/e4m3.py on CPU, bit for bit, because neither a maximum nor a count depends on the order of programs.

Shape letters: B sequences, H heads, T tokens, D head size.
"""

import torch
import triton
import triton.language as tl

from trl_fp8.quantization.formats import E4M3_MAX


ELEMENTS = 4096  # about as many elements per program, in whole tokens


def add_magnitudes(
    states: torch.Tensor,
    real_BT: torch.Tensor,
    amax: torch.Tensor,
    elements: torch.Tensor,
    limit: torch.Tensor | None,
    beyond: torch.Tensor | None,
) -> None:
    """Update `amax`, `elements` and `beyond` in place, as `codec.kv_scales.add_magnitudes` does, in one launch."""
    real_BT = real_BT.expand(states.shape[0], states.shape[2]).view(torch.uint8)
    if states.numel():
        grid, tile = _tiles(states)
        with torch.cuda.device_of(states):
            sizes, strides = states.shape[1:], (*states.stride(), *real_BT.stride())
            figures = amax.view(torch.int32), elements, limit, beyond
            _add_magnitudes[grid](states, real_BT, *figures, *sizes, *strides, limit is not None, *tile)


def round_trip(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the values of `codec.e4m3.cache_round_trip`, without a gradient, in the shape and dtype of `states`.

    `states` have up to four dims and any strides. The result has the same order of dims in memory. `scale` is a number
    or a tensor of one element.
    """
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((), scale, device=states.device)
    scale = scale.to(states.device, torch.float32).reshape(())
    result = torch.empty_like(states)  # dense, so any view that works on `states` works on it
    source, target = (each[(None,) * (4 - each.dim())] for each in (states, result))  # [B, H, T, D], views
    if states.numel():
        grid, tile = _tiles(source)
        with torch.cuda.device_of(states):
            sizes, strides = source.shape[1:], (*source.stride(), *target.stride())
            _round_trip[grid](source, target, scale, *sizes, *strides, tl.float8e4nv, E4M3_MAX, *tile)
    return result


def _tiles(states: torch.Tensor) -> tuple[tuple[int], tuple[int, int]]:
    """Return the 1-d grid for `[B, H, T, D]`, and the size (tokens, channels) of a program's tile."""
    batch, heads, tokens, channels = states.shape
    width = triton.next_power_of_2(channels)
    height = max(1, ELEMENTS // width)
    return (batch * heads * triton.cdiv(tokens, height),), (height, width)


@triton.jit
def _place_of_tile(heads, tokens, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's sequence and head, its tokens `[HEIGHT]` (int64) and channels `[WIDTH]`, and which of these
    tokens and channels exist.
    """
    tiles = tl.cdiv(tokens, HEIGHT)
    rest = tl.program_id(0) // heads
    token = (rest % tiles).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    channel = tl.arange(0, WIDTH)
    return (rest // tiles).to(tl.int64), tl.program_id(0) % heads, token, channel, token < tokens, channel < channels


# These arguments point into larger tensors, so their alignment differs between calls. Triton would recompile for each
# alignment
@triton.jit(do_not_specialize_on_alignment=["amax", "elements", "limit", "beyond"])
def _add_magnitudes(
    states,
    real,
    amax,
    elements,
    limit,
    beyond,
    heads,
    tokens,
    channels,
    batch_stride,
    head_stride,
    token_stride,
    channel_stride,
    real_batch_stride,
    real_token_stride,
    COUNT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    batch, head, token, channel, is_token, is_channel = _place_of_tile(heads, tokens, channels, HEIGHT, WIDTH)
    is_real = tl.load(real + batch * real_batch_stride + token * real_token_stride, mask=is_token, other=0) != 0
    place = states + batch * batch_stride + head * head_stride
    place = place + token[:, None] * token_stride + channel[None, :] * channel_stride
    values = tl.load(place, mask=is_real[:, None] & is_channel[None, :], other=0.0).to(tl.float32)

    # The maximum of magnitudes as integers. Without the sign bit FP32 numbers have the order of their bits, and NaN is
    # above all others; a maximum of floats would skip NaN. Atomics on one address wait for each other, so a program
    # first reads amax. Most programs would not raise it, and skip the atomic
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    tl.atomic_max(amax, largest, mask=largest > tl.load(amax), sem="relaxed")
    real_tokens = tl.sum(is_real.to(tl.int64), axis=0)
    number = real_tokens * heads * channels
    tl.atomic_add(elements, number.to(tl.float64), mask=(head == 0) & (number > 0), sem="relaxed")
    if COUNT:
        saturated = tl.sum(tl.sum((tl.abs(values) > tl.load(limit)).to(tl.int32), axis=1), axis=0)
        tl.atomic_add(beyond, saturated.to(tl.float64), mask=saturated > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["scale"])  # as `amax` above
def _round_trip(
    states,
    result,
    scale,
    heads,
    tokens,
    channels,
    batch_stride,
    head_stride,
    token_stride,
    channel_stride,
    result_batch_stride,
    result_head_stride,
    result_token_stride,
    result_channel_stride,
    CODES: tl.constexpr,
    LIMIT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    batch, head, token, channel, is_token, is_channel = _place_of_tile(heads, tokens, channels, HEIGHT, WIDTH)
    inside = is_token[:, None] & is_channel[None, :]
    place = states + batch * batch_stride + head * head_stride
    place = place + token[:, None] * token_stride + channel[None, :] * channel_stride
    factor = tl.load(scale)
    # Round to BF16 first, because the engine computes q, k and v in BF16
    values = tl.load(place, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    # Triton's `/` may be off by two units in the last place
    scaled = tl.clamp(tl.div_rn(values, factor), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    place = result + batch * result_batch_stride + head * result_head_stride
    place = place + token[:, None] * result_token_stride + channel[None, :] * result_channel_stride
    tl.store(place, (scaled.to(CODES).to(tl.float32) * factor).to(result.dtype.element_ty), mask=inside)
