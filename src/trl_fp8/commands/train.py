"""`trl-fp8 train`: check the arguments once, and have accelerate start `scripts/grpo.py` on each process."""

import os
import re
import sys
import textwrap
from argparse import Action, Namespace
from difflib import get_close_matches
from pathlib import Path
from shutil import get_terminal_size

from trl_fp8.run.lines import slow_step
from trl_fp8.scripts.grpo import refuse, require_task
from trl_fp8.upstream.patches import substituted


SCRIPT = "trl_fp8.scripts.grpo"
# What `accelerate launch` takes, and warns that it does, where nothing says how to launch
DEFAULTS = "--num_machines 1 --mixed_precision no --dynamo_backend no"
HEAD = """\
usage: trl-fp8 train --config FILE [--accelerate_config FILE] [--FLAG VALUE ...]
       trl-fp8 train --help FLAG [FLAG ...]      all that is said of these

GRPO with FP8 rollouts. FILE is a run config: YAML with a line for each flag, as those in examples/configs; flags after
it win. Flags of `accelerate launch` are handed on to it.

  --accelerate_config
      Which GPUs, and how the policy is spread over them: a file of `accelerate config`, or the name of one of TRL's,
      such as fsdp2 or zero3.
"""
TAIL = (
    "\nEverything else that TRL and transformers know: trl-fp8 train --help-all; every FP8 flag: docs/configuration.md"
)
COMMON = {  # group -> the flags that --help shows
    "model and data": "model_name_or_path dataset_name dataset_config prompt_column solution_column solution_marker "
    "system_prompt reward_funcs",
    "what is FP8": "fp8_weights fp8_base kv_cache_dtype fp8_forward router_replay rollout_correction",
    "engine": "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size",
    "batch": "per_device_train_batch_size gradient_accumulation_steps num_generations max_completion_length",
    "training": "learning_rate max_steps beta loss_type use_peft lora_r",
    "output": "output_dir save_steps report_to resume_from_checkpoint",
}
KINDS = {"int": "an integer", "float": "a number", "string_to_bool": "true or false"}


def launch(words: list[str]) -> int:
    """Start `accelerate launch` with the words of a command line. Return the exit status.

    It is 2 after one line for a user's mistake, here or in a process, and 130 after Ctrl-C. A single process takes the
    place of this one, so that status and signals are its own.
    """
    try:
        if {"-h", "--help", "--help-all"}.intersection(words):
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

    from trl_fp8.scripts.arguments import make_parser, parse_launch

    parser = make_parser()
    arguments = parser.read(words)
    launch_words = []
    for name, value in (arguments.run_config or {}).items():
        if name not in parser.by_name and name != "env" and value is not False:  # a switch of accelerate's, left out
            launch_words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    launch_words = resolve_accelerate_config_argument([*launch_words, *arguments.other_words])
    script_words = ["--quiet", *launch_words, "--module", SCRIPT, *words]
    launched = parse_launch(script_words)
    file = launched.config_file or (default_config_file if Path(default_config_file).is_file() else None)
    try:
        processes = launched.num_processes or (load_config_from_file(file).num_processes if file else 0)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--accelerate_config {file}: {error}") from error
    if file is None:  # accelerate would start one process where it sees no GPUs
        processes = processes or max(torch.cuda.device_count(), 1)
        chosen = (launched.cpu, launched.tpu, launched.use_fsdp, launched.use_deepspeed, launched.use_megatron_lm)
        multi_gpu = ["--multi_gpu"] if processes > 1 and not any(chosen) else []
        launched = parse_launch(["--num_processes", str(processes), *DEFAULTS.split(), *multi_gpu, *script_words])
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
    """Return all that is said of the flags among words; without any, a first sentence on each that most runs set.

    Flags may be spelled as on the command line or as in YAML. `ValueError` for a flag that is none.
    """
    from trl_fp8.scripts.arguments import make_parser, name_of

    parser = make_parser()
    known, names = parser.by_name, [name_of(word) for word in words if word not in ("-h", "--help", "--help-all")]
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
    for group, flags in COMMON.items():
        lines += [f"{group}:", *(_entry(known[name], first_sentence=True) for name in flags.split() if name in known)]
    return "\n".join([*lines, TAIL])


def _entry(action: Action, first_sentence: bool = False) -> str:
    """Return a flag's line and, indented below it, its text."""
    kind = f"one of {', '.join(map(str, action.choices))}" if action.choices else KINDS.get(action.type.__name__, "")
    facts = [kind] if kind else []
    facts += [] if action.default is None else [f"default {action.default}"]
    text = " ".join((action.help or "").replace("%%", "%").split())
    if first_sentence:
        text = re.split(r"(?<=\w\w[.])\s", text, maxsplit=1)[0]
    about = f" ({'; '.join(facts)})" if facts else ""
    width = min(get_terminal_size((120, 50)).columns, 120)
    lines = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([f"  --{action.dest}{about}", *lines])
