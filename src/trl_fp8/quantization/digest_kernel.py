"""`digest` on a GPU: one Triton kernel that reads each word once, where torch's operations take a dozen launches.

A sync takes two checksums of each of a model's hundreds of tensors, so that the launches are what they cost. Integer
sums modulo 2**64 do not depend on the order in which programs add to them: the result is that of digest.py on CPU.
"""

import torch
import triton
import triton.language as tl


HEIGHT, WIDTH = 32, 256  # words per program


def add_words(total: torch.Tensor, words: torch.Tensor, first_row: int, column_step: int) -> None:
    """Add to `total` (int64, 0-d) the sum of word (r, c) times `2 (first_row + r + c column_step) + 1`, modulo 2**64.

    `words` are int32 `[R, C]`, contiguous; `first_row` is the first one's in its tensor, `column_step` digest.py's P.
    """
    rows, columns = words.shape
    if words.numel():
        # Short rows, or few of them, are given tiles of their shape
        width = min(triton.next_power_of_2(columns), HEIGHT * WIDTH if rows < HEIGHT else WIDTH)
        height = HEIGHT * WIDTH // width
        with torch.cuda.device_of(words):
            grid = triton.cdiv(rows, height), triton.cdiv(columns, width)
            _add_words[grid](total, words, rows, columns, first_row, column_step, HEIGHT=height, WIDTH=width)


@triton.jit
def tile(rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Row numbers `[HEIGHT]` and column numbers `[WIDTH]` in int64, and which pairs of them are inside the matrix."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _add_words(total, words, rows, columns, first_row, column_step, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row, column, inside = tile(rows, columns, HEIGHT, WIDTH)
    word = tl.load(words + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.int64)
    key = 2 * ((first_row + row)[:, None] + (column * column_step)[None, :]) + 1
    tl.atomic_add(total, tl.sum(tl.sum(word * key, axis=1), axis=0))
