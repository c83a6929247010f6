"""A hook on the policy's attention. It reads the q, k, v that a KV cache gets, and passes on what the cache returns.

transformers calls one attention function with q, k, v after normalization and RoPE, so with the k and v that an engine
caches. The hook runs in front of that function. Features plug in the parts in brackets:

    q, k, v  ->  [observer]  ->  [round trip under scales]  ->  attention          ->  [watcher]
                             ->  [replacement], which gets q, k, v and the scales  ->  [watcher]

MLA caches a latent and the rotated part of the key, from which it expands k and v. So for MLA the hook also runs in
front of the expansion (`_expand`): the observer gets the latent as k and as v, and the latent's round trip uses k's
scale.

transformers looks up attention functions in a table by name. This module wraps the functions there (sdpa, flash,
kernels) under their own names. A wrapped function calls the hook of its model, if there is one (`_through_hook`).
Eager attention has no entry in the table, so this module registers one, `EAGER`.

Shape letters: L layers, B sequences, H heads, T tokens, D head size. Scales `[L, 3]` have the columns q, k, v.
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
from trl_fp8.recipe.outline import kv_layers_of

from .model import decoder_input, transformers_model


EAGER = "trl_fp8_eager"
_HOOK = "_trl_fp8_hook"
# The keyword that carries the result of `Replacement.before_forward` to `Replacement.attend`. transformers passes it
# on to the attention function, and gradient checkpointing repeats a forward with the keywords of that forward
_BATCH = "trl_fp8_batch"
_HOOKED: set[Callable] = set()  # registered attention functions that look for a hook


class Observer(Protocol):
    def add(self, layer: int, states: tuple[Tensor, ...], real_BT: Tensor | None, scaling: float, key: Tensor) -> None:
        """Observe an attention call.

        Args:
            states: q, k, v `[B, H, T, D]`, k and v as they are cached. For MLA k and v are the latent.
            real_BT: False at padding; None: there is no padding.
            scaling: Factor of the scores.
            key: The k that q is multiplied by: `states[1]`, except for MLA.
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

        `scales` `[3]` are those of the KV cache that rounds q, k, v; None: nothing is rounded. `options` are the
        keywords that transformers passes to an attention function.
        """


class AttentionHook:
    """A hook on a policy until `remove`. It does nothing while nothing is plugged in.

    The policy may be wrapped (PEFT, DDP, FSDP2): the hook is on the transformers model inside.
    """

    def __init__(self, model: nn.Module, skip_layers: Collection[int] = ()):
        self.base = transformers_model(model)
        text = self.base.config.get_text_config()
        self.layers: int = text.num_hidden_layers
        self.kv_layers = kv_layers_of(caches_of(text))  # numbers of the layers that cache k and v
        # Scales of the simulated FP8 cache, fp32 `[L, 3]` on the model's device; None: no cache is simulated
        self.scales_L3: Tensor | None = None
        self.observer: Observer | None = None
        self.query_rounded = False  # whether the attention of a simulated cache rounds q, too
        self._replacement: Replacement | None = None
        self._aligned = False  # see `align`
        self._note: Callable | None = None  # see `watched`
        self.skip(skip_layers)
        self._real_BT: Tensor | None = None  # False at padding; None: there is no padding
        self._latents: dict[int, Tensor] = {}  # MLA layer -> the latent that it caches; from `_expand` to `attend`
        decoder = self.base.get_decoder()
        # Modules that transformers passes to the attention function, or to the cache, have `layer_idx`. A layer that
        # calls no registered function is not hooked, and calibration then raises an error with the layer's number
        self.attention = [module for module in decoder.modules() if hasattr(module, "layer_idx")]
        self._hooked = ""  # name of the function that calls the hook
        self.stay_in_place()
        for module in self.attention:
            setattr(module, _HOOK, self)
            if hasattr(module, "expand_kv"):
                module.expand_kv = partial(self._expand, module.layer_idx, module.expand_kv)
        # Two hooks, because a vision-language model passes other masks than the padding mask to its decoder
        self._handles = (
            self.base.base_model.register_forward_pre_hook(self._note_padding, with_kwargs=True),
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
        )

    def skip(self, layers: Collection[int]) -> None:
        """Simulate no FP8 cache in these layers. They are still observed."""
        self.skip_layers = frozenset(layers)

    def align(self, aligned: bool) -> None:
        """Set whether all forwards count positions as the engine does, also those in which nothing is plugged in.

        Otherwise the log-probs of a sequence would differ slightly between forwards with and without a plug.
        """
        self._aligned = aligned

    @contextmanager
    def as_engine(self, scales_L3: Tensor | None) -> Iterator[None]:
        """Count positions as the engine does inside the block, and simulate its cache under these scales."""
        aligned_before = self._aligned
        scales_before = self.scales_L3
        self._aligned = True
        self.scales_L3 = scales_L3
        try:
            yield
        finally:
            self._aligned = aligned_before
            self.scales_L3 = scales_before

    def replace(self, replacement: Replacement | None) -> None:
        """Let `replacement` compute attention while it is `on`. With None, the policy's own function computes it."""
        self._replacement = replacement

    @contextmanager
    def watched(self, note: Callable[..., None]) -> Iterator[None]:
        """Call `note(attend, module, states, mask, options, output)` after each attention inside the block.

        Attention is eager there, so that every layer gets its mask. `attend` is the attention function of the model's
        file, `states` are q, k, v `[B, H, T, D]` as the cache holds them. `mask.sees(sequence, head, position, other)`
        says whether a position sees another one, also beyond the mask's length.
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
        """Let attention see k and v as an FP8 cache under these scales holds them. None: k and v are not rounded."""
        # Callers leave the scales set until after the backward, in case gradient checkpointing repeats the forward
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

    def stay_in_place(self) -> None:
        """Hook the attention function that the config names now. `set_attn_implementation` may have changed it.

        `implementation` is the name that the config had before this method changed it, and `_used` is its name now.
        `_hooked` is the name of the hooked function: EAGER for eager attention, otherwise `implementation`.
        """
        if self._hooked and self._used in (self._hooked, EAGER):  # inside `watched` the function is EAGER
            return
        self.implementation = self._used
        if self.implementation in ("eager", EAGER):  # a model made from a hooked model's config begins with EAGER
            self._hooked = EAGER
            self._use(EAGER)
        else:
            self._hooked = self.implementation
            _wrap_registered(self.implementation)

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[Observer]:
        """Show `observer` the forwards inside the block."""
        self.observer = observer
        try:
            yield observer
        finally:
            self.observer = None

    def attend(
        self,
        inner: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the attention function `inner` with all that is plugged in; q, k, v are `[B, H, T, D]`."""
        layer = module.layer_idx
        if self.observer is not None:
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            latent = self._latents.pop(layer, None)
            cached = (key, value) if latent is None else (latent, latent)
            self.observer.add(layer, (query, *cached), self._real_BT, scaling, key)
        batch = kwargs.pop(_BATCH, None)
        states = query, key, value
        scales = self._scales(layer)
        if scales is not None and not hasattr(module, "expand_kv"):  # MLA's k and v were rounded in `_expand`
            rounded_q = cache_round_trip(query, scales[0]) if self.query_rounded else query
            states = rounded_q, cache_round_trip(key, scales[1]), cache_round_trip(value, scales[2])
        if self._is_replaced:  # a replacement rounds q, k and v itself
            attended = self._replacement.attend(layer, (query, key, value), batch, scales, kwargs)
            output = attended, None  # without attention weights
        else:
            output = inner(module, *states, attention_mask, **kwargs)
        if self._note is not None:
            self._note(inner, module, states, attention_mask, kwargs, output[0])
        return output

    def _expand(self, layer: int, expand: Callable, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return MLA's k and v of latents `[B, 1, T, R]` and rotated keys `[B, 1, T, P]`, as a cache holds them."""
        cached = torch.cat([latent, rotated], -1)
        if self.observer is not None:
            self._latents[layer] = cached
        scales = self._scales(layer)
        if scales is not None:
            cached = cache_round_trip(cached, scales[1])
        return expand(*cached.split([latent.shape[-1], rotated.shape[-1]], -1))

    @property
    def _is_replaced(self) -> bool:
        return self._replacement is not None and self._replacement.on

    def _scales(self, layer: int) -> Tensor | None:
        """Return the scales `[3]` of a layer's simulated cache; None if the layer's cache is not simulated."""
        if self.scales_L3 is None or layer in self.skip_layers:
            return None
        return self.scales_L3[layer]

    def _note_padding(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask")
        self._real_BT = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give real tokens the positions that they have in the engine, if anything is plugged in."""
        self.stay_in_place()
        options = {}
        tokens = decoder_input(args, kwargs)
        if self._is_replaced:
            options[_BATCH] = self._replacement.before_forward(self._real_BT, tuple(tokens.shape[:2]), tokens.device)
        in_use = self._aligned or self._is_replaced or self.scales_L3 is not None or self.observer is not None
        if not in_use or self._real_BT is None or kwargs.get("position_ids") is not None:
            return args, kwargs | options
        # The trainer pads on the left. transformers counts positions from the first padding, an engine from the first
        # real token. Scores do not change with such a shift, but RoPE rotates k by the shift, so that k has another
        # largest element, and other bytes in e4m3
        positions = (self._real_BT.long().cumsum(-1) - 1).clamp_min(0)
        # If the mask also covers cached tokens, the tokens of this forward have the last positions
        own_positions = positions[:, -tokens.shape[1] :]
        return args, kwargs | options | {"position_ids": own_positions}

    @property
    def _used(self) -> str:
        return self.base.config.get_text_config()._attn_implementation

    def _use(self, implementation: str) -> None:
        """Set the attention implementation of the language model, and keep those of other parts of the model.

        Given a string, transformers would set it for all parts. A vision tower, for example, may have another one.
        """
        config = self.base.config
        text = config.get_text_config()
        parts = [name for name in config.sub_configs if getattr(config, name, None) is text]
        if parts:
            self.base.set_attn_implementation({parts[0]: implementation})
        else:
            self.base.set_attn_implementation(implementation)


def hook_of(model: nn.Module) -> AttentionHook:
    """Return the hook that is installed on a policy. Install one if there is none."""
    hook = _installed_hook(model)
    if hook is None:
        return AttentionHook(model)
    hook.stay_in_place()
    return hook


@contextmanager
def hooked(model: nn.Module) -> Iterator[AttentionHook]:
    """Yield the hook of a policy for the block. Remove the hook afterwards if this call installed it."""
    was_installed = _installed_hook(model) is not None
    hook = hook_of(model)
    try:
        yield hook
    finally:
        if not was_installed:
            hook.remove()


def _installed_hook(model: nn.Module) -> AttentionHook | None:
    for module in transformers_model(model).get_decoder().modules():
        if hasattr(module, _HOOK):
            return getattr(module, _HOOK)
    return None


def _wrap_registered(name: str) -> None:
    """Wrap the attention function that transformers knows by `name`, once."""
    attend = ALL_ATTENTION_FUNCTIONS[name]
    if attend in _HOOKED:
        return

    @wraps(attend)
    def attention(module, *args, **kwargs):
        return _through_hook(attend, module, *args, **kwargs)

    _HOOKED.add(attention)
    AttentionInterface.register(name, attention)


def _eager(module, *args, **kwargs):
    """Compute eager attention through the hook. This is the function that transformers calls by the name `EAGER`."""
    # The file that defines the attention class, or one of its bases, defines the eager function
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    attend = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    return _through_hook(attend, module, *args, **kwargs)


def _through_hook(attend, module, *args, **kwargs):
    hook = getattr(module, _HOOK, None)
    if hook is None:  # a module of a vision tower, or of a model that was made from a hooked model's config
        return attend(module, *args, **kwargs)
    return hook.attend(attend, module, *args, **kwargs)


def _eager_mask(*args, mask_function: Callable = causal_mask_function, **kwargs) -> Tensor:
    mask = eager_mask(*args, mask_function=mask_function, **kwargs)
    mask.sees = mask_function  # (sequence, head, position, other position); of any length, unlike the mask
    return mask


AttentionInterface.register(EAGER, _eager)
AttentionMaskInterface.register(EAGER, _eager_mask)
