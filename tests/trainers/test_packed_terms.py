"""Loss terms of packed samples as a table."""

import torch

from trl_fp8.trainers.packed_terms import PackedTerms


def test_terms_come_back_from_their_table():
    packed = PackedTerms(torch.tensor([0, 0, 2, 2, 2, 3]))  # sample 1 has no trained token
    values = torch.arange(1.0, 7)
    table = packed.table(values)
    assert table.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    assert torch.equal(packed.terms(table), values)
    assert packed.terms(torch.tensor([[7.0], [8.0], [9.0]])).tolist() == [7, 7, 8, 8, 8, 9]


def test_a_batch_without_terms_is_an_empty_table():
    packed = PackedTerms(torch.zeros(0, dtype=torch.long))
    assert packed.table(torch.zeros(0)).shape == (0, 0)
    assert packed.terms(torch.zeros(0, 0)).tolist() == []
