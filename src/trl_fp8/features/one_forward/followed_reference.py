"""The reference of `beta > 0` under one forward: what the engine would compute if it held the reference's weights.

    its modules    those of TRL's `ref_model`, or of the policy with its adapters disabled, or replaced by TRL's copy
    its weights    in the engine's form, written once, and put in the policy's place for each pass
    its KV cache   under the scales of the policy's rollouts (kv_cache.py)

So an untouched policy has a KL divergence of 0, as it has in TRL. A reference that is scored in high precision would
bring the policy's quantization into the KL divergence and its gradient: about as much as the mismatch that one forward
removes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from trl_fp8.policy.head import scored_by
from trl_fp8.policy.hook import hook_of
from trl_fp8.recipe.messages import listed
from trl_fp8.sync.delivery import InPlaceDelivery, Part

from .followable import require_followable
from .followed_head import followed_head
from .one_forward import OneForward


class ReferenceWeights:
    """The reference's weights in the form in which the engine holds the policy's; the first `held` takes the memory.

    Contents change places, one tensor at a time, not pointers: kernels, fused scales and CUDA graphs keep addresses.
    Each `held` proves that the engine then holds what was written. The seal of the policy proves before the next
    generation that the engine has the policy back.
    """

    def __init__(self, delivery: InPlaceDelivery, part: Part):
        """`part`: What of the engine a trainer computes with, and where the reference's weights for it come from."""
        self._delivery, self._part = delivery, part
        self._away: dict[str, torch.Tensor] = {}  # by name, what the engine does not hold now

    def outdate(self) -> None:
        """The reference has changed: the next `held` writes it anew."""
        self._part.seal = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block the engine holds the reference. A collective when it is written."""
        if not self._away:
            self._away = {name: torch.empty_like(tensor) for name, tensor in self._places().items()}
        self._change_places()
        try:
            if self._part.seal is None:
                self._delivery.send(self._part)
            else:
                self._require_unbroken()
            yield
        finally:
            self._change_places()

    def _change_places(self) -> None:
        for name, tensor in self._places().items():
            spare = tensor.clone()  # of one tensor at a time
            tensor.copy_(self._away[name])
            self._away[name].copy_(spare)

    def _places(self) -> dict[str, torch.Tensor]:
        """What the engine holds, each place once: layers that it fused can share a scale, by several names."""
        held = self._part.layout.held
        at = {(tensor.data_ptr(), tensor.shape): name for name, tensor in held.items()}
        return {name: held[name] for name in at.values()}

    def _require_unbroken(self) -> None:
        if changed := self._part.layout.changed(self._part.seal):
            self.outdate()
            raise RuntimeError(
                f"beta > 0: {len(changed)} tensors of the reference have changed since they were written: "
                f"{listed(changed, 12)}. Something wrote to memory that is not its own, so that the KL penalty would "
                "be that from another model. The next pass writes the reference anew."
            )


class FollowedReference:
    """Made when the engine can be called and `policy` follows it; `in_engine` is the policy's `SharedKernelsPart`."""

    def __init__(self, trainer, policy: OneForward, in_engine):
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

    def policy_changed(self) -> None:
        """An optimizer step came."""
        if self._moves:
            self.outdate()
