"""What tensors are called: in the policy, in the checkpoints that are published, and where vLLM loads and holds them.

    policy (transformers 5)                    ...mlp.experts.gate_up_proj            [E, 2I, K]
    sent, loaded by vLLM   `engine_name`       the same; Mixtral: ...block_sparse_moe.experts.w13
    held by vLLM's module  `sent_expert_name`  ...experts.routed_experts.w13_weight
    published              `published_names`   ...experts.0.gate_proj.weight, ...experts.0.up_proj.weight, [I, K] each

All but experts have one name everywhere, and vLLM fuses some of them. Shapes as in `experts.py`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch import nn


# Projections of a decoder layer. vLLM shards N (columns of x @ W.T) of those it fuses, and K of the others.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
COLUMN_PARALLEL = tuple(kind for group in FUSED for kind in group)
ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class ExpertNames:
    """How a family of models names the experts of a layer.

    Attributes:
        block: Module that holds router and experts.
        fused: Tensors of all experts, [E, 2I, K] and [E, K, I], where they are stored as such.
        published: The parts of each along its rows, where every expert is stored for itself.
    """

    block: str
    fused: tuple[str, str]
    published: tuple[tuple[str, ...], tuple[str, ...]]


TRANSFORMERS = ExpertNames("mlp", ("gate_up_proj", "down_proj"), (("gate_proj", "up_proj"), ("down_proj",)))
MIXTRAL = ExpertNames("block_sparse_moe", ("w13", "w2"), (("w1", "w3"), ("w2",)))
HELD = ("w13", "w2")  # what vLLM's modules call the fused tensors, of whatever family
_FAMILIES = {"mixtral": MIXTRAL}  # model types that transformers renames while loading, and vLLM does not


def checkpoint_name(name: str) -> str:
    """The name that a module or parameter has in the base model's checkpoint, inside PEFT's and FSDP's wrappings."""
    name = name.removeprefix("base_model.model.").replace("_checkpoint_wrapped_module.", "")
    return name.replace(".base_layer", "").replace(".modules_to_save.default", "")


def engine_name(name: str, model_type: str) -> str:
    """The name under which vLLM loads a parameter, or ignores a module, that transformers calls `name`."""
    if (family := _FAMILIES.get(model_type)) is None:
        return name
    name = name.replace(f".{TRANSFORMERS.block}.", f".{family.block}.")
    for ours, theirs in zip(TRANSFORMERS.fused, family.fused, strict=True):
        name = name.replace(f".experts.{ours}", f".experts.{theirs}")
    return name


def sent_expert_name(held: str, gate: str) -> str:
    """The name under which vLLM loads what its module of experts holds as `held` ("w13" or "w2").

    Args:
        held: One of `HELD`.
        gate: What the module expects the gate projection of an expert to be called (`ckpt_gate_proj_name`).
    """
    family = TRANSFORMERS if gate == TRANSFORMERS.published[0][0] else MIXTRAL
    return family.fused[HELD.index(held)]


def published_names(sent: str, scale_suffix: str) -> tuple[str, ...]:
    """What published checkpoints hold in place of a tensor of all experts, or of its scales: a name for each part
    along its rows, with {} for the expert's number. Empty for any other tensor.
    """
    layer, is_expert, tensor = sent.partition(".experts.")
    tensor, is_scale, _ = tensor.partition(scale_suffix)
    for family in (TRANSFORMERS, MIXTRAL):
        if is_expert and tensor in family.fused:
            parts = family.published[family.fused.index(tensor)]
            return tuple(f"{layer}.experts.{{}}.{part}.weight{is_scale}" for part in parts)
    return ()


def full_shape(parameter: "nn.Parameter") -> tuple[int, ...]:
    """Shape of a whole parameter, also where DeepSpeed's ZeRO-3 left an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
