"""`FP8GRPOConfig`: TRL's `GRPOConfig` plus the flags that say what is FP8.

Flags of TRL's whose defaults depend on whether anything is FP8 default to None, resolved in `__post_init__`. So
with every FP8 flag off the config is TRL's, field for field.
"""

from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from torch import nn
from trl import GRPOConfig

from .features import registrations
from .recipe.recipe import FP8Recipe, recipe_for_model
from .run.engine_flags import EngineFlags, WeightFlags
from .run.feature import FlagGroup


def groups_for(trl_config: type) -> tuple[type[FlagGroup], ...]:
    """Return the groups of flags that go with a config of TRL's."""
    known = {item.name for item in fields(trl_config)}
    # The last one first: an earlier feature's defaults depend on what a later one demands
    of_features = [one.flags for one in reversed(registrations()) if not one.needs or one.needs in known]
    return WeightFlags, EngineFlags, *filter(None, of_features)


_HIDDEN = "<HUB_TOKEN>"  # what transformers' `to_dict` has in the place of `hub_token`


@dataclass
class FP8Config:
    """Base of every FP8 config; its groups of flags and TRL's config are bases after this one."""

    def __post_init__(self):
        user_flags = {item.name for item in fields(self) if getattr(self, item.name) != default_of(item)}
        for group in self.groups():
            group.resolve(self)
        # Fields taken from another config set both of these, which TRL refuses; from `to_dict`, they hide the token
        size, steps = self.generation_batch_size, self.steps_per_generation
        if steps is not None:
            self.generation_batch_size = None
        if self.hub_token == _HIDDEN:
            self.hub_token = None
        super().__post_init__()
        if steps is not None and size not in (None, self.generation_batch_size):
            raise ValueError(
                f"generation_batch_size={size} with steps_per_generation={steps} and per_device_train_batch_size="
                f"{self.per_device_train_batch_size}, which make it {self.generation_batch_size}. Set one of the "
                "first two to None."
            )
        for group in self.groups():
            group.check(self)
        # A second config with no flag set would show these, too, but making one resets accelerate's state
        self.resolved_defaults = {name: value for name, value in self.to_dict().items() if name not in user_flags}

    @classmethod
    def groups(cls) -> list[type[FlagGroup]]:
        """Return the groups of flags, in the order in which they are resolved and checked."""
        return [base for base in cls.__mro__ if FlagGroup in base.__bases__]

    @property
    def any_fp8(self) -> bool:
        return any(getattr(self, name) != off for group in self.groups() for name, off in group.FP8.items())

    def fp8_flags(self, off: bool = False) -> str:
        """Return `name=value` of the flags that make something FP8; if `off`, with the values that switch it off."""
        named = {
            name: value if off else getattr(self, name) for one in self.groups() for name, value in one.FP8.items()
        }
        return (" with " if off else ", ").join(f"{name}={value!r}" for name, value in named.items())

    @property
    def own_engine(self) -> bool:
        """Return whether rollouts need this project's engine instead of TRL's."""
        return self.any_fp8 or any(group.wants_engine(self) for group in self.groups())

    @property
    def blind_pass(self) -> str | None:
        """Return the setting that hides tokens from TRL's old-log-prob pass, or None."""
        if not getattr(self, "vllm_importance_sampling_correction", True):
            return "vllm_importance_sampling_correction=False"
        return "mask_truncated_completions=True" if self.mask_truncated_completions else None

    def recipe_for(self, model: nn.Module, **resolved) -> FP8Recipe:
        """Return which tensors of `model` are FP8 under these flags on this machine. `resolved` override the flags."""
        on_gpu = self.device.type != "cpu"
        return recipe_for_model(model, **{"expert_kernels": on_gpu} | self.recipe_options() | resolved)

    def recipe_options(self) -> dict[str, Any]:
        """Return the arguments of `recipe_for_model` that flags decide."""
        decided = {"kv_cache_dtype": "auto"}
        for group in self.groups():
            decided |= group.recipe_fields(self)
        return decided


def default_of(item: Field) -> Any:
    """Return the default of a dataclass field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def documented(config: type, trl_config: type) -> str:
    """Return a docstring in the form of TRL's configs, made from the help texts of the flags."""
    of_trl = {item.name for item in fields(trl_config)}
    lines = [config.__doc__.rstrip(), "\nParameters:"]
    for item in fields(config):
        if item.name not in of_trl:
            kind = item.type.__name__ if isinstance(item.type, type) else str(item.type)
            lines.append(f"    {item.name} (`{kind}`, *optional*, defaults to `{default_of(item)!r}`):")
            lines.append(f"        {item.metadata['help']}")
    return "\n".join([*lines, f"\nThe parameters of `trl.{trl_config.__name__}`:\n\n{trl_config.__doc__.strip()}\n"])


@dataclass
class FP8GRPOConfig(FP8Config, *groups_for(GRPOConfig), GRPOConfig):
    """Configuration of `FP8GRPOTrainer`: every field of `trl.GRPOConfig`, and the ones below.

    Raises:
        ValueError: From `__post_init__`, if a flag's value is unknown or does not go with another; the message names
            flag, value, reason and remedy.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + [
        name for one in groups_for(GRPOConfig) for name in one.AS_JSON
    ]


FP8GRPOConfig.__doc__ = documented(FP8GRPOConfig, GRPOConfig)
