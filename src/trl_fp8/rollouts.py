"""`FP8Rollouts`: FP8 rollouts for one of TRL's trainers. A trainer's class names it as a base before TRL's class.

TRL's `__init__` starts the engine (`_make_generation`). Then TRL trains. Below, this class overrides TRL's methods
that take part in a step, in the order in which TRL calls them. They call hooks (run/feature.py), each for all features
in the order of features/__init__.py:

    _generate                  before_generation -> a turn (with tools several) -> after_generation
      _generate_single_turn    before_turn -> [sync: prepare, write, audit -> after_sync] -> generate in FP8
    old log-probs              scoring, reference
    batch                      extend_batch: here a correction computes its weights
    compute_loss               begin_loss -> TRL's loss, scoring -> backward -> end_loss
    log                        metrics of features are merged, and TRL logs them
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
from accelerate import Accelerator, PartialState
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
from .run.averaged import AveragedModel, has_average
from .run.batch import Batch, Metric, Rollouts, require_own_name
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
    require_known_commit,
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

    config_class: ClassVar[type]  # class of `args`

    # TRL's tests call methods of trainers whose __init__ has not run. With these values such a trainer acts as TRL's
    recipe: FP8Recipe | None = None  # None if every FP8 flag is off
    plan: Plan | None = None  # its summary is printed at the start; None if every FP8 flag is off
    features: tuple[Feature, ...] = ()  # they take part in a step, in this order
    context: int = 0  # length of the engine's longest sequence, in tokens; 0: not known
    handover: dict[str, Any]  # a registration's folder -> object that the registration made for its features

    # TRL's GRPO trainer sets these attributes, and its other trainers lack them
    tools = environments = environment_factories = rollout_func = ref_model = None
    has_prompts: ClassVar[bool] = True  # whether datasets have a column "prompt"
    has_fused_head: ClassVar[bool] = True  # the policy has TRL's fused output head, which makes no logits of a batch
    packed_forward = None  # method that runs the policy on packed sequences; None: the policy takes padded batches
    engine_module: ClassVar[str | None] = None  # where TRL looks up `VLLMGeneration`; None: in its trainer's module

    def __init__(self, model: Any, args: Any = None, **trainer_kwargs):
        """Take the arguments of TRL's trainer, as keywords. `args`: a `config_class`; None: a config of all defaults.

        Raises:
            ValueError: `args` is no `config_class`, or the dataset, the model or the launch does not fit its flags.
            OSError: The model is not in the cache, and the Hub is out of reach.
        """
        config_name = self.config_class.__name__
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{name.split('/')[-1]}-{config_name.removesuffix('Config')}")
        if not isinstance(args, self.config_class):
            raise ValueError(
                f"args is a {type(args).__name__}: {type(self).__name__} reads its FP8 flags from {config_name}. "
                f"Replace {type(args).__name__}(...) by {config_name}(...), which takes the same arguments."
            )
        # Refuse what can be refused before a model is loaded
        model_kwargs = args.model_init_kwargs or {}
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
                require_model(model, "model", model_kwargs.get("revision"))
            else:
                require_path(model)
            if args.vllm_engine_kwargs:
                require_engine_arguments(args.vllm_engine_kwargs)
            checkpoint = checkpoint_to_resume(args.output_dir, args.resume_from_checkpoint)
            if checkpoint:
                require_ranks(checkpoint, args.world_size)
            require_output(args, 0, 0)  # transformers makes this folder later, but its error would name no flag

        # TRL looks up its model loader in this module, and its engine unless `engine_module` is set
        trl_module = sys.modules[self.trl_class().__module__]
        construction = Construction(args, {"model": model, **trainer_kwargs}, trl_module.create_model_from_path)
        self.handover = construction.handover
        if not isinstance(model, str):
            in_high_precision(model)
        if args.own_engine and args.vllm_mode == "server" and args.base_in_engine:
            take_server_size(args, PartialState())  # for the base, which is quantized before there is an accelerator
        with ExitStack() as stack:
            # Features also release a model that an earlier trainer has used. They do so in reverse order, because a
            # later feature may have wrapped what an earlier one installed on it
            for registration in reversed(registrations()):
                stack.enter_context(registration.construct(construction))
            quantization = construction.trainer_kwargs.get("quantization_config")
            if args.own_engine:
                require_no_qlora(quantization or model_kwargs.get("quantization_config"))

            # Have transformers dequantize a checkpoint that is stored in FP8 or MXFP4
            is_unset = quantization is None and "quantization_config" not in model_kwargs
            if isinstance(model, str) and construction.dequantizes and is_unset:
                trusted = model_kwargs.get("trust_remote_code", args.trust_remote_code)
                dequantizing = dequantizing_config(model, model_kwargs.get("revision"), trusted)
                if dequantizing is not None and "quantization_config" not in signature(self.trl_class()).parameters:
                    raise ValueError(
                        f"model={model!r} is stored in FP8 or MXFP4, and TRL's {self.trl_class().__name__} takes no "
                        "quantization_config to load it in high precision. Pass a loaded model, or one in BF16."
                    )
                if dequantizing is not None:
                    construction.trainer_kwargs["quantization_config"] = dequantizing

            # TRL makes model and datasets, and then calls `VLLMGeneration(...)`, which is `make_generation` here.
            # While that runs, the name is TRL's class again, for modules that are imported only then
            stack.enter_context(without_noise())
            generation_module = import_module(self.engine_module or trl_module.__name__)
            trl_generation = generation_module.VLLMGeneration

            def make_generation(**kwargs) -> object:
                with substituted(generation_module, "VLLMGeneration", trl_generation):
                    return self._make_generation(**kwargs)

            stack.enter_context(substituted(generation_module, "VLLMGeneration", make_generation))
            stack.enter_context(substituted(trl_module, "create_model_from_path", construction.create_model))
            super().__init__(args=args, **construction.trainer_kwargs)
        in_high_precision(self.model)
        make_lists(self.processing_class)

        # `FP8ProgressCallback` replaces transformers' progress bar, which prints a dictionary of all metrics at each
        # log. If `disable_tqdm` is set or one of `callbacks` is a progress bar, none is added
        callbacks = [item if isinstance(item, type) else type(item) for item in trainer_kwargs.get("callbacks") or ()]
        has_own_bar = any(issubclass(item, FP8ProgressCallback) for item in callbacks)
        if has_own_bar or not any(issubclass(item, ProgressCallback) for item in callbacks):
            for default_bar in [item for item in self.callback_handler.callbacks if type(item) is ProgressCallback]:
                self.remove_callback(default_bar)
                if not has_own_bar:
                    self.add_callback(FP8ProgressCallback())

        self._make_features()
        for feature in self.features:
            if isinstance(feature, TrainerCallback):
                self.add_callback(feature)

    @classmethod
    def trl_class(cls) -> type:
        """Return TRL's trainer that this class extends: the first base that inherits TRL's `_BaseTrainer` directly."""
        return next(base for base in cls.__mro__ if _BaseTrainer in base.__bases__)

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the run's feature of class `kind`, or None."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @property
    def logged(self) -> dict[str, list]:
        """Return the values since the last log of training or evaluation: TRL's numbers and features' `Metric`s."""
        return self._metrics["train" if self.model.training else "eval"]

    def _make_features(self) -> None:
        """Make the recipe and the features, unless they exist. Called when there is a policy, and no engine yet."""
        if self.features:
            return
        args = self.args
        if args.own_engine:
            if args.vllm_mode == "server":
                take_server_size(args, self.accelerator)
            self.recipe = args.recipe_for(self.model)
            self.features = (Syncs(self), AveragedModel(self)) if has_average(args) else (Syncs(self),)
        for registration in registrations():
            if not registration.needs or hasattr(args, registration.needs):
                for feature in registration.features(self):
                    self.features += (feature,)  # one by one, because making a feature may look up an earlier one

    def _make_generation(self, **kwargs) -> object:
        """Start the engine in place of TRL's `VLLMGeneration(**kwargs)`, when model, reference and datasets exist."""
        args = self.args
        # TRL's engine starts if nothing needs this project's, except colocated on a CPU: see docs/migration.md
        if not args.own_engine and (args.vllm_mode == "server" or self.accelerator.device.type != "cpu"):
            from trl.generation.vllm_generation import VLLMGeneration  # needs vllm, which TRL makes optional

            return VLLMGeneration(**kwargs)
        return self._make_own_generation(**kwargs)

    def _make_own_generation(self, **kwargs) -> RolloutEngine:
        """Check the run, print the plan, and start this project's engine."""
        args, config = self.args, self.model.config
        # Refuse a model, prompts, a launch or a disk with which the run would fail later
        require_known_commit(config, args.model_init_kwargs)
        require_servable(self.model, engine_class)
        require_countable_experts(self.model, args.router_aux_loss_coef)
        if config.get_text_config() is config:
            require_no_images(self.train_dataset, config.name_or_path)
        engine_ranks = args.vllm_tensor_parallel_size if args.vllm_mode == "colocate" else 1
        server_clients = self.accelerator.num_processes if args.vllm_mode == "server" else 1
        require_same_turns(self.tools, engine_ranks, server_clients)
        outline = outline_of(self.model)
        self.context = args.vllm_max_model_length or int(outline.context * outline.stretch)
        makes_prompts = self.rollout_func or self.environment_factories
        if self.has_prompts and not makes_prompts:
            for name in ("train_dataset", "eval_dataset"):
                require_short_prompts(getattr(self, name), name, self.prompt_token_ids, self.context)
        check_launch(self.accelerator, engine_ranks)
        if args.save_strategy != "no" and self.accelerator.is_main_process:  # this process writes the weights
            require_output(args, *checkpoint_bytes(self.model, has_average(args)))

        # Make the recipe, the features and the plan, and print the plan
        if args.own_engine:
            lock_folder(args.output_dir, self.accelerator)
            # With FSDP only some ranks may have loaded the reference, and TRL does not copy it to the others
            if self.ref_model is not None:
                load_on_all_ranks(self.ref_model, self.accelerator.device)
        self._make_features()
        if args.own_engine:
            self.plan = plan_for_model(self.model, self.recipe)
            self.accelerator.print(f"{self.plan.summary()}\nLaunch: {launch_words(self.accelerator)}", flush=True)

        # Start the engine
        text = "Starting the engine; at its first start vLLM compiles what it needs."
        with slow_step(text, shown=self.accelerator.is_main_process):
            parts = [feature.engine_part() for feature in self.features]
            recipe = self.recipe or args.recipe_for(self.model)
            generation = self._start_engine(recipe, [part for part in parts if part is not None], **kwargs)
        if args.own_engine:
            set_seed(args.seed, device_specific=True)  # as TRL did before vLLM seeded all generators
        for feature in self.features:
            feature.engine_started(generation.numerics, generation.kernels)
        if args.own_engine:
            kernels = ", ".join(f"{name} ({count})" for name, count in generation.numerics.kernels.items())
            precision = trainer_precision(self)
            self.accelerator.print(f"Engine: {kernels or 'high precision'}. Trainer: {precision}.\n")
        return generation

    def _start_engine(self, recipe: FP8Recipe, parts: Sequence[Any], **kwargs) -> RolloutEngine:
        """Start and return an engine with the tensors of `recipe` in FP8.

        `parts` are the `EnginePart`s of features, `kwargs` the arguments of TRL's `VLLMGeneration`.
        """
        kwargs |= {"recipe": recipe, "parts": parts, "after_sync": self._after_sync}
        # These modules need vllm, which TRL makes optional
        if self.args.vllm_mode == "server":
            from .engine.vllm_server.mirrored_generation import MirroredGeneration
            from .engine.vllm_server.server_generation import ServerGeneration

            kwargs["transport"] = self.args.vllm_server_transport
            return MirroredGeneration(**kwargs) if self.args.policy_calls_engine else ServerGeneration(**kwargs)
        from .engine.vllm.generation import FP8VLLMGeneration

        return FP8VLLMGeneration(engine_kwargs=self.args.vllm_engine_kwargs, **kwargs)

    def _generate(self, prompts: list) -> tuple:
        if not self.features:
            return super()._generate(prompts)
        self._end_loss()  # `training_step` ends only the losses that it computes
        for feature in self.features:
            feature.before_generation(prompts)
        output = super()._generate(prompts)  # prompt ids, completion ids, and more. Calls `_generate_single_turn`
        rollouts = Rollouts(*output[:2])
        for feature in self.features:
            feature.after_generation(rollouts)
        self._add_metrics(rollouts.metrics)
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        for feature in self.features:
            feature.before_turn(prompt_ids)
        require_room(prompt_ids, self.context)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)  # TRL syncs first if the policy has changed

    def _after_sync(self) -> None:
        for feature in self.features:
            feature.after_sync()

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple:
        with ExitStack() as stack:
            is_policy = self.features and model is not self.ref_model and not is_reference(model)
            for feature in self.features:
                enclose = feature.scoring if is_policy else feature.reference
                stack.enter_context(enclose(attention_mask, logits_to_keep))
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    def score_alone(self, input_ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> None:
        """Run the policy's forward on tokens as TRL does to score them, but call no hook of a feature."""
        self.trl_class()._get_per_token_logps_and_entropies(self, self.model, input_ids, mask, logits_to_keep)

    def prompt_token_ids(self, prompts: list) -> list[list[int]]:
        """Return the token ids of prompts, as in a dataset's column "prompt"."""
        return self._tokenize_prompts(prompts)[0]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        # TRL's method calls `_generate`, and computes log-probs of policy and reference
        return self.extend_batch(super()._generate_and_score_completions(inputs))

    def extend_batch(self, tensors: dict) -> dict:
        """Return TRL's batch after features have extended and corrected it. Add their metrics to the next log."""
        batch = Batch(tensors)
        for feature in self.features:
            feature.extend_batch(batch)
        self._add_metrics(batch.metrics)
        return batch.tensors

    def compute_loss(self, model, inputs: dict, *args, **kwargs):
        try:
            for feature in self.features:
                feature.begin_loss(inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            if not torch.is_grad_enabled():  # in an evaluation no backward follows
                self._end_loss()

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        try:
            return super().training_step(*args, **kwargs)
        finally:  # not before the backward has ended, because gradient checkpointing repeats the forward in it
            self._end_loss()

    def _end_loss(self) -> None:
        for feature in self.features:
            feature.end_loss()

    def _add_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Add the metrics of one batch to the next log, beside TRL's."""
        for name, metric in metrics.items():
            require_own_name(name, self.logged[name])
            self.logged[name].append(metric)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Merge the features' metrics of all batches since the last log, then let TRL log them.

        TRL would log the mean of a list of values, which is wrong for maxima and ratios. A metric that no batch
        measured (NaN) is left out, because TRL would log it as None.
        """
        for name, values in list(self.logged.items()):
            if any(isinstance(value, Metric) for value in values):
                require_own_name(name, values)
                merged = reduce(or_, values).value  # `|` merges the metrics of two batches
                self.logged[name] = [merged]
                if math.isnan(merged):
                    del self.logged[name]
        super().log(logs, start_time)


def take_server_size(args: Any, state: Accelerator | PartialState) -> None:
    """Set `vllm_tensor_parallel_size` to the server's, because it decides which linears are FP8. Collective."""
    from .engine.vllm_server.server_generation import tensor_parallel_size  # needs vllm

    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    args.vllm_tensor_parallel_size = tensor_parallel_size(
        url, args.vllm_server_timeout, state, args.vllm_tensor_parallel_size
    )
