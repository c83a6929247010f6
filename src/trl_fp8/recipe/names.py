"""What a model's parameters are called, and how large they are, in the checkpoint that an engine loads."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch import nn


# model_type -> parts of a transformers 5 name and what vLLM 0.31 expects there (its fused expert tensors included)
_RENAMED = {
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".experts.gate_up_proj", ".experts.w13"),
        (".experts.down_proj", ".experts.w2"),
    ),
}


def checkpoint_name(name: str) -> str:
    """The name that a module or parameter has in the base model's checkpoint, inside PEFT's and FSDP's wrappings."""
    name = name.removeprefix("base_model.model.").replace("_checkpoint_wrapped_module.", "")
    return name.replace(".base_layer", "").replace(".modules_to_save.default", "")


def engine_name(name: str, model_type: str) -> str:
    """The name under which vLLM loads a parameter, or ignores a module, that transformers calls `name`."""
    for ours, engines in _RENAMED.get(model_type, ()):
        name = name.replace(ours, engines)
    return name


def full_shape(parameter: "nn.Parameter") -> tuple[int, ...]:
    """Shape of a whole parameter, also where DeepSpeed's ZeRO-3 left an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
