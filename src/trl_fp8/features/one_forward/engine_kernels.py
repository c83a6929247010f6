"""The kernels of a vLLM engine, as a policy calls them, and the `EnginePart` that provides them.

Each call runs one of the engine's own modules, with the engine's kernel and tensors. Callers name modules as the
policy does. The engine's module is looked up in the `Layout` (sync/pieces.py), which has the module of each tensor
that a sync writes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps

import torch
from torch import Tensor, nn
from torchao.quantization import Float8Tensor
from transformers import PretrainedConfig
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import commandr
from vllm.model_executor.models.interfaces import supports_multimodal

from trl_fp8.engine.kernels import Rotary
from trl_fp8.engine.vllm.colocated import Generation
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import CPU_KERNELS, Platform
from trl_fp8.quantization.codec.e4m3 import cache_round_trip
from trl_fp8.quantization.formats import FormatSpec
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import TensorGroup
from trl_fp8.sync.pieces import Layout, Piece
from trl_fp8.upstream import vllm as upstream
from trl_fp8.upstream.vllm import choose_experts

from .engine_invariance import CUDA, Invariance, invariant_on_cuda, require_cuda_kernels, require_invariant_routers
from .followed_reference import ReferenceWeights


HEAD = "lm_head"
NORMS = layernorm.RMSNorm, layernorm.GemmaRMSNorm, commandr.LayerNorm
# Bound of the mean |log-prob difference| for a trainer that calls the same kernels. On CPU, reductions in FP64 have
# the same result in any batch, but each side computes log-softmax in FP32. The bound for CUDA is a third of the
# mismatch of BF16 rollouts of a model with 2 layers; no run on a GPU has tested it
MISMATCH_BOUNDS = {"cpu": 1e-5, "cuda": 1e-3}


def without_gradients(call: Callable) -> Callable:
    """Return a function that calls `call` without gradients and without autocast, as an engine does."""

    @wraps(call)
    def called(*args, **kwargs):
        first_tensor = next(each for each in args if isinstance(each, Tensor))
        with torch.no_grad(), torch.autocast(first_tensor.device.type, enabled=False):
            return call(*args, **kwargs)

    return called


class EngineLinear:
    """A linear layer of the engine, see `engine.kernels.Linear`."""

    def __init__(self, module: nn.Module, layout: Layout, spec: FormatSpec, layers: dict[str, str]):
        """Wrap `module`. `layers` has all layers that `module` computes: the policy's name -> the engine's name."""
        self._module = module
        self._layout = layout
        self._format = spec
        self._names = layers
        self.layers = tuple(layers)

    @without_gradients
    def __call__(self, x: Tensor) -> Tensor:
        return self._module.quant_method.apply(self._module, x, getattr(self._module, "bias", None))

    def codes(self, layer: str) -> Float8Tensor | None:
        return held_codes(self._layout, f"{self._names[layer]}.weight", self._format)


class VLLMKernels:
    """The kernels of one engine, see `engine.kernels.EngineKernels`."""

    def __init__(self, model: nn.Module, layout: Layout, recipe: FP8Recipe, attention: Callable, tokens: int):
        """Find the kernels of `model`.

        Args:
            model: vLLM's model.
            layout: The engine's `Layout`.
            recipe: Says which layers are FP8, and how the engine names them.
            attention: Makes an `engine.kernels.Attention` from a layer of vLLM's.
            tokens: The largest number of tokens that the engine's experts can compute in one call.
        """
        self._model = model
        self._layout = layout
        self._recipe = recipe
        self._tokens = tokens
        text = model.get_language_model() if supports_multimodal(model) else model
        # Families whose head is always tied to the embedding have no module for the head
        self._head = getattr(text, HEAD, None) or text.model.embed_tokens
        self._layers = attention_layers(model)
        self._attend = cache(lambda number: attention(self._layers[number]))  # makes each layer's attention once
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._linears: dict[nn.Module, EngineLinear] = {}

    def linear(self, layer: str) -> EngineLinear:
        module = self._head if layer == HEAD else self._module(layer)
        if module in self._linears:
            return self._linears[module]
        layers = {}  # the policy's name -> the engine's name, of each layer that `module` computes
        if layer == HEAD:
            layers[HEAD] = HEAD
        else:
            for piece in self._layout.pieces.values():
                if piece.module is module and piece.attribute == "weight":
                    name = piece.name.removesuffix(".weight")
                    layers[self._recipe.linears[name]] = name
        self._linears[module] = EngineLinear(module, self._layout, self._recipe.format, layers)
        return self._linears[module]

    def reads(self, piece: Piece) -> bool:
        """Return whether a trainer that calls these kernels reads this tensor of the engine.

        The trainer reads all tensors except the embedding, because it looks embeddings up in its own weight. A weight
        that the head and the embedding share is read as the head's.
        """
        return not isinstance(piece.module, VocabParallelEmbedding) or piece.parameter is self._head.weight

    def norm(self, module: str) -> Callable[[Tensor], Tensor]:
        engine_norm = self._module(module)
        if not isinstance(engine_norm, NORMS):
            raise self._unknown(module, engine_norm)

        @without_gradients
        def norm(x: Tensor) -> Tensor:
            normalized = engine_norm(x)
            return normalized[0] if isinstance(normalized, tuple) else normalized

        return norm

    def activation(self, mlp: str) -> Callable[[Tensor], Tensor]:
        engine_mlp = self._modules.get(self._recipe.engine_name(mlp))
        if not hasattr(engine_mlp, "act_fn"):
            raise self._unknown(mlp, engine_mlp)
        return without_gradients(engine_mlp.act_fn)

    def rotary(self, layer: int) -> Rotary:
        rotary = self._rotary(layer)
        if rotary is None:
            raise self._unknown(f"the rotary embedding of layer {layer}", None)

        @without_gradients
        def rotate(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            # Clone, because CUDA's kernel writes its output into its arguments
            return rotary(positions, query.clone(), key.clone())

        return rotate

    def angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        table = getattr(self._rotary(layer), "cos_sin_cache", None)  # [positions, 2 F]: cos, then sin
        return None if table is None else table[positions].chunk(2, -1)

    def _rotary(self, layer: int) -> nn.Module | None:
        attention = self._names[self._layers[layer]].rpartition(".")[0]
        return getattr(self._modules[attention], "rotary_emb", None)

    def reference_activation(self, mlp: str, gate_up: Tensor) -> Tensor | None:
        engine_mlp = self._modules.get(self._recipe.engine_name(mlp))
        act = getattr(engine_mlp, "act_fn", None)
        return act.forward_native(gate_up) if isinstance(act, CustomOp) else None

    def eps(self, module: str) -> float | None:
        piece = self._layout.pieces.get(f"{self._recipe.engine_name(module)}.weight")
        if piece is None or not isinstance(piece.module, NORMS):
            return None
        return piece.module.variance_epsilon

    def attention(self, layer: int) -> object:
        return self._attend(layer)

    def scores(self, layer: int) -> tuple[float, int | None, float | None]:
        attention = self._layers[layer]
        if isinstance(attention, MLAAttention):
            return attention.scale, None, None
        return attention.impl.scale, attention.sliding_window, attention.impl.logits_soft_cap or None

    def router(self, module: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        gate = self._module(module)
        layer = self._recipe.engine_name(module).rpartition(".")[0]
        runner = self._inside(layer, MoERunner, module)

        @without_gradients
        def route(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = gate(x)
            logits = logits[0] if isinstance(logits, tuple) else logits
            return logits, *choose_experts(runner, x, logits)

        return route

    def experts(self, module: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        experts = self._inside(self._recipe.engine_name(module), RoutedExperts, module)

        @without_gradients
        def compute(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            ids = chosen.to(experts.quant_method.topk_indices_dtype or torch.int32)
            tokens = self._tokens
            parts = zip(x.split(tokens), weights.float().split(tokens), ids.split(tokens), strict=True)
            outputs = [experts.forward_modular(*part) for part in parts]
            return torch.cat(outputs)

        return compute

    @without_gradients
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    @contextmanager
    def watching(self, note: Callable[[tuple[str, ...], Tensor, Tensor], None]) -> Iterator[None]:
        def hook(layers: tuple[str, ...], module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            note(layers, args[0], output[0] if isinstance(output, tuple) else output)

        with ExitStack() as handles:
            for module, linear in self._linears.items():  # those that `linear` has returned
                # vLLM calls no forward of an output head. If embeddings are the head, their inputs are token ids
                if not isinstance(module, VocabParallelEmbedding):
                    handles.enter_context(module.register_forward_hook(partial(hook, linear.layers)))
            yield

    def _module(self, name: str) -> nn.Module:
        """Return the engine's module with the weight of the policy's module `name`. `ValueError` if there is none."""
        piece = self._layout.pieces.get(f"{self._recipe.engine_name(name)}.weight")
        if piece is None:
            raise self._unknown(name, None)
        return piece.module

    def _inside(self, engine_name: str, kind: type[nn.Module], name: str) -> nn.Module:
        """Return the first module of class `kind` inside the engine's module `engine_name`.

        `name` is the policy's name of the module, for an error.
        """
        outer = self._modules.get(engine_name)
        if outer is not None:
            for module in outer.modules():
                if isinstance(module, kind):
                    return module
        raise self._unknown(name, outer)

    def _unknown(self, name: str, found: nn.Module | None) -> ValueError:
        """Return the error for the policy's module `name`. `found` is what the engine has in its place."""
        what = "no counterpart" if found is None else f"a {type(found).__name__}, which the trainer cannot call"
        return ValueError(
            f"fp8_forward='one_forward': for {name} of a policy of type {self._recipe.model_type!r} the engine has "
            f"{what}. Set fp8_forward='off'."
        )


