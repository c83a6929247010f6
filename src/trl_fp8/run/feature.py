"""A feature: its flags, its hooks in a step, and the registration that makes both known.

    REGISTRATION = Registration(flags=..., features=...)     in features/NAME/__init__.py; NAME is in features.FOLDERS
    class NameFlags(FlagGroup)                               a base class of the config
    class Name(Feature)                                      made for each run whose flags switch it on

This module imports no torch, because the console script reads registrations before anything heavy is imported.

In the hooks, `mask` is TRL's attention mask `[B, S]`, and the last `logits_to_keep` columns are scored.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trl_fp8.recipe.outline import Outline


if TYPE_CHECKING:
    import torch

    from trl_fp8.engine.kernels import EngineKernels
    from trl_fp8.engine.protocol import EngineNumerics
    from trl_fp8.policy.swapped import Logits

    from .batch import Batch, Rollouts


def flag(default: Any, text: str) -> Any:
    """Return a dataclass field. `text` is its only description, for --help and docs/configuration.md."""
    return field(default=default, metadata={"help": text})


class FlagGroup:
    """Base of the dataclasses that an FP8 config is made of: one for weights, one for the engine, one per feature.

    The config calls each method of all its groups (config.py), as `Group.method(config)`: `self` is the whole config,
    TRL's fields included. Methods do nothing by default.
    """

    AS_JSON: ClassVar[tuple[str, ...]] = ()  # flags that a command line gives as JSON
    OFF_VALUES: ClassVar[dict[str, Any]] = {}  # flag that makes something FP8 -> the value that switches it off
    SAVING: ClassVar[dict[str, Any]] = {}  # flags with which a policy with adapters needs less memory

    # Facts of the whole config, for other code. The group that decides a fact overrides it with a property
    policy_calls_engine: ClassVar[bool] = False  # the policy's forward calls the engine's kernels
    base_in_engine: ClassVar[bool] = False  # the frozen base of a policy with adapters is in the engine alone
    replaces_correction: ClassVar[bool] = False  # TRL's correction is replaced even if nothing is FP8
    followed_sampling: ClassVar[frozenset[str]] = frozenset()  # sampling settings that the trainer applies, too

    def resolve(self) -> None:
        """Fill in defaults, before TRL's own `__post_init__`. Raise `ValueError` for an unknown value."""

    def check(self) -> None:
        """Raise `ValueError` for flags that contradict each other, after TRL's own `__post_init__`."""

    def wants_engine(self) -> bool:
        """Return whether these flags need this package's engine even if nothing is FP8."""
        return False

    def recipe_fields(self) -> dict[str, Any]:
        """Return the arguments of `recipe.recipe.recipe_for_model` that these flags decide."""
        return {}

    def check_model(self, outline: Outline) -> None:
        """Raise `ValueError` for a model that cannot be trained with these flags, as far as its outline shows it."""

    def rules_out_tensor_parallelism(self) -> bool:
        """Return whether these flags need an engine with vllm_tensor_parallel_size=1."""
        return False

    def memory_changes(self, setup: Any, outline: Outline, recipe: Any) -> dict[str, float]:
        """Return field of `TrainerMemory` -> bytes that these flags add to it (planning/trainer_memory.py)."""
        return {}

    def risks(self, outline: Outline, recipe: Any) -> list[Any]:
        """Return the risks that a plan warns of (`planning.risks.Risk`)."""
        return []

    def check_adapters(self, model: Any) -> None:
        """Raise `ValueError` for flags that contradict `model`, TRL's `ModelConfig` (flags of model and adapters)."""

    def flag_ruling_out_fp8_base(self, model: Any) -> str | None:
        """Return the flag of this config or of `ModelConfig` that rules out adapters on an FP8 base, or None."""
        return None

    def trl_default(self, name: str) -> Any:
        """Return the default of a flag in the first base class that is not this package's."""
        bases = [base for base in type(self).__mro__ if not issubclass(base, FlagGroup)]
        first = next(base for base in bases if hasattr(base, name))
        return getattr(first, name)


