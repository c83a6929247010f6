"""Truncated sampling: log-probs over the tokens that top-k, top-p and min-p left."""

from collections.abc import Iterator

from trl_fp8.run.feature import Registration

from .sampling_flags import SamplingFlags


def _features(trainer) -> Iterator:
    if trainer.args.survivors_returned:
        from .truncation import Truncation

        yield Truncation(trainer)


REGISTRATION = Registration(flags=SamplingFlags, features=_features)
