"""Top-k, top-p and min-p: the trainer normalizes log-probs over the tokens that survived them in the engine.

    generation     the engine returns the survivors of each sampled token                  `after_generation`
    scoring        old log-probs, reference and loss normalize over the survivors          `scoring`, `reference`
    batch          the batch gets survivors, a row for each sequence, because TRL shuffles
                   sequences                                                               `extend_batch`

A batch keeps its survivors in all updates on it. So the ratio of policy and old policy compares two distributions over
the same tokens, and so does the KL divergence from a reference.

Shape letters: B sequences, S tokens of a padded sequence, T tokens of a padded completion, M survivors of one sequence
(padded), E survivors of all sequences.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from trl_fp8.engine.protocol import Survivors
from trl_fp8.policy.swapped import scored_by
from trl_fp8.run.batch import COMPLETION_IDS, ROLLOUT_LOGPS, Batch, Rollouts, mean_of
from trl_fp8.run.feature import Feature

from .truncated_head import Rows, truncated_head


# Keys of a batch
SURVIVOR_COUNTS = "survivor_counts"  # [B, T] int32: number of survivors at each position; 0: not sampled
SURVIVOR_IDS = "survivor_ids"  # [B, M] int32: token ids of the survivors, position after position


class BatchSurvivors(NamedTuple):
    """Survivors of the completions of a batch, on the trainer's device."""

    counts_BT: Tensor  # as in SURVIVOR_COUNTS
    ids_BM: Tensor  # as in SURVIVOR_IDS, then padding with 0

    def contain(self, tokens_BT: Tensor) -> Tensor:
        """Return whether each token is among its survivors, `[B, T]`. Does not synchronize with the device."""
        # Sequence by sequence, because the indices below take ten times the memory of the ids
        columns_M = torch.arange(self.ids_BM.shape[1], device=self.ids_BM.device)
        found = []
        for counts_T, ids_M, tokens_T in zip(self.counts_BT, self.ids_BM, tokens_BT, strict=True):
            end_T = counts_T.cumsum(0)  # where the survivors of each token end in `ids_M`
            # The token that each survivor belongs to. Padding of `ids_M` gets the last token. It lies behind all ends,
            # so no count below includes it
            token_M = torch.searchsorted(end_T, columns_M, right=True).clamp_(max=len(tokens_T) - 1)
            # Count the survivors that equal their token, up to each survivor and then up to each token's end. A token
            # is among its survivors if the count grows from the previous token's end to the token's own end
            matches_M = (ids_M == tokens_T[token_M]).cumsum(0)
            matches_T = F.pad(matches_M, (1, 0))[end_T]
            grows_T = matches_T.diff(prepend=torch.zeros_like(matches_T[:1])) > 0
            found.append(grows_T)
        return torch.stack(found)

    def rows(self, mask_BS: Tensor, columns: int) -> Rows:
        """Return the rows of the tokens that TRL's head gets. In the mask the last `columns` are completions."""
        # Completions may be padded to more columns than in `counts_BT`
        counts_BT = F.pad(self.counts_BT, (0, columns - self.counts_BT.shape[1])).long()
        real_BT = mask_BS[:, -columns:] != 0  # False also at completions that mask_truncated_completions hides
        # Drop the padding of `ids_BM`, then the ids at tokens that are not real
        used_BM = torch.arange(self.ids_BM.shape[1], device=mask_BS.device) < counts_BT.sum(1, keepdim=True)
        is_real_E = real_BT.flatten().repeat_interleave(counts_BT.flatten())
        ids_E = self.ids_BM[used_BM].long()[is_real_E]
        counts_BT *= real_BT
        if trl_utils._use_triton(mask_BS.device):  # TRL then scores only real tokens of completions
            return Rows(counts_BT[real_BT], ids_E)
        # Otherwise TRL scores all tokens except the first of each sequence. Tokens of prompts have no survivors
        prompt_columns = mask_BS.shape[1] - 1 - columns
        return Rows(F.pad(counts_BT, (prompt_columns, 0)).flatten(), ids_E)


