"""`kl_floor`: the KL divergence of a policy that nobody has trained yet, where its reference is computed otherwise.

With router_replay='rollout' the trainer's own forward goes to the experts that the FP8 engine chose. The reference of
`beta > 0` routes itself: what it computes is no copy of what the engine did. So `kl` does not start at 0, and is to be
read against this value.
"""

from typing import TYPE_CHECKING

from accelerate.logging import get_logger

from trl_fp8.run.feature import Feature


if TYPE_CHECKING:
    from trl_fp8.rollouts import FP8Rollouts


logger = get_logger(__name__)


class KLFloor(Feature):
    """Logs `kl_floor` once: TRL's `kl` of the first loss, if no optimizer step came before it."""

    def __init__(self, trainer: "FP8Rollouts"):
        super().__init__(trainer)
        self._measured = False
        logger.warning(
            f"beta={trainer.args.beta} with router_replay={trainer.args.router_replay!r}: the reference chooses "
            "experts by itself, so that kl does not start at 0. kl_floor in the log is its value before the first "
            "step. With fp8_forward='one_forward' kl starts at 0."
        )

    def end_loss(self) -> None:
        trainer = self.trainer
        if self._measured or not trainer.model.training or not (kl := trainer.logged.get("kl")):
            return  # the last: the loss failed
        self._measured = True
        if trainer.state.global_step == 0:
            trainer.logged["kl_floor"].append(kl[0])
