"""Top-k, top-p and min-p: the trainer's log-probs are of the tokens that survived them, which the engine remembers.

    generated      -> survivors of each token of each rollout                   `after_generation`
    scoring        -> old log-probs, reference and loss normalize over them     `scoring`, `reference`
    batch          -> a row per sequence, which TRL shuffles and splits         `extend_batch`

Further updates on the same batch keep its survivors: ratios of the policy to its old self compare two
distributions over the same tokens, and so does the KL divergence from a reference.

Shape letters: B sequences, S tokens of a padded one, T of its completion, M survivors of one sequence (padded).
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
SURVIVOR_COUNTS = "survivor_counts"  # [B, T] int32: tokens that top-k, top-p and min-p left; 0: not sampled
SURVIVOR_IDS = "survivor_ids"  # [B, M] int32: their token ids, position after position


class BatchSurvivors(NamedTuple):
    """Survivors of the completions of a batch, on the trainer's device."""

    counts_BT: Tensor  # int32; 0: not sampled
    ids_BM: Tensor  # int32, position after position, then 0

    def rows(self, mask_BS: Tensor, columns: int) -> Rows:
        """Return rows for the tokens that TRL's head gets; the last `columns` of the mask are of completions."""
        counts_BT = F.pad(self.counts_BT, (0, columns - self.counts_BT.shape[1])).long()
        real_BT = mask_BS[:, -columns:] != 0  # without those that mask_truncated_completions takes out
        used_BM = torch.arange(self.ids_BM.shape[1], device=mask_BS.device) < counts_BT.sum(1, keepdim=True)
        ids_E = self.ids_BM[used_BM].long()[real_BT.flatten().repeat_interleave(counts_BT.flatten())]
        counts_BT *= real_BT
        if trl_utils._use_triton(mask_BS.device):  # TRL scores these rows and no others
            return Rows(counts_BT[real_BT], ids_E)
        return Rows(F.pad(counts_BT, (mask_BS.shape[1] - 1 - columns, 0)).flatten(), ids_E)


class Truncation(Feature):
    """Carries the engine's survivors to the output heads of policy and reference."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self._now: BatchSurvivors | None = None  # of the batch that is scored

    def engine_part(self):
        from .engine_survivors import SurvivorLog  # needs vllm

        self.log = SurvivorLog()
        return self.log

    def after_generation(self, rollouts: Rollouts) -> None:
        found = of_batch(self.log.of(rollouts.sequences), [len(prompt) for prompt in rollouts.prompt_ids])
        self._now = BatchSurvivors(*(tensor.to(self.trainer.accelerator.device) for tensor in found))

    def scoring(self, mask: Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self._truncated(mask, logits_to_keep, reference=False)

    def reference(self, mask: Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self._truncated(mask, logits_to_keep, reference=True)

    def extend_batch(self, batch: Batch) -> None:
        tensors = batch.tensors
        columns = tensors[COMPLETION_IDS].shape[1]
        counts_BT = F.pad(self._now.counts_BT, (0, columns - self._now.counts_BT.shape[1]))
        scored = batch.mask_BT != 0
        scored &= ~tensors[ROLLOUT_LOGPS].isnan()
        lost = int((scored & (counts_BT == 0)).sum())
        if lost:
            raise RuntimeError(
                f"the engine returned log-probs of {int(scored.sum())} tokens, and for {lost} of them no token that "
                "top_p, top_k and min_p left. Set top_p=1.0, top_k=0, min_p=None."
            )
        tensors[SURVIVOR_COUNTS] = counts_BT
        tensors[SURVIVOR_IDS] = self._now.ids_BM
        totals = torch.stack([counts_BT.sum(), (counts_BT > 0).sum()])
        survivors, tokens = self.trainer.accelerator.reduce(totals, "sum").tolist()
        batch.metrics["sampling/survivors_mean"] = mean_of(survivors, tokens)
        self._now = None

    def begin_loss(self, inputs: Mapping[str, Tensor]) -> None:
        self._now = BatchSurvivors(inputs[SURVIVOR_COUNTS], inputs[SURVIVOR_IDS])

    def end_loss(self) -> None:
        self._now = None

    @contextmanager
    def _truncated(self, mask_BS: Tensor, columns: int, reference: bool) -> Iterator[None]:
        if self._now is None:
            yield
            return
        rows = self._now.rows(mask_BS, columns)
        logits = None  # or those of a feature that makes them elsewhere
        for feature in self.trainer.features:
            logits = logits or feature.logits(reference)
        with scored_by(truncated_head(rows, logits)):
            yield
        if len(rows.counts_N):
            raise RuntimeError(
                f"TRL's output head left out {len(rows.counts_N)} tokens whose survivors are known (TRL 1.16 scores "
                "all of a batch on CPU, and the completions' elsewhere)."
            )


def of_batch(survivors: list[Survivors], prompts: list[int]) -> BatchSurvivors:
    """Return the survivors of completions; the first `prompts` tokens of each sequence are its prompt."""
    pairs = list(zip(survivors, prompts, strict=True))
    counts = [torch.from_numpy(each.counts_T[prompt:]) for each, prompt in pairs]
    ids = [torch.from_numpy(each.ids_E[each.counts_T[:prompt].sum() :]) for each, prompt in pairs]
    return BatchSurvivors(*(pad_sequence(each, batch_first=True) for each in (counts, ids)))
