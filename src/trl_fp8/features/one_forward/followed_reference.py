"""The reference of `beta > 0` under one forward: it computes what an engine with the reference's weights would.

    modules     those of TRL's `ref_model`. Without a `ref_model`: the policy's, with adapters off, or with TRL's copy
                of the adapters
    weights     stored as the engine stores the policy's weights. They are written again after a change. For each pass
                they change places with the policy's weights
    KV cache    rounded under the scales of the policy's rollouts (kv_cache.py)

So the KL divergence of an untrained policy is 0, as in TRL. If the reference were scored in high precision, the KL
divergence and its gradient would include the policy's quantization: about as much as the mismatch that one forward
removes.
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
    """The reference's weights, stored as the engine stores the policy's. The first pass allocates their memory.

    For a pass they change places with the policy's weights in the engine, one tensor at a time. Contents are swapped,
    not pointers, because kernels, fused scales and CUDA graphs keep addresses. Each pass proves by checksums that the
    engine holds the reference. Before the next generation the seal of the policy (its checksums) proves that the
    policy is back.

    Before each pass, checksums of the reference's parameters decide whether the weights are written again. A callback
    may have reset the reference, or the optimizer may have trained norms that the reference shares with the policy.
    PyTorch's version counters would miss writes through `.data`, which TRL's own callback makes.
    """

    def __init__(
        self, delivery: InPlaceDelivery, part: TensorGroup, parameters: Parameters, reduce_max: ReduceMax | None
    ):
        """Start with nothing written.

        Args:
            part: The engine's tensors that the trainer's kernels read. Its source yields the reference's weights.
            parameters: Returns this rank's shards of the reference parameters from which these weights are made.
            reduce_max: Element-wise maximum over all ranks, in place; None on one process.
        """
        self._delivery = delivery
        self._part = part
        self._parameters = parameters
        self._reduce_max = reduce_max
        self._spares: dict[str, torch.Tensor] = {}  # name -> contents of the model that is not in the engine now
        self._written: torch.Tensor | None = None  # checksums of the parameters, at the last write
        self._table: Table | None = None  # computes checksums of the parameters
        self._addresses: list[tuple] | None = None  # of the parameters in `_table`

    @contextmanager
    def in_engine(self) -> Iterator[None]:
        """Make the engine hold the reference inside the block. Collective."""
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
        """Exchange the contents of the engine's tensors with the spares."""
        for name, tensor in self._engine_tensors().items():
            copy = tensor.clone()
            tensor.copy_(self._spares[name])
            self._spares[name].copy_(copy)

    def _engine_tensors(self) -> dict[str, torch.Tensor]:
        """Return the engine's tensors by name. A tensor with several names, such as a shared scale, appears once."""
        tensors = {}
        places = set()
        for name, tensor in self._part.layout.held.items():
            place = tensor.data_ptr(), tensor.shape
            if place not in places:
                places.add(place)
                tensors[name] = tensor
        return tensors

    def _sums(self) -> torch.Tensor:
        """Return checksums of the reference's parameters as they are now, on the engine's device."""
        parameters = self._parameters()
        addresses = [(each.data_ptr(), each.shape, each.dtype) for each in parameters]
        if addresses != self._addresses:
            self._table = Table(parameters)
            self._addresses = addresses
        spare = next(iter(self._spares.values()))  # any: all are on the engine's device
        return self._table.sums().to(spare.device)

    def _is_written(self, sums: torch.Tensor) -> bool:
        """Return whether all engines now hold the reference whose parameters have the checksums `sums`.

        Waits for the device once. Raises `RuntimeError` on all ranks if the parameters have not changed since the last
        write, but an engine's tensors have.
        """
        seal = self._part.seal
        written = self._written
        if seal is None or written is None or len(written) != len(sums):
            return False
        in_engine = self._part.layout.sums()
        is_broken = in_engine != torch.tensor(seal, device=in_engine.device)
        # All ranks have to return the same value, or raise together. Otherwise they would enter different collectives
        verdict = torch.stack([(sums != written).any(), is_broken.any()]).long()
        if self._reduce_max is not None:
            self._reduce_max(verdict)
        # One copy to the host: a flag for each tensor of this rank, then both verdicts
        *broken_here, any_changed, any_broken = torch.cat([is_broken.long(), verdict]).tolist()
        if any_changed:
            return False
        if any_broken:
            by_name = zip(self._part.layout.names, broken_here, strict=True)
            names = [name for name, is_broken_here in by_name if is_broken_here]
            self._part.seal = None
            where = f"{len(names)} tensors of the reference" if names else "tensors of the reference on another rank"
            raise RuntimeError(
                f"beta > 0: {where} have changed since they were written: {listed(names, 12) or 'see its log'}. "
                "Something wrote to their memory, so the KL penalty would be against another model. "
                "The next pass writes the reference again."
            )
        return True


class FollowedReference:
    """A trainer's reference, whose modules call the engine's kernels as the policy's do.

    Args:
        policy: The policy's `OneForward`.
        part: The engine's `SharedKernelsPart`.
    """

    def __init__(self, trainer, policy: OneForward, part):
        self._trainer = trainer
        self._part = part
        self._model = None
        model = trainer.ref_model
        if model is None:
            self.forward = policy  # the policy's own modules compute the reference
        else:
            require_followable(model, policy.recipe, policy.backward.precision)
            self._model = transformers_model(model)
            self.forward = OneForward(model, policy.recipe, policy.kernels, policy.backward, hook_of(model))
        self.forward.switch(on=False)

    @cached_property
    def _weights(self) -> ReferenceWeights:
        trainer = self._trainer
        model = trainer.model if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
        return self._part.reference_weights(trainer.vllm_generation, model)

    @contextmanager
    def scored(self) -> Iterator[None]:
        """Let the reference compute with the engine's kernels and its own weights inside the block. Collective."""
        model = self._trainer.ref_model
        if model is not None and transformers_model(model) is not self._model:
            raise ValueError(
                f"beta={self._trainer.args.beta} with fp8_forward='one_forward': trainer.ref_model was replaced, and "
                "only the original one calls the engine's kernels. Copy the weights into the original model instead: "
                "trainer.ref_model.load_state_dict(model.state_dict())."
            )
        with self._weights.in_engine(), self.forward.switched(on=True), scored_by(followed_head(self.forward)):
            yield
