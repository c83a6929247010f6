"""Patches: found between two states of a buffer, encoded, decoded, and written into parts of an engine."""

import pytest
import torch
from torch import nn

from trl_fp8.engine.vllm_server import weight_patches
from trl_fp8.engine.vllm_server.staging import arranged, views
from trl_fp8.engine.vllm_server.weight_patches import Changes, bring_up_to_date, decoded
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.sync.pieces import Joined, Piece, Span


TENSORS = {
    "norm": ("bfloat16", [700]),
    "nothing": ("bfloat16", [0, 4]),
    "codes": ("float8_e4m3fn", [300, 512]),
    "more codes": ("float8_e4m3fn", [3, 5]),
    "scale": ("float32", []),
    "steps": ("int64", [3]),
}


def buffer_of(seed):
    """Return a table and a buffer of random bytes, NaN among them, with zeros between tensors."""
    table, size = arranged(TENSORS)
    buffer = torch.zeros(size, dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    for tensor in views(buffer, table).values():
        drawn = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=random)
        tensor.copy_(drawn.view(tensor.dtype).view(tensor.shape))
    return table, buffer


def changed_in(buffer, table, share, seed):
    """Return the buffer with other bytes in a share of its elements."""
    changed = buffer.clone()
    random = torch.Generator().manual_seed(seed)
    for tensor in views(changed, table).values():
        if tensor.numel():
            elements = tensor.view(weight_patches.AS_INTEGERS[tensor.element_size()]).view(-1)
            elements[torch.rand(tensor.numel(), generator=random) < share] += 1
    if share:
        views(changed, table)["scale"].view(torch.int32).add_(1)
    return changed


def applied(patch, buffer, table):
    """Return the buffer with a patch, as a worker that has whole tensors writes it."""
    result = buffer.clone()
    tensors = views(result, table)
    for name, changes in decoded(patch.body, patch.sha256, patch.counts, table).items():
        tensor = tensors[name]
        weight_patches.write(Piece(name, nn.Module(), "", tensor.dtype), tensor, changes, tensor.shape)
    return result


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.1])
@pytest.mark.parametrize("compared", [weight_patches.COMPARED_BYTES, 4096])
def test_a_patch_makes_the_new_buffer_of_the_old_one(share, compared, monkeypatch):
    monkeypatch.setattr(weight_patches, "COMPARED_BYTES", compared)
    table, sent = buffer_of(1)
    staged = changed_in(sent, table, share, 2)
    before = sent.clone()
    patch = bring_up_to_date(sent, staged, table)
    assert torch.equal(sent, staged)
    assert torch.equal(applied(patch, before, table), staged)
    assert torch.equal(applied(patch, staged, table), staged)  # values are absolute
    counts = {itemsize: count for itemsize, count, _ in patch.counts}
    for itemsize, dtype in weight_patches.AS_INTEGERS.items():
        elements = [each.view(dtype).view(-1) for each in views(staged, table).values() if each.itemsize == itemsize]
        old = [each.view(dtype).view(-1) for each in views(before, table).values() if each.itemsize == itemsize]
        assert counts[itemsize] == int((torch.cat(elements) != torch.cat(old)).sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_patch_found_on_a_gpu_is_that_of_the_cpu():
    table, sent = buffer_of(1)
    staged = changed_in(sent, table, 0.01, 2)
    expected = bring_up_to_date(sent.clone(), staged, table)
    assert bring_up_to_date(sent, staged.cuda(), table) == expected and torch.equal(sent, staged)


def test_a_patch_that_is_no_smaller_is_not_made():
    table, sent = buffer_of(1)
    staged = changed_in(sent, table, 0.4, 2)
    assert bring_up_to_date(sent, staged, table) is None
    assert torch.equal(sent, staged)


@pytest.mark.parametrize("gap", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28, 2**35, 2**40])
def test_gaps_of_any_length_come_back(gap):
    positions = torch.tensor([gap, gap + 1, gap + 2 + gap, 3 * gap + 5])
    assert torch.equal(weight_patches._positions(weight_patches._encoded_gaps(positions), 4), positions)


def test_positions_that_exceed_64_bits_are_refused():
    count = 2**23 + 16
    table, _ = arranged({"codes": ("float8_e4m3fn", [count])})
    # Ascending modulo 2**64, and in the tensor wherever a binary search for its ends looks: gaps of 0, in the middle
    # as many of 2**42 - 1 as exceed int64
    large = 2**21 + 1
    gaps = bytes(count // 2 + 1) + b"\xff\xff\xff\xff\xff\x7f" * large + bytes(count // 2 - 1 - large)
    patch = weight_patches.Patch(gaps + bytes(count), [(1, count, len(gaps))])
    with pytest.raises(ValueError, match="positions of the patch exceed 64 bits"):
        decoded(patch.body, patch.sha256, patch.counts, table)


# Pieces of ranks of a tensor [8, 12], whose parts together are all of it
ROWS = [(Span(0, 4, 8),), (Span(4, 4, 8),)]
COLUMNS = [(None, Span(0, 6, 12)), (None, Span(6, 6, 12))]
JOINED = [
    (Joined((Span(0, 2, 4), Span(0, 1, 2), Span(0, 1, 2))),),
    (Joined((Span(2, 2, 4), Span(1, 1, 2), Span(1, 1, 2))),),
]
HALVES = [(None, Span(0, 2, 4)), (None, Span(2, 2, 4))]  # of each of two equal parts
CASES = {
    "whole": [Piece("x", None, "", torch.int16)],
    "rows": [Piece("x", None, "", torch.int16, sent) for sent in ROWS],
    "columns": [Piece("x", None, "", torch.int16, sent) for sent in COLUMNS],
    "q, k and v": [Piece("x", None, "", torch.int16, sent) for sent in JOINED],
    "gate and up": [Piece("x", None, "", torch.int16, sent, equal=(0, 2)) for sent in HALVES],
    "transposed": [Piece("x", None, "", torch.int16, sent[::-1], sent_transposed=True) for sent in COLUMNS],
    "on the first": [Piece("x", None, "", torch.int16, zero=zero) for zero in (False, True)],
}


@pytest.mark.parametrize("pieces", CASES.values(), ids=CASES)
def test_parts_of_ranks_follow_the_whole_and_their_checksums_add_up_to_its(pieces):
    random = torch.Generator().manual_seed(0)
    old = torch.randint(-(2**15), 2**15, (8, 12), dtype=torch.int16, generator=random)
    positions = torch.tensor([0, 1, 12, 17, 40, 41, 53, 70, 95])
    new = old.clone()
    new.view(-1)[positions] += 7
    changes = Changes(positions, new.view(-1)[positions])
    total = elements = 0
    for piece in pieces:
        part = piece.of_sent(old).clone()
        weight_patches.write(piece, part, changes, [8, 12])
        assert torch.equal(part, piece.of_sent(new))
        whole, count = weight_patches.padded_to_whole(piece, part, [8, 12])
        total += int(digest(whole))
        elements += count
    assert (total - int(digest(new))) % 2**64 == 0 and elements == 96


def test_one_element_that_a_rank_lost_changes_the_sum_of_checksums():
    [first, second] = CASES["q, k and v"]
    new = torch.arange(96, dtype=torch.int16).view(8, 12)
    parts = [first.of_sent(new).clone(), second.of_sent(new).clone()]
    parts[1][2, 3] += 1
    total = sum(
        int(digest(weight_patches.padded_to_whole(*each, [8, 12])[0]))
        for each in zip(CASES["q, k and v"], parts, strict=True)
    )
    assert total != int(digest(new))
