"""The sequences of a padded batch: packed where waiting costs nothing, in place where it would."""

import torch

from trl_fp8.features.one_forward.followed_attention import Sequences


REAL = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
STATES = torch.arange(1, 4 * 2 * 5 * 3 + 1.0).view(4, 2, 5, 3)  # [B, H, T, D]


def rows(sequences):
    """The tokens of each sequence, of those that have any."""
    packed = sequences.packed(STATES)
    bounds = sequences.starts.tolist()
    return [packed[start:end] for start, end in zip(bounds, bounds[1:], strict=False) if end > start]


def test_real_tokens_are_packed_and_come_back():
    sequences = Sequences.of(REAL, 4, 5, torch.device("cpu"))
    assert sequences.starts.dtype == torch.int32 and sequences.starts.tolist() == [0, 3, 8, 10, 12]
    for row, found in enumerate(rows(sequences)):
        assert torch.equal(found, STATES[row].transpose(0, 1)[REAL[row]])
    back = sequences.padded(sequences.packed(STATES))
    assert torch.equal(back, STATES.transpose(1, 2) * REAL[..., None, None])


def test_on_a_gpu_padding_is_a_sequence_and_nothing_is_moved(monkeypatch):
    device = type("Device", (), {"type": "cuda"})()
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *args, device=None: arange(*args))
    sequences = Sequences.of(REAL, 4, 5, device)
    assert sequences.rows_N is None and len(sequences.starts) == 3 * 4 + 1
    found = rows(sequences)
    assert sum(map(len, found)) == 20
    for row in range(4):
        mine = STATES[row].transpose(0, 1)[REAL[row]]
        assert any(len(each) == len(mine) and torch.equal(each, mine) for each in found)
    assert torch.equal(sequences.padded(sequences.packed(STATES)), STATES.transpose(1, 2))


def test_without_a_mask_every_row_is_a_sequence():
    sequences = Sequences.of(None, 4, 5, torch.device("cpu"))
    assert sequences.starts.tolist() == [0, 5, 10, 15, 20] and sequences.rows_N is None
