"""Router replay: the trainer's routers use the experts that the engine chose."""

from collections.abc import Iterator

from trl_fp8.run.feature import Registration

from .router_flags import RouterFlags


def _features(trainer) -> Iterator:
    if trainer.args.routes_returned:
        from .routes import Routes

        yield Routes(trainer)


REGISTRATION = Registration(flags=RouterFlags, features=_features)
