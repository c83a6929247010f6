"""`trl-fp8 report`: what runs came to, also while they go on."""

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; several are compared")
    parser.add_argument("--output", metavar="FOLDER", help="where report.html goes (default: FIRST_RUN/report)")


def run(given: Namespace) -> str:
    from trl_fp8.report.page import write_report
    from trl_fp8.run.file import read_run

    page = write_report([read_run(folder) for folder in given.runs], given.output or Path(given.runs[0], "report"))
    return f"written: {page} and {len(list(page.parent.glob('*.png')))} pictures beside it"
