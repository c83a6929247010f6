"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts. rollouts.py describes a step."""

from functools import wraps
from inspect import signature

from trl import GRPOTrainer

from .config import FP8GRPOConfig
from .rollouts import FP8Rollouts


class FP8GRPOTrainer(FP8Rollouts, GRPOTrainer):
    """TRL's `GRPOTrainer` whose rollouts run in FP8. Takes exactly the arguments of `trl.GRPOTrainer`.

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
        plan: `Plan` whose summary is printed at the start; None likewise.
        features: What takes part in a step, in the order of their hooks.

    Raises:
        ValueError: `args` is not an `FP8GRPOConfig`, or the model or launcher does not go with its FP8 flags.
    """

    config_class = FP8GRPOConfig
    _tag_names = ["trl", "grpo", "fp8"]
    _name = "GRPO with FP8 rollouts"

    @wraps(GRPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(GRPOTrainer).bind(*args, **kwargs).arguments)
