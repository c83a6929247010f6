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
        "Whether output_dir/fp8_run.jsonl is written, from which `trl-fp8 report` draws: facts of the "
        "run, its logs, and of each generation a histogram of log-ratios, some pairs of log-probs and the KV "
        "scales (a few KiB).",
    )


def _features(trainer) -> Iterator:
    if trainer.args.fp8_run_log:
        from .run_log import RunLog

        yield RunLog(trainer)


def _add_report_arguments(parser: ArgumentParser) -> None:
    runs = "output_dir of a run, or the log in it; several are compared"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    output = "where report.html goes (default: RUN/report, of several RUN report beside the first)"
    parser.add_argument("--output", metavar="FOLDER", help=output)


def _report(options: Namespace) -> str:
    """Write the report of runs, also of those that go on. Return what the command prints."""
    try:
        from .report.page import write_report
    except ModuleNotFoundError as error:  # matplotlib, an extra
        raise ValueError(error) from error
    from .log_file import earlier_logs, file_of, read_runs

    folders = dict.fromkeys(file_of(run).parent for run in options.runs)
    first = next(iter(folders))
    beside = first / "report" if len(options.runs) == 1 else first.resolve().parent / "report"
    page = write_report(read_runs(options.runs), options.output or beside)
    written = f"written: {page} (open it in a browser), and its pictures beside it as PNG"
    earlier = [str(log) for folder in folders for log in earlier_logs(folder) if str(log) not in options.runs]
    if earlier:
        written += f"\nearlier runs in the same folder, which `trl-fp8 report` takes, too: {', '.join(earlier)}"
    return written


REPORT = Command("report", "draw reward, mismatch, KV scales and times of runs", _add_report_arguments, _report)
REGISTRATION = Registration(flags=RunLogFlags, features=_features, commands=(REPORT,))
