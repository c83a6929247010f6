"""`FP8Rollouts`: what makes one of TRL's trainers one with FP8 rollouts. To be inherited before it.

A step, and what features do in it (hooks of run/feature.py, of all features in the order of features/__init__.py):

    rollouts due   before_generation, before_turn -> [sync: prepare, write, audit; after_sync] -> generate (FP8)
                   after_generation
    old log-probs  scoring, reference
    batch          extend_batch
    loss           begin_loss -> TRL's own, scoring -> backward -> end_loss
"""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from operator import or_
from typing import Any, ClassVar, TypeVar

import torch
from accelerate.utils import set_seed
from transformers import ProgressCallback, TrainerCallback
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import get_config_model_id

from .engine.protocol import RolloutEngine
from .features import registrations
from .planning.plan import Plan, plan_for_model
from .policy.model import dequantizing_config, in_high_precision, is_reference, make_lists, require_countable_experts
from .recipe.from_model import outline_of
from .recipe.recipe import FP8Recipe
from .run.batch import Batch, Metric, Rollouts
from .run.checkpoints import checkpoint_to_resume, require_ranks
from .run.facts import trainer_precision
from .run.feature import Construction, Feature, inside
from .run.folder_lock import lock_folder
from .run.launch import (
    check_launch,
    checkpoint_bytes,
    launch_words,
    load_on_all_ranks,
    require_columns,
    require_no_images,
    require_no_qlora,
    require_output,
    require_path,
    require_room,
    require_rows,
    require_same_turns,
    require_short_prompts,
)
from .run.lines import slow_step
from .run.locations import require_model
from .run.progress import FP8ProgressCallback
from .run.saving import Saving
from .run.syncs import Syncs
from .sync.policy_checks import require_servable
from .upstream.patches import substituted
from .upstream.quiet import without_noise
from .upstream.vllm import engine_class, require_engine_arguments


AnyFeature = TypeVar("AnyFeature", bound=Feature)


