"""Which part of a matrix a program of a Triton kernel works on."""

import triton
import triton.language as tl


@triton.jit
def tile(rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Row numbers `[HEIGHT]` and column numbers `[WIDTH]` in int64, and which pairs of them are inside the matrix."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]
