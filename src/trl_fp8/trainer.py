"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts.

What it adds to a step, all of it around TRL's own code:

    rollouts due   -> remember the prompts -> [sync: calibrate KV scales on them, stream, audit] -> generate (FP8)
    old log-probs  -> importance ratios: TRL's modes, or a RolloutCorrection -> TRL's loss and optimizer step
    metrics        -> fp8/*, mismatch/*, correction/*                                             (logged as TRL's)
"""

from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import torch
import trl.trainer.grpo_trainer as trl_grpo
from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from .config import FP8GRPOConfig, fsdp1_message
from .correction import apply_correction
from .engine.upstream import substituted
from .numerics.health import health_warnings
from .numerics.kv_scales import KVScales, kv_scales_from_amax
from .plan import Plan, plan_for_model
from .policy.kv_calibration import observe_qkv_amax
from .recipe import FP8Recipe


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig

    from .engine.generation import FP8VLLMGeneration, SyncReport


logger = get_logger(__name__)

# Before the first rollouts only prompts can be observed, and completions reach further: 1.26 times the prompts' largest |q|
# on the addition demo. One more power of two costs a floating point format nothing.
PROMPTS_ONLY_MARGIN = 2.0

AnyDataset = Dataset | IterableDataset


class FP8GRPOTrainer(GRPOTrainer):
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
        plan: `Plan` printed at the start; None likewise.
        correction: `RolloutCorrection` in force; None if TRL does without one, or alone with everything FP8 off.

    Raises:
        ValueError: `args` is not an `FP8GRPOConfig`, or the model or launcher does not go with its FP8 flags.
    """

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
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = FP8GRPOConfig(f"{name.split('/')[-1]}-FP8GRPO")
        if not isinstance(args, FP8GRPOConfig):
            raise ValueError(
                f"args is a {type(args).__name__}: FP8GRPOTrainer reads its FP8 flags from FP8GRPOConfig. Replace "
                f"{type(args).__name__}(...) by FP8GRPOConfig(...); it takes the same arguments."
            )
        self.recipe: FP8Recipe | None = None
        self.plan: Plan | None = None
        self.correction = args.correction
        self._warned: set[str] = set()
        self._coming_prompts: list[list[int]] = []
        self._recent_rollouts: list[list[int]] = []
        self._logged_sync: SyncReport | None = None
        with substituted(trl_grpo, "VLLMGeneration", self._make_generation):
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

    def _make_generation(self, **kwargs) -> "FP8VLLMGeneration | trl_grpo.VLLMGeneration":
        """Called by TRL in place of its `VLLMGeneration(...)`, with the same arguments."""
        if not self.args.any_fp8 and (self.args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration

            return VLLMGeneration(**kwargs)
        from .engine.generation import FP8VLLMGeneration  # needs vllm, which TRL makes optional

        if DistributedBackend(self.accelerator).fsdp_version == 1:
            raise ValueError(fsdp1_message("fsdp_version: 1 in the accelerate configuration", "fsdp_version: 2"))
        recipe = self.args.recipe_for(self.model)
        if self.args.any_fp8:
            self.recipe, self.plan = recipe, plan_for_model(self.model, recipe)
            self.accelerator.print(self.plan.table())
        return FP8VLLMGeneration(
            recipe=recipe, calibrate=self._calibrate_kv_scales, engine_kwargs=self.args.vllm_engine_kwargs, **kwargs
        )

    def _calibrate_kv_scales(self) -> KVScales:
        """Scales of the policy as it is now, on the coming prompts and the latest rollouts; the same on every rank."""
        sequences = chain.from_iterable(zip_longest(self._coming_prompts, self._recent_rollouts, fillvalue=[]))
        amax_L3 = observe_qkv_amax(
            self.model_wrapped,
            list(sequences),
            pad_token_id=self._tokenizer.pad_token_id,
            max_tokens=self.args.kv_calibration_tokens,
        )
        if self.accelerator.num_processes > 1:
            torch.distributed.all_reduce(amax_L3, op=torch.distributed.ReduceOp.MAX)
        margin = self.args.kv_scale_margin * (1.0 if self._recent_rollouts else PROMPTS_ONLY_MARGIN)
        return kv_scales_from_amax(amax_L3, margin)

    def _generate(self, prompts: list) -> tuple:
        if self.recipe is None:
            return super()._generate(prompts)
        if self.rollout_func is not None:  # TRL syncs before anything is tokenized
            self._coming_prompts = _unique(self._tokenize_prompts(prompts)[0])
        output = super()._generate(prompts)
        rollouts = zip(*output[:2], strict=True)  # prompt_ids, completion_ids
        self._recent_rollouts = [list(prompt) + list(completion) for prompt, completion in rollouts]
        self._log_sync()
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        self._coming_prompts = _unique(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        output = super()._generate_and_score_completions(inputs)
        if self.correction is None:
            return output
        logged = self._metrics["train" if self.model.training else "eval"]
        wanted = self.correction.trl_mode, self.correction.bound_min, self.correction.bound_max
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        from_trl = wanted == (self.vllm_importance_sampling_mode, *bounds)
        if not from_trl:  # TRL described a ratio that is not used
            for statistic in ("min", "mean", "max"):
                logged.pop(f"sampling/importance_sampling_ratio/{statistic}")
        metrics = apply_correction(output, self.correction, self.accelerator, ratio_from_trl=from_trl)
        for name, value in metrics.items():
            logged[name].append(value)
        for name, text in health_warnings(metrics, self.correction).items():
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(text)
        return output

    def _log_sync(self) -> None:
        """Add the latest sync's figures to TRL's metrics, once per sync. All of them are on the host already."""
        sync = self.vllm_generation.last_sync
        if sync is self._logged_sync:
            return
        self._logged_sync = sync
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["fp8/sync_seconds"].append(sync.seconds)
        metrics["fp8/quantize_seconds"].append(sync.quantize_seconds)
        metrics["fp8/audited_tensors"].append(float(sync.audited_tensors))
        if self.recipe.fp8_weights:
            metrics["fp8/weight_relative_error"].append(sync.weight_relative_error)
        if sync.kv_scales is not None:
            metrics["fp8/calibration_seconds"].append(sync.calibration_seconds)
            metrics["fp8/kv_scale_min"].append(sync.kv_scales.values.min().item())
            metrics["fp8/kv_scale_max"].append(sync.kv_scales.values.max().item())


def _unique(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts come `num_generations` times each."""
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
