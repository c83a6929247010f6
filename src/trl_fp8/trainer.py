"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts.

What it adds to a step, all of it around TRL's own code:

    rollouts due   -> remember the prompts -> [sync: KV scales, stream, audit] -> generate (FP8)
    old log-probs  -> q, k, v observed for the next scales -> importance ratios -> TRL's loss and optimizer step
    both forwards  -> optionally with k and v as the KV cache held them, under the scales of those rollouts
    metrics        -> fp8/*, mismatch/*, correction/*                                             (logged as TRL's)
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trl.trainer.grpo_trainer as trl_grpo
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from .config import FP8GRPOConfig
from .correction import apply_correction, warn_once
from .engine.replicas import all_reduce_max
from .engine.upstream import substituted
from .launch import check_launch
from .plan import Plan, plan_for_model
from .policy.adapters import is_reference
from .policy.attention_tap import AttentionTap
from .policy.fp8_flow import FP8Flow
from .policy.kv_calibration import KVCalibrator
from .policy.precision_flow import PrecisionFlow
from .probe import outliers_on_first_prompts
from .recipe import FP8Recipe
from .rollout_buffer import load_rollouts, save_rollouts
from .sync_metrics import sync_metrics


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig

    from .engine.generation import FP8VLLMGeneration, SyncReport


logger = get_logger(__name__)

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
        self._tap: AttentionTap | None = None
        self._calibrator: KVCalibrator | None = None
        self._flow: PrecisionFlow | None = None
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
        if self._flow is not None:
            self.add_callback(self._flow)

    def _make_generation(self, **kwargs) -> "FP8VLLMGeneration | trl_grpo.VLLMGeneration":
        """Called by TRL in place of its `VLLMGeneration(...)`, with the same arguments."""
        if not self.args.any_fp8 and (self.args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration

            return VLLMGeneration(**kwargs)
        from .engine.generation import FP8VLLMGeneration  # needs vllm, which TRL makes optional

        check_launch(self.accelerator, self.args.vllm_tensor_parallel_size)
        recipe = self.args.recipe_for(self.model)
        if recipe.fp8_kv_cache:
            recipe = self._tap_attention(recipe)
        if self.args.any_fp8:
            self.recipe, self.plan = recipe, plan_for_model(self.model, recipe)
            self.accelerator.print(self.plan.table())
        generation = FP8VLLMGeneration(
            recipe=recipe,
            calibrate=lambda: self._calibrator.next_scales(self.model_wrapped),
            engine_kwargs=self.args.vllm_engine_kwargs,
            **kwargs,
        )
        if self._tap is not None:
            self._tap.quantize_query = generation.quantizes_query
        if self.args.fp8_flow_on:
            self._flow = self._precision_flow(generation)
            generation.quantized = self._flow.quantized_weight if self._flow.keeps_weights else None
        return generation

    def _precision_flow(self, generation: "FP8VLLMGeneration") -> PrecisionFlow:
        """Make the policy compute what the engine's kernels were found to compute."""
        scaling = generation.activation_scaling
        flow = FP8Flow(
            **self.args.flow,
            weight_format=self.recipe.scale_format,
            activation_format=scaling.scale_format,
            activation_amax_floor=scaling.amax_floor,
            cache_weights=not (self.is_fsdp_enabled or self.is_deepspeed_enabled),
        )
        logger.info(f"trainer: {flow}")
        return PrecisionFlow(self.model, self.recipe, flow, self._tap)

    def _tap_attention(self, recipe: FP8Recipe) -> FP8Recipe:
        """Tap the policy's attention; returns the recipe with kv_cache_skip_layers='auto' resolved."""
        reduce_max = all_reduce_max if self.accelerator.num_processes > 1 else None
        self._tap = AttentionTap(self.model, recipe.kv_cache_skip_layers)
        if self.args.skip_layers is None:
            errors = outliers_on_first_prompts(self, self._tap, reduce_max)
            recipe = self.args.recipe_for(self.model, tuple(errors))
            self._tap.high_precision_layers = frozenset(errors)
        self._calibrator = KVCalibrator(
            self._tap,
            **self.args.calibration,
            pad_token_id=self._tokenizer.pad_token_id,
            fused_lm_head=True,
            reduce_max=reduce_max,
        )
        return recipe

    def _generate(self, prompts: list) -> tuple:
        if self.recipe is None:
            return super()._generate(prompts)
        if self._calibrator and self.rollout_func is not None:  # TRL syncs before anything is tokenized
            self._calibrator.coming_prompts = self._tokenize_prompts(prompts)[0]
        several_turns = self.tools or self.environments or self.rollout_func
        self.vllm_generation.llm.keep_weights = bool(several_turns) or not self.model.training
        output = super()._generate(prompts)
        if self._calibrator:
            rollouts = zip(*output[:2], strict=True)  # prompt_ids, completion_ids
            sequences = [list(prompt) + list(completion) for prompt, completion in rollouts]
            self._calibrator.rollouts_arrived(sequences, self.vllm_generation.last_sync.kv_scales)
            self._simulate(self._kv_scales_in_force)
        if self._flow is not None and is_peft_model(self.model):
            self._flow.weights_changed()  # the sync merged and unmerged adapters
        self._log_sync()
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        if self._calibrator:
            self._calibrator.coming_prompts = prompt_ids
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs) -> tuple:
        if self._calibrator is None or model is self.ref_model or is_reference(model):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with self._calibrator.watching():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def compute_loss(self, model, inputs: dict, *args, **kwargs):
        if "kv_scales" in inputs:
            self._simulate(inputs["kv_scales"][0])
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        try:
            return super().training_step(*args, **kwargs)
        finally:  # not before: gradient checkpointing runs the forward again in the backward pass
            self._simulate(None)

    def prediction_step(self, *args, **kwargs) -> tuple:
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._simulate(None)

    @property
    def _kv_scales_in_force(self) -> torch.Tensor:
        return self.vllm_generation.last_sync.kv_scales.values.to(self.accelerator.device)

    def _simulate(self, scales_L3: torch.Tensor | None) -> None:
        if self.args.simulate_kv_cache:
            self._tap.scales_L3 = scales_L3

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        output = super()._generate_and_score_completions(inputs)
        logged = self._metrics["train" if self.model.training else "eval"]
        if self.args.simulate_kv_cache:  # a copy per sequence, because TRL shuffles and splits batches by sequence
            output["kv_scales"] = self._kv_scales_in_force.expand(len(output["prompt_ids"]), -1, -1)
        if self._calibrator and (saturation := self._calibrator.saturation()) is not None:
            logged["fp8/kv_saturation_fraction"].append(saturation)
        if self.correction is None:
            return output
        wanted = self.correction.trl_mode, self.correction.bound_min, self.correction.bound_max
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        from_trl = wanted == (self.vllm_importance_sampling_mode, *bounds)
        if not from_trl:  # TRL described a ratio that is not used
            for statistic in ("min", "mean", "max"):
                logged.pop(f"sampling/importance_sampling_ratio/{statistic}")
        metrics = apply_correction(output, self.correction, self.accelerator, ratio_from_trl=from_trl)
        for name, value in metrics.items():
            logged[name].append(value)
        warn_once(metrics, self.correction, self._warned)
        return output

    def _log_sync(self) -> None:
        """Add the latest sync's figures to TRL's metrics, once per sync. All of them are on the host already."""
        sync = self.vllm_generation.last_sync
        if sync is self._logged_sync:
            return
        self._logged_sync = sync
        logged = self._metrics["train" if self.model.training else "eval"]
        margin = self._calibrator and self._calibrator.margin_in_force
        for name, value in sync_metrics(sync, self.recipe, margin).items():
            logged[name].append(value)

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self._calibrator:
            self._calibrator.save(folder, self.accelerator.process_index)
        if self.args.any_fp8 and self._step % (self.args.steps_per_generation * self.num_iterations):
            save_rollouts(folder, self.accelerator, self._step, self._buffered_inputs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.args.any_fp8:
            return
        if self._calibrator:
            self._calibrator.load(checkpoint, self.accelerator.process_index)
        if rollouts := load_rollouts(checkpoint, self.accelerator):
            self._step, self._buffered_inputs = rollouts
