"""Log-probs of the engine for trainers of TRL that request none, and the flags of a correction that reads them."""

import math
from dataclasses import dataclass

import torch

from trl_fp8.run.feature import flag


@dataclass
class ComparedFlags:
    """Flags of `trl.GRPOConfig` that a correction reads."""

    vllm_importance_sampling_correction: bool = flag(
        True, "Whether to compare rollouts with the policy and correct the difference, where anything is FP8."
    )
    vllm_importance_sampling_mode: str = flag("sequence_mask", "As in `trl.GRPOConfig`.")
    vllm_importance_sampling_clip_max: float | None = flag(3.0, "As in `trl.GRPOConfig`.")
    vllm_importance_sampling_clip_min: float | None = flag(None, "Lower bound of the ratio, or None.")

    vllm_importance_sampling_cap = None  # no flag: TRL's deprecated name of `vllm_importance_sampling_clip_max`


class Compared:
    """Base of a trainer whose batch gets the engine's log-probs. Stands before `FP8Rollouts` in the list of bases."""

    _rollout_logps: list[list[float]] = []  # log-probs of the latest generation, a list for each completion

    @property
    def compared(self) -> bool:
        """Return whether a batch gets the engine's log-probs."""
        return self.args.own_engine and self.args.vllm_importance_sampling_correction

    def _make_generation(self, **kwargs) -> object:
        if not self.compared:
            return super()._make_generation(**kwargs)
        generation = super()._make_generation(**kwargs | {"logprobs": 0})  # 0: only the sampled token's log-prob
        generate = generation.generate

        def generate_and_keep_logps(*args, **kwargs) -> tuple:
            output = generate(*args, **kwargs)
            logprobs = output[2]  # for each token of each completion a list: the log-prob of the sampled token
            self._rollout_logps = []
            for completion in logprobs:
                logps = [logps_of_token[0] for logps_of_token in completion]
                # TRL has None in place of NaN. The correction counts NaN as missing
                self._rollout_logps.append([math.nan if logp is None else logp for logp in logps])
            return output

        generation.generate = generate_and_keep_logps
        return generation

    def rollout_logps(self, trainer_logps: torch.Tensor) -> torch.Tensor:
        """Return the engine's log-probs of the latest generation, padded with 0 to the trainer's shape `[B, T]`."""
        rollout_logps = torch.zeros_like(trainer_logps)
        for row, logps in zip(rollout_logps, self._rollout_logps, strict=True):
            row[: len(logps)] = torch.tensor(logps, dtype=row.dtype, device=row.device)
        return rollout_logps
