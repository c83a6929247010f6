"""`trl-fp8 train`: check the arguments once, and have accelerate start `scripts/grpo.py` on each process."""

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from copy import copy
from importlib.resources import files
from pathlib import Path
from shutil import get_terminal_size

from trl_fp8.run.lines import did_you_mean, slow_step
from trl_fp8.scripts.grpo import refuse, require_task
from trl_fp8.upstream.patches import substituted


SCRIPT = "trl_fp8.scripts.grpo"
# What `accelerate launch` takes, and warns that it does, where nothing says how to launch
DEFAULTS = "--num_machines 1 --mixed_precision no --dynamo_backend no"
HELP = ("-h", "--help", "--help-all")
HEAD = """\
usage: trl-fp8 train --config FILE [--accelerate_config FILE] [--FLAG VALUE ...]
       trl-fp8 train --help [FLAG ...]
       trl-fp8 train --help-all                  all that TRL and transformers know; FP8 flags: docs/configuration.md

GRPO with FP8 rollouts. FILE is a run config: YAML with a line for each flag, as those in examples/configs; flags after
it win. Flags of `accelerate launch` are handed on to it. --accelerate_config says which GPUs, and how the policy is
spread over them: a file of `accelerate config`, or the name of one of TRL's, such as fsdp2 or zero3.

"""
COMMON = {  # group -> the flags that --help shows
    "model and data": "model_name_or_path dataset_name dataset_config prompt_column solution_column solution_marker "
    "system_prompt reward_funcs",
    "what is FP8": "fp8_weights fp8_base kv_cache_dtype fp8_forward router_replay rollout_correction",
    "engine": "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size",
    "batch": "per_device_train_batch_size gradient_accumulation_steps num_generations max_completion_length",
    "training": "learning_rate max_steps beta use_peft lora_r",
    "output": "output_dir save_steps report_to resume_from_checkpoint",
}


def launch(words: list[str]) -> int:
    """Start `accelerate launch` with the words of a command line. Return the exit status.

    It is 2 after one line for a user's mistake, here or in a process, and 130 after Ctrl-C. A single process takes the
    place of this one, so that status and signals are its own.
    """
    try:
        if set(HELP).intersection(words):
            sys.stdout.write(help_text(words))
            return 0
        with slow_step("Importing TRL, and checking the arguments."):
            launched = launch_arguments(words)
    except (ValueError, OSError) as error:
        return refuse(error)
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        with substituted(accelerate_launch, "simple_launcher", _become):
            accelerate_launch.launch_command(launched)
    except ChildFailedError as error:
        if 2 not in [failure.exitcode for failure in error.failures.values()]:
            raise
        return 2  # the process has said why
    except SignalException as error:
        os._exit(128 + error.sigval)  # the processes have ended; taking torch apart would take seconds
    return 0


def launch_arguments(words: list[str]) -> Namespace:
    """Check all arguments. Return those of `accelerate launch`, with all words for the script, which reads its own."""
    import torch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from trl_fp8.scripts.arguments import Parser, parse_launch

    parser = Parser()
    arguments = parser.read(words)
    launch_words = []
    for name, value in (arguments.run_config or {}).items():
        if name not in parser.by_name and name != "env" and value is not False:  # a switch of accelerate's, left out
            launch_words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    try:
        launch_words = resolve_accelerate_config_argument([*launch_words, *arguments.other_words])
    except ValueError as error:
        names = sorted(file.name.removesuffix(".yaml") for file in files("trl.accelerate_configs").iterdir())
        usable = ", ".join(name for name in names if not name.startswith(("_", "fsdp1")))  # FSDP1 is refused
        raise ValueError(f"{error} TRL's are {usable}.") from error
    launch_words += ["--quiet", "--module", SCRIPT, *words]
    launched = parse_launch(launch_words)
    # As many processes as accelerate will start: batches are checked for them
    file = launched.config_file or (default_config_file if Path(default_config_file).is_file() else None)
    if file is None:  # accelerate would start one process where it sees no GPUs
        processes = launched.num_processes or max(torch.cuda.device_count(), 1)
        chosen = (launched.cpu, launched.tpu, launched.use_fsdp, launched.use_deepspeed, launched.use_megatron_lm)
        multi_gpu = ["--multi_gpu"] if processes > 1 and not any(chosen) else []
        launched = parse_launch(["--num_processes", str(processes), *DEFAULTS.split(), *multi_gpu, *launch_words])
    else:
        try:
            processes = launched.num_processes or load_config_from_file(file).num_processes
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"--accelerate_config {file}: {error}") from error
    script, _, model, mixture = arguments.configs(processes)
    if launched.training_script != SCRIPT:
        raise ValueError(
            f"{launched.training_script!r} belongs to no flag. A run config follows --config, and what accelerate "
            "shall do may stand in a file, behind --accelerate_config."
        )
    require_task(script, model, mixture)
    return launched


def _become(args: Namespace) -> None:
    """Replace accelerate's launcher of one process, which waits for a child and makes 1 of its exit status."""
    from accelerate.utils import prepare_simple_launcher_cmd_env

    words, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(words[0], words, environment)  # noqa: S606, no shell: words are passed on as they are


def help_text(words: list[str]) -> str:
    """Return the help on the flags among words, spelled as on the command line or as in YAML; without any, on those
    that most runs set. `ValueError` for a flag that is none.
    """
    from trl_fp8.scripts.arguments import Parser, name_of

    parser = Parser()
    if "--help-all" in words:
        return parser.format_help()
    names = [name_of(word) for word in words if word not in HELP]
    for name in names:
        if name not in parser.by_name:
            raise ValueError(f"--help {name}: no flag has this name{did_you_mean(name, parser.by_name)}")
    width = min(get_terminal_size((120, 50)).columns, 120)
    formatter = ArgumentDefaultsHelpFormatter(parser.prog, max_help_position=6, width=width)
    for group, flags in {None: " ".join(names)}.items() if names else COMMON.items():
        formatter.start_section(group)
        for name in flags.split():
            if name in parser.by_name:  # the flags of a feature are there with it
                action = copy(parser.by_name[name])
                vars(action).update(option_strings=[f"--{name}"], metavar=None if action.choices else "VALUE")
                formatter.add_argument(action)
        formatter.end_section()
    return formatter.format_help() if names else HEAD + formatter.format_help()
