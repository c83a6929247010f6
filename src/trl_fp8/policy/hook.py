"""A hook on the policy's attention: it sees the q, k, v that a KV cache gets, and passes on what the cache would hold.

transformers calls one attention function with q, k, v after normalization and RoPE, which is exactly what an engine
caches. The hook sits in front of that function; parts in brackets are plugged in from outside:

    q, k, v  ->  [observer]  ->  [round trip under scales]  ->  attention, or [replacement]  ->  [watcher]

MLA caches a latent and the rotated part of the key, from which it expands k and v. There the hook also sits in front
of the expansion: the observer gets the latent as k and as v, and its round trip is under k's scale.

Registered implementations (sdpa, flash, kernels) are wrapped under their own name and do nothing for models without a
hook; eager attention has no entry in transformers' table and gets one of our own.

Shape letters: L layers, B sequences, H heads, T tokens, D head size; columns as in `kv_scales.QKV`.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_fp8.quantization.codec.e4m3 import cache_round_trip
from trl_fp8.recipe.from_model import caches_of
from trl_fp8.recipe.outline import kv_layers

from .model import transformers_model


EAGER = "trl_fp8_eager"
_HOOK = "_trl_fp8_hook"
# The keyword under which `Replacement.before_forward` reaches `Replacement.attend`: transformers hands it on to the
# attention function, and gradient checkpointing keeps it with the forward that it belongs to
_BATCH = "trl_fp8_batch"
_HOOKED: set[Callable] = set()  # registered attention functions that look for a hook


class Observer(Protocol):
    def add(self, layer: int, states: tuple[Tensor, ...], real_BT: Tensor | None, scaling: float, key: Tensor) -> None:
        """Look at an attention call. `states` are q, k, v `[B, H, T, D]`, k and v as they are cached; tokens outside
        of `real_BT` are padding (None: there is none); scores are multiplied by `scaling`; `key` is k as q meets it.
        """


class Replacement(Protocol):
    """Computes attention in place of the policy's function while it is `on`."""

    on: bool

    def before_forward(self, real_BT: Tensor | None, shape: tuple[int, int], device: torch.device) -> object:
        """Prepare for a forward of `[B, T]` tokens. The result reaches `attend` as `batch`."""

    def attend(
        self, layer: int, states: tuple[Tensor, ...], batch: object, scales: Tensor | None, options: dict
    ) -> Tensor:
        """Return the output `[B, T, H, D]` of q, k, v `[B, H, T, D]`.

        The KV cache rounds them under `scales` `[3]` (None: it does not); `options` are the keywords that transformers
        gives an attention function.
        """


