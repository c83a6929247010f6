"""`FP8GRPOConfig`: TRL's `GRPOConfig` plus the flags that say what is FP8.

Some of TRL's flags get another default if anything is FP8. Such a flag defaults to None here, and `__post_init__`
replaces None by TRL's default or by this package's. So with every FP8 flag off the config equals TRL's, field for
field.
"""

from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar

from torch import nn
from trl import GRPOConfig

from .features import registrations
from .recipe.recipe import FP8Recipe, recipe_for_model
from .run.engine_flags import EngineFlags, WeightFlags
from .run.feature import FlagGroup


def groups_for(trl_config: type) -> tuple[type[FlagGroup], ...]:
    """Return the groups of FP8 flags that extend a config of TRL's, such as `GRPOConfig`."""
    trl_fields = {item.name for item in fields(trl_config)}
    groups = [WeightFlags, EngineFlags]
    for registration in reversed(registrations()):  # defaults of earlier features depend on flags of later ones
        if registration.flags and (not registration.needs or registration.needs in trl_fields):
            groups.append(registration.flags)
    return tuple(groups)


PLACEHOLDER = "<HUB_TOKEN>"  # transformers' `to_dict` writes this in place of the value of `hub_token`


@dataclass
class FP8Config:
    """Mixin of every FP8 config, whose bases are, in this order: `FP8Config`, its groups of flags, TRL's config."""

    REFUSED: ClassVar[dict[str, str]] = {}  # flag that the trainer of this config refuses -> reason

    def __post_init__(self):
        defaults = {item.name: default_of(item) for item in fields(self)}
        user_flags = {name for name, default in defaults.items() if getattr(self, name) != default}
        for name in defaults:
            if name in user_flags and name in self.REFUSED:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} with {type(self).__name__}: {self.REFUSED[name]}. Set "
                    f"{name}={defaults[name]!r}."
                )
        for group in self.groups():
            group.resolve(self)
        # A config made from the fields of another one sets both `generation_batch_size` and `steps_per_generation`,
        # but TRL takes only one. A config made from `to_dict` has a placeholder as `hub_token`
        batch_size = self.generation_batch_size
        steps = self.steps_per_generation
        if steps is not None:
            self.generation_batch_size = None
        if self.hub_token == PLACEHOLDER:
            self.hub_token = None
        super().__post_init__()
        if steps is not None and batch_size not in (None, self.generation_batch_size):
            raise ValueError(
                f"generation_batch_size={batch_size} with steps_per_generation={steps} and "
                f"per_device_train_batch_size={self.per_device_train_batch_size}, which make it "
                f"{self.generation_batch_size}. Set one of the first two to None."
            )
        for group in self.groups():
            group.check(self)
        # The values of the flags that the user did not change. The run log lists all flags that differ from them. It
        # cannot compare with a second config instead, because making one resets accelerate's state
        self.resolved_defaults = {name: value for name, value in self.to_dict().items() if name not in user_flags}

    @property
    def _VALID_DICT_FIELDS(self) -> list[str]:  # noqa: N802, transformers' name
        """Return the fields that transformers parses if they are JSON."""
        fields_as_json = list(super()._VALID_DICT_FIELDS)
        for group in self.groups():
            fields_as_json += group.AS_JSON
        return fields_as_json

    @classmethod
    def trl_config(cls) -> type:
        """Return TRL's config that this one extends."""
        return next(base for base in cls.__mro__ if base.__module__.startswith("trl."))

    @classmethod
    def groups(cls) -> list[type[FlagGroup]]:
        """Return the groups of flags, in the order in which they are resolved and checked."""
        return [base for base in cls.__mro__ if FlagGroup in base.__bases__]

    @property
    def any_fp8(self) -> bool:
        """Return whether weights or KV cache are FP8, that is, a flag in `OFF_VALUES` differs from its value."""
        off_values = {}
        for group in self.groups():
            off_values |= group.OFF_VALUES
        return any(getattr(self, name) != off_value for name, off_value in off_values.items())

    @property
    def own_engine(self) -> bool:
        """Return whether the rollouts come from this project's engine instead of TRL's."""
        return self.any_fp8 or any(group.wants_engine(self) for group in self.groups())

    @property
    def setting_against_full_pass(self) -> str | None:
        """Return the setting, as `flag=value`, because of which TRL leaves out its old-log-prob pass or masks tokens
        in it. None if the pass sees every token of the rollouts.
        """
        if not getattr(self, "vllm_importance_sampling_correction", True):
            return "vllm_importance_sampling_correction=False"
        return "mask_truncated_completions=True" if self.mask_truncated_completions else None

    def recipe_for(self, model: nn.Module, **resolved) -> FP8Recipe:
        """Return the recipe: which tensors of `model` are FP8 under these flags on this machine.

        `resolved` are arguments of `recipe_for_model`. They override those that the flags decide.
        """
        options = {"expert_kernels": self.device.type != "cpu"} | self.recipe_options() | resolved
        return recipe_for_model(model, **options)

    def recipe_options(self) -> dict[str, Any]:
        """Return the arguments of `recipe_for_model` that flags decide."""
        options = {"kv_cache_dtype": "auto"}
        for group in self.groups():
            options |= group.recipe_fields(self)
        return options


def default_of(item: Field) -> Any:
    """Return the default of a dataclass field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def documented(config: type) -> type:
    """Set the docstring of a config, in the form of TRL's, from the help texts of its flags. Return the config."""
    trl_config = config.trl_config()
    trl_fields = {item.name for item in fields(trl_config)}
    lines = [config.__doc__.rstrip(), "\nParameters:"]
    for item in fields(config):
        if item.name not in trl_fields:
            type_name = item.type.__name__ if isinstance(item.type, type) else str(item.type)
            lines.append(f"    {item.name} (`{type_name}`, *optional*, defaults to `{default_of(item)!r}`):")
            lines.append(f"        {item.metadata['help']}")
    lines.append(f"\nThe parameters of `trl.{trl_config.__name__}`:\n\n{trl_config.__doc__.strip()}\n")
    config.__doc__ = "\n".join(lines)
    return config


@documented
@dataclass
class FP8GRPOConfig(FP8Config, *groups_for(GRPOConfig), GRPOConfig):
    """Configuration of `FP8GRPOTrainer`: every field of `trl.GRPOConfig`, and the ones below.

    Raises:
        ValueError: From `__post_init__`, if a flag's value is unknown or does not go with another; the message names
            flag, value, reason and remedy.
    """
