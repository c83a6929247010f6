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


RESUME = (  # in the place of transformers' text
    "Checkpoint that the run goes on from: its folder, or 'auto' for the last one in output_dir that was written to "
    "its end. With 'auto' a run without one begins at the start."
)


class Arguments(NamedTuple):
    """Values that a run config and the words after it set, before the dataclasses check it."""

    values: Namespace  # by name, of the types of the flags
    run_config: dict[str, Any] | None  # its lines; None without a run config
    spelled: dict[str, str]  # name -> the word that sets it
    other_words: list[str]  # those of `accelerate launch`

    def sets(self, name: str) -> bool:
        """Return whether the run config or a word sets it. Otherwise `values` has TRL's default."""
        return name in self.spelled or (self.run_config or {}).get(name) is not None

    def configs(
        self, processes: int | None = None
    ) -> tuple[TaskArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig]:
        """Return the dataclasses. `ValueError` for a value that is unknown, or does not go with another.

        With `processes` they are checked for that many, which do not run yet, and no device is touched.
        """
        config = FP8GRPOConfig
        if processes is not None:
            config = type("FP8GRPOConfig", (config,), {"world_size": processes, "device": torch.device("cpu")})
        values = vars(self.values)
        try:
            script, args, model, mixture = (
                kind(**{field.name: values[field.name] for field in fields(kind) if field.init})
                for kind in (TaskArguments, config, ModelConfig, DatasetMixtureConfig)
            )
        except JSONDecodeError as error:
            raise ValueError(f"{error.doc!r} begins like JSON and is none: {error}. Quote it as one word.") from error
        except TypeError as error:  # of a value in YAML
            raise ValueError(f"the run config has a value of a wrong type: {error}") from error
        for group in args.groups():
            group.check_adapters(args, model)
        if args.base_in_engine and not self.sets("dtype"):
            model = replace(model, dtype=None)  # weights beside an FP8 base are BF16; TRL's default is FP32
        return script, args, model, mixture


class Parser(TrlParser):
    """TRL's parser, which raises `ValueError` for a mistake, and suggests the name that a misspelt one is close to."""

    def __init__(self):
        types = TaskArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig
        super().__init__(types, prog="trl-fp8 train", allow_abbrev=False)
        # --help has no type, nor has --no_... of what is on by default
        self.by_name = {each.dest: each for each in self._option_string_actions.values() if each.type is not None}
        self.by_name["resume_from_checkpoint"].help = RESUME
        if not torch.cuda.is_available():
            self.set_defaults(use_cpu=True, bf16=False)  # many CPUs emulate BF16

    def read(self, words: list[str]) -> Arguments:
        """Return what words and the run config among them set; the words win.

        Raises:
            ValueError: The run config cannot be read, a name is unknown, or a value is not of its flag's type.
        """
        path, run_config, words = read_run_config(words)
        spelled = {}
        for word in words:
            flag_word = word.partition("=")[0]
            if flag_word.startswith("--") and " " not in flag_word:  # a value may have spaces
                action = self._option_string_actions.get(flag_word)
                spelled[action.dest if action else name_of(flag_word)] = flag_word
        launcher = _names(launch_command_parser()) | {"accelerate_config"}
        keys = {*self.by_name, *launcher, "env"}
        flags = _names(self) | launcher
        unknown = [f"key {key!r} in {path}{did_you_mean(key, keys)}" for key in run_config or () if key not in keys]
        unknown += [f"flag --{name}{did_you_mean(name, flags)}" for name in spelled if name not in flags]
        if unknown:
            raise ValueError(f"Unknown {' Unknown '.join(unknown)} All names: trl-fp8 train --help-all")
        lines = dict(run_config or {})
        environment = lines.pop("env", {})
        if not isinstance(environment, dict):
            raise ValueError(f"env={environment!r} in {path}: it has to be a dictionary of environment variables.")
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        actions = {name: self.by_name[name] for name in lines if name in self.by_name}
        self.set_defaults_with_config(**{name: _as_default(lines[name], actions[name]) for name in actions})
        values, other_words = self.parse_known_args(words)
        return Arguments(values, run_config, spelled, other_words)

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"argument (--[\w-]+)\S*:", r"\1:", message))  # --a_flag, not --a_flag/--a-flag


class LaunchParser(CustomArgumentParser):
    """The parser of `accelerate launch`, which raises `ValueError` for a mistake, too."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"accelerate launch: {message}")


def parse_launch(words: list[str]) -> Namespace:
    """Return what `accelerate launch` makes of its words. `ValueError` for those that it refuses."""
    parser = LaunchParser(prog="accelerate")
    launch_command_parser(parser.add_subparsers())
    return parser.parse_args(["launch", *words])


def read_run_config(words: list[str]) -> tuple[str, dict[str, Any] | None, list[str]]:
    """Return path and lines of the run config that words name, and the words without it; "" and None without one."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", action="append", nargs="?", const="", default=[])
    found, words = finder.parse_known_args(words)
    if not found.config:
        return "", None, words
    path = found.config[0]
    if not path or len(found.config) > 1:
        raise ValueError("--config takes one YAML file, as in --config examples/configs/qwen3_4b_1xh200.yaml.")
    if not Path(path).is_file():
        hint = did_you_mean(path, map(str, Path(path).parent.glob("*.yaml")), f", seen from {Path.cwd()}.")
        raise ValueError(f"--config {path}: there is no such file{hint}")
    try:
        lines = yaml.safe_load(Path(path).read_text())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(lines, dict):
        content = "empty" if lines is None else f"a {type(lines).__name__}"
        raise ValueError(f"--config {path} is {content}. It takes lines such as 'model_name_or_path: Qwen/Qwen3-4B'.")
    return path, {str(name): value for name, value in lines.items()}, words


def name_of(word: str) -> str:
    """Return the name that a word such as --fp8-weights sets."""
    return word.removeprefix("--").replace("-", "_")


def _names(parser: ArgumentParser) -> set[str]:
    """Return the names of all flags, --no_... included, and those that their values get."""
    actions = parser._option_string_actions
    return {name_of(word) for word in actions} | {action.dest for action in actions.values()}


def _as_default(value: Any, action: Action) -> Any:
    """Return a value of a run config as the default of its flag: numbers as text, which argparse checks."""
    if action.nargs == "+":
        return value if isinstance(value, list) or value is None else [value]
    if getattr(action.type, "__name__", "") not in ("int", "float", "string_to_bool"):
        return value
    return value if value is None and action.type not in (int, float) else str(value)
