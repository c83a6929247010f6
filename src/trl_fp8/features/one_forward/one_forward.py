"""One forward: the policy follows the engine, that is, each of its modules calls the engine's module of the same name.

    check        `require_followable` raises `ValueError` for a policy that cannot follow
    swap         `OneForward` gives each linear, norm, MLP and embedding of the decoder a class that can call the
                 engine (followed_*.py, between.py). Modules stay the same objects (policy/swapped.py)
    switch on    while the policy scores or trains, or the reference of `beta > 0` scores (followed_reference.py)

The engine has to hold the policy's weights, which following.py ensures.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from trl_fp8.engine.kernels import EngineKernels, Linear
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.swapped import HoldsCodes, Swapper, restore, swap
from trl_fp8.recipe.from_model import linear_layers, of_adapter, outline_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import TRANSFORMERS, checkpoint_name, expert_modules, is_router, without_copies
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import PATCHES, patch

from .between import (
    FollowedEmbedding,
    FollowedFusedMLP,
    FollowedMLP,
    FollowedNorm,
    FollowedParallelLayer,
    FollowedRotary,
    FollowedScaledEmbedding,
    RotaryPatch,
)
from .followed_attention import FollowedAttention
from .followed_experts import FollowedExperts, FollowedRouter
from .followed_linear import BackwardPrecision, FollowedAdapter, FollowedLinear, FusedCall, tokens_of
from .forward_flags import require_followed


# The attributes by which the two kinds of MLP are recognized. The last one is the activation function
MLPS = {
    FollowedMLP: ("gate_proj", "up_proj", "down_proj", "act_fn"),
    FollowedFusedMLP: ("gate_up_proj", "down_proj", "activation_fn"),
}
APPLY_ROTARY = "apply_rotary_pos_emb"


def require_followable(model: nn.Module, recipe: FP8Recipe, fp8_backward: str) -> None:
    """Raise `ValueError` for a policy whose forward the engine's kernels cannot replace."""
    require_lora(model)
    require_expert_backward(recipe, fp8_backward)
    require_followed(outline_of(model))
    base = transformers_model(model)
    # PATCHES lists `apply_rotary_pos_emb` in transformers' file of each known model type. A class from any other file
    # may compute something else
    if f"{type(base).__module__}.{APPLY_ROTARY}" not in PATCHES:
        raise ValueError(
            f"fp8_forward='one_forward' with a {type(base).__name__} of {type(base).__module__}: only transformers' "
            "own classes are known to compute the engine's operations. Set fp8_forward='off'."
        )
    dropout = getattr(base.config.get_text_config(), "attention_dropout", 0)
    if dropout:
        raise ValueError(
            f"fp8_forward='one_forward' with attention_dropout={dropout} in the model's config: the engine's "
            "attention drops nothing. Load the model with attention_dropout=0.0 "
            "(model_init_kwargs={'attention_dropout': 0.0}, or from_pretrained(..., attention_dropout=0.0)), or set "
            "fp8_forward='off'."
        )
    core = core_modules(base)
    for name, module in model.named_modules():
        if module not in core:
            continue
        if isinstance(module, nn.Embedding):
            followed_embedding(module)
        elif isinstance(module, nn.Dropout) and module.p and not of_adapter(name, model):
            raise ValueError(
                f"fp8_forward='one_forward': {checkpoint_name(name)} drops {module.p:g} of its input, but the engine "
                "drops nothing. Load the model without dropout (Phi-3: model_init_kwargs={'resid_pdrop': 0.0}), or "
                "set fp8_forward='off'."
            )
        elif isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            if not isinstance(module, HoldsCodes):
                raise ValueError(
                    f"fp8_forward='one_forward': {checkpoint_name(name)} is a {type(module).__name__}, whose forward "
                    "the engine does not compute. Set fp8_forward='off'."
                )


def require_expert_backward(recipe: FP8Recipe, fp8_backward: str) -> None:
    """Raise `ValueError` for an FP8 backward of FP8 experts."""
    if recipe.fp8_experts and fp8_backward == "fp8":
        raise ValueError(
            f"fp8_backward='fp8' with FP8 experts ({listed(recipe.fp8_experts, 1)}): they have a straight-through "
            "backward only. Set fp8_backward='bf16', or keep them in high precision with fp8_ignored_modules."
        )


