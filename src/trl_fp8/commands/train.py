"""`trl-fp8 train`: check the arguments once, and have accelerate start `scripts/grpo.py` on each process."""

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from copy import copy
from importlib.resources import files
from pathlib import Path
from shutil import get_terminal_size

from trl_fp8.run.lines import did_you_mean, slow_step
from trl_fp8.scripts.grpo import refuse, require_task
from trl_fp8.upstream.patches import substituted


SCRIPT = "trl_fp8.scripts.grpo"
# The defaults of `accelerate launch`, passed on because accelerate warns of each flag that is not set
DEFAULTS = "--num_machines 1 --mixed_precision no --dynamo_backend no"
HELP = ("-h", "--help", "--help-all")
HEAD = """\
usage: trl-fp8 train --config FILE [--accelerate_config FILE] [--FLAG VALUE ...]
       trl-fp8 train --help [FLAG ...]
       trl-fp8 train --help-all                  all that TRL and transformers know; FP8 flags: docs/configuration.md

GRPO with FP8 rollouts. FILE is a run config: YAML with a line for each flag, like those in examples/configs. Flags on
the command line override it. Flags of `accelerate launch` are passed on to accelerate. --accelerate_config says which
GPUs are used, and how the policy is sharded: a file of `accelerate config`, or the name of one of TRL's, such as fsdp2
or zero3.

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

    The status is 2 after a user's mistake, which this command or a process of the run has reported in one line. It is
    130 after Ctrl-C. A run of one process replaces this process: its exit status and signals are the command's.
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
        return 2  # the process has printed the reason
    except ValueError as error:  # flags that contradict each other, which accelerate finds before it starts a process
        return refuse(ValueError(f"accelerate launch: {error}"))
    except SignalException as error:
        os._exit(128 + error.sigval)  # the run's processes have ended; a normal exit would take seconds for torch
    return 0


def launch_arguments(words: list[str]) -> Namespace:
    """Check all arguments. Return those of `accelerate launch`, which passes all of `words` on to the script."""
    import torch
    import yaml
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from trl_fp8.scripts.arguments import Parser, parse_launch, words_for_accelerate

    parser = Parser()
    arguments = parser.read(words)
    for_accelerate = {}
    for name, value in (arguments.run_config or {}).items():
        if name not in parser.by_name and name != "env":
            for_accelerate[name] = value
    launch_words = _with_one_accelerate_config([*words_for_accelerate(for_accelerate), *arguments.other_words])
    try:
        launch_words = resolve_accelerate_config_argument(launch_words)
    except ValueError as error:
        names = sorted(file.name.removesuffix(".yaml") for file in files("trl.accelerate_configs").iterdir())
        usable = ", ".join(name for name in names if not name.startswith(("_", "fsdp1")))  # FSDP1 is refused
        raise ValueError(f"{error} TRL's are {usable}.") from error
    launch_words += ["--quiet", "--module", SCRIPT, *words]
    launched = parse_launch(launch_words)
    # Find the number of processes that accelerate will start: the config checks the batch size against it
    config_file = launched.config_file
    if not config_file and Path(default_config_file).is_file():
        config_file = default_config_file
    if not config_file:
        processes = launched.num_processes or max(torch.cuda.device_count(), 1)
        defaults = ["--num_processes", str(processes), *DEFAULTS.split()]
        backends = (launched.cpu, launched.tpu, launched.use_fsdp, launched.use_deepspeed, launched.use_megatron_lm)
        # Without --multi_gpu accelerate starts one process on a host without GPUs, whatever --num_processes says
        if processes > 1 and not any(backends):
            defaults.append("--multi_gpu")
        launched = parse_launch([*defaults, *launch_words])
    else:
        try:
            launcher_config = load_config_from_file(config_file)
            processes = launched.num_processes or launcher_config.num_processes
        except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise ValueError(f"--accelerate_config {config_file}: {error}") from error
        if processes is not None and processes < 1:  # accelerate's default is -1; None: as many as there are GPUs
            raise ValueError(f"--accelerate_config {config_file} has no num_processes. Add it, or --num_processes.")
    script, _, model, mixture = arguments.configs(processes)
    if launched.training_script != SCRIPT:
        raise ValueError(
            f"{launched.training_script!r} is not the value of any flag. Pass a run config as --config FILE, and a "
            "config of accelerate as --accelerate_config FILE."
        )
    # Libraries in this process have read variables such as HF_HOME already, before the run config set them. The
    # processes of the run begin with these variables, and make the same checks
    environment = (arguments.run_config or {}).get("env") or {}
    if not any(str(name).startswith("HF_") for name in environment):
        require_task(script, model, mixture)
    return launched


def _with_one_accelerate_config(words: list[str]) -> list[str]:
    """Return words of `accelerate launch` in which only the last --accelerate_config is left, as two words.

    So the command line overrides the run config. TRL reads only the first --accelerate_config, and knows neither
    --accelerate_config=NAME nor --accelerate-config.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", "--accelerate-config", nargs="?", const="")
    options, other_words = parser.parse_known_args(words)
    if options.accelerate_config is None:
        return words
    value = [options.accelerate_config] if options.accelerate_config else []
    return [*other_words, "--accelerate_config", *value]


def _become(args: Namespace) -> None:
    """Replace this process by the script. accelerate's own launcher starts a child and turns any failure into 1."""
    from accelerate.utils import prepare_simple_launcher_cmd_env

    words, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(words[0], words, environment)  # noqa: S606, no shell: words are passed on as they are


def help_text(words: list[str]) -> str:
    """Return the help for the flags named after --help (as `--max-steps` or `max_steps`), by default for `COMMON`.

    Raises `ValueError` for an unknown flag.
    """
    from trl_fp8.scripts.arguments import Parser, name_of

    parser = Parser()
    if "--help-all" in words:
        return parser.format_help()
    first_help = min(words.index(word) for word in HELP if word in words)
    names = [name_of(word) for word in words[first_help + 1 :] if word not in HELP]
    for name in names:
        if name not in parser.by_name:
            raise ValueError(f"--help {name}: no flag has this name{did_you_mean(name, parser.by_name)}")
    width = min(get_terminal_size((120, 50)).columns, 120)
    formatter = ArgumentDefaultsHelpFormatter(parser.prog, max_help_position=6, width=width)
    shown = {None: " ".join(names)} if names else COMMON
    for group, flags in shown.items():
        formatter.start_section(group)
        for name in flags.split():
            if name in parser.by_name:  # absent if the folder of its feature was deleted
                action = copy(parser.by_name[name])
                vars(action).update(option_strings=[f"--{name}"], metavar=None if action.choices else "VALUE")
                formatter.add_argument(action)
        formatter.end_section()
    return formatter.format_help() if names else HEAD + formatter.format_help()
