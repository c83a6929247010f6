"""One generation: TRL's batch is compared, corrected and measured, and its log-ratios are computed once.

TRL's `_generate_and_score_completions` returns a dictionary whose keys its loss reads. A correction replaces a few:

    importance_sampling_ratio   the correction's weights. Those of TRL's modes are TRL's bit for bit while all
                                log-probs are finite; a token with an infinite one gets the bound from TRL, 1 here
    tool_mask                   with denominator="shrink": the tokens that count (the attention mask stays)
    num_items_in_batch          likewise, over all ranks
    old_per_token_logps         with bypass: the rollout's log-probs
"""

import torch
from accelerate import Accelerator

from trl_fp8.run.log_ratio import LogRatio
from trl_fp8.run.metric import Metric

from .correction_report import correction_metrics
from .importance import RolloutCorrection, correct
from .mismatch import mismatch_tally, summarize_mismatch


def apply_correction(
    batch: dict[str, torch.Tensor],
    ratio: LogRatio,
    correction: RolloutCorrection,
    accelerator: Accelerator,
) -> dict[str, Metric]:
    """Correct `batch` in place and return `mismatch/*` and `correction/*`, over all ranks and before rejection.

    Every rank must call this: one gather, one host synchronization. Raises `RuntimeError` if the engine returned
    nothing but NaN.
    """
    corrected = correct(ratio, correction, lambda sums: accelerator.reduce(sums, "sum"), measured_kl=None)
    batch["importance_sampling_ratio"] = corrected.loss_weights
    if correction.denominator == "shrink":
        batch["tool_mask"] = corrected.loss_mask.to(batch["completion_mask"].dtype)
        batch["num_items_in_batch"] = accelerator.gather(corrected.loss_mask.sum()).sum()
    if corrected.old_logps is not None:
        batch["old_per_token_logps"] = corrected.old_logps
    sums = (mismatch_tally(ratio) | corrected.report).gathered(accelerator.gather).read()
    if sums["tokens"] and sums["missing"] == sums["tokens"]:
        raise RuntimeError(
            f"the engine returned no log-prob that is a number for any of {int(sums['tokens'])} tokens: it computes "
            "NaN, and what it sampled is no rollout of the policy. Look at the latest optimizer steps (grad_norm), "
            "and resume from the last good checkpoint; if it happens at the first step, run with fp8_weights=False or "
            "kv_cache_dtype='auto' to see which of the two does it."
        )
    return summarize_mismatch(sums) | correction_metrics(sums)
