"""Packed sequences as a paged KV cache holds them: each starts a page, and its pages follow one another.

Shape letters: N tokens of all sequences, R sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """Places of tokens in a paged KV cache.

    Attributes:
        slots: Tokens of a page.
        count: A bound of the pages that are used: the host waits for no length.
        slots_N: Each token's slot, counted over all pages, int64.
        table: Each sequence's pages, int32 `[R, pages of the longest]`; after its last one any that exist.
    """

    slots: int
    count: int
    slots_N: Tensor
    table: Tensor


def pages_of(starts: Tensor, longest: int, tokens: int, slots: int) -> Pages:
    """Pages for sequences that begin at the first R of `starts` `[R + 1]` and have `tokens` in all."""
    lengths = starts.diff().long()
    used = (lengths + slots - 1) // slots
    first_R, count = used.cumsum(0) - used, tokens // slots + len(lengths)
    each = torch.arange(len(lengths), device=starts.device)
    sequence_N = torch.repeat_interleave(each, lengths, output_size=tokens)
    position_N = torch.arange(tokens, device=starts.device) - starts.long()[sequence_N]
    table = first_R[:, None] + torch.arange(-(-longest // slots), device=starts.device)
    table = table.clamp_max_(count - 1).to(torch.int32)
    return Pages(slots, count, first_R[sequence_N] * slots + position_N, table)
