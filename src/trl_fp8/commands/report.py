"""`trl-fp8 report`: what runs came to."""

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run")


def run(given: Namespace) -> str:
    raise ValueError("not yet")
