"""The run's correction, applied to each generation batch, and warnings about its metrics.

TRL's `_generate_and_score_completions` returns a dictionary, whose entries TRL's loss reads. A correction replaces a
few entries:

    importance_sampling_ratio   the correction's weights. In TRL's four modes they equal TRL's bit for bit, except in
                                the special cases that importance.py lists
    tool_mask                   with denominator="shrink": the tokens that count (the attention mask does not change)
    num_items_in_batch          with denominator="shrink": the number of these tokens on all ranks
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
    VERSION_AGES,
    Batch,
    LogRatio,
    Metric,
    values_of,
)
from trl_fp8.run.feature import Feature

from .ages import BEYOND_MISMATCH, OF_ALL_AGES, age_metrics, of_age_0, with_latest_mismatch
from .health import health_warnings
from .importance import RolloutCorrection, correct
from .measures import measured, mismatch_metrics


logger = get_logger(__name__)


class Correction(Feature):
    """Replaces TRL's ratio, and adds the metrics `mismatch/*` and `correction/*`. Warns of each problem once a run."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.correction = trainer.args.correction
        require_loss_with_weights(type(trainer), self.correction)
        self._warned: set[str] = set()
        # Sum of -log r over the latest fresh tokens, and the number of these tokens; see `with_latest_mismatch`
        self._latest_fresh = 0.0, 0.0

    def facts(self) -> dict[str, object]:
        return {"correction": asdict(self.correction)}

    def extend_batch(self, batch: Batch) -> None:
        correction = self.correction
        # Drop TRL's metrics of its own ratio, because the loss does not get this ratio
        for statistic in ("min", "mean", "max"):
            self.trainer.logged.pop(f"sampling/importance_sampling_ratio/{statistic}", None)
        metrics = apply_correction(batch.tensors, batch.ratio, correction, self.trainer.accelerator)
        if BEYOND_MISMATCH in metrics:
            metric, self._latest_fresh = with_latest_mismatch(metrics[BEYOND_MISMATCH], self._latest_fresh)
            metrics[BEYOND_MISMATCH] = metric
        batch.metrics |= metrics
        for name, text in health_warnings(values_of(metrics), correction.level, correction.monitor_only).items():
            if name not in self._warned:
                self._warned.add(name)
                # One batch may be an outlier. If the run has a log, print only the first sentence, and refer to the
                # report, which averages over several steps, in place of the advice
                if any(feature.keeps_log for feature in self.trainer.features):
                    text = f"{text.partition('. ')[0]}. `trl-fp8 report` shows if that stays, and what to try"
                logger.warning(text)


def require_loss_with_weights(trainer: type, correction: RolloutCorrection) -> None:
    """Raise `ValueError` if the correction acts through weights that the trainer's loss does not read (as GMPO's).

    A loss reads the weights if the key of TRL's ratio is among the constants of the loss's compiled code, or of the
    code of a loss that it calls by `super()`.
    """
    has_weights = correction.level is not None or (correction.reject and correction.denominator == "keep")
    if correction.monitor_only or not has_weights:
        return
    for base in trainer.__mro__:
        if "_compute_loss" in vars(base):
            code = unwrap(base._compute_loss).__code__
            if LOSS_WEIGHTS in code.co_consts:
                return
            if "super" not in code.co_names:  # with `super`, a loss further up may read the weights
                raise ValueError(
                    f"{trainer.__name__} with {correction}: the loss of {base.__name__} reads no importance ratios, "
                    "so the correction would change nothing. In a loss of your own call super()._compute_loss, or "
                    f"read inputs[{LOSS_WEIGHTS!r}] in that method. Otherwise choose rollout_correction='monitor' "
                    "(only measure), rollout_correction={'level': None, 'bypass': True} (use the rollout's log-probs "
                    "as the old ones), or vllm_importance_sampling_correction=False."
                )


def apply_correction(
    tensors: dict[str, torch.Tensor], ratio: LogRatio, correction: RolloutCorrection, accelerator: Accelerator
) -> dict[str, Metric]:
    """Correct TRL's `tensors` in place. Return `mismatch/*`, `correction/*` and, if tokens have ages, `staleness/*`.

    Metrics are over all ranks. Collective, with one synchronization of the host.

    Raises:
        RuntimeError: All log-probs from the engine are NaN.
    """
    corrected = correct(ratio, correction, lambda sums: accelerator.reduce(sums, "sum"))
    tensors[LOSS_WEIGHTS] = corrected.loss_weights
    if correction.denominator == "shrink":
        tensors[TOOL_MASK] = corrected.loss_mask.to(tensors[COMPLETION_MASK].dtype)
        tensors[LOSS_TOKENS] = accelerator.gather(corrected.loss_mask.sum()).sum()
    if corrected.old_logps is not None:
        tensors[TRAINER_LOGPS] = corrected.old_logps
    metrics = mismatch_metrics(ratio)
    if VERSION_AGES in tensors:
        ages_BT = tensors[VERSION_AGES]
        # Measure mismatch/* only on tokens of age 0, but correction/* and OF_ALL_AGES on all tokens
        for name, metric in mismatch_metrics(of_age_0(ratio, ages_BT)).items():
            if name.startswith("mismatch/") and name not in OF_ALL_AGES:
                metrics[name] = metric
        metrics |= age_metrics(ratio, ages_BT)
    metrics = measured(metrics | corrected.metrics, accelerator.gather)
    missing, tokens = metrics["mismatch/fraction_missing"].parts
    if tokens and missing == tokens:
        raise RuntimeError(
            f"all {int(tokens)} log-probs from the engine are NaN, so its samples do not come from the policy. Look "
            "at grad_norm of the latest optimizer steps, and resume from the last good checkpoint. If it happens at "
            "the first step, run with fp8_weights=False or kv_cache_dtype='auto' to see which of the two causes it."
        )
    return metrics