def require_lora(model: nn.Module) -> None:
    """Raise `ValueError` for adapters other than plain LoRA."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            kind = _unknown_adapter(module)
            if kind is not None:
                layers.append(f"{checkpoint_name(name)} ({kind})")
    if layers:
        raise ValueError(
            "fp8_forward='one_forward' with adapters that are not plain LoRA on linear layers, experts or routers: "
            f"{listed(layers, 3)}. Their gradients need the output of the base alone, which the engine never "
            "computes. Use LoRA on these, without variants such as use_dora, or set fp8_forward='off'."
        )


def _unknown_adapter(module: BaseTunerLayer) -> str | None:
    """Return the kind of an adapter; None if it is plain LoRA on a linear layer, on experts or on a router."""
    if type(module) is ParamWrapper:
        if module.parameter_name in TRANSFORMERS.fused or is_router(module.get_base_layer()):
            return None
        return f"of the parameter {module.parameter_name}"
    if type(module) is not LoraLinear:
        return f"{type(module).__module__.split('.')[-2]}.{type(module).__name__}"
    variants = [type(variant).__name__ for variant in module.lora_variant.values()]
    return variants[0] if variants else None


class OneForward(FollowedAttention, Swapper):
    """Lets a policy follow an engine while it is on. It is on after its construction.

    The policy has to pass `require_followable` first, and must not be wrapped for training yet. If the engine has no
    kernel for a module, the constructor raises `ValueError` with the module's name, and no module changes.

    Attributes:
        on: Whether the policy follows now.
        modules: Path in `model` -> module that follows, in the model's order. PEFT's copies of
            `modules_to_save` for a reference follow, too, but are not listed.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: FP8Recipe,
        kernels: EngineKernels,
        backward: BackwardPrecision,
        hook: AttentionHook,
    ):
        self.backward = backward
        self.kernels = kernels
        self.recipe = recipe
        self.hook = hook
        self.on = True
        self.modules: dict[str, nn.Module] = {}
        self._swapped: list[nn.Module] = []
        base = transformers_model(model)
        # transformers' attention looks up the rotary function by name in the file of its model family. The patch there
        # stays permanently, and calls the original function unless it gets a `RotaryCall` (between.py)
        family = sys.modules[type(base).__module__]
        apply_rotary = getattr(family, APPLY_ROTARY)
        if not isinstance(apply_rotary, RotaryPatch):
            patch(family, APPLY_ROTARY, RotaryPatch(apply_rotary))
        core = core_modules(base)
        self._linears = {name: each for name, each in linear_layers(model) if each in core}
        self._experts = {experts for _, experts in expert_modules(model)}
        self._adapted = {each.base_layer for each in core if isinstance(each, BaseTunerLayer)}  # layers with adapters
        # The engine's linear layer -> the calls that the policy's layers share: the engine's, and that for Q(X.T)
        self._calls: dict[Linear, tuple[FusedCall, FusedCall]] = {}
        try:
            for path, module in list(model.named_modules()):
                if module in core and not of_adapter(without_copies(path), model):
                    self._follow(path, module)
        except ValueError:
            self.remove()
            raise
        hook.replace(self)

    def switch(self, on: bool) -> None:
        self.on = on

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        before = self.on
        self.on = on
        try:
            yield
        finally:
            self.on = before

    def remove(self) -> None:
        """Give the modules their own classes back. Idempotent."""
        if not self._swapped:
            return
        for module in self._swapped:
            restore(module)
        self._swapped.clear()
        self.modules.clear()
        self.hook.replace(None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy or pickle is None, because no engine holds the weights of a copied policy

    def _follow(self, path: str, module: nn.Module) -> None:
        """Let `module` follow, if it computes anything by itself."""
        kernels = self.kernels
        name = checkpoint_name(without_copies(path))
        if isinstance(module, nn.Linear):
            self._swap(path, module, FollowedLinear, **self._linear(name, module))
        elif isinstance(module, ParamWrapper):
            return  # it changes a parameter of the module that it wraps, and that module follows
        elif isinstance(module, BaseTunerLayer):
            self._swap(path, module, FollowedAdapter)
        elif is_router(module):
            self._swap(path, module, FollowedRouter, engine=kernels.router(name))
        elif module in self._experts:
            self._swap(path, module, FollowedExperts, engine=kernels.experts(name))
        elif isinstance(module, nn.Embedding):
            self._swap(path, module, followed_embedding(module))
        elif is_rotary(module):
            # The engine has one rotary embedding for each type of layer (windowed, global). A model whose layers all
            # have one type passes no type, which is the key None
            types = getattr(module.config, "layer_types", None) or []
            first_layer = {None: 0} | {kind: types.index(kind) for kind in types}
            engine = {kind: kernels.rotary(layer) for kind, layer in first_layer.items()}
            self._swap(path, module, FollowedRotary, engine=engine)
        elif hasattr(module, "self_attn") and not hasattr(module, "post_attention_layernorm"):  # attention beside MLP
            self._swap(path, module, FollowedParallelLayer)
        elif mlp_kind(module) is not None:
            self._swap(path, module, mlp_kind(module), engine=kernels.activation(name))
        elif hasattr(module, "sinks"):
            return  # attention, which follows through `AttentionHook`
        elif any(parameter.is_floating_point() for parameter in module.parameters(recurse=False)):
            # All other modules with weights of their own are norms
            self._swap(path, module, FollowedNorm, engine=kernels.norm(name))

    def _linear(self, name: str, module: nn.Linear) -> dict:
        """Return the attributes of a `FollowedLinear`."""
        engine = self.kernels.linear(name)
        peers = [self._linears[layer] for layer in engine.layers]  # the policy's layers that `engine` computes
        peers_before = peers[: engine.layers.index(name)]
        start = sum(peer.out_features for peer in peers_before)  # this layer's first column in the engine's output
        # Layers that the engine fuses share one call. Each layer reads its output once. A layer with adapters reads
        # its output twice: in `FollowedAdapter` for the output, and in PEFT's forward for the gradient
        if engine not in self._calls:
            readers = sum(2 if peer in self._adapted else 1 for peer in peers)
            self._calls[engine] = (
                FusedCall(lambda x: engine(tokens_of(x)), readers),
                FusedCall(lambda x: self.backward.quantize_for_backward(tokens_of(x).t()), len(peers)),
            )
        fused, x_t_codes = self._calls[engine]
        return {
            "name": name,
            "is_fp8": name in self.recipe.fp8_modules,
            "adapted": module in self._adapted,
            "engine": engine,
            "columns": slice(start, start + module.out_features),
            "fused": fused,
            "x_t_codes": x_t_codes,
        }

    def _swap(self, path: str, module: nn.Module, mixin: type, **attributes) -> None:
        swap(module, mixin, one_forward=self, **attributes)
        self._swapped.append(module)
        if checkpoint_name(path) == without_copies(checkpoint_name(path)):  # not one of PEFT's copies
            self.modules[path] = module


def core_modules(base: PreTrainedModel) -> set[nn.Module]:
    """Return the modules that compute logits from tokens: the decoder's and the output head."""
    return {base.get_output_embeddings(), *base.get_decoder().modules()}


def is_rotary(module: nn.Module) -> bool:
    """Return whether the module computes cos and sin of a rotary embedding."""
    return any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))


def mlp_kind(module: nn.Module) -> type | None:
    """Return the class in `MLPS` of an MLP; None for any other module."""
    for kind, parts in MLPS.items():
        if all(hasattr(module, part) for part in parts):
            return kind
    return None


def followed_embedding(module: nn.Embedding) -> type:
    """Return the class to mix into an embedding. `ValueError` if its forward is not known."""
    if type(module).forward is nn.Embedding.forward:
        return FollowedEmbedding
    if type(module).__name__.endswith("ScaledWordEmbedding"):
        return FollowedScaledEmbedding
    raise ValueError(
        f"fp8_forward='one_forward': the model's embedding is a {type(module).__name__}, and where an engine rounds "
        "its output is not known. Set fp8_forward='off'."
    )
