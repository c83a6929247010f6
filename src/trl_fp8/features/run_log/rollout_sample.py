"""What the run's file keeps of one batch's log-probs: a histogram of the log-ratio and a few pairs."""

import torch

from trl_fp8.run.log_ratio import LogRatio


BINS, LIMIT = 120, 3.0  # of log r in [-LIMIT, LIMIT], and an open bin on either side
POSITIONS, PAIRS = 1024, 256  # looked at, evenly over the batch; kept at most


def rollout_sample(ratio: LogRatio) -> dict[str, list | float]:
    """The histogram and the pairs (trainer, rollout) of one rank's batch. Waits for the device once."""
    scored = ratio.scored_BT.flatten().double()
    bins = ((ratio.values_BT.flatten() + LIMIT) * (BINS / (2 * LIMIT))).floor().long() + 1
    counts = scored.new_zeros(BINS + 2).scatter_add_(0, bins.clamp(0, BINS + 1), scored)
    chosen = torch.linspace(0, max(scored.numel() - 1, 0), min(POSITIONS, scored.numel()), device=scored.device).long()
    sides = [side.flatten()[chosen].double() for side in (ratio.trainer_BT, ratio.rollout_BT)]
    # one vector, so that all of it travels to the host in one copy
    counts, tokens = torch.cat([counts, *sides, scored[chosen]]).cpu().tensor_split([BINS + 2])
    columns = tokens.view(3, len(chosen)).T.tolist()
    pairs = [[round(trainer, 5), round(rollout, 5)] for trainer, rollout, is_scored in columns if is_scored]
    return {
        "log_ratio_limit": LIMIT,
        "log_ratio_counts": counts.long().tolist(),
        "log_probs": pairs[:: -(-len(pairs) // PAIRS) or 1],  # every n-th, n rounded up
    }
