"""Flags of a config: how one is declared, and what a group of them has to say."""

from dataclasses import field
from typing import Any, ClassVar


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

    def resolve(self) -> None:
        """Fill in defaults, before TRL's own `__post_init__`. `ValueError` for a value that is not known."""

    def check(self) -> None:
        """`ValueError` for what cannot be, after TRL's own `__post_init__`."""

    def wants_engine(self) -> bool:
        """Whether these flags want this project's engine, also where nothing is FP8."""
        return False

    def corrects(self) -> bool:
        """Whether these flags put another correction in the place of TRL's, also where nothing is FP8."""
        return False

    def calls_engine(self) -> bool:
        """Whether the policy's forward calls the engine's kernels."""
        return False

    def recipe_fields(self) -> dict[str, Any]:
        """Arguments of `recipe.recipe.recipe_for_model` that these flags decide."""
        return {}

    def trls_default(self, name: str) -> Any:
        """What TRL's own config has where nothing is said."""
        trls = next(base for base in type(self).__mro__ if not issubclass(base, FlagGroup) and hasattr(base, name))
        return getattr(trls, name)

    def followed_sampling(self) -> set[str]:
        """Settings of the sampling that the trainer's log-probs follow, as those of the rollouts do."""
        return set()
