"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts.

What it adds to a step, all of it around TRL's own code:

    rollouts due   -> remember the prompts -> [sync: KV scales, stream, audit] -> generate (FP8)
    old log-probs  -> q, k, v observed for the next scales -> importance ratios -> TRL's loss and optimizer step
    both forwards  -> optionally with k and v as the KV cache held them, under the scales of those rollouts, and with
                      the experts that the rollouts used
    metrics        -> fp8/*, mismatch/*, correction/*                                             (logged as TRL's)
"""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
import trl.trainer.grpo_trainer as trl_grpo
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from trl_fp8.correction.apply import apply_correction, batch_log_ratio, warn_once
from trl_fp8.correction.importance import RolloutCorrection
from trl_fp8.correction.log_ratio import LogRatio
from trl_fp8.features.instruments import follow_attention, precision_flow, tap_attention
from trl_fp8.planning.plan import Plan, plan_for_model
from trl_fp8.policy.attention.calibration import KVCalibrator
from trl_fp8.policy.attention.tap import AttentionTap
from trl_fp8.policy.flow.check import flow_warning
from trl_fp8.policy.flow.precision_flow import PrecisionFlow
from trl_fp8.policy.fp8_checkpoint import dequantizing_config, save_in_high_precision
from trl_fp8.policy.model import is_reference
from trl_fp8.policy.router.replay import RouterReplay
from trl_fp8.policy.router.routes import RolloutRoutes
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.run.facts import run_facts
from trl_fp8.run.launch import check_launch
from trl_fp8.run.log import RunLog
from trl_fp8.run.metrics import SyncLog
from trl_fp8.run.prompt_checks import require_prompts, require_rows
from trl_fp8.run.saving import Saving
from trl_fp8.upstream.patches import substituted

from .config import FP8GRPOConfig


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig

    from trl_fp8.engine.vllm.generation import FP8VLLMGeneration


AnyDataset = Dataset | IterableDataset
logger = get_logger(__name__)


class FP8GRPOTrainer(Saving, GRPOTrainer):
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

    # Of the class, so that overridden methods are TRL's on a trainer whose __init__ has not run, as TRL's own
    # tests make them
    recipe: FP8Recipe | None = None
    plan: Plan | None = None
    correction: RolloutCorrection | None = None
    _tap: AttentionTap | None = None
    _calibrator: KVCalibrator | None = None
    _flow: PrecisionFlow | None = None
    _flow_warned = False
    _routes: RolloutRoutes | None = None
    _run_log: RunLog | None = None

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
        if args.own_engine:
            require_rows(train_dataset)
        if not isinstance(model, str):
            save_in_high_precision(model)
        elif quantization_config is None and "quantization_config" not in (loading := args.model_init_kwargs or {}):
            trusted = loading.get("trust_remote_code", args.trust_remote_code)
            quantization_config = dequantizing_config(model, loading.get("revision"), trusted)
        self.correction = args.correction
        self._warned: set[str] = set()
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
        save_in_high_precision(self.model)
        if self._flow is not None:
            self.add_callback(self._flow)
        writes = args.fp8_run_log and self.accelerator.is_main_process
        self._run_log = RunLog(args.output_dir, partial(run_facts, self), writes)
        self.add_callback(self._run_log)

    def _make_generation(self, **kwargs) -> "FP8VLLMGeneration | trl_grpo.VLLMGeneration":
        """Called by TRL in place of its `VLLMGeneration(...)`, with the same arguments."""
        if not self.args.own_engine and (self.args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration

            return VLLMGeneration(**kwargs)
        from trl_fp8.engine.vllm.generation import FP8VLLMGeneration  # needs vllm, which TRL makes optional
        from trl_fp8.sync.policy_checks import require_servable

        require_servable(self.model)
        check_launch(self.accelerator, self.args.vllm_tensor_parallel_size)
        recipe = self.args.recipe_for(self.model)
        if recipe.fp8_kv_cache:
            self._tap, self._calibrator, recipe = tap_attention(self, recipe)
        if self.args.own_engine:
            self.recipe, self.plan = recipe, plan_for_model(self.model, recipe)
            self._sync_log = SyncLog(recipe)
            self.accelerator.print(self.plan.table())
        if self.args.routes_returned:
            replay = RouterReplay(self.model, f"router_replay={self.args.router_replay!r}")
            self._routes = RolloutRoutes(replay, self.args.router_replay)
        generation = FP8VLLMGeneration(
            recipe=recipe,
            calibrate=lambda: self._calibrator.next_scales(self.model_wrapped),
            engine_kwargs=self.args.vllm_engine_kwargs,
            return_routes=self.args.routes_returned,
            match_rounding=self.args.fp8_forward == "full",
            **kwargs,
        )
        if self._tap is not None:
            follow_attention(self, generation, self._tap)
        if self.args.fp8_flow_on:
            self._flow = precision_flow(self, generation, self._tap)
            generation.share = self._flow.keep_weight if self._flow.keeps_weights else None
        if self.args.own_engine:
            kernels = (
                ", ".join(f"{name} ({count})" for name, count in generation.numerics.kernels.items())
                or "high precision"
            )
            self.accelerator.print(
                f"Engine: {kernels}. Trainer: {self._flow.flow if self._flow else 'as TRL computes'}.\n"
            )
        return generation

    def _generate(self, prompts: list) -> tuple:
        if self.recipe is None:
            return super()._generate(prompts)
        if self._calibrator and self.rollout_func is not None:  # TRL syncs before anything is tokenized
            self._calibrator.coming_prompts = self._tokenize_prompts(prompts)[0]
        several_turns, llm = self.tools or self.environments or self.rollout_func, self.vllm_generation.llm
        llm.keep_weights = bool(several_turns) or not self.model.training
        llm.occasion = self.state.global_step, int(self.model.training)
        if self._routes:
            llm.routes.clear()
        output = super()._generate(prompts)
        rollouts = zip(*output[:2], strict=True)  # prompt_ids, completion_ids
        sequences = [list(prompt) + list(completion) for prompt, completion in rollouts]
        if self._routes:
            self._routes.arrived(llm.routes.of(sequences), [len(prompt) for prompt in output[0]])
        if self._calibrator:
            self._calibrator.rollouts_arrived(sequences, self.vllm_generation.last_sync.kv_scales)
            self._simulate(self._kv_scales_in_force)
        if self._flow is not None and is_peft_model(self.model):
            self._flow.weights_changed()  # the sync merged and unmerged adapters
        self._log_sync()
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        if self.recipe is not None:
            require_prompts(prompt_ids, self.args.vllm_max_model_length)
        if self._calibrator:
            self._calibrator.coming_prompts = prompt_ids
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple:
        with ExitStack() as watched:
            if (self._calibrator or self._routes) and model is not self.ref_model and not is_reference(model):
                if self._calibrator:
                    watched.enter_context(self._calibrator.watching())
                if self._routes:
                    scoring = self._routes.old_log_probs(input_ids.shape, logits_to_keep, input_ids.device)
                    watched.enter_context(scoring)
            inputs = input_ids, attention_mask, logits_to_keep
            return super()._get_per_token_logps_and_entropies(model, *inputs, *args, **kwargs)

    def compute_loss(self, model, inputs: dict, *args, **kwargs):
        if "kv_scales" in inputs:
            self._simulate(inputs["kv_scales"][0])
        if "routed_experts" in inputs:
            self._routes.replay.begin(inputs["routed_experts"], replay=True)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        try:
            return super().training_step(*args, **kwargs)
        finally:  # not before: gradient checkpointing runs the forward again in the backward pass
            self._end_forward()

    def prediction_step(self, *args, **kwargs) -> tuple:
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._end_forward()

    def _end_forward(self) -> None:
        self._simulate(None)
        if self._routes:
            self._routes.replay.end()

    @property
    def _kv_scales_in_force(self) -> torch.Tensor:
        return self.vllm_generation.last_sync.kv_scales.values.to(self.accelerator.device)

    def _simulate(self, scales_L3: torch.Tensor | None) -> None:
        if self._tap is not None and self.args.simulate_kv_cache:
            self._tap.scales_L3 = scales_L3

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        output = super()._generate_and_score_completions(inputs)
        logged = self._metrics["train" if self.model.training else "eval"]
        if self._tap is not None and self.args.simulate_kv_cache:
            # a copy per sequence, because TRL shuffles and splits batches by sequence
            output["kv_scales"] = self._kv_scales_in_force.expand(len(output["prompt_ids"]), -1, -1)
        if self._routes:
            columns = output["prompt_ids"].shape[1], output["prompt_ids"].shape[1] + output["completion_ids"].shape[1]
            if (routes := self._routes.batch_field(*columns)) is not None:
                output["routed_experts"] = routes
            for name, value in self._routes.metrics(lambda sums: self.accelerator.reduce(sums, "sum")).items():
                logged[name].append(value)
        if self._calibrator and (saturation := self._calibrator.saturation()) is not None:
            logged["fp8/kv_saturation_fraction"].append(saturation)
        training, log = self.model.training, self._run_log
        ratio = batch_log_ratio(output) if self.correction is not None or log else None
        sample = log.sample(ratio) if training and log else None
        if self.correction is not None:
            self._correct(output, ratio, logged)
        if training and log:
            scales = self.vllm_generation.last_sync.kv_scales if self._calibrator else None
            saturated = self._calibrator.saturated_L2 if self._calibrator else None
            log.generation(self.state.global_step, sample, scales, saturated)
        return output

    def _correct(self, output: dict, ratio: LogRatio, logged: dict[str, list]) -> None:
        wanted = self.correction.trl_mode, self.correction.bound_min, self.correction.bound_max
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        from_trl = wanted == (self.vllm_importance_sampling_mode, *bounds)
        if not from_trl:  # TRL described a ratio that is not used
            for statistic in ("min", "mean", "max"):
                logged.pop(f"sampling/importance_sampling_ratio/{statistic}")
        metrics = apply_correction(output, ratio, self.correction, self.accelerator, ratio_from_trl=from_trl)
        for name, value in metrics.items():
            logged[name].append(value)
        warn_once(metrics, self.correction, self._warned)
        if self.args.fp8_forward == "full" and not self._flow_warned:
            self._check_flow(metrics["mismatch/logp_difference_mean"])

    def _check_flow(self, mismatch: float) -> None:
        left_out = self.recipe.fp8_kv_cache and not self.args.simulate_kv_cache
        known = {"adapters": is_peft_model(self.model), "kv_cache_left_out": left_out}
        if warning := flow_warning(mismatch, self.recipe.model_type, **known):
            self._flow_warned = True
            logger.warning(warning)

    def _log_sync(self) -> None:
        margin = self._calibrator and self._calibrator.margin_used
        logged = self._metrics["train" if self.model.training else "eval"]
        for name, value in self._sync_log.new_metrics(self.vllm_generation.last_sync, margin).items():
            logged[name].append(value)
