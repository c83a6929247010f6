"""`EngineKernels` in plain torch, for tests of the policy's side: it rounds as an engine does, to BF16 and e4m3.

Sums are FP64 and rounded once, so that no batch changes a bit of a row.
"""

import copy
import sys
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from trl_fp8.features.one_forward.followed_linear import BackwardPrecision
from trl_fp8.features.one_forward.one_forward import OneForward
from trl_fp8.policy.hook import hook_of
from trl_fp8.policy.model import transformers_model
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation
from trl_fp8.quantization.codec.e4m3 import cache_round_trip
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model


FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
PADDING = 16  # columns behind a fused call's output


def followed(model: nn.Module, recipe: FP8Recipe | None = None, **fields) -> tuple[OneForward, "FakeEngine"]:
    """Let `model` compute as an engine with its present weights; `fields` are of its `BackwardPrecision`."""
    recipe = recipe or recipe_for_model(model)
    engine = FakeEngine(model, recipe)
    backward = BackwardPrecision(format=recipe.format, scale_format=recipe.scale_format, **fields)
    return OneForward(model, recipe, engine, backward, hook_of(model)), engine


class FakeLinear:
    """Rows times weights, FP8 where the engine holds codes; `calls` counts."""

    def __init__(self, layers: dict[str, tuple[Float8Tensor | Tensor, Tensor | None]]):
        self.layers, self._held, self.calls = tuple(layers), layers, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs = [self._product(x, *weights) for weights in self._held.values()]
        return torch.cat([*outputs, x.new_full((len(x), PADDING), float("nan"))], 1)

    @staticmethod
    def _product(x: Tensor, weight: Float8Tensor | Tensor, bias: Tensor | None) -> Tensor:
        assert x.dtype == torch.bfloat16 and x.dim() == 2
        if isinstance(weight, Float8Tensor):
            x = dequantize_weight(quantize_activation(x, "pow2"), torch.float32)
            weight = dequantize_weight(weight, torch.float32)
        y = (x.double() @ weight.double().T).to(torch.bfloat16)
        return y if bias is None else y + bias

    def codes(self, layer: str) -> Float8Tensor | None:
        weight = self._held[layer][0]
        return weight if isinstance(weight, Float8Tensor) else None


class FakeEngine:
    """See `engine.kernels.EngineKernels`. `lacks` are norms that it does not have."""

    def __init__(self, model: nn.Module, recipe: FP8Recipe, lacks: tuple[str, ...] = ()):
        self._recipe, self._lacks, self.linears, self.softcap = recipe, lacks, {}, None
        copied = copy.deepcopy(model)
        copied = copied.merge_and_unload() if hasattr(copied, "merge_and_unload") else transformers_model(copied)
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()
        self.held = copied.requires_grad_(False)

    def linear(self, layer: str) -> FakeLinear:
        parent, _, child = layer.rpartition(".")
        names = next((fused for fused in FUSED if child in fused), (child,))
        layers = [f"{parent}.{name}" if parent else name for name in names]
        if layers[0] not in self.linears:
            self.linears[layers[0]] = FakeLinear({name: self._weight(name) for name in layers})
        return self.linears[layers[0]]

    def _weight(self, name: str) -> tuple[Float8Tensor | Tensor, Tensor | None]:
        linear = self.held.get_submodule(name)
        weight = linear.weight.to(torch.bfloat16)
        if name in self._recipe.fp8_modules:
            (weight,) = quantize_fused([weight], self._recipe.format, self._recipe.scale_format)
        return weight, None if linear.bias is None else linear.bias.to(torch.bfloat16)

    def norm(self, module: str):
        if module in self._lacks:
            raise ValueError(f"the engine has no {module}")
        return lambda x: self.held.get_submodule(module)(x.float()).to(torch.bfloat16)

    def activation(self, mlp: str):
        return lambda gate_up: self.reference_activation(mlp, gate_up.float()).to(torch.bfloat16)

    def rotary(self, layer: int):
        rotary = self.held.get_decoder().rotary_emb
        types = [self.held.config.layer_types[layer]] if hasattr(rotary, "layer_types") else []
        apply = sys.modules[type(self.held).__module__].apply_rotary_pos_emb

        def turn(positions: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            turned = rotary(rows[0].float(), positions[None], *types)
            heads = [states.float().unflatten(1, (-1, turned[0].shape[-1])).transpose(0, 1)[None] for states in rows]
            return tuple(states[0].transpose(0, 1).flatten(1).to(torch.bfloat16) for states in apply(*heads, *turned))

        return turn

    def angles(self, layer: int, positions: Tensor):
        rotary = self.held.get_decoder().rotary_emb
        cos, sin = rotary(torch.zeros(()), positions[None])
        return cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]

    def reference_activation(self, mlp: str, gate_up: Tensor):
        gate, up = gate_up.chunk(2, -1)
        return self.held.get_submodule(mlp).act_fn(gate) * up

    def eps(self, module: str):
        return getattr(self.held.get_submodule(module), "variance_epsilon", None)

    def scores(self, layer: int):
        attention = self.attention(layer)
        return attention.scaling, attention.window, attention.softcap

    def attention(self, layer: int):
        module = self.held.get_decoder().layers[layer].self_attn
        window = getattr(module, "sliding_window", None)
        return FakeAttention(scaling=module.scaling, window=window, softcap=self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.held.get_output_embeddings().weight
        scale = getattr(self.held.config, "logit_scale", None) or 1.0
        return scale * (hidden.double() @ weight.double().T).to(torch.bfloat16)


class FakeAttention(SimpleNamespace):
    """Over packed sequences, k and v as a cache under `scales` holds them."""

    def __call__(self, query, key, value, starts, longest, scales):
        if scales is not None:
            key, value = cache_round_trip(key, scales[1]), cache_round_trip(value, scales[2])
        outputs, sums = [], []
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            q, k, v = (states[start:end].double() for states in (query, key, value))
            k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], 1) for states in (k, v))
            age = torch.arange(len(q))[:, None] - torch.arange(len(q))
            hidden = (age < 0) | (age >= (self.window or len(q) + 1))
            scores = torch.einsum("thd,shd->hts", q, k).mul(self.scaling).masked_fill(hidden, float("-inf"))
            outputs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v))
            sums.append(scores.logsumexp(-1))
        return torch.cat(outputs).to(query.dtype), torch.cat(sums, 1).float(), (query, key, value)
