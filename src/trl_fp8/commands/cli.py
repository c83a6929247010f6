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
    """Run a command. Return the exit status: 2 after a user's mistake, which is reported in one line.

    After Ctrl-C the process exits with 130.
    """
    quiet()
    words = sys.argv[1:] if words is None else words
    name = words[0] if words else ""
    with ended_by_ctrl_c(lambda: "stopped"):
        if name in ("train", "plan", "serve"):  # commands that import TRL or vLLM
            try:
                require_versions()
            except ImportError as error:
                return refuse(error)
        if name == "train":
            return train.launch(words[1:])
        if name == "serve":
            from . import serve  # its `run` replaces this process by vLLM's server

            return serve.run(words[1:])
        try:
            if name == "doctor":
                return doctor.run(words[1:])
            text = _plan(words[1:]) if name == "plan" else _command(words)
            print(text, flush=True)
        except BrokenPipeError:
            # The reader of stdout (`| head`) is gone. Python flushes stdout at exit, so let that go to /dev/null
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, OSError) as error:  # OSError: transformers found no such model, or a disk is full
            return refuse(error)
    return 0


def _plan(words: list[str]) -> str:
    # DeepSpeed logs to stdout when it is imported, but stdout must hold only the plan (--json)
    with redirect_stdout(sys.stderr):
        from . import plan_command  # imports torch, so `ended_by_ctrl_c` must be entered before

        return plan_command.text_of(words)


def _command(words: list[str]) -> str:
    """Run a command of fp8_checkpoints.py or of a feature. Return the text to print; without words return the help."""
    parser = argparse.ArgumentParser(prog="trl-fp8", description="FP8 rollouts for TRL's GRPOTrainer")
    parser.add_argument("--version", action="version", version=f"trl-fp8 {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    # `main` runs these four commands. They are added here only to be listed in the help
    subparsers.add_parser(
        "plan", help="say what of a model would be FP8, and what fits on which GPUs, with which flags"
    )
    subparsers.add_parser("train", help="GRPO with FP8 rollouts, with the arguments of `trl grpo` and the FP8 flags")
    subparsers.add_parser("doctor", help="check this machine, a verdict a line: the first thing to run on a new one")
    subparsers.add_parser("serve", help="a vLLM server for the rollouts of a trainer with vllm_mode='server'")
    feature_commands = [command for registration in registrations() for command in registration.commands]
    for command in (*COMMANDS, *feature_commands):
        subparser = subparsers.add_parser(command.word, help=command.text, description=command.text)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    if not words:
        return parser.format_help().rstrip()
    options, unknown = parser.parse_known_args(words)
    if unknown:  # let the command's own parser report them, with the usage of the command
        subparsers.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
