"""One forward: the trainer computes with the engine's kernels, on the engine's tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

from trl_fp8.run.registration import Construction, Registration

from . import forward_patches  # noqa: F401, adds to the register of patches
from .forward_flags import ForwardFlags


@contextmanager
def _construct(making: Construction) -> Iterator[None]:
    """A model that followed the engine of a trainer before this one computes by itself again."""
    if not isinstance(model := making.given["model"], str):
        from trl_fp8.policy.swapped import release

        release(model)
    yield


def _features(trainer) -> Iterator:
    args = trainer.args
    if args.one_forward:
        from .following import Following

        yield Following(trainer)
    if args.any_fp8:
        from .same_model import SameModel

        yield SameModel(trainer)


REGISTRATION = Registration(flags=ForwardFlags, construct=_construct, features=_features)
