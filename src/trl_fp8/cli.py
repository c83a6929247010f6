"""`trl-fp8`: the console script.

trl-fp8 plan MODEL              what of MODEL would be FP8, and what fits into a GPU then, from its config alone
trl-fp8 train --config x.yaml   GRPO with FP8 rollouts: the arguments of `trl grpo` and the FP8 flags,
                                through accelerate
trl-fp8 report RUN [RUN ...]    pictures and an HTML page of finished or running runs
trl-fp8 export MODEL FOLDER     MODEL as an FP8 checkpoint, without KV cache scales (those come from a training run)
trl-fp8 verify FOLDER           whether an exported checkpoint still is what was written
trl-fp8 push FOLDER REPO_ID     an exported checkpoint to the Hub
"""

import argparse
import sys

from .commands import checkpoints, plan, report, train
from .console.quiet import quiet


# word -> (help, arguments, what it does)
COMMANDS = {
    "plan": ("show which modules of a model would be FP8, and what that saves", plan.add_arguments, plan.run),
    "report": ("draw reward, mismatch, KV scales and times of runs", report.add_arguments, report.run),
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
    if words[:1] == ["train"]:  # its flags are TRL's, and its --help too
        return train.launch(words[1:])
    parser = argparse.ArgumentParser(prog="trl-fp8", description="FP8 rollouts for TRL's GRPOTrainer")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="GRPO with FP8 rollouts, with the arguments of `trl grpo` and the FP8 flags")
    for word, (text, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(word, help=text, description=text)
        add_arguments(command)
        command.set_defaults(run=run)
    given = parser.parse_args(words)
    try:
        print(given.run(given))
    except (ValueError, OSError) as error:  # OSError: transformers found no such model, or a disk is full
        print(f"trl-fp8: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
