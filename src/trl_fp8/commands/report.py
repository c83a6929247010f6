"""`trl-fp8 report`: what runs came to, also while they go on."""

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; several are compared")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="where report.html goes (default: RUN/report, of several RUN report beside the first)",
    )


def run(given: Namespace) -> str:
    try:
        from trl_fp8.report import canvas  # noqa: F401
    except ModuleNotFoundError as error:  # matplotlib, an extra
        raise ValueError(error) from error
    from trl_fp8.report.page import write_report
    from trl_fp8.run.file import read_runs, run_folder

    first = run_folder(given.runs[0])
    beside = first / "report" if len(given.runs) == 1 else first.resolve().parent / "report"
    page = write_report(read_runs(given.runs), given.output or beside)
    return f"written: {page} (open it in a browser), and its pictures beside it as PNG"
