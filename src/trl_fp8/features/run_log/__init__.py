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
    else:  # the report of an earlier run, whose log is fp8_run.1.jsonl, does not overwrite that of the current run
        number = logs[0].stem.removeprefix("fp8_run")  # such as ".1"; empty for the current run
        default_output = logs[0].with_name(f"report{number}")
    page = write_report(read_runs(options.runs), options.output or default_output)
    written = f"written: {page} (open it in a browser), and its pictures beside it as PNG"

    drawn = {log.resolve() for log in logs}  # resolved, because several paths may lead to one file
    not_drawn = {}  # resolved path -> path for the user
    for run_log in logs:
        for earlier in earlier_logs(run_log.parent):
            if earlier.resolve() not in drawn:
                not_drawn[earlier.resolve()] = str(earlier)
    if not_drawn:
        written += f"\nnot drawn: earlier runs in the same folder, also valid as RUN: {', '.join(not_drawn.values())}"
    return written


REPORT = Command("report", "draw reward, mismatch, KV scales and times of runs", _add_report_arguments, _report)
REGISTRATION = Registration(flags=RunLogFlags, features=_features, commands=(REPORT,))
