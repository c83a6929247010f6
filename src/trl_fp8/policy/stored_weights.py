"""Weights of a run's checkpoint, read into the model that is trained.

transformers 5.17's Trainer reads with `load_state_dict(strict=False)`, which skips every tensor that a file has under
another name than the model: the experts of a mixture, all of Gemma 3 with images. Here transformers' own loader
renames and fuses them, as `from_pretrained` does, but each value is copied into the parameter that is there.

Only the tensors of one parameter are in memory beside the model. HF_DEACTIVATE_ASYNC_LOAD keeps transformers from
reading ahead, which can put the whole checkpoint into the host's memory on every rank.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from trl_fp8.upstream.patches import substituted


_NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"


def weight_files(folder: str | Path) -> list[str]:
    """Return the files that `save_pretrained` wrote a whole model to; empty if the folder has none."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if Path(folder, name).exists():
            return [str(Path(folder, name))]
        if (index := Path(folder, f"{name}.index.json")).exists():
            return [str(Path(folder, shard)) for shard in {*json.loads(index.read_text())["weight_map"].values()}]
    return []


def load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Copy the weights of a checkpoint into `model`, whose parameters stay where they are.

    Raises:
        ValueError: A trained parameter has no weights in the checkpoint, or weights of another shape.
    """
    loaded: set[int] = set()

    def copy(model: PreTrainedModel, name: str, value: torch.Tensor, *_: Any) -> None:
        tensor = model.get_parameter_or_buffer(name)
        if tensor.shape != value.shape:
            shapes = f"has shape {list(value.shape)}, and {list(tensor.shape)} in the model"
            raise ValueError(f"{folder}: {name} {shapes}. Load the model that the checkpoint was written by.")
        with torch.no_grad():
            tensor.copy_(value)
        loaded.add(id(tensor))

    options = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    conversions = getattr(model, "_weight_conversions", None)  # save_pretrained undoes them
    setting = os.environ.get(_NO_READING_AHEAD)
    os.environ[_NO_READING_AHEAD] = "1"
    try:
        with substituted(core_model_loading, "set_param_for_module", copy):
            info, _ = model._load_pretrained_model(model, None, weight_files(folder), options)
    finally:
        model._weight_conversions = conversions
        if setting is None:
            del os.environ[_NO_READING_AHEAD]
        else:
            os.environ[_NO_READING_AHEAD] = setting
    failures = "".join(f" {name}: {reason}" for name, reason in info.conversion_errors.items())
    missing = [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in loaded]
    require_no(missing, f"{folder} lacks", f"It holds another model, or is not complete.{failures}")


def require_adapter(model: PeftModel, folder: str | Path) -> None:
    """Raise `ValueError` if a trained parameter of the active adapter is not in its checkpoint."""
    adapter = model.active_adapters[0]
    file = Path(folder, "" if adapter == "default" else adapter, ADAPTER_SAFE_WEIGHTS_NAME)
    if file.exists():
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
        missing = [name for name, tensor in _adapter(model).items() if tensor.requires_grad and name not in names]
        require_no(missing, f"{folder} lacks", "It holds another adapter: give the peft_config that it was made with.")


def unsaved_beside_adapters(model: PeftModel) -> list[str]:
    """Return the trained parameters that PEFT does not write into the checkpoint of an adapter."""
    saved = {id(tensor) for tensor in _adapter(model).values()}
    return [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in saved]


def require_no(names: Sequence[str], problem: str, advice: str) -> None:
    """Raise `ValueError` that names the first of `names`, if there are any."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"{problem} {names[0]}{more}, which the run trains. {advice}")


def _adapter(model: PeftModel) -> dict[str, nn.Parameter]:
    """Return what PEFT writes of the active adapter, under the names that it writes."""
    state, name = model.state_dict(keep_vars=True), model.active_adapters[0]
    return get_peft_model_state_dict(model, state, adapter_name=name, save_embedding_layers=False)
