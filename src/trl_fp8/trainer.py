"""`FP8GRPOTrainer`: TRL's `GRPOTrainer` with FP8 rollouts.

A step, and who takes part in it. Everything optional is a feature: an object with the hooks of run/feature.py.

    rollouts due   -> [sync: KV scales, write, audit] -> generate (FP8)     Syncs, KVCache, Routes, SameModel
    old log-probs  -> q, k, v observed for the next scales                   KVCache, Routes, Truncation
    batch          -> importance ratios, mismatch/*, correction/*            RunLog, Correction, Flow
    loss           -> TRL's, over the policy as the rollouts saw it          KVCache, Routes, Truncation
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, TypeVar

import torch
import trl.trainer.grpo_trainer as trl_grpo
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    ProgressCallback,
    TrainerCallback,
)
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from .config import FP8GRPOConfig
from .features.correction.correction import Correction
from .features.correction.importance import RolloutCorrection
from .features.kv_cache.kv_cache import KVCache
from .features.one_forward.following import Flow
from .features.one_forward.one_forward import release
from .features.one_forward.same_model import SameModel
from .features.router_replay.kl_floor import KLFloor
from .features.router_replay.routes import Routes
from .features.run_log.run_log import RunLog
from .features.shared_base.adaptable import require_adaptable, require_apart, require_trainable_base
from .features.shared_base.held_base import HeldBase, SharedBase, Source, require_own_weights
from .features.shared_base.stored_base import load_without_base
from .features.truncated_sampling.truncation import Truncation
from .planning.plan import Plan, plan_for_model
from .policy.model import dequantizing_config, in_high_precision, is_reference, require_countable_experts
from .policy.processor import make_lists
from .recipe.recipe import FP8Recipe
from .run.feature import Batch, Feature, Rollouts
from .run.launch import check_launch, load_on_all_ranks, require_no_images, require_rows, require_same_turns
from .run.lines import slow_step
from .run.metric import Metric
from .run.output import checkpoint_bytes, require_output
from .run.progress import FP8ProgressCallback
from .run.saving import Saving
from .run.syncs import Syncs
from .sync.policy_checks import require_servable
from .upstream.patches import substituted
from .upstream.quiet import without_noise
from .upstream.vllm import engine_class


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig

    from .engine.protocol import RolloutEngine
    from .engine.vllm.part import EnginePart


AnyDataset = Dataset | IterableDataset
AnyFeature = TypeVar("AnyFeature", bound=Feature)
# The run log writes what the KV cache recorded of a batch; the flow looks at the mismatch that a correction measured;
# a truncation scores with a head of its own in place of the flow's
ORDER = (Syncs, KVCache, Routes, RunLog, Correction, Flow, KLFloor, Truncation, SameModel)


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
        plan: `Plan` whose summary is printed at the start; None likewise.
        correction: `RolloutCorrection` in force; None if TRL does without one, or alone with everything FP8 off.
        features: What takes part in a step, in the order of `ORDER`.

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
    features: tuple[Feature, ...] = ()
    _base: Source | None = None  # FP8 weights that the policy was made without

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
            require_output(args, 0, 0)  # transformers makes the folder, with an error that names no flag
        loader = trl_grpo.create_model_from_path
        if args.fp8_base:
            require_trainable_base(args, peft_config, quantization_config)
            loader = partial(self._load_without_base, args, peft_config, loader)
        if not isinstance(model, str):
            in_high_precision(model)
            if args.fp8_base:
                release(model)
                recipe = args.recipe_for(model)
                require_apart(model, peft_config, recipe)
                self._base = HeldBase(model, recipe)
            else:
                require_own_weights(model)
        elif (
            not args.fp8_base
            and quantization_config is None
            and "quantization_config" not in (loading := args.model_init_kwargs or {})
        ):
            trusted = loading.get("trust_remote_code", args.trust_remote_code)
            quantization_config = dequantizing_config(model, loading.get("revision"), trusted)
        engine = substituted(trl_grpo, "VLLMGeneration", self._make_generation)
        loading = substituted(trl_grpo, "create_model_from_path", loader)
        with without_noise(), engine, loading, self._restored_on_failure():
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
        in_high_precision(self.model)
        make_lists(self.processing_class)
        self._choose_progress([one if isinstance(one, type) else type(one) for one in callbacks or ()])
        self.correction = args.correction
        if self.correction is not None:
            self._add(Correction(self))
        if args.fp8_run_log:
            self._add(RunLog(self))
        for feature in self.features:
            self.add_callback(feature)

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """The run's feature of a kind, None if it does without."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @property
    def logged(self) -> dict[str, list]:
        """What came since the last log of training or of evaluation: TRL's numbers, and a `Metric` of features."""
        return self._metrics["train" if self.model.training else "eval"]

    def _add(self, feature: AnyFeature) -> AnyFeature:
        self.features = tuple(sorted([*self.features, feature], key=lambda one: ORDER.index(type(one))))
        return feature

    def _choose_progress(self, given: list[type[TrainerCallback]]) -> None:
        """Put `FP8ProgressCallback` in the place of the bar that transformers added, which prints a dictionary of all
        metrics at each log. Where a bar was given among `callbacks`, or `disable_tqdm` is set, nothing changes.
        """
        asked = any(issubclass(one, FP8ProgressCallback) for one in given)
        if not asked and any(issubclass(one, ProgressCallback) for one in given):
            return
        for default in [one for one in self.callback_handler.callbacks if type(one) is ProgressCallback]:
            self.remove_callback(default)
            if not asked:
                self.add_callback(FP8ProgressCallback())

    def _note(self, metrics: Mapping[str, Metric]) -> None:
        """Keep metrics of one batch for the next log, beside TRL's."""
        for name, metric in metrics.items():
            if self.logged[name] and not isinstance(self.logged[name][0], Metric):
                raise ValueError(
                    f"log_metric({name!r}, ...): a reward logs under the name of one of this trainer's own metrics. "
                    "Give it another name."
                )
            self.logged[name].append(metric)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Merge what features measured since the last log, then have TRL log it: TRL averages lists, and would average
        maxima and ratios, too. What was not measured (NaN) is left out, where TRL would log None.
        """
        for name, batches in list(self.logged.items()):
            if batches and isinstance(batches[0], Metric):
                value = reduce(or_, batches).value
                self.logged[name] = [value]
                if math.isnan(value):
                    del self.logged[name]
        super().log(logs, start_time)

    def _load_without_base(
        self, args: FP8GRPOConfig, peft_config: "PeftConfig | None", create: Callable, name: str, **loading
    ) -> PreTrainedModel:
        """Called by TRL in place of its `create_model_from_path`. What is trained is FP32, as TRL loads it."""
        if getattr(peft_config, "modules_to_save", None) or getattr(peft_config, "bias", "none") != "none":
            loading = {"dtype": torch.float32} | loading
        model, self._base = load_without_base(create, name, args.recipe_for, **loading)
        require_apart(model, peft_config, self._base.recipe)
        return model

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """A model that was given keeps its weights if no trainer comes of it."""
        try:
            yield
        except BaseException:
            if isinstance(self._base, HeldBase):
                self._base.restore()
            raise

    def _make_generation(self, **kwargs) -> "RolloutEngine | trl_grpo.VLLMGeneration":
        """Called by TRL in place of its `VLLMGeneration(...)`, with the same arguments: the plan, the engine, and the
        features that follow it.
        """
        args = self.args
        if not args.own_engine and (args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration

            return VLLMGeneration(**kwargs)
        require_servable(self.model, engine_class)
        require_countable_experts(self.model, args.router_aux_loss_coef)
        if (config := self.model.config).get_text_config() is config:
            require_no_images(self.train_dataset, config.name_or_path)
        require_same_turns(self.tools, args.vllm_tensor_parallel_size)
        check_launch(self.accelerator, args.vllm_tensor_parallel_size)
        if args.save_strategy != "no" and self.accelerator.is_main_process:  # it writes the weights
            require_output(args, *checkpoint_bytes(self.model))
        if args.own_engine and self.ref_model is not None:  # with everything off this is TRL, its defects included
            load_on_all_ranks(self.ref_model, self.accelerator.device)
        recipe = self._base.recipe if self._base else args.recipe_for(self.model)
        if self._base:
            require_adaptable(self.model, recipe)
        if recipe.fp8_kv_cache:
            recipe = self._add(KVCache(self, recipe)).recipe  # with kv_cache_skip_layers="auto" resolved
        if args.own_engine:
            self.recipe, self.plan = recipe, plan_for_model(self.model, recipe)
            self._add(Syncs(self))
            self.accelerator.print(self.plan.summary(), flush=True)
        if args.routes_returned:
            self._add(Routes(self))
        if args.survivors_returned:
            self._add(Truncation(self))
        flow = self._add(Flow(self)) if args.fp8_flow_on else None
        if args.any_fp8:
            self._add(SameModel(self))
        if args.beta and args.router_replay == "rollout" and flow is None:
            self._add(KLFloor(self))
        text = "Starting the engine; at its first start vLLM compiles what it needs."
        with slow_step(text, shown=self.accelerator.is_main_process):
            parts = [part for feature in self.features if (part := feature.engine_part()) is not None]
            if self._base:
                from .features.shared_base.engine_base import BasePart  # needs vllm

                parts.append(BasePart(SharedBase(self.model, self._base, self.accelerator.device)))
            generation = self._start_engine(recipe, parts, **kwargs)
        for feature in self.features:
            feature.engine_started(generation.numerics, generation.kernels)
        if args.own_engine:
            kernels = [f"{name} ({count})" for name, count in generation.numerics.kernels.items()]
            engine, trainer = ", ".join(kernels) or "high precision", flow or "as TRL computes"
            trainer = f"{trainer}, on the engine's FP8 base; syncs send adapters" if self._base else trainer
            self.accelerator.print(f"Engine: {engine}. Trainer: {trainer}.\n")
        return generation

    def _start_engine(self, recipe: FP8Recipe, parts: "Sequence[EnginePart]", **kwargs) -> "RolloutEngine":
        """The engine that follows the policy by `recipe`; `kwargs` as for TRL's `VLLMGeneration`."""
        from .engine.vllm.generation import FP8VLLMGeneration  # needs vllm, which TRL makes optional

        args = self.args
        return FP8VLLMGeneration(
            recipe=recipe,
            parts=parts,
            after_sync=self._after_sync,
            engine_kwargs=args.vllm_engine_kwargs,
            **kwargs,
        )

    def _after_sync(self) -> None:
        for feature in self.features:
            feature.after_sync()

    def _generate(self, prompts: list) -> tuple:
        for feature in self.features:
            feature.before_generation(prompts)
        output = super()._generate(prompts)
        rollouts = Rollouts(*output[:2]) if self.features else None
        for feature in self.features:
            feature.after_generation(rollouts)
        self._note(rollouts.metrics if rollouts else {})
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        for feature in self.features:
            feature.before_turn(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple:
        with ExitStack() as around:
            of_policy = self.features and model is not self.ref_model and not is_reference(model)
            for feature in self.features:
                scored = feature.scoring if of_policy else feature.reference
                around.enter_context(scored(attention_mask, logits_to_keep))
            inputs = input_ids, attention_mask, logits_to_keep
            return super()._get_per_token_logps_and_entropies(model, *inputs, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        batch = Batch(super()._generate_and_score_completions(inputs))
        for feature in self.features:
            feature.extend_batch(batch)
        self._note(batch.metrics)
        return batch.tensors

    def compute_loss(self, model, inputs: dict, *args, **kwargs):
        for feature in self.features:
            feature.begin_loss(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        try:
            return super().training_step(*args, **kwargs)
        finally:  # not before: gradient checkpointing runs the forward again in the backward pass
            self._end_loss()

    def prediction_step(self, *args, **kwargs) -> tuple:
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._end_loss()

    def _end_loss(self) -> None:
        for feature in self.features:
            feature.end_loss()
