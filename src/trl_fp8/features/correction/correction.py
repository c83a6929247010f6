"""The correction in force, applied to each generation batch, with what it gives reason to worry about."""

from dataclasses import asdict

from accelerate.logging import get_logger
from trl import GRPOTrainer

from trl_fp8.run.feature import Batch, Feature
from trl_fp8.run.metric import values_of

from .apply import apply_correction
from .health import health_warnings


logger = get_logger(__name__)


class Correction(Feature):
    """Replaces TRL's ratio, and adds `mismatch/*` and `correction/*`."""

    def __init__(self, trainer: GRPOTrainer):
        super().__init__(trainer)
        self.correction = trainer.args.correction
        self._warned: set[str] = set()

    def facts(self) -> dict[str, object]:
        return {"correction": asdict(self.correction)}

    def extend_batch(self, batch: Batch) -> None:
        trainer, correction = self.trainer, self.correction
        for statistic in ("min", "mean", "max"):  # TRL describes its own ratio, which the loss does not get
            trainer.logged.pop(f"sampling/importance_sampling_ratio/{statistic}")
        metrics = apply_correction(batch.tensors, batch.ratio, correction, trainer.accelerator)
        batch.metrics |= metrics
        for name, text in health_warnings(values_of(metrics), correction.level, correction.monitor_only).items():
            if name not in self._warned:
                self._warned.add(name)
                if trainer.args.fp8_run_log:  # one batch says little, and the report averages
                    text = f"{text.partition('. ')[0]}. `trl-fp8 report` shows if that stays, and what to try"
                logger.warning(text)
