"""`FP8Rollouts`: FP8 rollouts for one of TRL's trainers. A trainer inherits it before TRL's class.

The engine starts while TRL's `__init__` runs (`_make_generation`). A step, and the hooks of features in it
(run/feature.py), which are called for all features in the order of features/__init__.py:

    rollouts due   before_generation, before_turn -> [sync: prepare, write, audit; after_sync] -> generate (FP8)
                   after_generation
    old log-probs  scoring, reference
    batch          extend_batch
    loss           begin_loss -> TRL's own, scoring -> backward -> end_loss
"""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from importlib import import_module
from inspect import signature
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
from .run.feature import Construction, Feature
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
    plan: Plan | None = None  # its summary is printed at the start; None if every FP8 flag is off
    features: tuple[Feature, ...] = ()  # parts of a step, in the order of their hooks
    context: int = 0  # tokens of a sequence in the engine; 0: not known
    handover: dict[str, Any]  # by folder: what registrations leave to their features

    # What GRPO has and TRL's other trainers lack; GRPO's own values hide these
    tools = environments = environment_factories = rollout_func = ref_model = None

    has_prompts: ClassVar[bool] = True  # datasets have a column "prompt"
    engine_module: ClassVar[str | None] = None  # where TRL looks up `VLLMGeneration`; None: the trainer's own

    def __init__(self, model: Any, args: Any = None, **trainer_kwargs):
        """Take the arguments of TRL's trainer, by their names.

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

        # Refuse what can be refused before a model is loaded
        loading = args.model_init_kwargs or {}
        if args.own_engine:
            require_rows(trainer_kwargs.get("train_dataset"))
            rewards = trainer_kwargs.get("reward_funcs") or ()
            if self.has_prompts:
                require_columns(
                    {name: trainer_kwargs.get(name) for name in ("train_dataset", "eval_dataset")},
                    rewards if isinstance(rewards, list | tuple) else [rewards],
                    adds_columns=bool(trainer_kwargs.get("rollout_func") or trainer_kwargs.get("environment_factory")),
                )
            if isinstance(model, str):
                require_model(model, "model", loading.get("revision"))
            else:
                require_path(model)
            if args.vllm_engine_kwargs:
                require_engine_arguments(args.vllm_engine_kwargs)
            checkpoint = checkpoint_to_resume(args.output_dir, args.resume_from_checkpoint)
            if checkpoint:
                require_ranks(checkpoint, args.world_size)
            require_output(args, 0, 0)  # transformers makes the folder, with an error that names no flag

        trl_module = sys.modules[self.trl_class().__module__]  # it looks up its engine there, and its model loader
        construction = Construction(args, {"model": model, **trainer_kwargs}, trl_module.create_model_from_path)
        self.handover = construction.handover
        if not isinstance(model, str):
            in_high_precision(model)
        with ExitStack() as stack:
            # In reverse order: a later feature may have wrapped what an earlier one installed on the model
            for registration in reversed(registrations()):
                stack.enter_context(registration.construct(construction))
            quantization = construction.trainer_kwargs.get("quantization_config")
            if args.own_engine:
                require_no_qlora(quantization or loading.get("quantization_config"))

            # transformers dequantizes a checkpoint that is stored in FP8 or MXFP4
            unset = quantization is None and "quantization_config" not in loading
            if isinstance(model, str) and construction.dequantizes and unset:
                trusted = loading.get("trust_remote_code", args.trust_remote_code)
                stored = dequantizing_config(model, loading.get("revision"), trusted)
                if stored is not None and "quantization_config" not in signature(self.trl_class()).parameters:
                    raise ValueError(
                        f"model={model!r} is stored in FP8 or MXFP4, and TRL's {self.trl_class().__name__} takes no "
                        "quantization_config to load it in high precision. Pass a loaded model, or one in BF16."
                    )
                if stored is not None:
                    construction.trainer_kwargs["quantization_config"] = stored

            # TRL makes model and dataset, and then the engine: `_make_generation` is called inside
            stack.enter_context(without_noise())
            generation_module = import_module(self.engine_module or trl_module.__name__)
            original = generation_module.VLLMGeneration

            def make_generation(**kwargs) -> object:
                with substituted(generation_module, "VLLMGeneration", original):  # for what is imported meanwhile
                    return self._make_generation(**kwargs)

            stack.enter_context(substituted(generation_module, "VLLMGeneration", make_generation))
            stack.enter_context(substituted(trl_module, "create_model_from_path", construction.create_model))
            super().__init__(args=args, **construction.trainer_kwargs)
        in_high_precision(self.model)
        make_lists(self.processing_class)

        # The bar that transformers adds prints a dictionary of all metrics at each log. `FP8ProgressCallback` takes
        # its place, unless `disable_tqdm` is set or one of `callbacks` is a bar
        callbacks = [one if isinstance(one, type) else type(one) for one in trainer_kwargs.get("callbacks") or ()]
        has_own_bar = any(issubclass(one, FP8ProgressCallback) for one in callbacks)
        if has_own_bar or not any(issubclass(one, ProgressCallback) for one in callbacks):
            for default in [one for one in self.callback_handler.callbacks if type(one) is ProgressCallback]:
                self.remove_callback(default)
                if not has_own_bar:
                    self.add_callback(FP8ProgressCallback())

        self._make_features()
        for feature in self.features:
            if isinstance(feature, TrainerCallback):
                self.add_callback(feature)

    @classmethod
    def trl_class(cls) -> type:
        """Return TRL's own trainer: of several the one that the others extend, whose module makes model and engine."""
        return next(base for base in cls.__mro__ if _BaseTrainer in base.__bases__)

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the run's feature of a kind, or None."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @property
    def logged(self) -> dict[str, list]:
        """Values since the last log of training or of evaluation: TRL's numbers, and a `Metric` of features."""
        return self._metrics["train" if self.model.training else "eval"]

    def _make_features(self) -> None:
        """Make the features once: after the policy, and before an engine of ours starts."""
        if self.features:
            return
        args = self.args
        if args.own_engine:
            if args.vllm_mode == "server":
                from .engine.vllm_server.server_generation import tensor_parallel_size  # needs vllm

                url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
                args.vllm_tensor_parallel_size = tensor_parallel_size(
                    url, args.vllm_server_timeout, self.accelerator, args.vllm_tensor_parallel_size
                )
            self.recipe = args.recipe_for(self.model)
            self.features = (Syncs(self),)
        for registration in registrations():
            if not registration.needs or hasattr(self.args, registration.needs):
                for feature in registration.features(self):  # one by one: a later one may ask for an earlier one
                    self.features += (feature,)

    def _make_generation(self, **kwargs) -> object:
        """Start the engine. TRL calls this in place of its `VLLMGeneration(...)`, with the same arguments, as soon as
        model, reference and datasets are there.
        """
        args = self.args
        if not args.own_engine and (args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration  # needs vllm, which TRL makes optional

            return VLLMGeneration(**kwargs)

        # Refuse a model, prompts, a launch or a disk with which the run would fail later
        require_servable(self.model, engine_class)
        require_countable_experts(self.model, args.router_aux_loss_coef)
        config = self.model.config
        if config.get_text_config() is config:
            require_no_images(self.train_dataset, config.name_or_path)
        ranks = args.vllm_tensor_parallel_size if args.vllm_mode == "colocate" else 1  # that share an engine
        server_ranks = self.accelerator.num_processes if args.vllm_mode == "server" else 1
        require_same_turns(self.tools, ranks, server_ranks)
        outline = outline_of(self.model)
        self.context = args.vllm_max_model_length or int(outline.context * outline.stretch)
        makes_prompts = self.rollout_func or self.environment_factories
        if self.has_prompts and not makes_prompts:
            for name in ("train_dataset", "eval_dataset"):
                require_short_prompts(getattr(self, name), name, self.prompt_token_ids, self.context)
        check_launch(self.accelerator, ranks)
        if args.save_strategy != "no" and self.accelerator.is_main_process:  # it writes the weights
            require_output(args, *checkpoint_bytes(self.model))

        # Features and the plan, which says what will be FP8
        if args.own_engine:
            lock_folder(args.output_dir, self.accelerator)
        if args.own_engine and self.ref_model is not None:  # with everything off this is TRL, its defects included
            load_on_all_ranks(self.ref_model, self.accelerator.device)
        self._make_features()
        if args.own_engine:
            self.plan = plan_for_model(self.model, self.recipe)
            self.accelerator.print(f"{self.plan.summary()}\nLaunch: {launch_words(self.accelerator)}", flush=True)

        # The engine starts
        text = "Starting the engine; at its first start vLLM compiles what it needs."
        with slow_step(text, shown=self.accelerator.is_main_process):
            parts = [feature.engine_part() for feature in self.features]
            recipe = self.recipe or args.recipe_for(self.model)
            generation = self._start_engine(recipe, [part for part in parts if part is not None], **kwargs)
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
        """Return an engine that follows the policy by `recipe`; `parts` are those of features, `kwargs` are the
        arguments of TRL's `VLLMGeneration`.
        """
        if self.args.vllm_mode == "server":
            from .engine.vllm_server.server_generation import ServerGeneration  # needs vllm, which TRL makes optional

            return ServerGeneration(recipe=recipe, parts=parts, after_sync=self._after_sync, **kwargs)
        from .engine.vllm.generation import FP8VLLMGeneration

        options = {"after_sync": self._after_sync, "engine_kwargs": self.args.vllm_engine_kwargs}
        return FP8VLLMGeneration(recipe=recipe, parts=parts, **options, **kwargs)

    def _generate(self, prompts: list) -> tuple:
        self._end_loss()  # of a `compute_loss` outside of a training step
        for feature in self.features:
            feature.before_generation(prompts)
        output = super()._generate(prompts)  # calls `_generate_single_turn`, several times with tools
        rollouts = Rollouts(*output[:2]) if self.features else None
        for feature in self.features:
            feature.after_generation(rollouts)
        self._note(rollouts.metrics if rollouts else {})
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        for feature in self.features:
            feature.before_turn(prompt_ids)
        require_room(prompt_ids, self.context)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)  # syncs first if the policy has changed

    def _after_sync(self) -> None:
        for feature in self.features:
            feature.after_sync()

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple:
        inputs = attention_mask, logits_to_keep
        with ExitStack() as stack:
            of_policy = self.features and model is not self.ref_model and not is_reference(model)
            for feature in self.features:
                stack.enter_context(feature.scoring(*inputs) if of_policy else feature.reference(*inputs))
            return super()._get_per_token_logps_and_entropies(model, input_ids, *inputs, *args, **kwargs)

    def score_alone(self, input_ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> None:
        """Run the policy as TRL scores tokens, without any feature."""
        self.trl_class()._get_per_token_logps_and_entropies(self, self.model, input_ids, mask, logits_to_keep)

    def prompt_token_ids(self, prompts: list) -> list[list[int]]:
        """Return the token ids of prompts as rows of a dataset have them."""
        return self._tokenize_prompts(prompts)[0]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        return self.extended(super()._generate_and_score_completions(inputs))

    def extended(self, tensors: dict) -> dict:
        """Return TRL's batch as features extend it, and note what they measure."""
        batch = Batch(tensors)
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
