"""The arguments of `trl-fp8 train` and `plan`: those of `trl grpo`, the FP8 flags, and the columns of a dataset."""

import os
import re
from argparse import Action, ArgumentParser, Namespace
from dataclasses import dataclass, fields, replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.utils import CustomArgumentParser
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_fp8.config import FP8GRPOConfig
from trl_fp8.run.feature import flag
from trl_fp8.run.lines import did_you_mean

from .rewards import NAMES


@dataclass
class TaskArguments(GRPOScriptArguments):
    """The task of a run: a dataset, its columns, and rewards."""

    reward_funcs: list[str] | None = flag(
        None, f"Rewards, summed with `reward_weights`: {', '.join(NAMES)}, or paths as in my_module.reward."
    )
    overlong_buffer: int = flag(
        512, "Tokens before max_completion_length over which soft_overlong_punishment falls to -1."
    )
    prompt_column: str | None = flag(
        None, "Column with the problem, if it is not 'prompt'. A text becomes the user's message."
    )
    solution_column: str | None = flag(None, "Column with the solution, if it is not 'solution'.")
    solution_marker: str | None = flag(
        None, "Text in the solution behind which the answer stands: '####' in GSM8K. The answer is boxed."
    )
    system_prompt: str | None = flag(
        None, "System message put before every prompt. A prompt that is text becomes the user's message."
    )


RESUME = (  # help text in place of transformers' own
    "Checkpoint to resume from: its folder, or 'auto' for the last one in output_dir that was written to its end. "
    "With 'auto' a run without a checkpoint starts from the beginning."
)


class Arguments(NamedTuple):
    """Values of flags from a run config and a command line, before the dataclasses check them."""

    values: Namespace  # attribute named like the flag -> its value, in the flag's type
    run_config: dict[str, Any] | None  # entries of the file; None without a run config
    spelled: dict[str, str]  # name of each flag on the command line -> the flag as it is spelled there
    other_words: list[str]  # words of the command line that belong to `accelerate launch`

    def sets(self, name: str) -> bool:
        """Return whether the run config or the command line sets a flag. Otherwise `values` has TRL's default."""
        return name in self.spelled or (self.run_config or {}).get(name) is not None

    def configs(
        self, processes: int | None = None
    ) -> tuple[TaskArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig]:
        """Return the configs of task, trainer, model and mixture of datasets.

        Raises `ValueError` for a value that is unknown, or that contradicts another.

        With `processes` the values are checked for a launch of this many processes. The processes need not run yet,
        and no device is initialized.
        """
        config_class = FP8GRPOConfig
        # transformers' properties `world_size` and `device` would initialize a device and the process group
        if processes is not None:
            attributes = {"world_size": processes, "device": torch.device("cpu")}
            config_class = type("FP8GRPOConfig", (FP8GRPOConfig,), attributes)

        def make(config_type: type) -> Any:
            names = [field.name for field in fields(config_type) if field.init]
            return config_type(**{name: getattr(self.values, name) for name in names})

        try:
            script, args, model, mixture = map(make, (TaskArguments, config_class, ModelConfig, DatasetMixtureConfig))
        except JSONDecodeError as error:
            raise ValueError(f"{error.doc!r} begins like JSON and is none: {error}. Quote it as one word.") from error
        except TypeError as error:  # argparse checks the types of flags, but not of all values in YAML
            raise ValueError(f"the run config has a value of a wrong type: {error}") from error
        for group in args.groups():
            group.check_adapters(args, model)
        if args.base_in_engine and not self.sets("dtype"):
            model = replace(model, dtype=None)  # TRL's default is FP32, but weights beside an FP8 base are BF16
        return script, args, model, mixture


