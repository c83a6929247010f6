"""What `FP8GRPOTrainer` holds beyond TRL's trainer: attributes of the class, None, until its `__init__` has run.

So the methods that it overrides are TRL's on a trainer that was made without `__init__`, as TRL's own tests make them.
"""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .numerics.importance import RolloutCorrection
    from .plan import Plan
    from .policy.attention_tap import AttentionTap
    from .policy.kv_calibration import KVCalibrator
    from .policy.precision_flow import PrecisionFlow
    from .recipe import FP8Recipe
    from .rollout_routes import RolloutRoutes
    from .run_log import RunLog


class RunParts:
    """Attributes of `FP8GRPOTrainer`; to be inherited. Those that its docstring does not name are for its methods."""

    recipe: "FP8Recipe | None" = None
    plan: "Plan | None" = None
    correction: "RolloutCorrection | None" = None
    _tap: "AttentionTap | None" = None
    _calibrator: "KVCalibrator | None" = None
    _flow: "PrecisionFlow | None" = None
    _routes: "RolloutRoutes | None" = None
    _run_log: "RunLog | None" = None
