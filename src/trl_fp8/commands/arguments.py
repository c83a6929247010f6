"""The arguments of `trl-fp8 train` and `plan`: those of `trl grpo`, the FP8 flags, and what becomes of a dataset."""

import os
import re
import textwrap
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from json import JSONDecodeError
from shutil import get_terminal_size
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.utils import CustomArgumentParser
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_fp8.config import FP8GRPOConfig
from trl_fp8.run.flag import flag

from .rewards import NAMES
from .run_config import did_you_mean, read_run_config


HEAD = """\
usage: trl-fp8 train --config FILE [--accelerate_config FILE] [--FLAG VALUE ...]
       trl-fp8 train --help FLAG [FLAG ...]      all that is said of these

GRPO with FP8 rollouts. FILE is a run config: YAML with a line for each flag, as those in examples/configs; flags after
it win.
"""
TAIL = (
    "\nEverything else that TRL and transformers know: trl-fp8 train --help-all; every FP8 flag: docs/configuration.md"
)
COMMON = {  # group -> the flags that --help shows
    "launch": "accelerate_config",
    "model and data": "model_name_or_path dataset_name dataset_config prompt_column solution_column solution_marker "
    "system_prompt reward_funcs",
    "what is FP8": "fp8_weights fp8_base kv_cache_dtype fp8_forward router_replay rollout_correction",
    "engine": "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size",
    "batch": "per_device_train_batch_size gradient_accumulation_steps num_generations max_completion_length",
    "training": "learning_rate max_steps beta loss_type use_peft lora_r",
    "output": "output_dir save_steps report_to resume_from_checkpoint",
}
KINDS = {"int": "an integer", "float": "a number", "string_to_bool": "true or false"}


@dataclass
class TaskArguments(GRPOScriptArguments):
    """What is learned: a dataset, what becomes of its columns, and rewards."""

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
    accelerate_config: str | None = flag(
        None,
        "Which GPUs, and how the policy is spread over them: a file of `accelerate config`, or the name of one of "
        "TRL's, such as fsdp2 or zero3. Read by the command alone.",
    )


HELP = {  # in the place of transformers' text
    "resume_from_checkpoint": "Checkpoint that the run goes on from: its folder, or 'auto' for the last one in "
    "output_dir that was written to its end. With 'auto' a run without one begins at the start."
}


class Asked(NamedTuple):
    """What a run config and the words after it ask for, before the dataclasses check it."""

    values: Namespace  # by name, of the types of the flags
    given: dict[str, Any] | None  # lines of the run config; None: there is none
    spelled: dict[str, str]  # name -> the word that sets it
    launch_words: tuple[list[str], list[str]]  # what is accelerate's, of the run config and of the words

    def sets(self, name: str) -> bool:
        """Whether the run config or a word has a value for it. What has none has TRL's default in `values`."""
        return name in self.spelled or (self.given or {}).get(name) is not None

    def made(
        self, processes: int | None = None
    ) -> tuple[TaskArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig]:
        """The dataclasses, which check their values.

        Args:
            processes: On all machines together, if they do not run yet: the config is checked for as many, and touches
                no device. None in one of them.

        Raises:
            ValueError: A value is unknown, or does not go with another.
        """
        config = FP8GRPOConfig
        if processes is not None:
            config = type("FP8GRPOConfig", (config,), {"world_size": processes, "device": torch.device("cpu")})
        kinds = TaskArguments, config, ModelConfig, DatasetMixtureConfig
        named = vars(self.values)
        try:
            script, args, model, mixture = (
                kind(**{field.name: named[field.name] for field in fields(kind) if field.init}) for kind in kinds
            )
        except JSONDecodeError as error:
            raise ValueError(f"{error.doc!r} begins like JSON and is none: {error}. Quote it as one word.") from error
        for group in args.groups():
            group.check_adapters(args, model)
        return script, args, model, mixture


class Parser(TrlParser):
    """TRL's parser whose complaints are a `ValueError`, and which looks at the types in a run config, too."""

    def __init__(self, *types: Any, **options: Any):
        super().__init__(*types, **options)
        # --help has no type, nor has --no_... of what is on by default
        self.by_name = {each.dest: each for each in self._option_string_actions.values() if each.type is not None}
        for name in self.by_name.keys() & HELP:
            self.by_name[name].help = HELP[name]

    def read(self, words: list[str], launches: bool = True) -> Asked:
        """What words and the run config that they name ask for; the words win. As `parse_args_and_config`, in two
        steps: how many processes the config is checked for is known after the first.

        Args:
            words: Of a command line.
            launches: Whether words may be accelerate's. A run config's lines may be.

        Raises:
            ValueError: The run config cannot be read, or a name is unknown, or a value is not of its flag's type.
        """
        if launches and words and not words[0].startswith("-"):
            raise ValueError(
                f"{words[0]!r} belongs to no flag. A run config follows --config, as in --config {words[0]}"
            )
        path, given, words = read_run_config(words)
        spelled = {}
        for word in words:
            flag_word = word.partition("=")[0]
            if flag_word.startswith("--") and " " not in flag_word:  # what has spaces is a value
                action = self._option_string_actions.get(flag_word)
                spelled[action.dest if action else _name(flag_word)] = flag_word
        for_launch = launch_names()
        flags = _names(self) | (for_launch if launches else set())
        keys = {*self.by_name, *for_launch, "env"}
        unknown = [(key, keys, f"key {key!r} in {path}") for key in given or () if key not in keys]
        unknown += [(name, flags, f"flag --{name}") for name in spelled if name not in flags]
        if unknown:
            asked = " ".join(f"Unknown {text}{did_you_mean(name, known)}" for name, known, text in unknown)
            raise ValueError(f"{asked} All names: trl-fp8 train --help-all")
        lines = dict(given or {})
        if not isinstance(environment := lines.pop("env", {}), dict):
            raise ValueError(f"env={environment!r} in {path}: it has to be a dictionary of environment variables.")
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        of_file = self.set_defaults_with_config(**lines)
        values, of_words = self.parse_known_args(words)
        if of_words and not launches:
            raise ValueError(f"{of_words[0]!r} belongs to no flag.")
        return Asked(values, given, spelled, (of_file, of_words))

    def set_defaults_with_config(self, **lines: Any) -> list[str]:
        for name in lines.keys() & self.by_name.keys():
            lines[name] = _fitting(lines[name], self.by_name[name])
        return super().set_defaults_with_config(**lines)

    def error(self, message: str) -> NoReturn:
        raise ValueError(_without_spellings(message))


