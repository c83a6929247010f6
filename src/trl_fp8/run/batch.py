"""The records of one generation, and the names that TRL's batch has for its tensors.

TRL's `_generate_and_score_completions` returns a dictionary of tensors, which its loss reads. Features add keys of
their own. TRL shuffles and splits a batch by sequence, so each of their tensors has a row for each sequence.

Shape letters: B sequences, P prompt columns, T completion columns.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from .log_ratio import LogRatio, log_ratio
from .metric import Metric


# TRL's keys, as of 1.16
PROMPT_IDS = "prompt_ids"  # [B, P], padded on the left
COMPLETION_IDS = "completion_ids"  # [B, T], padded on the right
COMPLETION_MASK = "completion_mask"  # [B, T]: 0 at padding
TOOL_MASK = "tool_mask"  # [B, T]: 0 at tokens that a tool wrote; TRL leaves it out where there are no tools
TRAINER_LOGPS = "old_per_token_logps"  # [B, T]: absent where TRL runs no old-log-prob pass
ROLLOUT_LOGPS = "sampling_per_token_logps"  # [B, T]: the engine's; absent without importance sampling correction
LOSS_WEIGHTS = "importance_sampling_ratio"  # [B, T] or [B, 1]: factors of the loss
LOSS_TOKENS = "num_items_in_batch"  # 0-d: tokens that the loss averages over, on all ranks


@dataclass
class Rollouts:
    """Token ids of one generation, a list for each rollout."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    metrics: dict[str, Metric] = field(default_factory=dict)  # measured by features; the trainer logs all of them

    @cached_property
    def sequences(self) -> list[list[int]]:
        """Prompt and completion of each rollout."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [list(prompt) + list(completion) for prompt, completion in pairs]


@dataclass
class Batch:
    """One generation batch on its way from TRL's scoring to its loss."""

    tensors: dict[str, torch.Tensor]  # TRL's dictionary, by the keys above
    metrics: dict[str, Metric] = field(default_factory=dict)  # measured by features; the trainer logs all of them
    record: dict = field(default_factory=dict)  # what the run's log keeps of it besides

    @property
    def mask_BT(self) -> torch.Tensor:
        """Nonzero at the tokens that the policy wrote: the completion without padding and tool output."""
        return self.tensors[COMPLETION_MASK] * self.tensors.get(TOOL_MASK, 1)

    @cached_property
    def ratio(self) -> LogRatio | None:
        """Log-ratios of the tokens that the policy wrote; None if TRL did not ask both sides for log-probs.

        The first access computes them, and has to come before a correction replaces the log-probs.
        """
        if not {TRAINER_LOGPS, ROLLOUT_LOGPS} <= self.tensors.keys():
            return None
        return log_ratio(self.tensors[TRAINER_LOGPS], self.tensors[ROLLOUT_LOGPS], self.mask_BT)
