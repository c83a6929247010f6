"""Base of trainers that distill: their loss reads a teacher, and nothing compares log-probs of engine and policy."""

from dataclasses import dataclass, fields

import torch

from trl_fp8.config import FP8Config, default_of
from trl_fp8.run.launch import require_room


REFUSED = "fp8_forward", "fp8_base", "router_replay"  # flags of features that follow TRL's pass over rollouts


@dataclass
class UnscoredConfig(FP8Config):
    """Base of the configs of trainers that distill."""

    # What GRPO's config has and some of theirs lack
    use_transformers_continuous_batching = transformers_continuous_batching_config = None
    router_aux_loss_coef = 0.0

    blind_pass = "a trainer that distills"  # noqa: S105, no password. KV scales are calibrated on the policy

    def __post_init__(self):
        super().__post_init__()
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in REFUSED and value != default_of(item):
                raise ValueError(
                    f"{item.name}={value!r} with {type(self).__name__}: it follows the pass in which a trainer scores "
                    f"its rollouts, and one that distills has none. Set {item.name}={default_of(item)!r}."
                )


class Unscored:
    """Base of a trainer that distills. It stands before `FP8Rollouts`."""

    def score_alone(self, input_ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> None:
        self.model(input_ids=input_ids, attention_mask=mask, use_cache=False)


class SelfDistillation(Unscored):
    """Hooks of a step in TRL's SDFT and SDPO, which have the same methods. It stands before `FP8Rollouts`."""

    engine_module = "trl.generation.vllm_generation"

    def prompt_token_ids(self, prompts: list) -> list[list[int]]:
        return self._tokenize_prompts(prompts)

    def _generate_vllm(self, prompt_ids: list[list[int]]) -> tuple:
        for feature in self.features:
            feature.before_turn(prompt_ids)
        require_room(prompt_ids, self.context)
        return super()._generate_vllm(prompt_ids)

    def _prepare_training_batch(self, inputs: list[dict]) -> dict:
        return self.extended(super()._prepare_training_batch(inputs))