class FP8Rollouts(Saving):
    """Methods of a trainer whose rollouts come from an FP8 engine."""

    config_class: ClassVar[type]  # of `args`

    # Of the class, so that overridden methods are TRL's on a trainer whose __init__ has not run, as TRL's own
    # tests make them
    recipe: FP8Recipe | None = None  # None if every FP8 flag is off
    plan: Plan | None = None  # its summary is printed at the start; None likewise
    features: tuple[Feature, ...] = ()  # what takes part in a step, in the order of their hooks
    context: int = 0  # tokens of a sequence in the engine; 0: not known
    handover: dict[str, Any]  # by folder: what registrations leave to their features

    # What GRPO has and TRL's other trainers lack; GRPO's own values hide these
    tools = environments = environment_factories = rollout_func = None

    def __init__(self, model: Any, args: Any = None, **given):
        """Arguments are those of TRL's trainer, by their names.

        Raises:
            ValueError: `args` is of another class than `config_class`, or the model or launcher does not go with its
                FP8 flags.
        """
        kind = self.config_class
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = kind(f"{name.split('/')[-1]}-{kind.__name__.removesuffix('Config')}")
        if not isinstance(args, kind):
            raise ValueError(
                f"args is a {type(args).__name__}: {type(self).__name__} reads its FP8 flags from {kind.__name__}. "
                f"Replace {type(args).__name__}(...) by {kind.__name__}(...); it takes the same arguments."
            )
        if args.own_engine:
            require_rows(given.get("train_dataset"))
            rewards = given.get("reward_funcs") or ()
            require_columns(
                {name: given.get(name) for name in ("train_dataset", "eval_dataset")},
                rewards if isinstance(rewards, list | tuple) else [rewards],
                adds_columns=bool(given.get("rollout_func") or given.get("environment_factory")),
            )
            if isinstance(model, str):
                require_model(model, "model", (args.model_init_kwargs or {}).get("revision"))
            else:
                require_path(model)
            if args.vllm_engine_kwargs:
                require_engine_arguments(args.vllm_engine_kwargs)
            if checkpoint := checkpoint_to_resume(args.output_dir, args.resume_from_checkpoint):
                require_ranks(checkpoint, args.world_size)
            require_output(args, 0, 0)  # transformers makes the folder, with an error that names no flag
        trls = sys.modules[self.trls().__module__]  # where it looks up its engine, and how a model is loaded
        construction = Construction(args, {"model": model, **given}, trls.create_model_from_path)
        if not isinstance(model, str):
            in_high_precision(model)
        self.handover = construction.handover
        # The last one first: what a later feature put on a given policy lies over what an earlier one did
        with inside(registration.construct(construction) for registration in reversed(registrations())):
            if args.own_engine:
                loading = args.model_init_kwargs or {}
                quantization = construction.trainer_kwargs.get("quantization_config")
                require_no_qlora(quantization or loading.get("quantization_config"))
            if isinstance(model, str) and construction.dequantizes:
                self._dequantize(construction)
            generation = substituted(trls, "VLLMGeneration", self._make_generation)
            with without_noise(), generation, substituted(trls, "create_model_from_path", construction.create_model):
                super().__init__(args=args, **construction.trainer_kwargs)
        in_high_precision(self.model)
        make_lists(self.processing_class)
        callbacks = given.get("callbacks") or ()
        self._choose_progress([one if isinstance(one, type) else type(one) for one in callbacks])
        self._make_features()
        for feature in self.features:
            if isinstance(feature, TrainerCallback):
                self.add_callback(feature)

    @classmethod
    def trls(cls) -> type:
        """Return TRL's own trainer: of several the one that the others extend, whose module makes model and engine."""
        return next(base for base in cls.__mro__ if _BaseTrainer in base.__bases__)

    @staticmethod
    def _dequantize(construction: Construction) -> None:
        """Have transformers dequantize a checkpoint that is stored in FP8 or MXFP4."""
        loading = construction.args.model_init_kwargs or {}
        if construction.trainer_kwargs.get("quantization_config") is None and "quantization_config" not in loading:
            trusted = loading.get("trust_remote_code", construction.args.trust_remote_code)
            stored = dequantizing_config(construction.trainer_kwargs["model"], loading.get("revision"), trusted)
            construction.trainer_kwargs["quantization_config"] = stored

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """The run's feature of a kind, None if it does without."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @property
    def logged(self) -> dict[str, list]:
        """What came since the last log of training or of evaluation: TRL's numbers, and a `Metric` of features."""
        return self._metrics["train" if self.model.training else "eval"]

    def _make_features(self) -> None:
        """Once: after the policy was made, and before an engine of ours starts."""
        if self.features:
            return
        if self.args.own_engine:
            self.recipe = self.args.recipe_for(self.model)
            self.features = (Syncs(self),)
        for registration in registrations():
            if not registration.needs or hasattr(self.args, registration.needs):
                for feature in registration.features(self):  # one by one: a later one may ask for an earlier one
                    self.features += (feature,)

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

    def _make_generation(self, **kwargs) -> object:
        """Called by TRL in place of its `VLLMGeneration(...)`, with the same arguments: features, plan, engine."""
        args = self.args
        if not args.own_engine and (args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration  # needs vllm, which TRL makes optional

            return VLLMGeneration(**kwargs)
        require_servable(self.model, engine_class)
        require_countable_experts(self.model, args.router_aux_loss_coef)
        if (config := self.model.config).get_text_config() is config:
            require_no_images(self.train_dataset, config.name_or_path)
        require_same_turns(self.tools, args.vllm_tensor_parallel_size)
        outline = outline_of(self.model)
        self.context = args.vllm_max_model_length or int(outline.context * outline.stretch)
        if not self.rollout_func and not self.environment_factories:  # they may make prompts of their own
            for name in ("train_dataset", "eval_dataset"):
                require_short_prompts(
                    getattr(self, name), name, lambda prompts: self._tokenize_prompts(prompts)[0], self.context
                )
        check_launch(self.accelerator, args.vllm_tensor_parallel_size)
        if args.save_strategy != "no" and self.accelerator.is_main_process:  # it writes the weights
            require_output(args, *checkpoint_bytes(self.model))
        if args.own_engine:
            lock_folder(args.output_dir, self.accelerator)
        if args.own_engine and self.ref_model is not None:  # with everything off this is TRL, its defects included
            load_on_all_ranks(self.ref_model, self.accelerator.device)
        self._make_features()
        if args.own_engine:
            self.plan = plan_for_model(self.model, self.recipe)
            self.accelerator.print(f"{self.plan.summary()}\nLaunch: {launch_words(self.accelerator)}", flush=True)
        text = "Starting the engine; at its first start vLLM compiles what it needs."
        with slow_step(text, shown=self.accelerator.is_main_process):
            parts = [part for feature in self.features if (part := feature.engine_part()) is not None]
            recipe = self.recipe or args.recipe_for(self.model)
            generation = self._start_engine(recipe, parts, **kwargs)
        if args.own_engine:
            set_seed(args.seed, device_specific=True)  # as TRL did before: vLLM seeds all generators by the rank
        for feature in self.features:
            feature.engine_started(generation.numerics, generation.kernels)
        if args.own_engine:
            kernels = [f"{name} ({count})" for name, count in generation.numerics.kernels.items()]
            engine = ", ".join(kernels) or "high precision"
            self.accelerator.print(f"Engine: {engine}. Trainer: {trainer_precision(self)}.\n")
        return generation

    def _start_engine(self, recipe: FP8Recipe, parts: Sequence[Any], **kwargs) -> RolloutEngine:
        """The engine that follows the policy by `recipe`; `parts` of features, `kwargs` as TRL's `VLLMGeneration`."""
        from .engine.vllm.generation import FP8VLLMGeneration  # needs vllm, which TRL makes optional

        options = {"after_sync": self._after_sync, "engine_kwargs": self.args.vllm_engine_kwargs}
        return FP8VLLMGeneration(recipe=recipe, parts=parts, **options, **kwargs)

    def _after_sync(self) -> None:
        for feature in self.features:
            feature.after_sync()

    def _generate(self, prompts: list) -> tuple:
        self._end_loss()  # of a `compute_loss` outside of a training step
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
        require_room(prompt_ids, self.context)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _scored(self, model: Any, *inputs: Any) -> AbstractContextManager[None]:
        """Around a pass of the policy or of its reference."""
        of_policy = self.features and model is not self.ref_model and not is_reference(model)
        return inside(one.scoring(*inputs) if of_policy else one.reference(*inputs) for one in self.features)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple:
        with self._scored(model, attention_mask, logits_to_keep):
            inputs = input_ids, attention_mask, logits_to_keep
            return super()._get_per_token_logps_and_entropies(model, *inputs, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        batch = Batch(super()._generate_and_score_completions(inputs))
        for feature in self.features:
            feature.extend_batch(batch)
        self._note(batch.metrics)
        return batch.tensors

    def compute_loss(self, model, inputs: dict, *args, **kwargs):
        try:
            for feature in self.features:
                feature.begin_loss(inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            if not torch.is_grad_enabled():  # an evaluation: no backward comes
                self._end_loss()

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        try:
            return super().training_step(*args, **kwargs)
        finally:  # not before: gradient checkpointing runs the forward again in the backward pass
            self._end_loss()

    def _end_loss(self) -> None:
        for feature in self.features:
            feature.end_loss()
