"""Conversion between the loss terms of TRL's packed batch and the table that corrections read, a row for each sample.

Shape letters: M terms of a rank, one for each trained token of each sample; B samples, T terms of the longest one.
"""

import torch
from torch import Tensor


class PackedTerms:
    """Terms of samples, in the order in which TRL packs them: sample by sample, token by token.

    Args:
        sample_M: int64, not decreasing: index of the sample that each term belongs to. Samples without terms get no
            row.
    """

    def __init__(self, sample_M: Tensor):
        _, row_M, counts_B = sample_M.unique_consecutive(return_inverse=True, return_counts=True)
        first_term_B = counts_B.cumsum(0) - counts_B  # index of each sample's first term
        self._row_M = row_M
        self._column_M = torch.arange(len(sample_M), device=sample_M.device) - first_term_B[row_M]
        most_terms = int(counts_B.max()) if len(counts_B) else 0
        self._shape = (len(counts_B), most_terms)  # B, T

    def table(self, values_M: Tensor) -> Tensor:
        """Return the values as a table `[B, T]`, 0 behind the terms of a sample."""
        table_BT = values_M.new_zeros(self._shape)
        table_BT[self._row_M, self._column_M] = values_M
        return table_BT

    def terms(self, table: Tensor) -> Tensor:
        """Return the values `[M]` of the terms in a table `[B, T]`, or `[B, 1]` with one value for each sample."""
        return table.expand(self._shape)[self._row_M, self._column_M]
