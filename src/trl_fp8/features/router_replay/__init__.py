"""Router replay: the trainer's routers use the experts that the engine chose."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_fp8.run.registration import Registration

from . import router_patches  # noqa: F401, adds to the register of patches
from .router_flags import RouterFlags


if TYPE_CHECKING:
    from trl_fp8.run.feature import Feature


def _features(trainer) -> "Iterator[Feature]":
    args = trainer.args
    if args.routes_returned:
        from .kl_floor import KLFloor
        from .routes import Routes

        yield Routes(trainer)
        if args.beta and args.router_replay == "rollout" and not args.policy_calls_engine:
            yield KLFloor(trainer)


REGISTRATION = Registration(flags=RouterFlags, features=_features)
