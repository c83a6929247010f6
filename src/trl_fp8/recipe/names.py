"""Names of tensors: in the policy, in published checkpoints, and where vLLM loads and holds them.

    policy (transformers 5)                    ...mlp.experts.gate_up_proj            [E, 2I, K]
    a checkpoint           `stored_name`       the same; Mixtral: ...block_sparse_moe.experts.w13
    vLLM's modules         `held_name`         the same, except for the parts that vLLM's class renames
        of experts         `sent_expert_name`  ...experts.routed_experts.w13_weight
    published              `published_names`   ...experts.0.gate_proj.weight, ...experts.0.up_proj.weight, [I, K] each

E experts, I intermediate size of one expert, K hidden size; `down_proj` is [E, K, I]. Most other tensors have one name
everywhere, and vLLM fuses some of them.
"""

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .families import family_of


if TYPE_CHECKING:
    from torch import nn


# Projections of a decoder layer, by the name of the layer that vLLM fuses them into (FUSED). Checkpoints of some
# families have the fused layer already. For tensor parallelism vLLM divides the rows N of a weight in COLUMN_PARALLEL
# (each fused part by itself) and the columns K of a weight in ROW_PARALLEL. A weight in REPLICATED is whole on each
# rank.
REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")  # MLA's projections into the latents that all heads share
MLA = (*REPLICATED, "kv_b_proj")
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": REPLICATED,
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),  # of Qwen3.5's linear attention
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
GATE_UP = "input_linear"  # gate and up of Granite's shared experts, which have no gate_proj and up_proj
COLUMN_PARALLEL = (*FUSED["qkv_proj"], *FUSED["gate_up_proj"], "q_b_proj", "kv_b_proj", GATE_UP)
ROW_PARALLEL = ("o_proj", "down_proj", "output_linear")
LINEAR_ATTENTION = ("in_proj_qkvz", *FUSED["in_proj_qkvz"], "out_proj")  # large layers; the last is row parallel
PARTS = {"in_proj_qkv": 3}  # tensor of a checkpoint -> number of its parts, each of which vLLM divides by itself


@dataclass(frozen=True)
class ExpertNames:
    """Names of the experts of a layer in a family of models."""

    fused: tuple[str, str]  # tensors of all experts, [E, 2I, K] and [E, K, I]
    # The parts of each of the two tensors along its rows. Published checkpoints have these parts for each expert
    published: tuple[tuple[str, ...], tuple[str, ...]]


TRANSFORMERS = ExpertNames(("gate_up_proj", "down_proj"), (("gate_proj", "up_proj"), ("down_proj",)))
MIXTRAL = ExpertNames(("w13", "w2"), (("w1", "w3"), ("w2",)))
HELD = ("w13", "w2")  # names of the fused tensors in vLLM's modules, for every family
NOWHERE = -1  # stands for an expert's number if no route is known for a token and layer
# Prefixes of the language model in vision-language models. `_HELD_PARTS` knows vLLM's names only for `WRAPPED`
WRAPPED = "model.language_model"
WRAPPED_OTHERWISE = ("language_model.model", "model")  # of Gemma 3, and of Qwen2-VL and Qwen2.5-VL
# With modules_to_save PEFT has a module's original and a trained copy. These parts of a name distinguish them
_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)")
_HELD_PARTS = (  # start of a name with `WRAPPED` -> its start in vLLM's class
    (f"{WRAPPED}.", "language_model.model."),
    ("lm_head", "language_model.lm_head"),
    ("model.", ""),  # vision tower and projector
)


def checkpoint_name(name: str) -> str:
    """Return the base checkpoint's name of a module or parameter inside PEFT's and FSDP's wrappers."""
    name = name.removeprefix("base_model.model.").replace("_checkpoint_wrapped_module.", "")
    return name.replace(".base_layer", "").replace(".modules_to_save.default", "")


def without_copies(name: str) -> str:
    """Return the name of a module or parameter without PEFT's part that marks an original or a copy."""
    return _COPY.sub("", name)


def stored_name(name: str, model_type: str) -> str:
    """Return the checkpoint's name of the tensor that transformers calls `name`. vLLM loads it by that name."""
    return _replaced(name, family_of(model_type).stored)


