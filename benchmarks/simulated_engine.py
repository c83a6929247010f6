"""An engine's arithmetic in a transformers model: BF16, FP8 linears and an FP8 KV cache, each to be switched on alone.

An FP8 linear multiplies the dequantized codes of weight and activations. With power-of-two scales these are exact in
BF16, so that a BF16 GEMM computes what the engine's does, up to the order of its sums; with other scales the product
is taken in FP32. vLLM's reference kernels on a CPU add in FP64, which is slow; `bench_anatomy --engines` compares
both.

Shape letters: B sequences, T tokens, V vocabulary, N out-features, K in-features.
"""

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from trl_fp8.features.kv_cache.observation import observe_sequences
from trl_fp8.policy.hook import AttentionHook, hooked
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.e4m3 import cache_round_trip
from trl_fp8.quantization.codec.kv_scales import KVScales, kv_scales_from_amax
from trl_fp8.quantization.codec.weights import quantize_as_engine, quantize_fused
from trl_fp8.quantization.formats import (
    FLOORED_SCALE_AMAX,
    FORMATS,
    ActivationScaling,
    FormatSpec,
    ScaleFormat,
)


KINDS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MARGIN = 1.05  # default of the flag kv_scale_margin
ROWS = 4  # sequences whose logits are in memory together


@dataclass(frozen=True)
class Sequences:
    """Prompts with completions, right-padded: ids, mask of real tokens and of completions `[B, T]`."""

    ids: Tensor
    real: Tensor
    completion: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> "Sequences":
        rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        real = torch.arange(longest) < lengths
        return cls(ids, real, real & (torch.arange(longest) >= starts))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, rows: slice) -> "Sequences":
        return Sequences(self.ids[rows], self.real[rows], self.completion[rows])

    def token_lists(self) -> list[list[int]]:
        return [row[real].tolist() for row, real in zip(self.ids, self.real, strict=True)]


class SimulatedEngine:
    """A BF16 copy of a Llama or Qwen3 policy that rounds as an engine does."""

    def __init__(self, policy: PreTrainedModel):
        self.model: LlamaForCausalLM = deepcopy(policy).to(torch.bfloat16).eval()
        self.hook = AttentionHook(self.model)

        self.linears = {name: module for name, module in self.model.model.named_modules() if _is_linear(module)}
        self._high = {name: module.weight.detach() for name, module in self.linears.items()}
        self._handles: list = []
        self._rounded: tuple[Tensor, Tensor] | None = None  # the latest input of a linear, before and after rounding
        self.kv_scales: KVScales | None = None

    @torch.no_grad()
    def round(
        self,
        linears: Collection[str] = (),
        spec: FormatSpec = FORMATS["blocks"],
        scale_format: ScaleFormat = "pow2",
        kv_scales: KVScales | None = None,
        activations: ActivationScaling | None = None,
    ) -> None:
        """Hold these linears in FP8, and all others in BF16; cache k and v under `kv_scales` (None: in BF16).

        `activations` are an engine's; None: scales of the same kind as the weights'.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name, module in self.linears.items():
            module.weight = nn.Parameter(self._high[name], requires_grad=False)
        if activations is None:
            activations = ActivationScaling(scale_format if spec.weight_block else "fp32", FLOORED_SCALE_AMAX)
        for names in self._fused(linears):
            codes = quantize_fused([self._high[name] for name in names], spec, scale_format)
            exact = scale_format == "pow2" and activations.scale_format == "pow2"
            dtype = torch.bfloat16 if exact else torch.float32
            for name, code in zip(names, codes, strict=True):
                module = self.linears[name]
                module.weight = nn.Parameter(dequantize_weight(code, dtype), requires_grad=False)
                self._handles.append(module.register_forward_pre_hook(self._rounder(spec, activations, dtype)))
                self._handles.append(module.register_forward_hook(lambda _, __, y: y.to(torch.bfloat16)))
        self.kv_scales = kv_scales
        self.hook.simulate(None if kv_scales is None else kv_scales.values)

    def _fused(self, linears: Collection[str]) -> list[list[str]]:
        """Return the names grouped as vLLM fuses them."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name in self.linears:
            if name in linears:
                parent, _, last = name.rpartition(".")
                [kind] = [kind for kind, members in KINDS.items() if last in members]
                groups.setdefault((parent, kind), []).append(name)
        return list(groups.values())

    def _rounder(self, spec: FormatSpec, scaling: ActivationScaling, dtype: torch.dtype):
        def rounded(module: nn.Module, args: tuple) -> tuple:
            [x] = args
            if self._rounded is None or self._rounded[0] is not x:  # q, k and v have one input
                self._rounded = x, dequantize_weight(quantize_as_engine(x, spec, scaling), dtype)
            return (self._rounded[1],)

        return rounded

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], tokens: int, seed: int, end: int | None = None):
        """Sample completions at temperature 1. Return their token ids and log-probs, lists of tensors `[T]`.

        `end` ends a completion; None: all have `tokens` tokens.
        """
        generator = torch.Generator().manual_seed(seed)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        cache = DynamicCache() if self.kv_scales is None else RoundedCache(self.kv_scales)
        self.hook.simulate(None)  # the cache holds rounded states already
        chosen, logps, step = [], [], ids
        for _ in range(tokens):
            positions = (real.cumsum(-1) - 1).clamp_min(0)[:, -step.shape[1] :]
            logits = self.model(
                input_ids=step,
                attention_mask=real,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            log_probs = logits.float().log_softmax(-1)
            step = torch.multinomial(log_probs.exp(), 1, generator=generator)
            chosen.append(step[:, 0])
            logps.append(log_probs.gather(-1, step)[:, 0])
            real = F.pad(real, (0, 1), value=1)
        self.hook.simulate(None if self.kv_scales is None else self.kv_scales.values)
        rows = torch.stack(chosen, 1)
        ends = torch.full((len(rows),), tokens)
        if end is not None:
            is_end = rows == end
            ends = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, ends)
        lengths = ends.tolist()
        pairs = zip(rows, torch.stack(logps, 1), lengths, strict=True)
        return [(row[:length], logp[:length]) for row, logp, length in pairs]


class RoundedCache(DynamicCache):
    """A KV cache that holds k and v as e4m3 codes under `scales` would."""

    def __init__(self, scales: KVScales):
        super().__init__()
        self._scales = scales

    def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        _, k_scale, v_scale = self._scales.values[layer]
        states = cache_round_trip(key, k_scale), cache_round_trip(value, v_scale)
        return super().update(*states, layer, *args, **kwargs)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def calibrated_scales(model: PreTrainedModel, sequences: list[list[int]]) -> KVScales:
    """Return KV scales that hold q, k and v of these tokens under `model`, with the default margin."""
    with hooked(model) as hook:
        observed = observe_sequences(model, hook, sequences, max_tokens=sum(map(len, sequences)), moments=False)
    return kv_scales_from_amax(observed.amax_L3, MARGIN)


@torch.no_grad()
def log_probs(model: PreTrainedModel, sequences: Sequences):
    """Yield, for `ROWS` sequences at a time, log-probs `[n, V]` of their completion tokens' places, and the tokens."""
    for start in range(0, len(sequences), ROWS):
        part = sequences.rows(slice(start, start + ROWS))
        hidden = model.model(input_ids=part.ids, attention_mask=part.real.long(), use_cache=False).last_hidden_state
        wanted = part.completion[:, 1:]
        logits = model.lm_head(hidden[:, :-1][wanted]).float()
        yield logits.log_softmax(-1), part.ids[:, 1:][wanted]
