"""Observe the largest q, k and v of each layer in a forward of the policy.

vLLM 0.31 has no calibration of its own, and the KV cache holds what attention sees: k and v after normalization and
RoPE. transformers' attention interface is called with exactly that, so an attention function that notes magnitudes and
then calls SDPA is all it takes; neither the model's code nor its weights are touched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


OBSERVER = "trl_fp8_observer"
_observation: ContextVar[tuple[torch.Tensor, torch.Tensor]] = ContextVar("kv_observation")


def observe_qkv_amax(
    model: nn.Module, sequences: Sequence[Sequence[int]], *, pad_token_id: int = 0, max_tokens: int = 8192
) -> torch.Tensor:
    """Largest |q|, |k|, |v| per layer over the tokens of `sequences`, after normalization and RoPE.

    Args:
        model: The policy as the trainer calls it (a transformers model, or a PEFT, DDP or FSDP2 wrapping of one).
        sequences: Token ids, one list a sequence. Repeated sequences are run once; the first `max_tokens` tokens are
            used, so the most telling sequences should come first.
        pad_token_id: Any valid token id; padding is masked.
        max_tokens: Bound on the tokens of the forward.

    Returns:
        fp32 `[L, 3]` on the model's device, columns q, k, v; 0 where a layer was not run.
    """
    rows = _bounded(sequences, max_tokens)
    base = _transformers_model(model)
    device = next(base.parameters()).device
    length = max(map(len, rows))
    ids = torch.tensor([row + [pad_token_id] * (length - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    amax_L3 = torch.zeros(base.config.get_text_config().num_hidden_layers, 3, device=device)
    with torch.no_grad(), _observing(base, amax_L3, mask):
        model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return amax_L3


def _bounded(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    rows, left = [], max_tokens
    for row in dict.fromkeys(tuple(sequence[:max_tokens]) for sequence in sequences):
        if row and len(row) <= left:
            rows.append(list(row))
            left -= len(row)
    if not rows:
        raise ValueError("KV cache scales cannot be calibrated: there is no prompt with at least one token.")
    return rows


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model to calibrate the KV cache on.")


@contextmanager
def _observing(model: PreTrainedModel, amax_L3: torch.Tensor, mask_BT: torch.Tensor) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(OBSERVER)
    token = _observation.set((amax_L3, mask_BT.bool()[:, None, :, None]))
    try:
        yield
    finally:
        _observation.reset(token)
        model.set_attn_implementation(before)


def _observe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    amax_L3, real_B1T1 = _observation.get()
    observed = torch.stack([_amax(states, real_B1T1) for states in (query, key, value)])
    amax_L3[module.layer_idx] = torch.maximum(amax_L3[module.layer_idx], observed)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _amax(states_BHTD: torch.Tensor, real_B1T1: torch.Tensor) -> torch.Tensor:
    return states_BHTD.abs().masked_fill(~real_B1T1, 0).amax().float()


AttentionInterface.register(OBSERVER, _observe)
AttentionMaskInterface.register(OBSERVER, sdpa_mask)
