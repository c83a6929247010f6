"""`EngineKernels` of a vLLM engine: each call runs the engine's own module, its kernel, on its tensors.

Modules are found by the tensors that a sync writes to them (`Layout`), and so by the policy's own names.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps

import torch
from torch import Tensor, nn
from torchao.quantization import Float8Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import commandr
from vllm.model_executor.models.interfaces import supports_multimodal

from trl_fp8.engine.kernels import Rotary
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.quantization.formats import FormatSpec
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.pieces import Layout, Piece
from trl_fp8.upstream.vllm import choose_experts


HEAD = "lm_head"
NORMS = layernorm.RMSNorm, layernorm.GemmaRMSNorm, commandr.LayerNorm


def without_gradients(call: Callable) -> Callable:
    """`call` as an engine runs: without gradients, whatever autocast is set to."""

    @wraps(call)
    def called(*args, **kwargs):
        device = next(each for each in args if isinstance(each, Tensor)).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return call(*args, **kwargs)

    return called


class EngineLinear:
    """A linear layer of the engine, see `engine.kernels.Linear`."""

    def __init__(self, module: nn.Module, layout: Layout, spec: FormatSpec, layers: dict[str, str]):
        """`layers`: name in the policy -> in the engine, of those that `module` computes."""
        self._module, self._layout, self._format, self._names = module, layout, spec, layers
        self.layers = tuple(layers)

    @without_gradients
    def __call__(self, x: Tensor) -> Tensor:
        return self._module.quant_method.apply(self._module, x, getattr(self._module, "bias", None))

    def codes(self, layer: str) -> Float8Tensor | None:
        return held_codes(self._layout, f"{self._names[layer]}.weight", self._format)


class VLLMKernels:
    """The kernels of one engine, see `engine.kernels.EngineKernels`."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        recipe: FP8Recipe,
        attention: Callable[[nn.Module], object],
        tokens: int,
    ):
        """`attention` makes the platform's attention from a layer of the engine. `tokens`: The engine has made room to
        compute so many at once.
        """
        self._model, self._layout, self._recipe, self._tokens = model, layout, recipe, tokens
        text = model.get_language_model() if supports_multimodal(model) else model
        self._head = getattr(text, HEAD, None) or text.model.embed_tokens  # families that are always tied have none
        self._layers = attention_layers(model)
        self._attend = cache(lambda number: attention(self._layers[number]))
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._linears: dict[nn.Module, EngineLinear] = {}

    def linear(self, layer: str) -> EngineLinear:
        module = self._head if layer == HEAD else self._holding(layer)
        if module not in self._linears:
            pieces = self._layout.pieces.values()
            weights = [piece.name for piece in pieces if piece.module is module and piece.attribute == "weight"]
            held = [name.removesuffix(".weight") for name in weights]
            layers = {self._recipe.linears[name]: name for name in held} if layer != HEAD else {HEAD: HEAD}
            self._linears[module] = EngineLinear(module, self._layout, self._recipe.format, layers)
        return self._linears[module]

    def reads(self, piece: Piece) -> bool:
        """Return whether a trainer that calls these kernels computes with this part of the engine: with all but the
        embeddings, which it looks up in its own weight. An output head that is tied to them is one of the engine's.
        """
        return not isinstance(piece.module, VocabParallelEmbedding) or piece.parameter is self._head.weight

    def norm(self, module: str) -> Callable[[Tensor], Tensor]:
        held = self._holding(module)
        if not isinstance(held, NORMS):
            raise self._unknown(module, held)

        @without_gradients
        def norm(x: Tensor) -> Tensor:
            normalized = held(x)
            return normalized[0] if isinstance(normalized, tuple) else normalized

        return norm

    def activation(self, mlp: str) -> Callable[[Tensor], Tensor]:
        held = self._modules.get(self._recipe.engine_name(mlp))
        if not hasattr(held, "act_fn"):
            raise self._unknown(mlp, held)
        return without_gradients(held.act_fn)

    def rotary(self, layer: int) -> Rotary:
        if (rotary := self._rotary(layer)) is None:
            raise self._unknown(f"the rotary embedding of layer {layer}", None)
        # CUDA's kernel writes where it reads
        return without_gradients(lambda positions, query, key: rotary(positions, query.clone(), key.clone()))

    def angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        table = getattr(self._rotary(layer), "cos_sin_cache", None)
        return None if table is None else table[positions].chunk(2, -1)

    def _rotary(self, layer: int) -> nn.Module | None:
        attention = self._names[self._layers[layer]].rpartition(".")[0]
        return getattr(self._modules[attention], "rotary_emb", None)

    def definition(self, mlp: str, gate_up: Tensor) -> Tensor | None:
        act = getattr(self._modules.get(self._recipe.engine_name(mlp)), "act_fn", None)
        return act.forward_native(gate_up) if isinstance(act, CustomOp) else None

    def eps(self, module: str) -> float | None:
        piece = self._layout.pieces.get(f"{self._recipe.engine_name(module)}.weight")
        return piece.module.variance_epsilon if piece is not None and isinstance(piece.module, NORMS) else None

    def attention(self, layer: int) -> object:
        return self._attend(layer)

    def scores(self, layer: int) -> tuple[float, int | None, float | None]:
        held = self._layers[layer]
        if isinstance(held, MLAAttention):
            return held.scale, None, None
        return held.impl.scale, held.sliding_window, held.impl.logits_soft_cap or None

    def router(self, module: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        gate = self._holding(module)
        runner = self._inside(self._recipe.engine_name(module).rpartition(".")[0], MoERunner)

        @without_gradients
        def route(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = gate(x)
            logits = logits[0] if isinstance(logits, tuple) else logits
            return logits, *choose_experts(runner, x, logits)

        return route

    def experts(self, module: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        held = self._inside(self._recipe.engine_name(module), RoutedExperts)

        @without_gradients
        def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            ids = chosen.to(held.quant_method.topk_indices_dtype or torch.int32)
            parts = zip(*(each.split(self._tokens) for each in (x, weights.float(), ids)), strict=True)
            return torch.cat([held.forward_modular(*part) for part in parts])  # a copy: on CUDA it is lent memory

        return experts

    @without_gradients
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    @contextmanager
    def watching(self, note: Callable[[tuple[str, ...], Tensor, Tensor], None]) -> Iterator[None]:
        def noted(layers: tuple[str, ...], module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            note(layers, args[0], output[0] if isinstance(output, tuple) else output)

        with ExitStack() as handles:
            for module, call in self._linears.items():
                handles.enter_context(module.register_forward_hook(partial(noted, call.layers)))
            yield

    def _holding(self, name: str) -> nn.Module:
        piece = self._layout.pieces.get(f"{self._recipe.engine_name(name)}.weight")
        if piece is None:
            raise self._unknown(name, None)
        return piece.module

    def _inside(self, name: str, kind: type[nn.Module]) -> nn.Module:
        return next(each for each in self._model.get_submodule(name).modules() if isinstance(each, kind))

    def _unknown(self, name: str, found: nn.Module | None) -> ValueError:
        what = "nothing" if found is None else f"a {type(found).__name__}"
        return ValueError(
            f"fp8_forward='one_forward': for {name} of a policy of type {self._recipe.model_type!r} the engine has "
            f"{what}, which the trainer cannot call. Set fp8_forward='off'."
        )
