"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts. rollouts.py describes a step."""

from functools import wraps
from inspect import signature

from trl import GRPOTrainer

from .config import FP8GRPOConfig
from .rollouts import FP8Rollouts


class FP8GRPOTrainer(FP8Rollouts, GRPOTrainer):
    """TRL's `GRPOTrainer`, whose rollouts run in FP8. It takes exactly the arguments of `trl.GRPOTrainer`.

    Example:

    ```python
    from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer

    trainer = FP8GRPOTrainer(
        model="Qwen/Qwen3-8B",
        reward_funcs=accuracy_reward,
        args=FP8GRPOConfig("out"),
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Attributes:
        recipe: `FP8Recipe` of the run; None if every FP8 flag is off.
        plan: `Plan`, whose summary is printed at the start; None if every FP8 flag is off.
        features: `Feature`s that take part in a step, in the order in which their hooks are called.

    Raises:
        ValueError: `args` is not an `FP8GRPOConfig`, or its FP8 flags cannot be used with this model or launcher.
    """

    config_class = FP8GRPOConfig
    _tag_names = ["trl", "grpo", "fp8"]
    _name = "GRPO with FP8 rollouts"

    @wraps(GRPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        # `FP8Rollouts` reads the arguments by name
        super().__init__(**signature(GRPOTrainer).bind(*args, **kwargs).arguments)
