"""A finished sync as metrics; everything in it is on the host already."""

from typing import TYPE_CHECKING

from .recipe import FP8Recipe


if TYPE_CHECKING:
    from .engine.generation import SyncReport


def sync_metrics(sync: "SyncReport", recipe: FP8Recipe, kv_margin: float | None) -> dict[str, float]:
    """Metric name -> value; weight errors and KV scales (`kv_margin` is theirs) only where something is FP8."""
    metrics = {
        "fp8/sync_seconds": sync.seconds,
        "fp8/quantize_seconds": sync.quantize_seconds,
        "fp8/audited_tensors": float(sync.audited_tensors),
    }
    if recipe.fp8_weights:
        metrics["fp8/weight_relative_error"] = sync.weight_relative_error
    if sync.kv_scales is not None:
        metrics["fp8/calibration_seconds"] = sync.calibration_seconds
        metrics["fp8/kv_scale_min"] = sync.kv_scales.values.min().item()
        metrics["fp8/kv_scale_max"] = sync.kv_scales.values.max().item()
        metrics["fp8/kv_margin"] = kv_margin
    return metrics
