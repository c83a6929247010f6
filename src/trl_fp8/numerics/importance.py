"""Rollout correction, see `trl_fp8.correction.importance`."""

from trl_fp8.correction.importance import RolloutCorrection, correct_rollout


__all__ = ["RolloutCorrection", "correct_rollout"]
