"""The reference of `beta > 0` under one forward: what the engine would compute if it held the reference's weights.

    its modules    those of TRL's `ref_model`, or of the policy with its adapters disabled, or replaced by TRL's copy
    its weights    in the engine's form, written when they have changed, and swapped with the policy's for each pass
    its KV cache   under the scales of the policy's rollouts (kv_cache.py)

So the KL divergence of an untouched policy is 0, as in TRL. Scoring the reference in high precision would add the
policy's quantization to the KL divergence and its gradient: about as much as the mismatch that one forward removes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from trl_fp8.policy.hook import hook_of
from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.swapped import scored_by
from trl_fp8.quantization.codec.digest import Table
from trl_fp8.recipe.messages import listed
from trl_fp8.sync.audit import ReduceMax
from trl_fp8.sync.delivery import InPlaceDelivery, TensorGroup

from .followed_head import followed_head
from .one_forward import OneForward, require_followable


Parameters = Callable[[], Sequence[torch.Tensor]]


class ReferenceWeights:
    """The reference's weights in the form in which the engine holds the policy's. The first pass allocates them.

    Contents are swapped, one tensor at a time, not pointers: kernels, fused scales and CUDA graphs keep addresses.
    Each pass proves that the engine then holds what was written. The seal of the policy proves before the next
    generation that the engine has the policy back.

    Before each pass checksums of the reference's parameters decide whether they are written again: a callback may have
    reset it, or an optimizer may have trained norms beside adapters. PyTorch's version counters would miss writes
    through `.data`, as TRL's own callback makes them.
    """

    def __init__(
        self, delivery: InPlaceDelivery, part: TensorGroup, parameters: Parameters, reduce_max: ReduceMax | None
    ):
        """`part` is what a trainer computes with of the engine, and where the reference's weights for it come from.
        `parameters` returns this rank's share of those weights.
        """
        self._delivery, self._part, self._parameters, self._reduce_max = delivery, part, parameters, reduce_max
        self._spares: dict[str, torch.Tensor] = {}  # name -> contents of whichever model the engine does not hold now
        self._written: torch.Tensor | None = None  # checksums of the parameters that were written last
        self._table: Table | None = None
        self._addresses: list[tuple] | None = None  # of the parameters in `_table`

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        """Let the engine hold the reference inside the block. Collective."""
        if not self._spares:
            self._spares = {name: torch.empty_like(tensor) for name, tensor in self._engine_tensors().items()}
        sums = self._sums()
        self._swap()
        try:
            if not self._is_written(sums):
                self._delivery.send(self._part)
                self._written = sums
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the contents of the engine's tensors with the spare ones."""
        for name, tensor in self._engine_tensors().items():
            copy = tensor.clone()
            tensor.copy_(self._spares[name])
            self._spares[name].copy_(copy)

    def _engine_tensors(self) -> dict[str, torch.Tensor]:
        """Return the engine's tensors without aliases. Layers that it fused can share a scale under several names."""
        by_address = {}
        for name, tensor in self._part.layout.held.items():
            by_address[tensor.data_ptr(), tensor.shape] = name, tensor
        return dict(by_address.values())

    def _sums(self) -> torch.Tensor:
        """Return checksums of the reference's parameters as they are now, on the engine's device."""
        parameters = self._parameters()
        addresses = [(each.data_ptr(), each.shape, each.dtype) for each in parameters]
        if addresses != self._addresses:
            self._table, self._addresses = Table(parameters), addresses
        return self._table.sums().to(next(iter(self._spares.values())).device)

    def _is_written(self, sums: torch.Tensor) -> bool:
        """Return whether the parameters with these checksums are in the engine, on all ranks; writing is collective.

        Waits for the device once. `RuntimeError` if they were written and the engine holds something else.
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
                f"{listed(broken, 12)}. Something wrote to their memory, so the KL penalty would be that from another "
                "model. The next pass writes the reference again."
            )
        return True


class FollowedReference:
    """The reference of a trainer, which follows the engine like its policy.

    It needs an engine that can be called, `policy`, which follows it, and the policy's `SharedKernelsPart`.
    """

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
        """Score the reference inside the block."""
        model = self._trainer.ref_model
        if model is not None and transformers_model(model) is not self._model:
            raise ValueError(
                f"beta={self._trainer.args.beta} with fp8_forward='one_forward': trainer.ref_model was replaced, and "
                "only the original one calls the engine's kernels. Copy the weights into that one instead: "
                "trainer.ref_model.load_state_dict(model.state_dict())."
            )
        with self._weights.in_engine(), self.forward.switched(on=True), scored_by(followed_head(self.forward)):
            yield
