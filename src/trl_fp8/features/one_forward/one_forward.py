"""One forward: a policy whose modules compute what the engine's modules of the same names compute.

    made         each linear, norm, MLP and embedding of the decoder gets the engine's call (modules/)
    on           while the policy scores or trains, and while the reference of `beta > 0` does (followed_reference.py)
    up to date   as long as the engine holds the policy's weights, which following.py keeps so

Modules stay the same objects: only their class is exchanged (policy/swapped.py).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from trl_fp8.engine.kernels import EngineKernels, Linear
from trl_fp8.features.one_forward.modules.between import (
    FollowedEmbedding,
    FollowedFusedMLP,
    FollowedMLP,
    FollowedNorm,
    FollowedParallelLayer,
    FollowedRotary,
    FollowedScaledEmbedding,
    RotaryPatch,
)
from trl_fp8.features.one_forward.modules.followed_attention import FollowedAttention
from trl_fp8.features.one_forward.modules.followed_experts import FollowedExperts, FollowedRouter
from trl_fp8.features.one_forward.modules.followed_linear import (
    FollowedAdapter,
    FollowedLinear,
    FusedCall,
    tokens_of,
)
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.swapped import Swapper, restore, swap
from trl_fp8.recipe.from_model import linear_layers, of_adapter
from trl_fp8.recipe.names import checkpoint_name, expert_modules, is_router, without_copies
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import patch

from .backward import BackwardPrecision


MLPS = {
    FollowedMLP: ("gate_proj", "up_proj", "down_proj", "act_fn"),
    FollowedFusedMLP: ("gate_up_proj", "down_proj", "activation_fn"),
}
APPLY_ROTARY = "apply_rotary_pos_emb"


class OneForward(FollowedAttention, Swapper):
    """Installed on a policy before it is wrapped for training, and on from then on; `modules`: those that follow.

    The policy has passed `require_followable`. `ValueError` names a module that the engine has no call for, and leaves
    the policy as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: FP8Recipe,
        kernels: EngineKernels,
        backward: BackwardPrecision,
        hook: AttentionHook,
    ):
        self.backward, self.kernels, self.recipe, self.hook = backward, kernels, recipe, hook
        self.on = True
        self.modules: dict[str, nn.Module] = {}  # by their paths in `model`, in its order
        self.copies: dict[str, nn.Module] = {}  # likewise: of PEFT's `modules_to_save`, for a reference
        base = transformers_model(model)
        # Attention calls the rotary function of its family's file by name. The patch stays for good and does nothing
        # without a `RotaryCall`
        family = sys.modules[type(base).__module__]
        apply_rotary = getattr(family, APPLY_ROTARY)
        if not isinstance(apply_rotary, RotaryPatch):
            patch(family, APPLY_ROTARY, RotaryPatch(apply_rotary))
        ours = computing(base)
        self._linears = {name: linear for name, linear in linear_layers(model) if linear in ours}
        self._experts = {experts for _, experts in expert_modules(model)}
        self._adapted = {module.base_layer for module in ours if isinstance(module, BaseTunerLayer)}
        self._calls: dict[Linear, tuple[FusedCall, FusedCall]] = {}
        try:
            for name, module in list(model.named_modules()):
                if module in ours and not of_adapter(without_copies(name), model):
                    self._follow(name, module)
        except ValueError:
            self.remove()
            raise
        hook.replace(self)

    def switch(self, on: bool) -> None:
        self.on = on

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def remove(self) -> None:
        """Turn the modules back into what they were, unless that was done."""
        if not self.modules:
            return
        for module in (*self.modules.values(), *self.copies.values()):
            restore(module)
        self.modules.clear()
        self.copies.clear()
        self.hook.replace(None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a policy has no engine that holds its weights

    def _follow(self, path: str, module: nn.Module) -> None:
        """Let `module` call the engine, if it computes anything by itself."""
        name, kernels = checkpoint_name(without_copies(path)), self.kernels
        if isinstance(module, nn.Linear):
            self._swap(path, module, FollowedLinear, **self._linear(name, module))
        elif isinstance(module, ParamWrapper):
            return  # puts its sums into the module inside, which follows
        elif isinstance(module, BaseTunerLayer):
            self._swap(path, module, FollowedAdapter)
        elif is_router(module):
            self._swap(path, module, FollowedRouter, engine=kernels.router(name))
        elif module in self._experts:
            self._swap(path, module, FollowedExperts, engine=kernels.experts(name))
        elif isinstance(module, nn.Embedding):
            self._swap(path, module, followed_embedding(module))
        elif is_rotary(module):
            types = getattr(module.config, "layer_types", None) or []
            first = {None: 0} | {kind: types.index(kind) for kind in types}
            self._swap(path, module, FollowedRotary, engine={k: kernels.rotary(layer) for k, layer in first.items()})
        elif hasattr(module, "self_attn") and not hasattr(module, "post_attention_layernorm"):
            self._swap(path, module, FollowedParallelLayer)
        elif mlp := next((kind for kind, parts in MLPS.items() if all(hasattr(module, part) for part in parts)), None):
            self._swap(path, module, mlp, engine=kernels.activation(name))
        elif hasattr(module, "sinks"):
            return  # attention, which `AttentionHook` lets follow
        elif any(parameter.is_floating_point() for parameter in module.parameters(recurse=False)):
            self._swap(path, module, FollowedNorm, engine=kernels.norm(name))

    def _linear(self, name: str, module: nn.Linear) -> dict:
        """The attributes of a `FollowedLinear`."""
        engine = self.kernels.linear(name)
        peers = [self._linears[layer] for layer in engine.layers]
        start = sum(peer.out_features for peer in peers[: engine.layers.index(name)])
        # Layers that the engine fused share one call. Each reads its output once, an adapted layer twice: for its
        # value, and in PEFT's own forward, which gives the gradient
        if engine not in self._calls:
            readers = sum(2 if peer in self._adapted else 1 for peer in peers)
            self._calls[engine] = (
                FusedCall(lambda x: engine(tokens_of(x)), readers),
                FusedCall(lambda x: self.backward.quantize_for_backward(tokens_of(x).t()), len(peers)),
            )
        fused, along_tokens = self._calls[engine]
        return {
            "name": name,
            "is_fp8": name in self.recipe.fp8_modules,
            "adapted": module in self._adapted,
            "engine": engine,
            "columns": slice(start, start + module.out_features),
            "fused": fused,
            "along_tokens": along_tokens,
        }

    def _swap(self, path: str, module: nn.Module, mixin: type, **attributes) -> None:
        swap(module, mixin, one_forward=self, **attributes)
        name = checkpoint_name(path)
        among = self.modules if name == without_copies(name) else self.copies
        among[path] = module


def is_rotary(module: nn.Module) -> bool:
    """True for what makes cos and sin of a rotary embedding."""
    return any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))


def computing(base: PreTrainedModel) -> set[nn.Module]:
    """The modules between tokens and logits."""
    return {base.get_output_embeddings(), *base.get_decoder().modules()}


def followed_embedding(module: nn.Embedding) -> type:
    if type(module).forward is nn.Embedding.forward:
        return FollowedEmbedding
    if type(module).__name__.endswith("ScaledWordEmbedding"):
        return FollowedScaledEmbedding
    raise ValueError(
        f"fp8_forward='one_forward': the model's embedding is a {type(module).__name__}, of which is not known where "
        "an engine rounds. Set fp8_forward='off'."
    )
