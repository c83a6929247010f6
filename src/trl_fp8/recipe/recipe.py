"""The recipe: which tensors of a model are FP8, and in which format.

`recipe_for` decides on a recipe once, before the engine starts. A recipe lists exact module names, because vLLM
silently drops patterns and unknown names from its ignore list. Each linear layer is in `fp8_modules`, or in
`kept_modules` with the reason.

A linear layer is FP8 if it is a projection of a decoder layer (or of its shared expert) and each of its shards at the
engine's tensor parallel size fits the format, e.g. fills whole 128x128 blocks (`_why_kept`). Projections that vLLM
fuses (q, k, v and gate, up) are all FP8, or none of them is. All experts of a layer are FP8 under the same condition,
if the engine has kernels for FP8 experts. Output head, embeddings, norms, routers, gates of shared experts and of
linear attention, and vision towers stay in high precision.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from trl_fp8.quantization.formats import BLOCKS, FORMATS, FormatSpec, ScaleFormat, format_named

from .families import family_of
from .names import (
    COLUMN_PARALLEL,
    FUSED,
    GATE_UP,
    LINEAR_ATTENTION,
    MLA,
    PARTS,
    REPLICATED,
    ROW_PARALLEL,
    TRANSFORMERS,
    fused_name,
    held_name,
    router_name,
    stored_name,
)
from .outline import Outline


if TYPE_CHECKING:
    from torch import nn


# Patterns of module names: projections of a decoder layer, gates of linear attention, and vision parts
_KINDS = "|".join((*COLUMN_PARALLEL, *FUSED, *ROW_PARALLEL, *REPLICATED))
_BLOCKS = r"self_attn|mlp|mlp\.shared_experts?|shared_mlp"
_OF_LAYER = rf"(?:{_BLOCKS})\.(?:{_KINDS})|linear_attn\.(?:{'|'.join(LINEAR_ATTENTION)})"
_PROJECTION = re.compile(rf"(?:^|\.)layers\.\d+\.(?:{_OF_LAYER})$")
_GATES = re.compile(r"\.linear_attn\.in_proj_(?:ba|b|a)$")
_VISION = re.compile(r"(?:^|\.)(?:vis(?:ion|ual)|multi_modal_projector)")


@dataclass(frozen=True)
class FP8Recipe:
    """FP8 tensors of the engine by exact checkpoint names in model order; final once the engine has started."""

    fp8_modules: tuple[str, ...]  # linear layers whose weights are FP8
    kept_modules: dict[str, str] = field(default_factory=dict)  # other linear layers, experts and routers -> reason
    kv_cache_dtype: str = "fp8"  # "fp8" (e4m3, calibrated per-tensor scales) or "auto" (the model's dtype)
    kv_cache_skip_layers: tuple[int, ...] = ()  # decoder layers whose KV cache stays in the model's dtype
    format: FormatSpec = BLOCKS  # format of the weights
    scale_format: ScaleFormat = "pow2"  # format of the weights' scales, see `trl_fp8.quantization.codec.e4m3`
    kv_scale_margin: float = 1.05  # factor on the calibrated amax of q, k and v before it becomes a scale
    tensor_parallel_size: int = 1  # ranks that share one engine
    fp8_experts: tuple[str, ...] = ()  # expert modules whose weights are FP8
    model_type: str = ""  # `model_type` of the language model's config, on which names in the engine depend
    decoder: str = "model"  # name of the policy's module that has the decoder layers

    @cached_property
    def fp8_tensors(self) -> frozenset[str]:
        """Return the checkpoint names of the weights that are FP8."""
        experts = {f"{name}.{parameter}" for name in self.fp8_experts for parameter in TRANSFORMERS.fused}
        return frozenset(experts | {f"{name}.weight" for name in self.fp8_modules})

    @property
    def fp8_weights(self) -> bool:
        return bool(self.fp8_modules or self.fp8_experts)

    @property
    def has_experts(self) -> bool:
        return bool(self.fp8_experts) or any(name.endswith(".experts") for name in self.kept_modules)

    @cached_property
    def linears(self) -> dict[str, str]:
        """Map the engine's name of each linear layer and expert module to the policy's name."""
        return {self.engine_name(name): name for name in (*self.fp8_modules, *self.kept_modules)}

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a parameter or module of the policy."""
        return stored_name(name, self.model_type)

    def engine_name(self, name: str) -> str:
        """Return the engine's name of a parameter or module of the policy."""
        return held_name(self.stored_name(name), self.model_type, self.decoder)

    def scale_name(self, name: str) -> str:
        """Return the engine's name of the scale of an FP8 weight of the policy."""
        return self.engine_name(name + self.format.scale_suffix)

    def sharing_scale(self, name: str) -> tuple[str, ...]:
        """Return `name` and the FP8 weights that share its scale, in the order in which vLLM fuses them."""
        if not self.format.fused_share_scale:
            return (name,)
        weights = [f"{peer}.weight" for peer in _fused_with(name.removesuffix(".weight"))]
        sharing = tuple(weight for weight in weights if weight in self.fp8_tensors)
        return sharing or (name,)  # a weight that vLLM fuses with no other has a scale of its own

    def keeping(self, modules: Iterable[str], reason: str) -> "FP8Recipe":
        """Return this recipe with `modules`, and the layers that vLLM fuses with them, in high precision."""
        reasons = dict.fromkeys(modules, reason)
        for name in list(reasons):
            for peer in _fused_with(name):
                if peer in self.fp8_modules and peer not in reasons:
                    reasons[peer] = _fused_reason(name)
        return replace(
            self,
            fp8_modules=tuple(name for name in self.fp8_modules if name not in reasons),
            fp8_experts=tuple(name for name in self.fp8_experts if name not in reasons),
            kept_modules=self.kept_modules | reasons,
        )

    def gemms(self, outline: Outline) -> Counter[tuple[int, int]]:
        """Count the layers by the shape `[N, K]` of a rank's FP8 weights, as vLLM fuses them."""
        rows_of = Counter()  # (fused layer, columns) -> rows of all its projections
        for name in self.fp8_modules:
            for rows, columns in _shards(outline, name, self.tensor_parallel_size):
                rows_of[fused_name(name), int(columns)] += int(rows)
        return Counter((rows, columns) for (_, columns), rows in rows_of.items())

    @property
    def fp8_kv_cache(self) -> bool:
        return self.kv_cache_dtype != "auto"

    @property
    def quantization_config(self) -> dict | None:
        """Return the checkpoint's `quantization_config`, which vLLM reads; None if nothing is FP8."""
        if not (self.fp8_weights or self.fp8_kv_cache):
            return None
        # An FP8 KV cache alone needs this entry, too: without it vLLM's attention has no scales of q, k and v to load
        ignored: dict[str, None] = {}  # names of modules in high precision, each once, in order
        for name in self.kept_modules:
            ignored[self.stored_name(name)] = None
            ignored[name] = None  # vLLM's MiniMax-M2 looks up the policy's name
        if family_of(self.model_type).fuses_unsaid:
            ignored |= dict.fromkeys(map(fused_name, ignored))
        return self.format.quantization_config | {self.format.kept_key: [*ignored]}


