"""The reference of `beta > 0` under one forward: what the engine would compute if it held the reference's weights.

    its modules    those of TRL's `ref_model`, or of the policy with its adapters disabled, or replaced by TRL's copy
    its weights    in the engine's form, written when they have changed, and put in the policy's place for each pass
    its KV cache   under the scales of the policy's rollouts (kv_cache.py)

So an untouched policy has a KL divergence of 0, as it has in TRL. A reference that is scored in high precision would
bring the policy's quantization into the KL divergence and its gradient: about as much as the mismatch that one forward
removes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from trl_fp8.policy.head import scored_by
from trl_fp8.policy.hook import hook_of
from trl_fp8.policy.model import transformers_model
from trl_fp8.quantization.codec.digest import Table
from trl_fp8.recipe.messages import listed
from trl_fp8.sync.audit import ReduceMax
from trl_fp8.sync.delivery import InPlaceDelivery, Part

from .followed_head import followed_head
from .one_forward import OneForward, require_followable


Parameters = Callable[[], Sequence[torch.Tensor]]


class ReferenceWeights:
    """The reference's weights in the form in which the engine holds the policy's; the first `held` takes the memory.

    Contents change places, one tensor at a time, not pointers: kernels, fused scales and CUDA graphs keep addresses.
    Each `held` proves that the engine then holds what was written. The seal of the policy proves before the next
    generation that the engine has the policy back.

    Before each pass checksums of the reference's parameters decide whether they are written again: a callback may have
    reset it, or an optimizer trained norms beside adapters. PyTorch's version counters would miss writes through
    `.data`, as TRL's own callback makes them.
    """

    def __init__(self, delivery: InPlaceDelivery, part: Part, parameters: Parameters, reduce_max: ReduceMax | None):
        """`part`: What of the engine a trainer computes with, and where the reference's weights for it come from.
        `parameters` returns this rank's share of those weights.
        """
        self._delivery, self._part, self._parameters, self._reduce_max = delivery, part, parameters, reduce_max
        self._away: dict[str, torch.Tensor] = {}  # by name, what the engine does not hold now
        self._written: torch.Tensor | None = None  # checksums of the parameters that were written last
        self._table: Table | None = None
        self._places: list[tuple] | None = None  # of the parameters in `_table`

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block the engine holds the reference. A collective."""
        if not self._away:
            self._away = {name: torch.empty_like(tensor) for name, tensor in self._engine_tensors().items()}
        sums = self._sums()
        self._change_places()
        try:
            if not self._is_written(sums):
                self._delivery.send(self._part)
                self._written = sums
            yield
        finally:
            self._change_places()

    def _change_places(self) -> None:
        for name, tensor in self._engine_tensors().items():
            spare = tensor.clone()  # of one tensor at a time
            tensor.copy_(self._away[name])
            self._away[name].copy_(spare)

    def _engine_tensors(self) -> dict[str, torch.Tensor]:
        """Return what the engine holds, each place once: layers that it fused can share a scale, by several names."""
        held = self._part.layout.held
        at = {(tensor.data_ptr(), tensor.shape): name for name, tensor in held.items()}
        return {name: held[name] for name in at.values()}

    def _sums(self) -> torch.Tensor:
        """Return checksums of the reference's parameters as they are now, on the engine's device."""
        parameters = self._parameters()
        places = [(each.data_ptr(), each.shape, each.dtype) for each in parameters]
        if places != self._places:
            self._table, self._places = Table(parameters), places
        return self._table.sums().to(next(iter(self._away.values())).device)

    def _is_written(self, sums: torch.Tensor) -> bool:
        """Return whether the engine holds the parameters with these checksums, on all ranks: writing is a collective.
        Waits for the device once. `RuntimeError` if it should, and holds something else.
        """
        seal, written = self._part.seal, self._written
        if seal is None or written is None or len(written) != len(sums):
            return False
        changed = (sums != written).any().long()[None]
        if self._reduce_max is not None:
            self._reduce_max(changed)
        *found, is_changed = torch.cat([self._part.layout.sums(), changed]).tolist()
        if is_changed:
            return False
        if broken := [name for name, a, b in zip(self._part.layout.names, seal, found, strict=True) if a != b]:
            self._part.seal = None
            raise RuntimeError(
                f"beta > 0: {len(broken)} tensors of the reference have changed since they were written: "
                f"{listed(broken, 12)}. Something wrote to memory that is not its own, so that the KL penalty would "
                "be that from another model. The next pass writes the reference anew."
            )
        return True


class FollowedReference:
    """Made when the engine can be called and `policy` follows it; `in_engine` is the policy's `SharedKernelsPart`."""

    def __init__(self, trainer, policy: OneForward, in_engine):
        self._trainer, self.forward, self._in_engine = trainer, policy, in_engine
        self._model = trainer.ref_model and transformers_model(trainer.ref_model)
        if trainer.ref_model is not None:
            require_followable(trainer.ref_model, policy.recipe, policy.backward.precision)
            hook = hook_of(trainer.ref_model)
            self.forward = OneForward(trainer.ref_model, policy.recipe, policy.kernels, policy.backward, hook)
        self.forward.switch(on=False)

    @cached_property
    def _weights(self) -> ReferenceWeights:
        trainer = self._trainer
        model = trainer.model if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
        return self._in_engine.reference_weights(trainer.vllm_generation, model)

    @contextmanager
    def scored(self) -> Iterator[None]:
        """Around a pass of the reference."""
        model = self._trainer.ref_model
        if model is not None and transformers_model(model) is not self._model:
            raise ValueError(
                f"beta={self._trainer.args.beta} with fp8_forward='one_forward': trainer.ref_model is another model "
                "than the one that calls the engine's kernels. Copy its weights into that one instead: "
                "trainer.ref_model.load_state_dict(model.state_dict())."
            )
        with self._weights.held(), self.forward.switched(on=True), scored_by(followed_head(self.forward)):
            yield
