"""Checks that a model or a dataset exists: in a folder, in the cache, or on the Hub, with one request.

transformers and datasets try an unreachable Hub for a minute, and never suggest a folder with a similar name.
"""

import json
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import httpx
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig


ADAPTERS = "adapter_config.json"  # PEFT's file in a folder of adapters


def require_model(model: str, flag: str, revision: str | None = None) -> None:
    """Raise an error that names `flag` if `model` is neither a folder with a model nor a repository on the Hub.

    Raises:
        ValueError: There is no such folder, or it holds no model, and the Hub has no such model.
        OSError: The Hub is out of reach, and no such model is in its cache.
    """
    folder = Path(model)
    setting = f"{flag}={model!r}"
    if folder.is_file():
        raise ValueError(f"{setting} is a file. Give its folder, or the id of a model on the Hub.")
    if not folder.is_dir():
        return _require_repository(model, flag, "model", revision)
    if (folder / "config.json").is_file():
        return
    if (folder / ADAPTERS).is_file():
        base = json.loads((folder / ADAPTERS).read_text()).get("base_model_name_or_path")
        raise ValueError(
            f"{setting} holds adapters of {base!r}, and no model. Give that model; or merge them into it first: "
            "trainer.merge_and_export(folder) in the run, or PEFT's AutoPeftModelForCausalLM.from_pretrained("
            f"{model!r}).merge_and_unload(), saved with its tokenizer."
        )
    fault = "has no config.json" if any(folder.iterdir()) else "is empty"
    raise ValueError(f"{setting} {fault}. Give the folder of a checkpoint, or the id of a model on the Hub.")


def require_dataset(dataset: str, flag: str) -> None:
    """Raise the errors of `require_model` if `dataset` is no folder, no builder, not cached and not on the Hub."""
    path = Path(dataset)
    if path.is_file():
        folder = str(path.absolute().parent)  # absolute, because datasets loads no "."
        raise ValueError(
            f"{flag}={dataset!r} is a file. Give its folder; or, in the YAML file and in place of {flag}, "
            f"datasets: [{{path: {folder!r}, data_files: {path.name!r}}}]."
        )
    is_builder = dataset.isidentifier() and find_spec(f"datasets.packaged_modules.{dataset}")
    *namespace, name = dataset.split("/")
    cache = Path(datasets.config.HF_DATASETS_CACHE, "___".join([*namespace, camelcase_to_snakecase(name)]))
    is_address = dataset.startswith(("hf://", "buckets/"))  # only `load_dataset` can read these
    if not (path.is_dir() or is_builder or cache.is_dir() or is_address):
        _require_repository(dataset, flag, "dataset")


def model_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return the config.json of a command's MODEL. Raise the errors of `require_model`; `ValueError` for bad JSON."""
    require_model(model, "MODEL", revision)
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        return config
    except (TypeError, RecursionError) as error:  # transformers assumes that any JSON is a dictionary
        raise ValueError(
            f"MODEL={model!r}: its config.json is no JSON of a model ({error}). Download it again."
        ) from error
    except (OSError, ValueError) as error:
        error_type = OSError if isinstance(error, OSError) else ValueError
        raise error_type(f"MODEL={model!r}: {error}") from error


def _require_repository(name: str, flag: str, kind: str, revision: str | None = None) -> None:
    """Raise the errors of `require_model` unless the cache or the Hub has a repository `name`.

    `kind` is "model" or "dataset".
    """
    folder = Path(name)
    siblings = []
    if folder.parent.is_dir():
        siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    similar = get_close_matches(folder.name, siblings, n=1)
    suggestion = f": did you mean {folder.parent / similar[0]}?" if similar else "."
    no_folder = f"{flag}={name!r}: there is no such folder, seen from {Path.cwd()}"
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(no_folder + suggestion)
    try:
        if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        exists = HfApi().repo_exists(name, repo_type=kind)
    except HFValidationError as error:  # the name cannot be that of a repository
        raise ValueError(no_folder + suggestion) from error
    except (httpx.HTTPError, OSError) as error:
        reason = f"the Hub cannot be asked for a {kind} of this name ({error})"
        raise OSError(f"{no_folder}, and {reason}{suggestion}") from None
    if not exists:
        raise ValueError(f"{no_folder}, and no {kind} of this name on the Hub that your token may read{suggestion}")
