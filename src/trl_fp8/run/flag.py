"""Flags of a config: how one is declared, and what a group of them has to say."""

from dataclasses import field
from typing import Any, ClassVar

from trl_fp8.recipe.outline import Outline


def flag(default: Any, text: str) -> Any:
    """A dataclass field; `text` is its line in --help and in docs/configuration.md, and stands nowhere else."""
    return field(default=default, metadata={"help": text})


class FlagGroup:
    """Base of the dataclasses that an FP8 config is made of: one for weights, one for the engine, one for a feature.

    The config calls each method of all its groups (config.py), as `Group.method(config)`: `self` is the whole config,
    TRL's fields included. Each method does nothing by itself.
    """

    AS_JSON: ClassVar[tuple[str, ...]] = ()  # flags that a command line gives as JSON
    FP8: ClassVar[dict[str, Any]] = {}  # flags that make something FP8 -> the value that does not
    SAVING: ClassVar[dict[str, Any]] = {}  # flags with which a policy with adapters needs less memory
    # Of the whole config; the one group that decides it has a property of this name
    policy_calls_engine: ClassVar[bool] = False  # the policy's forward calls the engine's kernels
    base_in_engine: ClassVar[bool] = False  # the frozen base of a policy with adapters is in the engine alone

    def resolve(self) -> None:
        """Fill in defaults, before TRL's own `__post_init__`. `ValueError` for a value that is not known."""

    def check(self) -> None:
        """`ValueError` for what cannot be, after TRL's own `__post_init__`."""

    def wants_engine(self) -> bool:
        """Return whether these flags need this project's engine even if nothing is FP8."""
        return False

    def corrects(self) -> bool:
        """Return whether these flags replace TRL's correction even if nothing is FP8."""
        return False

    def recipe_fields(self) -> dict[str, Any]:
        """Return the arguments of `recipe.recipe.recipe_for_model` that these flags decide."""
        return {}

    def check_model(self, outline: Outline) -> None:
        """`ValueError` for a model that cannot be trained with these flags, as far as its outline shows it."""

    def in_one_piece(self) -> bool:
        """Return whether these flags rule out tensor parallelism."""
        return False

    def memory_changes(self, setup: Any, outline: Outline, recipe: Any) -> dict[str, float]:
        """Return the bytes that these flags add to parts of a trainer's memory (`planning.trainer_memory`)."""
        return {}

    def risks(self, outline: Outline, recipe: Any) -> list[Any]:
        """Return what a plan warns of (`planning.risks.Risk`)."""
        return []

    def check_adapters(self, model: Any) -> None:
        """`ValueError` for what does not go with TRL's `ModelConfig`, its flags of a model and its adapters."""

    def against_base(self, model: Any) -> str | None:
        """Return a sentence on the flag, of these or of TRL's `ModelConfig`, that rules out adapters on an FP8 base;
        None if none does.
        """
        return None

    def trls_default(self, name: str) -> Any:
        """Return the default of TRL's own config."""
        trls = next(base for base in type(self).__mro__ if not issubclass(base, FlagGroup) and hasattr(base, name))
        return getattr(trls, name)

    def followed_sampling(self) -> set[str]:
        """Return the sampling settings that the trainer's log-probs follow."""
        return set()
