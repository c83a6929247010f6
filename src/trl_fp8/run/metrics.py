"""Finished syncs as metrics, each once; everything in them is on the host already."""

from typing import TYPE_CHECKING

from accelerate.logging import get_logger

from trl_fp8.recipe.recipe import FP8Recipe


if TYPE_CHECKING:
    from trl_fp8.engine.protocol import SyncReport


logger = get_logger(__name__)


class SyncLog:
    """Turns the latest sync into metrics, and warns of weights that went dead.

    Args:
        recipe: Of the run.
    """

    def __init__(self, recipe: FP8Recipe):
        self.recipe = recipe
        self._logged: SyncReport | None = None
        self._dead: set[str] = set()

    def new_metrics(self, sync: "SyncReport", kv_margin: float | None) -> dict[str, float]:
        """Metrics of `sync`, or nothing if it was logged before; `kv_margin` is that of its KV scales."""
        if sync is self._logged:
            return {}
        self._logged = sync
        if new := [name for name in sync.dead_blocks if name not in self._dead]:
            self._dead.update(new)
            listed = ", ".join(f"{name} ({sync.dead_blocks[name]} blocks)" for name in new[:6])
            logger.warning(
                f"{len(new)} weights ({self.recipe.format.description}) have blocks that the engine holds as good as "
                f"zero: {listed}{', ...' if len(new) > 6 else ''}. Usual causes: experts that get no tokens, pruned "
                "weights."
            )
        return sync_metrics(sync, self.recipe, kv_margin)


def sync_metrics(sync: "SyncReport", recipe: FP8Recipe, kv_margin: float | None) -> dict[str, float]:
    """Metric name -> value; weight errors and KV scales (`kv_margin` is theirs) only where something is FP8."""
    metrics = {
        "fp8/sync_seconds": sync.seconds,
        "fp8/quantize_seconds": sync.quantize_seconds,
        "fp8/audited_tensors": float(sync.audited_tensors),
    }
    if recipe.fp8_weights:
        metrics["fp8/weight_relative_error"] = sync.weight_relative_error
        metrics["fp8/dead_blocks"] = float(sum(sync.dead_blocks.values()))
    if sync.kv_scales is not None:
        metrics["fp8/calibration_seconds"] = sync.calibration_seconds
        metrics["fp8/kv_scale_min"] = sync.kv_scales.values.min().item()
        metrics["fp8/kv_scale_max"] = sync.kv_scales.values.max().item()
        metrics["fp8/kv_margin"] = kv_margin
    return metrics