class Truncation(Feature):
    """Passes the engine's survivors to the output heads of policy and reference."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self._current: BatchSurvivors | None = None  # survivors of the batch that is scored or in the loss

    def engine_part(self):
        from .engine_survivors import SurvivorLog  # needs vllm

        self.log = SurvivorLog()
        return self.log

    def after_generation(self, rollouts: Rollouts) -> None:
        survivors = self.log.notes_on(rollouts.sequences)
        found = of_batch(survivors, [len(prompt) for prompt in rollouts.prompt_ids])
        device = self.trainer.accelerator.device
        self._current = BatchSurvivors(found.counts_BT.to(device), found.ids_BM.to(device))

    def scoring(self, mask: Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self._truncated(mask, logits_to_keep, reference=False)

    def reference(self, mask: Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self._truncated(mask, logits_to_keep, reference=True)

    def extend_batch(self, batch: Batch) -> None:
        tensors = batch.tensors
        columns = tensors[COMPLETION_IDS].shape[1]
        counts_BT = F.pad(self._current.counts_BT, (0, columns - self._current.counts_BT.shape[1]))
        scored = batch.mask_BT != 0
        scored &= ~tensors[ROLLOUT_LOGPS].isnan()
        survivors_of_batch = BatchSurvivors(counts_BT, self._current.ids_BM)
        is_survivor = survivors_of_batch.contain(tensors[COMPLETION_IDS])
        lost = int((scored & ~is_survivor).sum())
        if lost:
            raise RuntimeError(
                f"the engine returned log-probs of {int(scored.sum())} tokens, but for {lost} of them it did not "
                "return the tokens that survived top_p, top_k and min_p, or the sampled token is not among these. "
                "Set top_p=1.0, top_k=0, min_p=None."
            )
        tensors[SURVIVOR_COUNTS] = counts_BT
        tensors[SURVIVOR_IDS] = self._current.ids_BM
        totals = torch.stack([counts_BT.sum(), (counts_BT > 0).sum()])
        survivors, tokens = self.trainer.accelerator.reduce(totals, "sum").tolist()  # over all ranks
        batch.metrics["sampling/survivors_mean"] = mean_of(survivors, tokens)
        self._current = None

    def begin_loss(self, inputs: Mapping[str, Tensor]) -> None:
        self._current = BatchSurvivors(inputs[SURVIVOR_COUNTS], inputs[SURVIVOR_IDS])

    def end_loss(self) -> None:
        self._current = None

    @contextmanager
    def _truncated(self, mask_BS: Tensor, columns: int, reference: bool) -> Iterator[None]:
        if self._current is None:
            yield
            return
        rows = self._current.rows(mask_BS, columns)
        # A feature may compute the logits in place of the model's own output head. Take the first one that does
        logits = None
        for feature in self.trainer.features:
            logits = logits or feature.logits(reference)
        with scored_by(truncated_head(rows, logits)):
            yield
        if len(rows.counts_N):
            raise RuntimeError(
                f"TRL's output head left out {len(rows.counts_N)} tokens whose survivors are known (on CPU TRL 1.16 "
                "scores all tokens of a batch, elsewhere only those of completions)."
            )


def of_batch(survivors: list[Survivors], prompts: list[int]) -> BatchSurvivors:
    """Return the survivors of completions, padded. `prompts` has each sequence's number of prompt tokens."""
    counts = []
    ids = []
    for sequence, prompt in zip(survivors, prompts, strict=True):
        counts.append(torch.from_numpy(sequence.counts_T[prompt:]))
        # A prompt that continues a conversation has survivors of its own. They come first in `ids_E`
        of_prompt = sequence.counts_T[:prompt].sum()
        ids.append(torch.from_numpy(sequence.ids_E[of_prompt:]))
    return BatchSurvivors(pad_sequence(counts, batch_first=True), pad_sequence(ids, batch_first=True))
