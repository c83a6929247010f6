"""The config.json of the model that a command names, found without torch, which takes seconds to import."""

import json
from pathlib import Path
from typing import Any


def model_config(model: str) -> Any:
    """What the model's config.json holds; `ValueError` if there is none of that name, or it is no JSON."""
    folder = Path(model)
    if folder.is_file():
        raise ValueError(f"MODEL={model!r} is a file. Give its folder, or the id of a model on the Hub.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        inside = "is empty" if not any(folder.iterdir()) else "has no config.json"
        raise ValueError(
            f"MODEL={model!r} {inside}. Give the folder of a checkpoint, or the id of a model on the Hub."
        )
    path = folder / "config.json" if folder.is_dir() else _downloaded(model)
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"MODEL={model!r}: its config.json is no JSON ({error}). Download it again.") from error


def _downloaded(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"MODEL={model!r} is no folder here, and no config.json of that name came from the Hub: {said}"
        ) from error
