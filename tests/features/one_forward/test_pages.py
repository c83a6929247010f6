"""Pages of packed sequences, by the definition: what is written to a token's slot is read through the table."""

import pytest
import torch

from trl_fp8.features.one_forward.followed_attention import pages_of


@pytest.mark.parametrize("lengths", [(5, 1, 23, 12), (16,), (1,), (16, 32, 1), (3,) * 40, (0, 7, 0, 16, 0)], ids=str)
@pytest.mark.parametrize("slots", [1, 16, 32])
def test_each_sequence_is_read_back_through_its_pages(lengths, slots):
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens, longest = sum(lengths), max(lengths)
    pages = pages_of(starts, longest, tokens, slots)
    assert len(pages.slots_N.unique()) == tokens and pages.slots_N.dtype == torch.int64
    assert pages.table.dtype == torch.int32 and pages.table.shape == (len(lengths), -(-longest // slots))
    assert 0 <= pages.table.min() and pages.table.max() < pages.count and pages.slots_N.max() < pages.count * slots
    cache = torch.full((pages.count * slots,), -1)
    cache[pages.slots_N] = torch.arange(tokens)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        read = cache.view(pages.count, slots)[pages.table[row].long()].flatten()[:length]
        assert read.tolist() == list(range(start, start + length))
