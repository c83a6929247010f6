"""Batches of log-probs to test correction and mismatch on: adversarial, random, and Gaussian with a known KL."""

import math

import torch
from hypothesis import strategies as st


ODD_LOGPS = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1e-6, -19.9, -45.0, -1e4, 1e300, -1e300])
# In millionths, about the spacing of fp32 log-probs: of a smaller difference k3 keeps no digits, in float64 either.
LOGPS = st.one_of(st.integers(-12_000_000, 0).map(lambda n: n * 1e-6), ODD_LOGPS)


@st.composite
def batches(draw, logps=LOGPS):
    """Draw (trainer, rollout, mask), float64: with lengths 0 and 1, all masked, and holes in the mask."""
    B, T = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    count = B * T
    trainer = draw(st.lists(logps, min_size=count, max_size=count))
    other = draw(st.lists(logps, min_size=count, max_size=count))
    near = st.integers(-500_000, 500_000).map(lambda n: n * 1e-6)
    shift = draw(st.lists(st.one_of(st.none(), st.just(0.0), near), min_size=count, max_size=count))
    rollout = [b if d is None else a + d for a, b, d in zip(trainer, other, shift, strict=True)]
    mask = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    shaped = [torch.tensor(x, dtype=torch.float64).reshape(B, T) for x in (trainer, rollout)]
    return *shaped, torch.tensor(mask, dtype=torch.long).reshape(B, T)


def random_batch(B=6, T=50, sigma=0.3, seed=0, dtype=torch.float32, padded=True):
    """Draw log-probs that differ by N(0, sigma^2), with completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    trainer = torch.randn(B, T, generator=generator).abs().neg().to(dtype)
    rollout = trainer + sigma * torch.randn(B, T, generator=generator).to(dtype)
    mask = torch.ones(B, T, dtype=torch.long)
    if padded:
        for i in range(B):
            mask[i, T - (i * T) // (2 * B) :] = 0
    return trainer, rollout, mask


def fp8_batch(B, T, kl, seed=0):
    """Draw log r ~ N(-kl, 2 kl), the Gaussian with E[r] = 1: KL(rollout || trainer) is exactly `kl` per token."""
    generator = torch.Generator().manual_seed(seed)
    log_r = -kl + math.sqrt(2 * kl) * torch.randn(B, T, generator=generator, dtype=torch.float64)
    rollout = torch.full((B, T), -1.0, dtype=torch.float64)
    return rollout + log_r, rollout, torch.ones(B, T, dtype=torch.long)


def pairs_to_logps(ratios):
    """Return log-probs whose ratio trainer / rollout is `ratios`."""
    rollout = torch.full_like(torch.tensor(ratios, dtype=torch.float64), -3.0)
    trainer = rollout + torch.tensor(ratios, dtype=torch.float64).log()
    return trainer, rollout, torch.ones(rollout.shape, dtype=torch.long)


def policy_losses(per_token_loss, weights, mask, max_length=16):
    """Yield how TRL 1.16 weights and averages a policy loss, for each loss type that multiplies by the ratio."""
    weighted = per_token_loss * weights
    tokens = mask.sum().clamp(min=1.0)
    return {
        "grpo": ((weighted * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        "bnpo": (weighted * mask).sum() / tokens,
        "dr_grpo": (weighted * mask).sum() / (weighted.size(0) * max_length),
        "dapo and cispo": (weighted * mask).sum() / tokens,
        "luspo": (weighted * mask).sum(-1).mean(),
    }
