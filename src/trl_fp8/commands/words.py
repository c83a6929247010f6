"""What a YAML file and the words after it tell `trl-fp8 train`, and what of that is wrong at first sight.

TRL's arguments take ten seconds to import, so that names are compared with the sources that declare them; what only
the dataclasses know is found later, by `arguments`.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


DECLARED = (  # where arguments are declared, one a line, four spaces from the margin
    *("transformers.training_args", "trl.trainer.base_config", "trl.trainer.grpo_config", "trl.trainer.model_config"),
    *(
        "trl.scripts.utils",
        "trl.scripts.grpo",
        "trl_fp8.config",
        "trl_fp8.commands.arguments",
        "trl_fp8.run.engine_flags",
        "trl_fp8.run.weight_flags",
    ),
    *(
        f"trl_fp8.features.{group}"
        for group in (
            "correction.correction_flags",
            "one_forward.forward_flags",
            "kv_cache.kv_cache_flags",
            "router_replay.router_flags",
        )
    ),
)
LAUNCHER = "accelerate.commands.launch"


class Settings(NamedTuple):
    """`words` as they were given; `in_file` what the YAML file behind --config says, if there is one."""

    words: list[str]
    file: str | None
    in_file: dict[str, Any]

    @property
    def flags(self) -> list[str]:
        """Names of the flags among the words, as the file would write them. What has spaces is a value."""
        names = [word[2:].partition("=")[0] for word in self.words if word.startswith("--")]
        return [name.replace("-", "_") for name in names if " " not in name]

    def values(self, name: str) -> list[Any]:
        """What is set for `name`: by the words or else by the file; empty if neither does."""
        for place in range(len(self.words) - 1, -1, -1):
            flag, _, value = self.words[place].partition("=")
            if flag.startswith("--") and flag[2:].replace("-", "_") == name:
                rest = self.words[place + 1 :]
                following = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
                return [value] if value else rest[:following]
        value = self.in_file.get(name)
        return value if isinstance(value, list) else [] if value is None else [value]


def read(words: list[str]) -> Settings:
    """The words, and the YAML file that they name with --config. `ValueError` for a file that cannot be meant."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    given = Settings(words, None, {})
    if words and not words[0].startswith("-"):
        raise ValueError(f"{words[0]!r} belongs to no flag. A YAML file follows --config, as in --config {words[0]}")
    if "--config" not in words:
        return given
    if not (paths := given.values("config")) or words.count("--config") > 1:
        raise ValueError("--config takes one YAML file, as in --config examples/configs/qwen3_4b_1xh200.yaml.")
    import yaml

    file = paths[0]
    if not Path(file).is_file():
        beside = map(str, Path(file).parent.glob("*.yaml"))
        hint = did_you_mean(file, beside, f", seen from {Path.cwd()}.")
        raise ValueError(f"--config {file}: there is no such file{hint}")
    try:
        text = Path(file).read_text()
        in_file = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {file} is no YAML: {error}") from error
    if of := re.match(r"# (examples/\w+\.py): ", text):
        raise ValueError(f"--config {file} is of another script: python {of[1]} --config {file}")
    if not isinstance(in_file, dict):
        found = "empty" if in_file is None else f"a {type(in_file).__name__}"
        raise ValueError(f"--config {file} is {found}. It takes lines such as 'model_name_or_path: Qwen/Qwen3-4B'.")
    return Settings(words, file, {str(name): value for name, value in in_file.items()})


def check(given: Settings) -> None:
    """Raise `ValueError` for unknown names, and for what a run cannot do without."""
    known = known_names()
    unknown = [(name, f"key {name!r} in {given.file}") for name in given.in_file if name not in known]
    unknown += [(name, f"flag --{name}") for name in given.flags if name not in known]
    if unknown:
        asked = " ".join(f"Unknown {text}{did_you_mean(name, known)}" for name, text in unknown)
        raise ValueError(f"{asked} All names: trl-fp8 train --help-all")
    if not given.values("model_name_or_path"):
        raise ValueError(
            "model_name_or_path is not set. Give a model, as in --model_name_or_path Qwen/Qwen3-4B, or a file with "
            "all of a run, as in --config examples/configs/qwen3_4b_1xh200.yaml."
        )
    named, mixed = given.values("dataset_name"), given.values("datasets")
    if bool(named) == bool(mixed):
        which = f"dataset_name={named[0]!r} and datasets are both set" if named else "dataset_name is not set"
        raise ValueError(f"{which}. Give one of them, as in --dataset_name trl-lib/DeepMath-103K.")


def known_names() -> set[str]:
    """Every name that a file or a flag may set, and a few more that only later are found to be none."""
    names = {name for module in DECLARED for name in re.findall(r"(?m)^    (\w+): ", _source(module))}
    options = [name.replace("-", "_") for name in re.findall(r'"--([\w-]+)"', _source(LAUNCHER))]
    return names.union(options, (f"no_{name}" for name in names), ("accelerate_config", "config", "env"))


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """A question after an unknown name, or `otherwise` if no known one is like it."""
    close = get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else otherwise


def _source(module: str) -> str:
    package, *parts = module.split(".")
    (folder,) = find_spec(package).submodule_search_locations
    return Path(folder, *parts).with_suffix(".py").read_text()
