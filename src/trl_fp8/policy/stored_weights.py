"""Loading of a checkpoint's weights into the model that a run trains, and checks that no trained weight is missing.

    load_weights              copies a whole checkpoint into the model
    load_adapter              copies an adapter's checkpoint into the model
    unsaved_beside_adapters   finds trained parameters that an adapter's checkpoint leaves out

Some tensors have other names in a checkpoint than in the model: experts, and all tensors of Gemma 3 with images.
transformers 5.17's Trainer loads with `load_state_dict(strict=False)`, which skips them silently. Here transformers'
own loader renames and fuses tensors, as in `from_pretrained`, and each result is copied into the existing parameter.

Beside the model, only the tensors of one parameter are in memory. For this purpose HF_DEACTIVATE_ASYNC_LOAD is set.
Otherwise transformers would read ahead, and could put the complete checkpoint into host memory on every rank.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from trl_fp8.upstream.patches import substituted


_NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"  # environment variable of transformers


def weight_files(folder: str | Path) -> list[str]:
    """Return the weight files that `save_pretrained` wrote to `folder`; empty if there are none."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        file = Path(folder, name)
        if file.exists():
            return [str(file)]
        index = Path(folder, f"{name}.index.json")
        if index.exists():
            shards = set(json.loads(index.read_text())["weight_map"].values())
            return [str(Path(folder, shard)) for shard in shards]
    return []


def load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Copy the weights of a checkpoint into `model`. Its parameters keep their memory.

    Raises:
        ValueError: The checkpoint lacks a trained parameter, or has a weight of another shape.
    """
    loaded: set[int] = set()  # ids of the tensors into which a value was copied

    def copy_into_model(model: PreTrainedModel, name: str, value: torch.Tensor, *_: Any) -> None:
        tensor = model.get_parameter_or_buffer(name)
        if tensor.shape != value.shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(value.shape)}, and {list(tensor.shape)} in the model. Load the "
                "model that wrote the checkpoint."
            )
        with torch.no_grad():
            tensor.copy_(value)
        loaded.add(id(tensor))

    options = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    # The loader stores in `_weight_conversions` how it converted names and shapes, and save_pretrained reverts these
    # conversions. Keep the conversions of the model's first load, so that it is saved in the form of that checkpoint
    own_conversions = getattr(model, "_weight_conversions", None)
    previous_value = os.environ.get(_NO_READING_AHEAD)
    os.environ[_NO_READING_AHEAD] = "1"
    try:
        with substituted(core_model_loading, "set_param_for_module", copy_into_model):
            info, _ = model._load_pretrained_model(model, None, weight_files(folder), options)
    finally:
        model._weight_conversions = own_conversions
        if previous_value is None:
            del os.environ[_NO_READING_AHEAD]
        else:
            os.environ[_NO_READING_AHEAD] = previous_value
    failures = "".join(f" {name}: {reason}" for name, reason in info.conversion_errors.items())
    missing = [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in loaded]
    require_none_missing(missing, f"{folder} lacks", f"It holds another model, or is not complete.{failures}")


def load_adapter(model: PeftModel, folder: str | Path) -> None:
    """Copy the active adapter of the checkpoint in `folder` into `model`, if it is there in safetensors.

    transformers 5.17's Trainer does not always load this adapter. If PEFT wrote another adapter into a folder of its
    own, such as TRL's copy "ref" of the default adapter, a resumed run gets only the adapters in such folders. And
    the best model gets no adapter from such a folder.

    Raises:
        ValueError: The checkpoint lacks a trained parameter of the adapter.
    """
    adapter = model.active_adapters[0]
    # PEFT writes the default adapter into the folder itself, and any other into a folder of its name
    adapter_folder = Path(folder, "" if adapter == "default" else adapter)
    file = adapter_folder / ADAPTER_SAFE_WEIGHTS_NAME
    if not file.exists():
        return
    with safe_open(file, framework="pt") as stored:
        stored_names = set(stored.keys())
    trained = [name for name, tensor in _adapter(model).items() if tensor.requires_grad]
    missing = [name for name in trained if name not in stored_names]
    advice = "It holds another adapter: give the peft_config that it was made with."
    require_none_missing(missing, f"{folder} lacks", advice)
    weights = load_peft_weights(str(adapter_folder), device="cpu")
    set_peft_model_state_dict(model, weights, adapter_name=adapter)


def unsaved_beside_adapters(model: PeftModel) -> list[str]:
    """Return the names of trained parameters that PEFT does not write into an adapter's checkpoint."""
    saved = {id(tensor) for tensor in _adapter(model).values()}
    return [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in saved]


def require_none_missing(missing: Sequence[str], problem: str, advice: str) -> None:
    """Raise `ValueError` if parameters are `missing`. The message is `problem`, the first name, and `advice`."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{problem} {missing[0]}{more}, which the run trains. {advice}")


def _adapter(model: PeftModel) -> dict[str, nn.Parameter]:
    """Return the tensors of the active adapter that PEFT writes, by the names under which it writes them."""
    state = model.state_dict(keep_vars=True)
    name = model.active_adapters[0]
    return get_peft_model_state_dict(model, state, adapter_name=name, save_embedding_layers=False)