class CPUAttention:
    """Attention of a CPU engine's layer over whole sequences; see `engine.kernels.Attention`."""

    def __init__(self, layer: Attention):
        # needs vLLM's CPU build
        from trl_fp8.engine.vllm.cpu.reference_attention import attend_packed

        self._attend = attend_packed
        self._fp8 = layer.kv_cache_dtype.startswith("fp8")
        impl = layer.impl
        self.scaling = impl.scale
        self.window = impl.sliding_window
        self.softcap = impl.logits_soft_cap
        self._sinks = impl.sinks

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        if self._fp8 != (scales is not None):
            raise RuntimeError(f"KV scales are {scales} for a layer whose cache is {'' if self._fp8 else 'not '}FP8.")
        if scales is not None:  # round only k and v: the CPU engine rounds no query
            key = cache_round_trip(key, scales[1])
            value = cache_round_trip(value, scales[2])
        options = self.scaling, self.window, self.softcap, self._sinks
        # lse_HN is the log-sum-exp `[H, T]`
        output, lse_HN = self._attend(query, key, value, starts, *options)
        return output, lse_HN, (query, key, value)


class KernelsPart(EnginePart):
    """Provides the kernels of an engine to a policy that calls them or is compared with them."""

    def ready(self, generation: Generation) -> None:
        if generation.platform.name == "cuda":
            from .engine_flash_attention import PackedAttention as attention  # vLLM's CPU build has no FlashAttention
        else:
            attention = CPUAttention
        engine = generation.engine
        tokens = upstream.engine_config(generation.llm).scheduler_config.max_num_batched_tokens
        self.kernels = VLLMKernels(engine.model, engine.layout, generation.recipe, attention, tokens)