class LaunchParser(CustomArgumentParser):
    """What `accelerate launch` parses its words with, for the same complaints."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"accelerate launch: {_without_spellings(message)}")


def launch_names() -> set[str]:
    """Names of all flags of `accelerate launch`."""
    return _names(launch_command_parser())


def parse_launch(words: list[str]) -> Namespace:
    """What `accelerate launch` makes of its words. `ValueError` for those that it refuses."""
    parser = LaunchParser(prog="accelerate")
    launch_command_parser(parser.add_subparsers())
    return parser.parse_args(["launch", "--quiet", *words])


def make_parser() -> Parser:
    types = TaskArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig
    parser = Parser(types, prog="trl-fp8 train", allow_abbrev=False)
    if not torch.cuda.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)  # many CPUs emulate BF16
    return parser


def help_text(words: list[str]) -> str:
    """Everything that is said of the flags among words, spelled as on the command line or as in YAML; of all flags
    for --help-all. Without any, a first sentence on each that most runs set. `ValueError` for a flag that is none.
    """
    parser = make_parser()
    known, names = parser.by_name, [_name(word) for word in words if word not in ("-h", "--help", "--help-all")]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            raise ValueError(
                f"--help {name}: no flag has this name{'; close are ' + ', '.join(near) if near else ''}."
            )
    if names:
        return "\n".join(_entry(known[name]) for name in names)
    if "--help-all" in words:
        return parser.format_help()
    lines = [HEAD]
    for group, of_group in COMMON.items():
        # A feature that was deleted has no flags
        shown = [known[name] for name in of_group.split() if name in known]
        lines += [f"{group}:", *(_entry(action, first_sentence=True) for action in shown)]
    return "\n".join([*lines, TAIL])


def _entry(action: Action, first_sentence: bool = False) -> str:
    """A flag's line and, indented below it, its text."""
    kind = f"one of {', '.join(map(str, action.choices))}" if action.choices else KINDS.get(action.type.__name__, "")
    stated = [kind] if kind else []
    stated += [] if action.default is None else [f"default {action.default}"]
    text = " ".join((action.help or "").replace("%%", "%").split())
    if first_sentence:
        text = re.split(r"(?<=\w\w[.])\s", text, maxsplit=1)[0]
    about = f" ({'; '.join(stated)})" if stated else ""
    width = min(get_terminal_size((120, 50)).columns, 120)
    said = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([f"  --{action.dest}{about}", *said])


def _fitting(value: Any, action: Action) -> Any:
    """A value of a run config as its flag takes it: one value of a list is a list. `ValueError` for another type."""
    said, kind = f"{action.dest}={value!r} in the run config", getattr(action.type, "__name__", "")
    if value is None and action.type not in (int, float):
        return value
    if action.nargs == "+" and not isinstance(value, list):
        value = [value]
    for item in value if action.nargs == "+" else [value]:
        try:
            if kind in KINDS:
                action.type(str(item))
            elif is_dataclass(action.type):
                action.type(**item)
        except (TypeError, ValueError, ArgumentTypeError) as error:
            raise ValueError(f"{said}: {_wanted(action)}") from error
        if action.choices and item not in action.choices:
            raise ValueError(f"{said}: it has to be one of {[*action.choices]}.")
    return value


def _wanted(action: Action) -> str:
    if is_dataclass(action.type):
        first, *others = (part.name for part in fields(action.type))
        return f"each of them has to have {first}, and may have {', '.join(others)}."
    return f"it has to be {KINDS[action.type.__name__]}, by default {action.default}."


def _without_spellings(message: str) -> str:
    """What argparse says of --a_flag/--a-flag, of --a_flag."""
    return re.sub(r"argument (--[\w-]+)\S*:", r"\1:", message)


def _names(parser: ArgumentParser) -> set[str]:
    """Names of all flags, --no_... included, and those that their values get."""
    actions = parser._option_string_actions
    return {_name(word) for word in actions} | {action.dest for action in actions.values()}


def _name(word: str) -> str:
    return word.removeprefix("--").replace("-", "_")