def is_fp32(name: str, model_type: str) -> bool:
    """Return whether an engine has the parameter that transformers calls `name` in FP32, so that a sync must not round
    it.
    """
    return name.endswith(family_of(model_type).fp32)


def held_name(stored: str, model_type: str, decoder: str) -> str:
    """Return the name in vLLM's class of the parameter or module that a checkpoint calls `stored`.

    For `decoder` see `Outline.decoder`.
    """
    name = stored
    if decoder == WRAPPED:
        for before, after in _HELD_PARTS:
            if stored.startswith(before):
                name = after + stored.removeprefix(before)
                break
    return _replaced(name, family_of(model_type).in_engine)


def _replaced(name: str, parts: Iterable[tuple[str, str]]) -> str:
    """Return `name` with each part, if the name has it, replaced: (part, its replacement)."""
    for before, after in parts:
        name = name.replace(before, after)
    return name


def fused_name(name: str) -> str:
    """Return the name of the layer that vLLM fuses a projection into; the name itself if it is not fused."""
    parent, _, kind = name.rpartition(".")
    for fused, parts in FUSED.items():
        if kind in parts:
            return f"{parent}.{fused}"
    return name


def sent_expert_name(engine_name: str, gate: str) -> str:
    """Return the name under which vLLM loads the tensor `engine_name`, one of `HELD`.

    `gate` is the `ckpt_gate_proj_name` of vLLM's module of experts.
    """
    family = TRANSFORMERS if gate == "gate_proj" else MIXTRAL
    return family.fused[HELD.index(engine_name)]


def published_names(sent: str, scale_suffix: str, model_type: str = "") -> tuple[str, ...]:
    """Return the published names of a tensor of all experts, or of its scales; `{}` stands for the expert's number.

    Empty for other tensors, and for families that publish a layer's experts in one tensor.
    """
    layer, is_expert, tensor_name = sent.partition(".experts.")
    if not is_expert or family_of(model_type).experts_together:
        return ()
    tensor, suffix, _ = tensor_name.partition(scale_suffix)  # the suffix is "" if the name is not that of scales
    for family in (TRANSFORMERS, MIXTRAL):
        if tensor in family.fused:
            parts = family.published[family.fused.index(tensor)]
            return tuple(f"{layer}.experts.{{}}.{part}.weight{suffix}" for part in parts)
    return ()


def full_shape(parameter: "nn.Parameter") -> tuple[int, ...]:
    """Return the shape of a whole parameter, also if DeepSpeed's ZeRO-3 left an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def expert_modules(model: "nn.Module") -> Iterator[tuple[str, "nn.Module"]]:
    """Yield the modules that hold all experts of a layer in 3-D parameters, by checkpoint name."""
    for wrapped_name, module in model.named_modules():
        name = checkpoint_name(wrapped_name)
        if name.rpartition(".")[2] == "experts":
            if any(len(full_shape(parameter)) == 3 for parameter in expert_weights(module).values()):
                yield name, module


def expert_weights(experts: "nn.Module") -> dict[str, "nn.Parameter"]:
    """Return the weights of all experts of a layer. They are parameters, or attributes of a shared base's modules."""
    shared = {name: getattr(experts, name) for name in TRANSFORMERS.fused if hasattr(experts, name)}
    return dict(experts.named_parameters(recurse=False)) or shared


def router_name(experts: str, modules: Container[str]) -> str:
    """Return the name, among `modules`, of the router in front of the experts `...mlp.experts`."""
    block = experts.rpartition(".")[0]
    router = f"{block}.router"
    return router if router in modules else f"{block}.gate"


def routers(model: "nn.Module") -> dict[str, "nn.Module | None"]:
    """Return the router in front of the experts of each layer, by name; None if there is no module of that name.

    `model` has no wrappers of PEFT.
    """
    modules = dict(model.named_modules())
    names = [router_name(name, modules) for name, _ in expert_modules(model)]
    return {name: modules.get(name) for name in names}


def is_router(module: "nn.Module") -> bool:
    """Return whether a router chooses experts by one top-k and returns logits, weights and choice in this order.

    True for the routers of Qwen2-MoE, Qwen3-MoE, Mixtral and OLMoE. Granite's router returns the choice first.
    """
    name = type(module).__name__
    return name.endswith("TopKRouter") and not name.startswith("GraniteMoe")
