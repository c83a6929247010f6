"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts. What a step is stands in rollouts.py."""

from typing import TYPE_CHECKING

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc

from .config import FP8GRPOConfig
from .rollouts import FP8Rollouts


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


AnyDataset = Dataset | IterableDataset


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

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: FP8GRPOConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | DatasetDict | IterableDatasetDict | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        tools: list | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
    ):
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
