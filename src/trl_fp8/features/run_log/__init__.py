"""The run log: fp8_run.jsonl, and the report that is drawn from it."""

from collections.abc import Iterator

from trl_fp8.run.feature import Registration

from .report.report_command import REPORT
from .run_log_flags import RunLogFlags


def _features(trainer) -> Iterator:
    if trainer.args.fp8_run_log:
        from .run_log import RunLog

        yield RunLog(trainer)


REGISTRATION = Registration(flags=RunLogFlags, features=_features, commands=(REPORT,))
