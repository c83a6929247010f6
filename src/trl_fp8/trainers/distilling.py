"""Base of trainers that distill: their loss reads logits of a teacher beside those of the policy.

DistillationTrainer    scores no rollouts
SDFT, SDPO             one forward makes the logits of the policy, of its teacher and, for further updates on the
                       same rollouts, the old log-probs (`_forward_logits`)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from trl.trainer.utils import selective_log_softmax

from trl_fp8.config import FP8Config, default_of
from trl_fp8.run.launch import require_room


@dataclass
class DistillingConfig(FP8Config):
    """Base of the configs of trainers that distill."""

    # Not flags: what GRPO's config has and some of theirs lack
    use_transformers_continuous_batching = transformers_continuous_batching_config = None
    router_aux_loss_coef = 0.0

    REFUSED: ClassVar[dict[str, str]] = {  # flag -> why
        "fp8_forward": "a distilling loss reads logits of the policy's own output head",
        "fp8_base": "a distilling loss reads logits of the policy's own output head",
        "router_replay": "it follows the pass in which a trainer scores its rollouts, and one that distills has none",
    }

    blind_pass = "a trainer that distills"  # noqa: S105, no password. KV scales are calibrated on the policy

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in self.REFUSED and value != default_of(item):
                raise ValueError(
                    f"{item.name}={value!r} with {type(self).__name__}: {self.REFUSED[item.name]}. Set "
                    f"{item.name}={default_of(item)!r}."
                )
        super().__post_init__()


@dataclass
class SelfDistillationConfig(DistillingConfig):
    """Base of the configs of SDFT and SDPO."""

    generate_from_teacher, beta = False, 0.0  # SDPO lacks the first flag, SDFT the second
    REFUSED = {name: why for name, why in DistillingConfig.REFUSED.items() if name != "router_replay"}

    def __post_init__(self):
        super().__post_init__()
        if self.generate_from_teacher and self.router_replay != "off":
            raise ValueError(
                f"router_replay={self.router_replay!r} with generate_from_teacher=True: the engine continues the "
                "teacher's prompts, and the policy computes other ones. Set router_replay='off'."
            )

    @property
    def compared(self) -> bool:
        """Return whether the loss needs log-probs of rollouts also where TRL makes none."""
        return False

    @property
    def rollouts_scored(self) -> bool:
        """Return whether a pass scores the rollouts before the first loss on them."""
        steps = (self.steps_per_generation or self.gradient_accumulation_steps) * self.num_iterations
        several_updates = self.gradient_accumulation_steps % steps != 0
        return not self.generate_from_teacher and (several_updates or self.compared)

    @property
    def blind_pass(self) -> str | None:
        if not self.rollouts_scored:
            return "generate_from_teacher=True" if self.generate_from_teacher else "num_iterations=1"
        return "mask_truncated_completions=True" if getattr(self, "mask_truncated_completions", False) else None


class Distilling:
    """Base of a trainer that distills. It stands before `FP8Rollouts`."""

    def score_alone(self, input_ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> None:
        self.model(input_ids=input_ids, attention_mask=mask, use_cache=False)


class SelfDistillation(Distilling):
    """Hooks of a step in TRL's SDFT and SDPO, which have the same methods. It stands before `FP8Rollouts`."""

    engine_module = "trl.generation.vllm_generation"
    _forward_of = "loss"  # which forward runs: of the "loss", over "rollouts", of the "teacher"

    def prompt_token_ids(self, prompts: list) -> list[list[int]]:
        return self._tokenize_prompts(prompts)

    def _generate_vllm(self, prompt_ids: list[list[int]]) -> tuple:
        for feature in self.features:
            feature.before_turn(prompt_ids)
        require_room(prompt_ids, self.context)
        return super()._generate_vllm(prompt_ids)

    def _prepare_training_batch(self, inputs: list[dict]) -> dict:
        return self.extended(super()._prepare_training_batch(inputs))

    def _compute_rollout_logps(self, **tensors) -> torch.Tensor | None:
        if not self.features:
            return super()._compute_rollout_logps(**tensors)
        if not self.args.rollouts_scored:
            return None
        # TRL's own method makes the logits of a whole generation at once, and features take them for several passes
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
        completion_ids, size = tensors["completion_ids"], self.args.per_device_train_batch_size
        logps = []
        with torch.no_grad(), self._during("rollouts"), ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.scoring(mask, completion_ids.shape[1]))
            for rows, of_rows, completions in zip(
                ids.split(size), mask.split(size), completion_ids.split(size), strict=True
            ):
                logits = self._forward_logits(self.model, rows, of_rows, completion_ids.shape[1])
                logps.append(selective_log_softmax(logits, completions))
        return torch.cat(logps)

    def _forward_logits(self, model, input_ids, attention_mask, logits_to_keep) -> torch.Tensor:
        with ExitStack() as stack:
            for feature in self.features if self._forward_of != "rollouts" else ():
                hook = feature.reference if self._forward_of == "teacher" else feature.scoring
                stack.enter_context(hook(attention_mask, logits_to_keep))
            return super()._forward_logits(model, input_ids, attention_mask, logits_to_keep)

    @contextmanager
    def _get_teacher_context_for_self_distillation(self) -> Iterator[None]:
        with super()._get_teacher_context_for_self_distillation(), self._during("teacher"):
            yield

    @contextmanager
    def _during(self, name: str) -> Iterator[None]:
        """Let forwards inside the block be of the pass `name`."""
        self._forward_of = name
        try:
            yield
        finally:
            self._forward_of = "loss"
