"""`trl-fp8 train`: `trl grpo` with `FP8GRPOTrainer`.

The command splits its words as `trl grpo` does: what the trainer's dataclasses know goes to the script, the rest to
`accelerate launch`, which runs this module once a process.
"""

from typing import TYPE_CHECKING

from trl_fp8.console.quiet import quiet


if TYPE_CHECKING:
    from trl import TrlParser


def launch(words: list[str]) -> int:
    """Start `accelerate launch` on this module; `--accelerate_config` takes a file or the name of one of TRL's."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    *_, from_config, from_words = make_parser().parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    launch_words = resolve_accelerate_config_argument(from_config + from_words)
    launched = launch_command_parser().parse_args([*launch_words, "--module", __name__, *_without(words, from_words)])
    launch_command(launched)
    return 0


def make_parser() -> "TrlParser":
    """Arguments of `trl grpo`, with `FP8GRPOConfig` in place of `GRPOConfig`."""
    import torch
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    from trl_fp8.config import FP8GRPOConfig

    parser = TrlParser((GRPOScriptArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig), prog="trl-fp8 train")
    if not torch.cuda.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)  # many CPUs emulate BF16
    return parser


def main() -> None:
    """What each process runs: TRL's own script, whose trainer is exchanged."""
    quiet()
    import trl
    from trl.scripts.grpo import main as train_as_trl

    from trl_fp8.trainer import FP8GRPOTrainer
    from trl_fp8.upstream.patches import substituted

    script, args, model, dataset = make_parser().parse_args_and_config(fail_with_unknown_args=False)
    with substituted(trl, "GRPOTrainer", FP8GRPOTrainer):
        train_as_trl(script, args, model, dataset)


def _without(words: list[str], removed: list[str]) -> list[str]:
    """`words` without `removed`, which are some of them in the same order."""
    left, kept = list(removed), []
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            kept.append(word)
    return kept


if __name__ == "__main__":
    main()