class AttentionHook:
    """A hook that stays on a policy, in any wrappers, until `remove`. With nothing plugged in it does nothing."""

    def __init__(self, model: nn.Module, skip_layers: Collection[int] = ()):
        self.base = transformers_model(model)
        text = self.base.config.get_text_config()
        self.layers: int = text.num_hidden_layers
        self.kv_layers = kv_layers(caches_of(text))  # those that cache k and v
        self.scales_L3: Tensor | None = None  # fp32 `[L, 3]` on the model's device, while simulated
        self.observation: Observer | None = None
        self.query_rounded = False  # the simulated cache's attention rounds q, too
        self._replacement: Replacement | None = None
        self._aligned = False
        self._note: Callable | None = None
        self.skip(skip_layers)
        self._real_BT: Tensor | None = None  # which tokens are no padding; None: all
        self._latents: dict[int, Tensor] = {}  # layer of MLA -> what it caches, until it attends
        decoder = self.base.get_decoder()
        # Modules that transformers passes to the attention function, or to the cache, have this attribute. A layer
        # that calls no registered function is not hooked, and calibration then raises an error with its number.
        self.attention = [module for module in decoder.modules() if hasattr(module, "layer_idx")]
        self.implementation = self._used
        self._hooked = EAGER if self.implementation == "eager" else self.implementation
        if self._hooked == EAGER:
            self._use(EAGER)
        else:
            _wrap_registered(self.implementation)
        for module in self.attention:
            setattr(module, _HOOK, self)
            if hasattr(module, "expand_kv"):
                module.expand_kv = partial(self._expand, module.layer_idx, module.expand_kv)
        # A vision-language model turns the padding mask into other masks before it calls its decoder
        note = self.base.base_model.register_forward_pre_hook(self._note_padding, with_kwargs=True)
        self._handles = note, decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def skip(self, layers: Collection[int]) -> None:
        """Observe these layers, and never simulate them: their KV cache is not FP8."""
        self.skip_layers = frozenset(layers)

    def align(self, aligned: bool) -> None:
        """Set whether forwards count positions as the engine does. A forward that is observed and one that is not then
        give the same log-probs.
        """
        self._aligned = aligned

    @contextmanager
    def as_engine(self, scales_L3: Tensor | None) -> Iterator[None]:
        """Count positions as the engine does inside the block, and simulate its cache under these scales."""
        before = self._aligned, self.scales_L3
        self._aligned, self.scales_L3 = True, scales_L3
        try:
            yield
        finally:
            self._aligned, self.scales_L3 = before

    def replace(self, replacement: Replacement | None) -> None:
        """Let `replacement` compute attention while it is on; None: the policy's own function always does."""
        self._replacement = replacement

    @contextmanager
    def watched(self, note: Callable[..., None]) -> Iterator[None]:
        """Make attention eager inside the block, so that every layer gets its mask; `note(attend, module, states,
        mask, options, output)` follows each call: `attend` is the attention function of the model's file, `states` are
        q, k, v `[B, H, T, D]` as the cache holds them, `mask` has `sees`, which says of any two positions whether the
        first one sees the second.
        """
        self._note = note
        self._use(EAGER)
        try:
            yield
        finally:
            self._note = None
            self._use(self._hooked)

    def round_queries(self, rounded: bool) -> None:
        """Set whether the attention of a simulated FP8 cache rounds q, too."""
        self.query_rounded = rounded

    def simulate(self, scales_L3: Tensor | None) -> None:
        """Let attention see k and v as an FP8 cache under these scales holds them; None: as they are."""
        # stays set until the backward ends: gradient checkpointing runs the forward again in it
        self.scales_L3 = scales_L3

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self.attention:
            delattr(module, _HOOK)
            vars(module).pop("expand_kv", None)
        if self.implementation == "eager" and self._used == EAGER:
            self._use("eager")

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def is_in_place(self) -> bool:
        """Return whether attention still calls this hook: `set_attn_implementation` may have chosen another one."""
        return self._used in (self._hooked, EAGER)

    @contextmanager
    def observing(self, observation: Observer) -> Iterator[Observer]:
        """Show `observation` the forwards inside the block."""
        self.observation = observation
        try:
            yield observation
        finally:
            self.observation = None

    def attend(
        self,
        attend: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the attention function `attend` behind the hook; q, k, v are `[B, H, T, D]`."""
        layer = module.layer_idx
        if self.observation is not None:
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            latent = self._latents.pop(layer, None)
            cached = (key, value) if latent is None else (latent, latent)
            self.observation.add(layer, (query, *cached), self._real_BT, scaling, key)
        batch = kwargs.pop(_BATCH, None)
        states = query, key, value
        scales = self._scales(layer)
        if scales is not None and not hasattr(module, "expand_kv"):
            rounded_q = cache_round_trip(query, scales[0]) if self.query_rounded else query
            states = rounded_q, cache_round_trip(key, scales[1]), cache_round_trip(value, scales[2])
        if self._is_replaced:
            output = self._replacement.attend(layer, (query, key, value), batch, scales, kwargs), None
        else:
            output = attend(module, *states, attention_mask, **kwargs)
        if self._note is not None:
            self._note(attend, module, states, attention_mask, kwargs, output[0])
        return output

    def _expand(self, layer: int, expand: Callable, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v of MLA from its latent `[B, 1, T, R]` and the rotated part of its key `[B, 1, T, P]`."""
        both = torch.cat([latent, rotated], -1)
        if self.observation is not None:
            self._latents[layer] = both
        if (scales := self._scales(layer)) is not None:
            both = cache_round_trip(both, scales[1])
        return expand(*both.split([latent.shape[-1], rotated.shape[-1]], -1))

    @property
    def _is_replaced(self) -> bool:
        return self._replacement is not None and self._replacement.on

    def _scales(self, layer: int) -> Tensor | None:
        return None if self.scales_L3 is None or layer in self.skip_layers else self.scales_L3[layer]

    def _note_padding(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask")
        self._real_BT = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Give real tokens the positions that they have in the engine, if anything is plugged in."""
        options = {}
        tokens = next(
            (t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None
        )
        if self._is_replaced:
            options[_BATCH] = self._replacement.before_forward(self._real_BT, tuple(tokens.shape[:2]), tokens.device)
        idle = not (self._aligned or self._is_replaced) and self.scales_L3 is None and self.observation is None
        if idle or self._real_BT is None or kwargs.get("position_ids") is not None:
            return args, kwargs | options
        # The trainer pads on the left, and transformers counts positions from the first padding. Attention itself is
        # invariant to a shift, but RoPE turns k by it: k gets another largest element, and e4m3 other bytes. If the
        # mask also covers cached tokens, the last positions are those of this forward
        positions = (self._real_BT.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        return args, kwargs | options | {"position_ids": positions}

    @property
    def _used(self) -> str:
        return self.base.config.get_text_config()._attn_implementation

    def _use(self, implementation: str) -> None:
        """Set the attention implementation of the language model. The towers of images and sounds keep theirs, which
        may be another one: a string would set all of them.
        """
        config, text = self.base.config, self.base.config.get_text_config()
        parts = [name for name in config.sub_configs if getattr(config, name, None) is text]
        one = {parts[0]: implementation} if parts else implementation
        self.base.set_attn_implementation(one)


def hook_of(model: nn.Module) -> AttentionHook:
    """Return the hook installed on a policy; a new one if there is none or the attention implementation changed."""
    installed = (getattr(module, _HOOK, None) for module in transformers_model(model).get_decoder().modules())
    hook = next((hook for hook in installed if hook is not None), None)
    if hook is not None and hook.is_in_place:
        return hook
    if hook is not None:
        hook.remove()
    return AttentionHook(model)


@contextmanager
def hooked(model: nn.Module) -> Iterator[AttentionHook]:
    """Yield the hook of a policy for the block. It is removed afterwards if it was not there before."""
    there = any(hasattr(module, _HOOK) for module in transformers_model(model).get_decoder().modules())
    hook = hook_of(model)
    try:
        yield hook
    finally:
        if not there:
            hook.remove()


def _wrap_registered(name: str) -> None:
    attend = ALL_ATTENTION_FUNCTIONS[name]
    if attend in _HOOKED:
        return

    @wraps(attend)
    def attention(module, *args, **kwargs):
        return _through_hook(attend, module, *args, **kwargs)

    _HOOKED.add(attention)
    AttentionInterface.register(name, attention)


def _eager(module, *args, **kwargs):
    # The file that defines the attention class, or one of its bases, defines its eager function
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    attend = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    return _through_hook(attend, module, *args, **kwargs)


def _through_hook(attend, module, *args, **kwargs):
    hook = getattr(module, _HOOK, None)  # none: a vision tower, or a model made from a hooked model's config
    return attend(module, *args, **kwargs) if hook is None else hook.attend(attend, module, *args, **kwargs)


def _eager_mask(*args, mask_function: Callable = causal_mask_function, **kwargs) -> Tensor:
    mask = eager_mask(*args, mask_function=mask_function, **kwargs)
    mask.sees = mask_function  # (sequence, head, position, other position); of any length, unlike the mask
    return mask


AttentionInterface.register(EAGER, _eager)
AttentionMaskInterface.register(EAGER, _eager_mask)