class Parser(TrlParser):
    """TRL's parser. It raises `ValueError` for a mistake, and suggests a name for one that is misspelt."""

    def __init__(self):
        dataclasses = TaskArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig
        super().__init__(dataclasses, prog="trl-fp8 train", allow_abbrev=False)
        # Flags that a run config may set. Only --help, and --no_... of flags that are on by default, have no type
        self.by_name = {each.dest: each for each in self._option_string_actions.values() if each.type is not None}
        self.by_name["resume_from_checkpoint"].help = RESUME
        if not torch.cuda.is_available():
            self.set_defaults(use_cpu=True, bf16=False)  # many CPUs emulate BF16

    def read(self, words: list[str]) -> Arguments:
        """Return the values of flags in `words`, and in the run config that they name. Flags win over the file.

        Raises:
            ValueError: The run config cannot be read, a name is unknown, or a value is not of its flag's type.
        """
        path, run_config, flag_words = read_run_config(words)
        entries = run_config or {}
        spelled = {}
        for word in flag_words:
            spelling, _, _ = word.partition("=")
            if spelling.startswith("--") and " " not in spelling:  # a word with a space is a value that begins with --
                action = self._option_string_actions.get(spelling)
                name = action.dest if action else name_of(spelling)
                spelled[name] = spelling
        launcher = _names(launch_command_parser()) | {"accelerate_config"}
        keys = {*self.by_name, *launcher, "env"}
        flags = _names(self) | launcher
        unknown = [f"key {key!r} in {path}{did_you_mean(key, keys)}" for key in entries if key not in keys]
        unknown += [f"flag --{name}{did_you_mean(name, flags)}" for name in spelled if name not in flags]
        if unknown:
            raise ValueError(f"Unknown {' Unknown '.join(unknown)} All names: trl-fp8 train --help-all")
        environment = entries.get("env") or {}
        if not isinstance(environment, dict):
            raise ValueError(f"env={environment!r} in {path}: it has to be a dictionary of environment variables.")
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        defaults = {}
        for name, value in entries.items():
            if name in self.by_name:
                defaults[name] = _as_default(value, self.by_name[name])
        self.set_defaults_with_config(**defaults)
        values, other_words = self.parse_known_args(flag_words)
        return Arguments(values, run_config, spelled, other_words)

    def error(self, message: str) -> NoReturn:
        # argparse names both spellings, as --a_flag/--a-flag. Show the first one
        raise ValueError(re.sub(r"argument (--[\w-]+)\S*:", r"\1:", message))


class LaunchParser(CustomArgumentParser):
    """The parser of `accelerate launch`. It raises `ValueError` for a mistake."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"accelerate launch: {message}")


def parse_launch(words: list[str]) -> Namespace:
    """Parse the words of `accelerate launch`. Raise `ValueError` for those that it refuses."""
    parser = LaunchParser(prog="accelerate")
    launch_command_parser(parser.add_subparsers())
    return parser.parse_args(["launch", *words])


def words_for_accelerate(entries: dict[str, Any]) -> list[str]:
    """Return entries of a run config as words of `accelerate launch`. An entry that is null is left out.

    A switch takes no value on a command line. `ValueError` if its entry is neither true nor false.
    """
    actions = {}
    for word, action in launch_command_parser()._option_string_actions.items():
        actions[name_of(word)] = action
    words = []
    for name, value in entries.items():
        action = actions.get(name)
        if value is None:
            continue
        if action is not None and action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} in the run config: it is a switch. Use true, or remove it.")
            if value:
                words.append(f"--{name}")
            continue
        if value is False and action is not None and action.type is bool:
            value = ""  # accelerate calls `bool` with the word, and bool("false") is True
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def read_run_config(words: list[str]) -> tuple[str, dict[str, Any] | None, list[str]]:
    """Return path and entries of the file after --config ("" and None without --config), and the other words."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", const="", default=[])
    options, words = parser.parse_known_args(words)
    if not options.config:
        return "", None, words
    path = options.config[0]
    if not path or len(options.config) > 1:
        raise ValueError("--config takes one YAML file, as in --config examples/configs/qwen3_4b_1xh200.yaml.")
    if not Path(path).is_file():
        hint = did_you_mean(path, map(str, Path(path).parent.glob("*.yaml")), f", seen from {Path.cwd()}.")
        raise ValueError(f"--config {path}: there is no such file{hint}")
    try:
        entries = yaml.safe_load(Path(path).read_text())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(entries, dict):
        content = "empty" if entries is None else f"a {type(entries).__name__}"
        raise ValueError(f"--config {path} is {content}. It takes lines such as 'model_name_or_path: Qwen/Qwen3-4B'.")
    return path, {str(name): value for name, value in entries.items()}, words


def name_of(word: str) -> str:
    """Return the attribute that a flag such as --fp8-weights sets: fp8_weights."""
    return word.removeprefix("--").replace("-", "_")


def _names(parser: ArgumentParser) -> set[str]:
    """Return the names of all flags, --no_... included, and of the attributes that they set."""
    actions = parser._option_string_actions
    return {name_of(word) for word in actions} | {action.dest for action in actions.values()}


def _as_default(value: Any, action: Action) -> Any:
    """Return a value of a run config as the default of its flag. argparse converts and checks defaults that are text,
    so numbers and booleans become text.
    """
    if action.nargs == "+":
        return value if isinstance(value, list) or value is None else [value]
    type_name = getattr(action.type, "__name__", "")  # TRL's wrapper for a flag that may be None has it, too
    if type_name in ("int", "float"):
        return str(value)  # YAML's null becomes "None", which argparse reads as None where a flag may be None
    if type_name == "string_to_bool" and value is not None:
        return str(value)
    return value
