"""`trl-fp8`: the console script. `trl-fp8 --help` lists its commands."""

import argparse
import os
import sys
from contextlib import redirect_stdout

from trl_fp8 import __version__
from trl_fp8.features import registrations
from trl_fp8.run.interrupt import ended_by_ctrl_c
from trl_fp8.scripts.grpo import refuse
from trl_fp8.upstream.quiet import quiet
from trl_fp8.upstream.versions import require_versions

from . import doctor, train
from .fp8_checkpoints import COMMANDS


def main(words: list[str] | None = None) -> int:
    """Run a command. Return the exit status: 2 after one line for a user's mistake, 130 after Ctrl-C."""
    quiet()
    words = sys.argv[1:] if words is None else words
    with ended_by_ctrl_c(lambda: "stopped"):
        if words[:1] in (["train"], ["plan"], ["serve"]):  # their flags are TRL's, too
            try:
                require_versions()
            except ImportError as error:
                return refuse(error)
        if words[:1] == ["train"]:
            return train.launch(words[1:])
        if words[:1] == ["serve"]:
            from . import serve  # its process becomes vLLM's

            return serve.run(words[1:])
        try:
            if words[:1] == ["doctor"]:
                return doctor.run(words[1:])
            print(_plan(words[1:]) if words[:1] == ["plan"] else _command(words), flush=True)
        except BrokenPipeError:  # `| head` has seen enough; what Python flushes at its end goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, OSError) as error:  # OSError: transformers found no such model, or a disk is full
            return refuse(error)
    return 0


def _plan(words: list[str]) -> str:
    with redirect_stdout(sys.stderr):  # DeepSpeed, for one, logs to stdout, which --json is alone on
        from . import plan_command  # imports torch, which `ended_by_ctrl_c` has to come before

        return plan_command.run(words)


def _command(words: list[str]) -> str:
    """Return what a command prints whose parser is argparse's own; without words the help."""
    parser = argparse.ArgumentParser(prog="trl-fp8", description="FP8 rollouts for TRL's GRPOTrainer")
    parser.add_argument("--version", action="version", version=f"trl-fp8 {__version__}")
    added = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    added.add_parser("plan", help="say what of a model would be FP8, and what fits on which GPUs, with which flags")
    added.add_parser("train", help="GRPO with FP8 rollouts, with the arguments of `trl grpo` and the FP8 flags")
    added.add_parser("doctor", help="check this machine, a verdict a line: the first thing to run on a new one")
    added.add_parser("serve", help="a vLLM server for the rollouts of a trainer with vllm_mode='server'")
    of_features = [each for registration in registrations() for each in registration.commands]
    for each in (*COMMANDS, *of_features):
        command = added.add_parser(each.word, help=each.text, description=each.text)
        each.add_arguments(command)
        command.set_defaults(run=each.run)
    if not words:
        return parser.format_help().rstrip()
    options, unknown = parser.parse_known_args(words)
    if unknown:  # with the usage of the command, not that of all
        added.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
