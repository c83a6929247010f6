"""What an engine sampled, as a trainer scores it."""

from contextlib import nullcontext

import torch


class Rollouts:
    """Sampled completions, right-padded: ids, mask, completion mask `[B, T]` and the engine's log-probs of them.

    Args:
        outputs: What vLLM's `generate` returned, with log-probs of the sampled tokens.
    """

    def __init__(self, outputs: list, device: torch.device):
        rows = [(list(output.prompt_token_ids), sampled) for output in outputs for sampled in output.outputs]
        shape = len(rows), max(len(prompt) + len(completion.token_ids) for prompt, completion in rows)
        self.ids, self.mask, self.completion = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        self.logps = torch.zeros(shape)
        for row, (prompt, completion) in enumerate(rows):
            tokens = prompt + list(completion.token_ids)
            span = slice(len(prompt), len(tokens))
            self.ids[row, : len(tokens)] = torch.tensor(tokens)
            self.mask[row, : len(tokens)] = 1
            self.completion[row, span] = 1
            sampled = zip(completion.logprobs, completion.token_ids, strict=True)
            self.logps[row, span] = torch.tensor([logprobs[token].logprob for logprobs, token in sampled])
        for name in ("ids", "mask", "completion", "logps"):
            setattr(self, name, getattr(self, name).to(device))

    def distances(self, logps: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
        """|log-prob - log-prob| of each completion token, in one row: `logps` `[B, T]` against the engine's own, or
        against `others`.
        """
        return (logps - (self.logps if others is None else others)).abs()[self.completion.bool()]


@torch.no_grad()
def score(model: torch.nn.Module, rollouts: Rollouts) -> torch.Tensor:
    """The trainer's log-probs `[B, T]` of all tokens but the first: in FP32 on CPU, under BF16 autocast on a GPU."""
    on_gpu = rollouts.ids.is_cuda
    with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext():
        logits = model(input_ids=rollouts.ids, attention_mask=rollouts.mask).logits
    logps = torch.zeros_like(rollouts.logps)
    logps[:, 1:] = logits[:, :-1].float().log_softmax(-1).gather(-1, rollouts.ids[:, 1:, None])[..., 0]
    return logps
