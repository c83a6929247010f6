"""The run config: the YAML file behind --config, with a line for each flag of `trl-fp8 train`."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml


def read_run_config(words: list[str]) -> tuple[str, dict[str, Any] | None, list[str]]:
    """Path and lines of the run config that words name, and the words without it; "" and None if they name none.

    Raises:
        ValueError: The file cannot be meant; the message says why, and what it takes.
    """
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" not in words:
        return "", None, words
    place = words.index("--config")
    path = next((word for word in words[place + 1 : place + 2] if not word.startswith("--")), None)
    if path is None or words.count("--config") > 1:
        raise ValueError("--config takes one YAML file, as in --config examples/configs/qwen3_4b_1xh200.yaml.")
    if not Path(path).is_file():
        beside = map(str, Path(path).parent.glob("*.yaml"))
        hint = did_you_mean(path, beside, f", seen from {Path.cwd()}.")
        raise ValueError(f"--config {path}: there is no such file{hint}")
    try:
        text = Path(path).read_text()
        lines = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} is no YAML: {error}") from error
    if of := re.match(r"# (examples/\w+\.py): ", text):
        raise ValueError(f"--config {path} is of another script: python {of[1]} --config {path}")
    if not isinstance(lines, dict):
        found = "empty" if lines is None else f"a {type(lines).__name__}"
        raise ValueError(f"--config {path} is {found}. It takes lines such as 'model_name_or_path: Qwen/Qwen3-4B'.")
    return path, {str(name): value for name, value in lines.items()}, words[:place] + words[place + 2 :]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """A question after an unknown name, or `otherwise` if no known one is like it."""
    close = get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else otherwise
