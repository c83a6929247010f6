"""The run log: fp8_run.jsonl, and the report that is drawn from it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_fp8.run.registration import Command, Registration

from .report import report_command
from .run_log_flags import RunLogFlags


if TYPE_CHECKING:
    from trl_fp8.run.feature import Feature


def _features(trainer) -> "Iterator[Feature]":
    if trainer.args.fp8_run_log:
        from .run_log import RunLog

        yield RunLog(trainer)


_REPORT = Command(
    "report", "draw reward, mismatch, KV scales and times of runs", report_command.add_arguments, report_command.run
)
REGISTRATION = Registration(flags=RunLogFlags, features=_features, commands=(_REPORT,))
