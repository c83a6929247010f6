"""The config.json of the model that a command names."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig


ADAPTERS = "adapter_config.json"  # PEFT's, in a folder of adapters


def model_config(model: str, said: str = "MODEL", revision: str | None = None) -> dict[str, Any]:
    """What the config.json of a folder or of an id on the Hub holds.

    Args:
        model: The folder of a model, or an id of the Hub, which has one slash at most.
        said: What the user calls it.
        revision: Of the repository on the Hub.

    Raises:
        ValueError: There is no such folder, it holds no model, or its config.json is no JSON.
        OSError: The Hub has no such model, or is out of reach.
    """
    folder, named = Path(model), f"{said}={model!r}"
    if folder.is_file():
        raise ValueError(f"{named} is a file. Give its folder, or the id of a model on the Hub.")
    if not folder.exists() and (model.count("/") > 1 or model.startswith((".", "/", "~"))):
        raise ValueError(f"{named}: there is no such folder, seen from {Path.cwd()}{_meant(folder) or '.'}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        if (folder / ADAPTERS).is_file():
            base = json.loads((folder / ADAPTERS).read_text()).get("base_model_name_or_path")
            raise ValueError(
                f"{named} holds adapters of {base!r}, and no model. Give that model; or merge them into it first: "
                "trainer.merge_and_export(folder) in the run, or PEFT's AutoPeftModelForCausalLM.from_pretrained("
                f"{model!r}).merge_and_unload(), saved with its tokenizer."
            )
        inside = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ValueError(f"{named} {inside}. Give the folder of a checkpoint, or the id of a model on the Hub.")
    try:
        return PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    except (TypeError, RecursionError) as error:  # transformers takes any JSON for a dictionary
        raise ValueError(f"{named}: its config.json is no JSON of a model ({error}). Download it again.") from error
    except (OSError, ValueError) as error:
        if not folder.exists() and (meant := _meant(folder)):
            raise ValueError(f"{named}: there is no such folder, seen from {Path.cwd()}{meant}") from error
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{named}: {error}") from error


def _meant(folder: Path) -> str:
    """A question for the folder that has nearly that name; empty if there is none."""
    beside = folder.parent
    folders = [path.name for path in beside.iterdir() if path.is_dir()] if beside.is_dir() else []
    close = get_close_matches(folder.name, folders, n=1)
    return f": did you mean {beside / close[0]}?" if close else ""
