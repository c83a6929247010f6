"""The correction in force, applied to each generation batch, and warnings about what it measures.

TRL's `_generate_and_score_completions` returns a dictionary whose keys its loss reads. A correction replaces a few:

    importance_sampling_ratio   the correction's weights. Those of TRL's modes are TRL's bit for bit while all
                                log-probs are finite; a token with an infinite one gets the bound from TRL, 1 here
    tool_mask                   with denominator="shrink": the tokens that count (the attention mask stays)
    num_items_in_batch          with denominator="shrink": their number, over all ranks
    old_per_token_logps         with bypass: the rollout's log-probs
"""

from dataclasses import asdict
from inspect import unwrap

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from trl_fp8.run.batch import (
    COMPLETION_MASK,
    LOSS_TOKENS,
    LOSS_WEIGHTS,
    TOOL_MASK,
    TRAINER_LOGPS,
    Batch,
    LogRatio,
    Metric,
    values_of,
)
from trl_fp8.run.feature import Feature

from .health import health_warnings
from .importance import RolloutCorrection, correct
from .measures import measured, mismatch_metrics


logger = get_logger(__name__)


class Correction(Feature):
    """Replaces TRL's ratio, and adds `mismatch/*` and `correction/*`. It warns of each problem once a run."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.correction = trainer.args.correction
        require_loss_with_weights(type(trainer), self.correction)
        self._warned: set[str] = set()

    def facts(self) -> dict[str, object]:
        return {"correction": asdict(self.correction)}

    def extend_batch(self, batch: Batch) -> None:
        correction = self.correction
        for statistic in ("min", "mean", "max"):  # TRL describes its own ratio, which the loss does not get
            self.trainer.logged.pop(f"sampling/importance_sampling_ratio/{statistic}", None)
        metrics = apply_correction(batch.tensors, batch.ratio, correction, self.trainer.accelerator)
        batch.metrics |= metrics
        for name, text in health_warnings(values_of(metrics), correction.level, correction.monitor_only).items():
            if name not in self._warned:
                self._warned.add(name)
                # one batch says little, a report averages
                if any(feature.keeps_log for feature in self.trainer.features):
                    text = f"{text.partition('. ')[0]}. `trl-fp8 report` shows if that stays, and what to try"
                logger.warning(text)


def require_loss_with_weights(trainer: type, correction: RolloutCorrection) -> None:
    """Raise `ValueError` for a correction by weights if the trainer's loss does not name TRL's ratio, as GMPO's."""
    weights = correction.level is not None or (correction.reject and correction.denominator == "keep")
    if correction.monitor_only or not weights:
        return
    for base in trainer.__mro__:
        if "_compute_loss" in vars(base):
            code = unwrap(base._compute_loss).__code__
            if LOSS_WEIGHTS in code.co_consts:
                return
            if "super" not in code.co_names:
                raise ValueError(
                    f"{trainer.__name__} with {correction}: the loss of {base.__name__} reads no importance ratios, "
                    "so that the correction would change nothing. Set rollout_correction='monitor', which measures "
                    "alone, rollout_correction={'level': None, 'bypass': True}, which takes the rollout's log-probs "
                    "for the old ones, or vllm_importance_sampling_correction=False."
                )


def apply_correction(
    tensors: dict[str, torch.Tensor], ratio: LogRatio, correction: RolloutCorrection, accelerator: Accelerator
) -> dict[str, Metric]:
    """Correct TRL's `tensors` in place and return `mismatch/*` and `correction/*`, over all ranks, before rejection.

    Every rank must call this: one gather, one host synchronization. Raises `RuntimeError` if the engine returned
    nothing but NaN.
    """
    corrected = correct(ratio, correction, lambda sums: accelerator.reduce(sums, "sum"))
    tensors[LOSS_WEIGHTS] = corrected.loss_weights
    if correction.denominator == "shrink":
        tensors[TOOL_MASK] = corrected.loss_mask.to(tensors[COMPLETION_MASK].dtype)
        tensors[LOSS_TOKENS] = accelerator.gather(corrected.loss_mask.sum()).sum()
    if corrected.old_logps is not None:
        tensors[TRAINER_LOGPS] = corrected.old_logps
    metrics = measured(mismatch_metrics(ratio) | corrected.metrics, accelerator.gather)
    missing, tokens = metrics["mismatch/fraction_missing"].parts
    if tokens and missing == tokens:
        raise RuntimeError(
            f"the engine returned no log-prob that is a number for any of {int(tokens)} tokens: it computes NaN, and "
            "what it sampled is no rollout of the policy. Look at the latest optimizer steps (grad_norm), and resume "
            "from the last good checkpoint; if it happens at the first step, run with fp8_weights=False or "
            "kv_cache_dtype='auto' to see which of the two does it."
        )
    return metrics
