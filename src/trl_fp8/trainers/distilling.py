"""Bases of trainers that distill: their loss reads logits of a teacher beside those of the policy.

DistillationTrainer    never computes log-probs of rollouts
SDFT, SDPO             one method, `_forward_logits`, computes all logits: the policy's, the teacher's and, if there
                       are several updates on the same rollouts, those for the old log-probs
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from trl.trainer.utils import selective_log_softmax

from trl_fp8.config import FP8Config
from trl_fp8.run.launch import require_room


@dataclass
class DistillingConfig(FP8Config):
    """Base of the configs of trainers that distill."""

    # Attributes of GRPO's config that some of these configs lack. They are not flags
    use_transformers_continuous_batching = transformers_continuous_batching_config = None
    router_aux_loss_coef = 0.0

    REFUSED: ClassVar[dict[str, str]] = {  # flag -> why
        "fp8_forward": "a distilling loss reads logits of the policy's own output head",
        "fp8_base": "a distilling loss reads logits of the policy's own output head",
        "router_replay": "it follows the pass in which a trainer scores its rollouts, and one that distills has none",
    }

    setting_against_full_pass = "a trainer that distills"  # noqa: S105, no password


@dataclass
class SelfDistillationConfig(DistillingConfig):
    """Base of the configs of SDFT and SDPO."""

    generate_from_teacher = False  # SDPO lacks this flag
    beta = 0.0  # SDFT lacks this flag
    REFUSED = {name: why for name, why in DistillingConfig.REFUSED.items() if name != "router_replay"}

    def __post_init__(self):
        super().__post_init__()
        if self.use_teacher_server and "," in (self.vllm_server_base_url or ""):
            raise ValueError(
                f"vllm_server_base_url={self.vllm_server_base_url!r} with use_teacher_server=True: TRL asks one "
                "server for the teacher's scores. Set vllm_server_base_url to the address of one, or "
                "use_teacher_server=False."
            )
        if self.generate_from_teacher and self.router_replay != "off":
            raise ValueError(
                f"router_replay={self.router_replay!r} with generate_from_teacher=True: the engine continues the "
                "teacher's prompts, and the policy computes with others. Set router_replay='off'."
            )

    @property
    def compared(self) -> bool:
        """Return whether a correction needs log-probs of rollouts, even if TRL computes none."""
        return False

    @property
    def rollouts_scored(self) -> bool:
        """Return whether a pass computes the log-probs of rollouts before the first loss on them."""
        if self.generate_from_teacher:
            return False
        losses = (self.steps_per_generation or self.gradient_accumulation_steps) * self.num_iterations
        has_several_updates = self.gradient_accumulation_steps % losses != 0
        return has_several_updates or self.compared

    @property
    def setting_against_full_pass(self) -> str | None:
        if self.generate_from_teacher:
            return "generate_from_teacher=True"
        if not self.rollouts_scored:
            return "num_iterations=1"
        return "mask_truncated_completions=True" if getattr(self, "mask_truncated_completions", False) else None


class Distilling:
    """Base of a trainer that distills. It stands before `FP8Rollouts` in the list of bases."""

    has_fused_head = False

    def score_alone(self, input_ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> None:
        self.model(input_ids=input_ids, attention_mask=mask, use_cache=False)


class SelfDistillation(Distilling):
    """Calls of features' hooks in a step of TRL's SDFT and SDPO, which have the same methods."""

    engine_module = "trl.generation.vllm_generation"
    _forward_kind = "loss"  # purpose of the next forwards: "loss", "rollouts" (old log-probs) or "teacher"

    def prompt_token_ids(self, prompts: list) -> list[list[int]]:
        return self._tokenize_prompts(prompts)

    def _generate_vllm(self, prompt_ids: list[list[int]]) -> tuple:
        for feature in self.features:
            feature.before_turn(prompt_ids)
        require_room(prompt_ids, self.context)
        return super()._generate_vllm(prompt_ids)

    def _prepare_training_batch(self, inputs: list[dict]) -> dict:
        return self.extend_batch(super()._prepare_training_batch(inputs))

    def _compute_rollout_logps(self, **tensors) -> torch.Tensor | None:
        if not self.features:
            return super()._compute_rollout_logps(**tensors)
        if not self.args.rollouts_scored:
            return None
        # TRL's method would make the logits of a whole generation at once. Here the batches have the loss's size, and
        # all are inside one `scoring` of each feature
        completion_ids = tensors["completion_ids"]
        ids = torch.cat([tensors["prompt_ids"], completion_ids], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
        logits_to_keep = completion_ids.shape[1]
        batch_size = self.args.per_device_train_batch_size
        logps = []
        with torch.no_grad(), self._during("rollouts"), ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.scoring(mask, logits_to_keep))
            for first in range(0, len(ids), batch_size):
                rows = slice(first, first + batch_size)
                logits = self._forward_logits(self.model, ids[rows], mask[rows], logits_to_keep)
                logps.append(selective_log_softmax(logits, completion_ids[rows]))
        return torch.cat(logps)

    def _forward_logits(self, model, input_ids, attention_mask, logits_to_keep) -> torch.Tensor:
        with ExitStack() as stack:
            if self._forward_kind != "rollouts":  # otherwise `_compute_rollout_logps` has entered `scoring`
                for feature in self.features:
                    hook = feature.reference if self._forward_kind == "teacher" else feature.scoring
                    stack.enter_context(hook(attention_mask, logits_to_keep))
            return super()._forward_logits(model, input_ids, attention_mask, logits_to_keep)

    @contextmanager
    def _get_teacher_context_for_self_distillation(self) -> Iterator[None]:
        with super()._get_teacher_context_for_self_distillation(), self._during("teacher"):
            yield

    @contextmanager
    def _during(self, name: str) -> Iterator[None]:
        """Treat forwards inside the block as "rollouts" or "teacher" (`_forward_kind`)."""
        self._forward_kind = name
        try:
            yield
        finally:
            self._forward_kind = "loss"