class SharedKernelsPart(KernelsPart):
    """Starts an engine whose kernels a trainer can share, and provides them."""

    batch_invariant = True
    mismatch_bound: float  # one of `MISMATCH_BOUNDS`; `started` sets it

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        if platform.name == "cuda":
            require_cuda_kernels(config.get_text_config(), platform.capability, platform.flash_attention)
        return invariance_of(platform).arguments()

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        return invariant_on_cuda() if platform.name == "cuda" else nullcontext()

    def started(self, generation: Generation) -> None:
        self.mismatch_bound = MISMATCH_BOUNDS[generation.platform.name]
        invariance_of(generation.platform).require(upstream.engine_config(generation.llm))
        require_invariant_routers(upstream.engine_model(generation.llm))
        generation.llm.share_weights()

    def reference_weights(self, generation: Generation, model: nn.Module) -> ReferenceWeights:
        """Return the weights of the reference `model`, in the form in which the engine stores weights.

        `model` is either TRL's copy of the policy, or the policy itself. During a pass of the reference, the adapters
        of the policy are disabled, or TRL's copy of the adapters is active.
        """
        weights = generation.weights
        layout = generation.engine.layout
        frozen: set[str] = set()  # names of tensors that are not trained: policy and reference share these tensors
        for group in generation.delivery.frozen:
            frozen.update(group.layout.names)
        read = set()  # names of the policy's tensors that the trainer's kernels read
        for piece in layout.pieces.values():
            if isinstance(piece.parameter, nn.Parameter) and self.kernels.reads(piece):
                read.add(piece.name)
        reference_layout = layout.part(read - frozen)
        names = frozenset(reference_layout.names)
        source = partial(weights.reference, model, names)
        part = TensorGroup(reference_layout, source, one_by_one=weights.yields_one_by_one(model))
        parameters = partial(weights.parts_of_reference, model, names)
        replicas = generation.replicas
        reduce_max = None if replicas is None else replicas.reduce_max
        return ReferenceWeights(generation.delivery, part, parameters, reduce_max)


def invariance_of(platform: Platform) -> Invariance:
    return CUDA if platform.name == "cuda" else Invariance(CPU_KERNELS)