def recipe_for_model(model: "nn.Module", **flags) -> FP8Recipe:
    """Call `recipe_for` with the outline of a transformers or PEFT causal LM, which may be on the meta device."""
    from .from_model import outline_of  # imports torch, for which `trl-fp8 --help` need not wait

    return recipe_for(outline_of(model), **flags)


def recipe_for(
    outline: Outline,
    *,
    fp8_weights: bool = True,
    kv_cache_dtype: str = "fp8",
    kv_cache_skip_layers: tuple[int, ...] = (),
    weight_format: str = "blocks",
    scale_format: ScaleFormat = "pow2",
    kv_scale_margin: float = 1.05,
    tensor_parallel_size: int = 1,
    ignored_modules: tuple[str, ...] = (),
    expert_kernels: bool = True,
) -> FP8Recipe:
    """Decide for each linear layer and expert module of a model whether it is FP8.

    Args:
        outline: Outline of the policy.
        ignored_modules: Linear layers and expert modules to keep, by exact name.
        expert_kernels: Whether the engine has kernels for FP8 experts. vLLM has them on CUDA, not on CPU.
        fp8_weights and others: See the flags of `FP8GRPOConfig`.

    Raises:
        ValueError: `fp8_weights` is on, but no layer can be FP8. The KV cache is FP8, but no layer caches keys and
            values. `ignored_modules` or `kv_cache_skip_layers` name layers that do not exist, or the latter names all
            layers. A format is unknown.
    """
    linears = outline.linears
    experts = outline.experts
    spec = format_named(weight_format)
    spec.require_scale_format(scale_format)
    modules = [*linears, *experts]
    _check_named(ignored_modules, modules, kv_cache_skip_layers, outline)
    if kv_cache_dtype != "auto" and outline.caches and not outline.kv_layers:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r}, but none of the {outline.layers} layers of {outline.class_name} "
            "caches keys and values (linear attention), so nothing of the KV cache would be FP8. Set "
            "kv_cache_dtype='auto'."
        )
    reasons = _reasons(outline, spec, tensor_parallel_size, ignored_modules, expert_kernels)
    if fp8_weights and len(reasons) == len(modules):
        smaller = []  # smaller tensor parallel sizes at which some module is FP8
        for size in range(1, tensor_parallel_size):
            if tensor_parallel_size % size == 0:
                reasons_at_size = _reasons(outline, spec, size, ignored_modules, expert_kernels)
                if len(reasons_at_size) < len(modules):
                    smaller.append(size)
        raise ValueError(_why_nothing(outline, reasons, spec, tensor_parallel_size, smaller))
    if not fp8_weights:
        reasons = {name: reasons.get(name, "fp8_weights is off") for name in modules}
    parents = {name.rpartition(".")[0] for name in outline.parameters}  # modules that have parameters of their own
    return FP8Recipe(
        fp8_modules=tuple(name for name in linears if name not in reasons),
        fp8_experts=tuple(name for name in experts if name not in reasons),
        kept_modules=reasons | {router_name(name, parents): "router" for name in experts},
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_skip_layers=tuple(sorted(kv_cache_skip_layers)),
        format=spec,
        scale_format=scale_format,
        kv_scale_margin=kv_scale_margin,
        tensor_parallel_size=tensor_parallel_size,
        model_type=outline.model_type,
        decoder=outline.decoder,
    )


