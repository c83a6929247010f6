"""Router replay: the trainer's routers use the experts that the engine chose."""

from collections.abc import Iterator

from trl_fp8.run.registration import Registration
from trl_fp8.upstream.patches import ON_INSTANCES, register

from .router_flags import RouterFlags


register(
    ON_INSTANCES,
    {
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter": (
            "features/router_replay/replay.py",
            "The class of routers, this one and its like: they take no choice.",
        ),
    },
)


def _features(trainer) -> Iterator:
    if trainer.args.routes_returned:
        from .routes import Routes

        yield Routes(trainer)


REGISTRATION = Registration(flags=RouterFlags, features=_features)
