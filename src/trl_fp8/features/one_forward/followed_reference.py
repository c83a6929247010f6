"""The reference of `beta > 0` under one forward: what the engine would compute if it held the reference's weights.

    its modules    those of TRL's `ref_model`, or of the policy with its adapters disabled, or replaced by TRL's copy
    its weights    in the engine's form, written once and put in the policy's place for a pass (reference_weights.py)
    its KV cache   under the scales of the policy's rollouts (kv_cache.py)

So an untouched policy has a KL divergence of 0, as it has in TRL. If the reference were scored in high precision, the
policy's quantization would show in it, about as large as the mismatch that one forward removes, and in the gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from trl_fp8.policy.head import scored_by
from trl_fp8.policy.hook import hook_of

from .followed_head import followed_head
from .one_forward import OneForward, require_followable
from .reference_weights import ReferenceWeights


if TYPE_CHECKING:
    from trl_fp8.rollouts import FP8Rollouts

    from .engine_part.kernels_part import SharedKernelsPart


class FollowedReference:
    """Made when the engine is there to be called; `policy` follows it already, and `in_engine` is what it shares."""

    def __init__(self, trainer: "FP8Rollouts", policy: OneForward, in_engine: "SharedKernelsPart"):
        self._trainer, self.forward, self._in_engine = trainer, policy, in_engine
        if trainer.ref_model is not None:
            require_followable(trainer.ref_model, policy.recipe, policy.backward.precision)
            hook = hook_of(trainer.ref_model)
            self.forward = OneForward(trainer.ref_model, policy.recipe, policy.kernels, policy.backward, hook)
        self.forward.switch(on=False)
        # With PEFT's `bias` the base's own biases are trained, and TRL's reference computes with them
        adapters = trainer.model.peft_config.values() if trainer.ref_model is None else ()
        self._moves = any(adapter.bias != "none" for adapter in adapters)

    @cached_property
    def _weights(self) -> ReferenceWeights:
        trainer = self._trainer
        model = trainer.model if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
        return self._in_engine.reference_weights(trainer.vllm_generation, model)

    @contextmanager
    def scored(self) -> Iterator[None]:
        """Around a pass of the reference."""
        with self._weights.held(), self.forward.switched(on=True), scored_by(followed_head(self.forward)):
            yield

    def outdate(self) -> None:
        """The weights of the reference have changed."""
        self._weights.outdate()
        self.forward.invalidate()

    def policy_changed(self) -> None:
        """An optimizer step came."""
        if self._moves:
            self.outdate()
