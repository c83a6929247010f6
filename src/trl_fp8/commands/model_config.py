"""The config.json of the model that a command names, found without torch, which takes seconds to import."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any


ADAPTERS = "adapter_config.json"  # PEFT's, in a folder of adapters


def model_config(model: str) -> Any:
    """What the model's config.json holds; `ValueError` if there is none of that name, or it is no JSON."""
    folder = Path(model)
    if folder.is_file():
        raise ValueError(f"MODEL={model!r} is a file. Give its folder, or the id of a model on the Hub.")
    require_model(model, "MODEL")
    if (folder / ADAPTERS).is_file() and not (folder / "config.json").is_file():
        base = json.loads((folder / ADAPTERS).read_text()).get("base_model_name_or_path")
        raise ValueError(
            f"MODEL={model!r} holds adapters of {base!r}, and no model. Give that model; or merge them into it first: "
            "trainer.merge_and_export(folder) in the run, or PEFT's AutoPeftModelForCausalLM.from_pretrained("
            f"{model!r}).merge_and_unload(), saved with its tokenizer."
        )
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


def require_model(model: str, said: str = "model_name_or_path") -> None:
    """Raise `ValueError` for what can only be a folder and is none, before anybody asks the Hub for it.

    Args:
        model: The folder of a model, or an id of the Hub, which has one slash at most.
        said: What the user calls it.
    """
    if not Path(model).exists() and (model.count("/") > 1 or model.startswith((".", "/", "~"))):
        raise ValueError(f"{said}={model!r}: there is no such folder, seen from {Path.cwd()}{_meant(model) or '.'}")


def missing_model(model: str, said: str, error: Exception) -> str:
    """What to say of a model of which the Hub had no config: `error`, unless a folder here has nearly that name."""
    if not Path(model).exists() and (meant := _meant(model)):
        return f"{said}={model!r}: there is no such folder, seen from {Path.cwd()}{meant}"
    return f"{said}={model!r}: {error}"


def _meant(model: str) -> str:
    """A question for the folder whose name is nearly that of `model`; empty if there is none."""
    beside = Path(model).parent
    folders = [path.name for path in beside.iterdir() if path.is_dir()] if beside.is_dir() else []
    close = get_close_matches(Path(model).name, folders, n=1)
    return f": did you mean {beside / close[0]}?" if close else ""


def _downloaded(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        reason = ValueError(f"no folder here, and no config.json of that name came from the Hub: {said}")
        raise ValueError(missing_model(model, "MODEL", reason)) from error