def _reasons(
    outline: Outline, spec: FormatSpec, tp_size: int, ignored: tuple[str, ...], expert_kernels: bool
) -> dict[str, str]:
    """Return the modules that stay in high precision, each with its reason."""
    modules = [*outline.linears, *outline.experts]
    reasons = {name: _why_kept(outline, name, spec, tp_size) for name in modules}
    if not expert_kernels:
        for name in outline.experts:
            reasons[name] = reasons[name] or "vLLM has no kernel for FP8 experts on CPU"
    reasons |= dict.fromkeys(ignored, "listed in fp8_ignored_modules")
    for name in outline.linears:  # layers that vLLM fuses are all FP8, or none is
        blocked = [peer for peer in _fused_with(name) if reasons.get(peer)]
        if reasons[name] is None and blocked:
            reasons[name] = _fused_reason(blocked[0])
    return {name: reason for name, reason in reasons.items() if reason}


def _why_nothing(outline: Outline, reasons: dict[str, str], spec: FormatSpec, tp_size: int, smaller: list[int]) -> str:
    """Return the error for a model of which no layer can be FP8.

    `smaller` are the tensor parallel sizes below `tp_size` at which some layers can be FP8.
    """
    remedies = [f"fp8_weight_format={name!r}" for name in formats_for(outline, tp_size)]
    if smaller:
        reason = f"split over {tp_size} GPUs, no layer of {outline.class_name} has shards that {spec.requirement}"
        remedies = [f"vllm_tensor_parallel_size={' or '.join(map(str, smaller))}", *remedies]
        return f"vllm_tensor_parallel_size={tp_size}: {reason}. Set {', or '.join(remedies)}."
    names_of = defaultdict(dict)  # reason -> last parts of the names
    for name, reason in reasons.items():
        names_of[reason][name.rpartition(".")[2]] = None
    kinds = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_of.items())
    return (
        f"fp8_weights=True, but none of the {len(reasons)} linear layers of {outline.class_name} can be FP8: {kinds}. "
        f"Set {', or '.join([*remedies, 'fp8_weights=False'])}, or take another model."
    )


def formats_for(outline: Outline, tensor_parallel_size: int = 1) -> list[str]:
    """Return the formats in which an engine on any GPU with FP8 can hold some linear layers or experts of a model."""
    modules = (*outline.linears, *outline.experts)
    names = []
    for name, spec in FORMATS.items():
        reasons = (_why_kept(outline, module, spec, tensor_parallel_size) for module in modules)
        if spec.on_all_gpus and None in reasons:
            names.append(name)
    return names


def adapter_targets(linears: Iterable[str]) -> list[str]:
    """Return the last parts of the names of the attention projections that can have adapters, also on an FP8 base."""
    targets: dict[str, None] = {}
    for name in linears:
        parent, _, kind = name.rpartition(".")
        if _PROJECTION.search(name) and parent.endswith("_attn") and kind not in MLA:
            targets[kind] = None
    return list(targets)


def is_vision(name: str) -> bool:
    """Return whether a module or parameter belongs to a vision tower, or to the projector behind it."""
    return _VISION.search(name) is not None


