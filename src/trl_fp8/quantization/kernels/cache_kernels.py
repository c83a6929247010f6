"""Triton kernels over q, k or v of one layer: their magnitudes, and their round trip through an FP8 cache.

    add_magnitudes    calls `_add_magnitudes`: the largest magnitude, and how many elements a cache would clip
    round_trip        calls `_round_trip`: each element as a cache with a scale returns it

A program of either kernel works on one tile: some tokens of one head of one sequence. torch would launch up to 18
kernels for magnitudes and seven for a round trip, and most of these would read the whole tensor. The kernels here read
the tensor once, in the strides in which attention gets it. Results equal those of codec/kv_scales.py and codec/e4m3.py
on CPU, bit for bit, because neither a maximum nor a count depends on the order of programs.

Shape letters: B sequences, H heads, T tokens, D head size.
"""

import torch
import triton
import triton.language as tl

from trl_fp8.quantization.formats import E4M3_MAX


ELEMENTS = 4096  # about how many elements a program's tile has: all channels of several tokens


def add_magnitudes(
    states: torch.Tensor,
    real_BT: torch.Tensor,
    amax: torch.Tensor,
    elements: torch.Tensor,
    limit: torch.Tensor | None,
    beyond: torch.Tensor | None,
) -> None:
    """Update `amax`, `elements` and `beyond` in place, as `codec.kv_scales.add_magnitudes` does, in one launch."""
    if states.numel() == 0:
        return
    real_BT = real_BT.expand(states.shape[0], states.shape[2]).view(torch.uint8)
    grid, tile = _tiles(states)
    sizes = states.shape[1:]
    strides = (*states.stride(), *real_BT.stride())
    # The kernel takes its arguments by position: pointers, sizes `(H, T, D)`, strides, and constants from `COUNT` on
    results = amax.view(torch.int32), elements, limit, beyond  # `limit` is only read
    count_beyond = limit is not None
    with torch.cuda.device_of(states):
        _add_magnitudes[grid](states, real_BT, *results, *sizes, *strides, count_beyond, *tile)


def round_trip(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the values of `codec.e4m3.cache_round_trip`, without a gradient, in the shape and dtype of `states`.

    `states` have up to four dims and any strides. The result has the same order of dims in memory. `scale` is a number
    or a tensor of one element.
    """
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((), scale, device=states.device)
    scale = scale.to(states.device, torch.float32).reshape(())
    result = torch.empty_like(states)  # without the gaps that `states` may have, so with strides of its own
    if states.numel() == 0:
        return result
    missing_dims = (None,) * (4 - states.dim())
    source = states[missing_dims]  # a view `[B, H, T, D]`
    target = result[missing_dims]
    grid, tile = _tiles(source)
    sizes = source.shape[1:]
    strides = (*source.stride(), *target.stride())
    with torch.cuda.device_of(states):
        _round_trip[grid](source, target, scale, *sizes, *strides, tl.float8e4nv, E4M3_MAX, *tile)
    return result


def _tiles(states: torch.Tensor) -> tuple[tuple[int], tuple[int, int]]:
    """Return the 1-d grid for `[B, H, T, D]`, and the size (tokens, channels) of a program's tile."""
    batch, heads, tokens, channels = states.shape
    width = triton.next_power_of_2(channels)
    height = max(1, ELEMENTS // width)
    programs = batch * heads * triton.cdiv(tokens, height)
    return (programs,), (height, width)


@triton.jit
def _place_of_tile(heads, tokens, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's sequence and head, its tokens `[HEIGHT]` and channels `[WIDTH]`, and which of these tokens
    and channels exist. Sequence, head and tokens are int64, because their products with strides may exceed int32.
    """
    # Heads vary fastest: program = (batch * tiles + tile) * heads + head
    head = (tl.program_id(0) % heads).to(tl.int64)
    batch_and_tile = tl.program_id(0) // heads
    tiles = tl.cdiv(tokens, HEIGHT)  # of one head of one sequence
    batch = (batch_and_tile // tiles).to(tl.int64)
    tile = (batch_and_tile % tiles).to(tl.int64)
    token = tile * HEIGHT + tl.arange(0, HEIGHT)
    channel = tl.arange(0, WIDTH)
    return batch, head, token, channel, token < tokens, channel < channels


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

    # Compare magnitudes as integers. Without the sign bit FP32 numbers have the order of their bits, and the bits of
    # NaN are above those of all numbers; a maximum of floats would skip NaN
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    # Atomics on one address wait for each other, so read amax first: most programs would not raise it, and skip the
    # atomic
    tl.atomic_max(amax, largest, mask=largest > tl.load(amax), sem="relaxed")
    real_tokens = tl.sum(is_real.to(tl.int64), axis=0)
    number = real_tokens * heads * channels  # of all heads, so only the program of head 0 adds them
    tl.atomic_add(elements, number.to(tl.float64), mask=(head == 0) & (number > 0), sem="relaxed")
    if COUNT:
        saturated = tl.sum(tl.sum((tl.abs(values) > tl.load(limit)).to(tl.int32), axis=1), axis=0)
        tl.atomic_add(beyond, saturated.to(tl.float64), mask=saturated > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["scale"])  # for the same reason as `amax` above
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
