"""The run log: fp8_run.jsonl, and the report that is drawn from it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from trl_fp8.run.feature import Command, FlagGroup, Registration, flag


@dataclass
class RunLogFlags(FlagGroup):
    """Flag of the run's own log."""

    fp8_run_log: bool = flag(
        True,
        "Whether output_dir/fp8_run.jsonl is written, the source of `trl-fp8 report`. It has facts of the run, its "
        "logs and, for each generation, a histogram of log-ratios, some pairs of log-probs and the KV scales (a few "
        "KiB).",
    )


def _features(trainer) -> Iterator:
    if trainer.args.fp8_run_log:
        from .run_log import RunLog

        yield RunLog(trainer)


def _add_report_arguments(parser: ArgumentParser) -> None:
    runs_help = "output_dir of a run, or a log in it; several runs are compared"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs_help)
    output_help = (
        "where report.html is written (default: RUN/report, or report.1 beside it for the log fp8_run.1.jsonl; for "
        "several runs a folder `report` beside the first)"
    )
    parser.add_argument("--output", metavar="FOLDER", help=output_help)


def _report(options: Namespace) -> str:
    """Write the report of runs, finished or not. Return what the command prints."""
    try:
        from .report.page import write_report
    except ModuleNotFoundError as error:  # matplotlib, which the extra `report` installs
        raise ValueError(error) from error
    from .log_file import earlier_logs, file_of, read_runs

    logs = [file_of(run) for run in options.runs]
    if len(logs) > 1:
        default_output = logs[0].parent.resolve().parent / "report"
    else:  # an earlier run, whose log is fp8_run.1.jsonl, does not overwrite the report of the current one
        stem = logs[0].stem
        number = stem.removeprefix("fp8_run") if stem.startswith("fp8_run") else ""
        default_output = logs[0].with_name(f"report{number}")
    page = write_report(read_runs(options.runs), options.output or default_output)
    written = f"written: {page} (open it in a browser), and its pictures beside it as PNG"

    # Compare resolved paths, because several paths may lead to one file
    drawn = {log.resolve() for log in logs}
    earlier = {log.resolve(): str(log) for run_log in logs for log in earlier_logs(run_log.parent)}
    not_drawn = [name for log, name in earlier.items() if log not in drawn]
    if not_drawn:
        written += f"\nnot drawn: earlier runs in the same folder, also valid as RUN: {', '.join(not_drawn)}"
    return written


REPORT = Command("report", "draw reward, mismatch, KV scales and times of runs", _add_report_arguments, _report)
REGISTRATION = Registration(flags=RunLogFlags, features=_features, commands=(REPORT,))