def _why_kept(outline: Outline, name: str, spec: FormatSpec, tp_size: int) -> str | None:
    """Return why an engine cannot hold a linear layer or module of experts in a format; None if it can."""
    per_rank = f" per rank at tensor parallel size {tp_size}" if tp_size > 1 else ""
    if name in outline.experts:
        if spec.why_no_experts:
            return spec.why_no_experts
        if not outline.experts[name]:
            return "experts of another layout than gate_up_proj [E, 2I, K] and down_proj [E, K, I]"
        _, hidden, intermediate = outline.parameters[f"{name}.down_proj"]
        if spec.fits(intermediate / tp_size, hidden):
            return None
        return f"experts of {intermediate / tp_size:g} x {hidden}{per_rank}, not multiples of {spec.alignment}"
    if name.rpartition(".")[2] == "lm_head":
        return "output head"
    if _GATES.search(name):
        return "gates of linear attention"
    if is_vision(name):
        return "vision tower"
    if not _PROJECTION.search(name):
        return "not named as a projection of Llama's decoder layers"
    shards = _shards(outline, name, tp_size)
    for rows, columns in shards:
        if not spec.fits(rows, columns):
            return f"{rows:g} x {columns:g}{per_rank} is not a multiple of {spec.alignment} x {spec.alignment}"
    # vLLM's kernel computes all layers that are fused with this layer at once, so their rows together must suffice
    fused = [peer for peer in _fused_with(name) if peer in outline.linears] or [name]
    fused_rows = 0
    for peer in fused:
        fused_rows += sum(rows for rows, _ in _shards(outline, peer, tp_size))
    columns = shards[0][1]  # the same in all shards
    if min(fused_rows, columns) < spec.smallest_side:
        least = f"{spec.smallest_side}, the smallest multiple of {spec.alignment} that vLLM's kernel takes"
        return f"{fused_rows:g} x {columns:g}{per_rank} has a side below {least}"
    return None


def _shards(outline: Outline, name: str, tp_size: int) -> list[tuple[float, float]]:
    """Return rows N and columns K of a rank's part of each projection in the weight of the linear layer `name`.

    A weight has several projections if the checkpoint has them fused. If `tp_size` does not divide a size, the result
    is a fraction.
    """
    rows, columns = outline.linears[name]
    parent, _, kind = name.rpartition(".")
    if kind in (*ROW_PARALLEL, LINEAR_ATTENTION[-1]):
        return [(rows, columns / tp_size)]
    if kind in REPLICATED:
        return [(rows, columns)]
    if kind in LINEAR_ATTENTION:
        parts = [rows]
        if kind in PARTS:  # the weight has q, k and v, and v has as many rows as z
            value_rows = outline.linears[f"{parent}.in_proj_z"][0]
            key_rows = (rows - value_rows) / 2
            parts = [key_rows, key_rows, value_rows]
        return [(part / tp_size, columns) for part in parts]
    projections = FUSED.get("gate_up_proj" if kind == GATE_UP else kind, (kind,))
    rows_of_each = [rows / len(projections)] * len(projections)
    if kind == "qkv_proj":
        key_rows = outline.kv_heads * outline.head_dim
        rows_of_each = [rows - 2 * key_rows, key_rows, key_rows]
    shards = []
    for projection, projection_rows in zip(projections, rows_of_each, strict=True):
        ranks = tp_size
        if projection in ("k_proj", "v_proj"):  # with fewer KV heads than ranks, several ranks hold the same head
            ranks = min(tp_size, outline.kv_heads)
        shards.append((projection_rows / ranks, columns))
    return shards


def _fused_with(name: str) -> list[str]:
    """Return the modules that vLLM fuses with this one, itself included; empty if there are none."""
    parent, _, kind = name.rpartition(".")
    for group in FUSED.values():
        if kind in group:
            return [f"{parent}.{peer}" for peer in group]
    return []


def _fused_reason(peer: str) -> str:
    return f"vLLM fuses it with {peer.rpartition('.')[2]}, which stays BF16"


def _check_named(ignored: tuple[str, ...], modules: list[str], skipped: tuple[int, ...], outline: Outline) -> None:
    """Raise `ValueError` for modules or layers that the model does not have, and for skipping all layers."""
    layers = outline.layers
    cached = outline.kv_layers or range(layers)  # layers with a KV cache; all layers if the outline names none
    unknown_modules = [name for name in ignored if name not in modules]
    if unknown_modules:
        raise ValueError(
            f"fp8_ignored_modules={unknown_modules} are not linear layers or experts of the model. Names are matched "
            f"exactly; the model has for example {modules[:3]}."
        )
    unknown_layers = [layer for layer in skipped if not 0 <= layer < layers]
    if unknown_layers:
        raise ValueError(
            f"kv_cache_skip_layers names layers {unknown_layers}, but the model's layers are 0 .. {layers - 1}."
        )
    without_cache = [layer for layer in skipped if layer not in cached]
    if without_cache:
        raise ValueError(
            f"kv_cache_skip_layers names layers {without_cache}, which cache no keys and values (linear attention). "
            f"The layers that do are {list(cached)}."
        )
    if len(set(skipped)) == len(cached):
        raise ValueError(
            f"kv_cache_skip_layers names all {len(cached)} layers, so nothing of the KV cache would be FP8. Set "
            "kv_cache_dtype='auto' instead."
        )
