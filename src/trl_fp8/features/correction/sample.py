"""A picture's worth of one batch's log-probs: a histogram of the log-ratio and a few pairs, in one small tensor."""

from dataclasses import dataclass

import torch

from trl_fp8.run.log_ratio import LogRatio


BINS, LIMIT = 120, 3.0  # of log r in [-LIMIT, LIMIT], and an open bin on either side
POSITIONS, PAIRS = 1024, 256  # looked at, evenly over the batch; kept at most


@dataclass(frozen=True)
class RolloutSample:
    """Still on the device: `[counts | trainer | rollout | scored]`, fp64."""

    packed: torch.Tensor

    def read(self) -> dict[str, list]:
        """The histogram and pairs (trainer, rollout), as a run's file keeps them. Waits for the device."""
        counts, rest = self.packed.cpu().tensor_split([BINS + 2])
        tokens = rest.view(3, len(rest) // 3).T.tolist()
        pairs = [[round(trainer, 5), round(rollout, 5)] for trainer, rollout, scored in tokens if scored]
        return {
            "log_ratio_limit": LIMIT,
            "log_ratio_counts": counts.long().tolist(),
            "log_probs": pairs[:: -(-len(pairs) // PAIRS) or 1],
        }


def rollout_sample(ratio: LogRatio) -> RolloutSample:
    """Sample one rank's batch; nothing is waited for."""
    scored = ratio.scored_BT.flatten().double()
    bins = ((ratio.values_BT.flatten() + LIMIT) * (BINS / (2 * LIMIT))).floor().long() + 1
    counts = scored.new_zeros(BINS + 2).scatter_add_(0, bins.clamp(0, BINS + 1), scored)
    chosen = torch.linspace(0, max(scored.numel() - 1, 0), min(POSITIONS, scored.numel()), device=scored.device).long()
    sides = [side.flatten()[chosen].double() for side in (ratio.trainer_BT, ratio.rollout_BT)]
    return RolloutSample(torch.cat([counts, *sides, scored[chosen]]))
