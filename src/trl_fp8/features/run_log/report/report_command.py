"""`trl-fp8 report`: what runs came to, also while they go on."""

from argparse import ArgumentParser, Namespace

from trl_fp8.run.feature import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output_dir of a run, or the log in it; several are compared"
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="where report.html goes (default: RUN/report, of several RUN report beside the first)",
    )


def _run(given: Namespace) -> str:
    try:
        from .page import write_report
    except ModuleNotFoundError as error:  # matplotlib, an extra
        raise ValueError(error) from error
    from trl_fp8.features.run_log.log_file import earlier_logs, file_of, read_runs

    folders = dict.fromkeys(file_of(run).parent for run in given.runs)
    first = next(iter(folders))
    beside = first / "report" if len(given.runs) == 1 else first.resolve().parent / "report"
    page = write_report(read_runs(given.runs), given.output or beside)
    written = f"written: {page} (open it in a browser), and its pictures beside it as PNG"
    if others := [str(log) for folder in folders for log in earlier_logs(folder) if str(log) not in given.runs]:
        written += f"\nearlier runs in the same folder, which `trl-fp8 report` takes, too: {', '.join(others)}"
    return written


REPORT = Command("report", "draw reward, mismatch, KV scales and times of runs", _add_arguments, _run)
