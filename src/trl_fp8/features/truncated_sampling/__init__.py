"""Truncated sampling: the trainer normalizes log-probs over the tokens that top-k, top-p and min-p left in the engine.

This feature has no flag of its own: TRL's sampling flags switch it on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trl_fp8.run.feature import FlagGroup, Registration


NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (None, 0.0)}  # values that leave no token out


@dataclass
class SamplingFlags(FlagGroup):
    """Properties of a config: whether sampling is truncated, and whether the trainer's log-probs follow it."""

    @property
    def truncated_by(self) -> dict[str, Any]:
        """Return the settings that leave out tokens, from the config's fields or from `generation_kwargs`."""
        fields = {name: getattr(self, name) for name in NEUTRAL}
        settings = fields | (self.generation_kwargs or {})
        return {name: settings[name] for name, neutral in NEUTRAL.items() if settings[name] not in neutral}

    @property
    def followed_sampling(self) -> frozenset[str]:
        """Return the sampling settings that the trainer applies, too. The check of the correction allows them."""
        return frozenset(NEUTRAL)

    @property
    def survivors_returned(self) -> bool:
        """Return whether the trainer normalizes over the tokens that top-k, top-p and min-p left in the engine."""
        # Ask only the other groups: `wants_engine` of this group returns this property
        other_groups = [group for group in self.groups() if group is not SamplingFlags]
        engine_wanted = any(group.wants_engine(self) for group in other_groups)
        needed = self.any_fp8 or self.replaces_correction or engine_wanted
        compared = self.use_vllm and getattr(self, "vllm_importance_sampling_correction", False)
        return bool(needed and compared and self.vllm_mode == "colocate" and self.truncated_by)

    def wants_engine(self) -> bool:
        return self.survivors_returned

    def check(self) -> None:
        compared = getattr(self, "vllm_importance_sampling_correction", False)
        corrected = compared and (self.any_fp8 or self.replaces_correction)
        if corrected and self.truncated_by and self.vllm_mode != "colocate":
            settings = ", ".join(f"{name}={value!r}" for name, value in self.truncated_by.items())
            raise ValueError(
                f"{settings} with vllm_mode={self.vllm_mode!r}: vLLM's log-probs are renormalized over the tokens "
                "that survive, and only a colocated engine returns these tokens. Set vllm_mode='colocate', or "
                "top_p=1.0, top_k=0, min_p=None."
            )


def _features(trainer) -> Iterator:
    if trainer.args.survivors_returned:
        from .truncation import Truncation

        yield Truncation(trainer)


REGISTRATION = Registration(flags=SamplingFlags, features=_features)
