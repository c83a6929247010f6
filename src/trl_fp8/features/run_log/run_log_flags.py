"""The flag of the run log."""

from dataclasses import dataclass

from trl_fp8.run.feature import FlagGroup, flag


@dataclass
class RunLogFlags(FlagGroup):
    """Flag of the run's own log."""

    fp8_run_log: bool = flag(
        True,
        "Whether output_dir/fp8_run.jsonl is written, from which `trl-fp8 report` draws: facts of the "
        "run, its logs, and of each generation a histogram of log-ratios, some pairs of log-probs and the KV "
        "scales (a few KiB).",
    )