class Feature:
    """Base of all features. Hooks do nothing by default, and are listed in the order of a step.

    The trainer calls each hook for all features, in the order of features/__init__.py. A feature that is also a
    `TrainerCallback` becomes a callback of the trainer.
    """

    keeps_log: bool = False  # whether this feature writes the log that `trl-fp8 report` reads

    def __init__(self, trainer: Any):
        self.trainer = trainer  # the `FP8Rollouts` whose step this feature takes part in

    def engine_part(self) -> Any:
        """Return the `EnginePart` of this feature (engine/vllm/part.py) or None. Called before the engine starts."""
        return None

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        """Receive the started engine's arithmetic, and its kernels, or None if the trainer cannot call its kernels."""

    def before_generation(self, prompts: list) -> None:
        """Prepare a generation; nothing is tokenized yet."""

    def before_turn(self, prompt_ids: list[list[int]]) -> None:
        """Prepare a call of the engine, before the sync that the call may need."""

    def after_sync(self) -> None:
        """Check the engine after a sync. The engine has the policy's weights, and has not sampled with them yet."""

    def after_generation(self, rollouts: Rollouts) -> None:
        """Read or measure the rollouts, after all turns."""

    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        """Enclose each pass of the policy that scores rollouts: TRL's old log-probs, and the loss."""
        return nullcontext()

    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        """Enclose each pass of a reference, which may be the policy without its adapters."""
        return nullcontext()

    def logits(self, reference: bool) -> Logits | None:
        """Return a function that computes the logits of policy or reference; None: their own output heads do that."""
        return None

    def as_rollouts_saw(self) -> AbstractContextManager:
        """Enclose a pass that has to compute as the engine did for the latest rollouts, for example with an FP8 KV
        cache. Unlike `scoring`, this hook measures nothing.
        """
        return nullcontext()

    def extend_batch(self, batch: Batch) -> None:
        """Add to TRL's complete batch, correct it or measure it."""

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Prepare the forward of a loss."""

    def end_loss(self) -> None:
        """Clean up after the backward, in which gradient checkpointing runs the forward again."""

    def save(self, folder: str) -> None:
        """Add to a checkpoint, on every rank."""

    def load(self, folder: str) -> None:
        """Read a checkpoint, on every rank."""

    def facts(self) -> dict[str, object]:
        """Return facts for the run's log and for the model card (run/facts.py)."""
        return {}

    def export_options(self) -> dict[str, object]:
        """Return the arguments of `export.export.export_fp8` that this feature adds. Raise `ValueError` if they are
        known only after a sync, and there was none.
        """
        return {}

    def merge_note(self, what: str) -> str:
        """Return a sentence for a model card on the weights that adapters were merged into.

        Log a warning if adapters had to be merged into other weights than the run started from, because the originals
        cannot be read again. `what` is the method that merged, for this warning.
        """
        return ""

    def banner(self) -> str:
        """Return a phrase on how the trainer itself computes, printed at the start of a run; empty for none."""
        return ""


@contextmanager
def as_rollouts_saw(features: Iterable[Feature]) -> Iterator[None]:
    """Enter `Feature.as_rollouts_saw` of all features."""
    with ExitStack() as stack:
        for feature in features:
            stack.enter_context(feature.as_rollouts_saw())
        yield


@dataclass
class Construction:
    """Arguments from which a trainer is about to be constructed. A registration may change them."""

    args: Any  # the config
    trainer_kwargs: dict[str, Any]  # the other arguments of TRL's trainer, by their names
    create_model: Callable  # TRL's `create_model_from_path`, or its substitute
    dequantizes: bool = True  # an FP8 checkpoint is loaded in high precision
    # Folder of a feature -> object that its registration leaves for the feature
    handover: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A command of the console script, such as `trl-fp8 report`."""

    word: str
    text: str  # for --help
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], str]  # returns the text to print


@dataclass(frozen=True)
class ServerFlag:
    """A flag of `trl-fp8 serve`."""

    word: str
    metavar: str
    text: str  # for --help
    part: Callable[[str], Any]  # value -> the `EnginePart` that the server gets; raises `ValueError`


@dataclass(frozen=True)
class Registration:
    """One feature, as the core knows it. Any field may stay empty."""

    # A base of the config, which declares, resolves and checks flags
    flags: type[FlagGroup] | None = None
    # Encloses the `__init__` of TRL's trainer, which loads the policy unless the user passed a model
    construct: Callable[[Construction], AbstractContextManager[None]] = lambda construction: nullcontext()
    # Called with a trainer that has its policy and no engine yet
    features: Callable[[Any], Iterable[Feature]] = lambda trainer: ()
    # Words of the console script
    commands: tuple[Command, ...] = ()
    # Flags of `trl-fp8 serve`
    server_flags: tuple[ServerFlag, ...] = ()
    # (logged metrics, facts of the run (run/facts.py)) -> for a report: name of a metric -> warning about it
    warnings: Callable[[Mapping[str, float], Mapping[str, Any]], dict[str, str]] = lambda metrics, facts: {}
    # A field of TRL's config without which a trainer cannot have this feature
    needs: str = ""
