"""`trl-fp8`: the console script.

trl-fp8 plan MODEL              what of MODEL would be FP8, and what fits on which GPUs then, from its config alone;
                                or of a run config: trl-fp8 plan --config x.yaml
trl-fp8 train --config x.yaml   GRPO with FP8 rollouts: the arguments of `trl grpo` and the FP8 flags,
                                through accelerate
trl-fp8 report RUN [RUN ...]    pictures and an HTML page of finished or running runs
trl-fp8 export MODEL FOLDER     MODEL as an FP8 checkpoint, without KV cache scales (those come from a training run)
trl-fp8 verify FOLDER           whether an exported checkpoint still is what was written
trl-fp8 push FOLDER REPO_ID     an exported checkpoint to the Hub
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from trl_fp8.features import registrations
from trl_fp8.upstream.quiet import quiet
from trl_fp8.upstream.versions import require_versions

from . import fp8_checkpoints as checkpoints
from . import train
from .interrupt import ended_by_ctrl_c


# word -> (help, arguments, what it does); further ones come from features
COMMANDS = {
    "export": (
        "write a model as an FP8 checkpoint that vLLM and transformers load",
        checkpoints.add_export_arguments,
        checkpoints.export,
    ),
    "verify": (
        "compare an exported checkpoint with its checksums",
        checkpoints.add_verify_arguments,
        checkpoints.verify,
    ),
    "push": ("upload an exported checkpoint to the Hub", checkpoints.add_push_arguments, checkpoints.push),
}


def main(words: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    quiet()
    words = sys.argv[1:] if words is None else words
    with ended_by_ctrl_c(lambda: "stopped"):
        return _run(words)


def _run(words: list[str]) -> int:
    if words[:1] in (["train"], ["plan"]):  # their flags are TRL's, too
        try:
            require_versions()
        except ImportError as error:
            print(f"trl-fp8: {error}", file=sys.stderr)
            return 2
        return train.launch(words[1:]) if words[0] == "train" else _answered(lambda: _plan(words[1:]))
    parser, commands = _parsers()
    if not words:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(words)
    if unknown:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return _answered(lambda: options.run(options))


def _plan(words: list[str]) -> str:
    with redirect_stdout(sys.stderr):  # DeepSpeed, for one, logs to stdout, which --json is alone on
        from . import plan_command  # imports torch, which `ended_by_ctrl_c` has to come before

        return plan_command.help_text() if {"-h", "--help"}.intersection(words) else plan_command.run(words)


def _answered(answer: Callable[[], str]) -> int:
    """Print an answer, or in a line why there is none, and return the exit status."""
    try:
        print(answer(), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what Python flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:  # OSError: transformers found no such model, or a disk is full
        print(f"trl-fp8: {error}", file=sys.stderr)
        return 2
    return 0


class Version(argparse.Action):
    """Prints the installed version and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"trl-fp8 {version('trl-fp8')}")
        parser.exit()


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all words, and those of each command, whose usage its errors show."""
    parser = argparse.ArgumentParser(prog="trl-fp8", description="FP8 rollouts for TRL's GRPOTrainer")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version")
    added = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    added.add_parser("plan", help="say what of a model would be FP8, and what fits on which GPUs, with which flags")
    added.add_parser("train", help="GRPO with FP8 rollouts, with the arguments of `trl grpo` and the FP8 flags")
    commands = {}
    of_features = [each for registration in registrations() for each in registration.commands]
    known = COMMANDS | {each.word: (each.text, each.add_arguments, each.run) for each in of_features}
    for word, (text, add_arguments, run) in known.items():
        commands[word] = added.add_parser(word, help=text, description=text)
        add_arguments(commands[word])
        commands[word].set_defaults(run=run)
    return parser, commands


if __name__ == "__main__":
    sys.exit(main())
