"""Mismatch of engine and trainer, see `trl_fp8.correction.mismatch`."""

from trl_fp8.correction.mismatch import mismatch_metrics


__all__ = ["mismatch_metrics"]
