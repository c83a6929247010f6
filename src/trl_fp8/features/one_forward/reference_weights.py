"""The weights of TRL's reference model (`beta > 0`), in the form in which the engine holds the policy's.

    written     into the engine's own tensors, by the writer and the audit that write the policy: once
    `held()`    engine and reference change places, one tensor at a time; at the end of the block they change back
    proven      each time: the engine then holds what was written. That it has the policy back is proven before the
                next generation, by the seal of the policy

Contents change places, not pointers: kernels, fused scales and CUDA graphs keep the addresses that they know.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trl_fp8.recipe.messages import listed
from trl_fp8.sync.delivery import InPlaceDelivery, Part


class ReferenceWeights:
    """Made without memory; the first `held` takes as much as `part` has in the engine."""

    def __init__(self, delivery: InPlaceDelivery, part: Part):
        """`part`: What of the engine a trainer computes with, and where the reference's weights for it come from."""
        self._delivery, self._part = delivery, part
        self._away: dict[str, torch.Tensor] = {}  # by name, what the engine does not hold now

    def outdate(self) -> None:
        """The reference has changed: it is written anew when it is needed next."""
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
            other = self._away[name]
            spare = tensor.clone()  # of one tensor at a time
            tensor.copy_(other)
            other.copy_(spare)

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
