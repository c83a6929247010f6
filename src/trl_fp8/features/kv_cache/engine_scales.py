"""`EngineScales`: the KV scales that each sync carries to the engine beside the weights.

A sync calls `prepare` (calibrates), `write`, and `verify` (reads the engine's scales back and compares).
"""

from collections.abc import Callable

import torch

from trl_fp8.engine.protocol import KVScaleStore
from trl_fp8.engine.vllm.colocated import Generation
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KV_SCALES, KVScales


class EngineScales(EnginePart):
    """The KV cache's part of an engine. It has the methods of `CarriedValue`, so each sync carries this object."""

    name = KV_SCALES

    def __init__(self, calibrate: Callable[[], KVScales]):
        """`calibrate` returns the scales for the policy as it is now. It may be a collective, and raises `ValueError`
        if the policy cannot be calibrated.
        """
        self.calibrate = calibrate
        self.value: KVScales | None = None
        self._store: KVScaleStore | None = None

    def carried(self, generation: Generation) -> "EngineScales":
        """Return this object. Raises `RuntimeError` if the scales of the engine's cache cannot be set."""
        self._store = generation.engine.kv_scales()
        return self

    def resume(self, scales_L3: torch.Tensor) -> None:
        """Set the scales of a resumed run until its first sync calibrates. After that sync this does nothing.

        A resumed run may begin with a loss on saved rollouts, which were sampled under these scales.
        """
        if self.value is None:
            self.value = KVScales(scales_L3.cpu())

    def prepare(self) -> None:
        self.value = self.calibrate()

    def write(self) -> None:
        self._store.write(self.value)

    def verify(self) -> None:
        self._store.verify(self.value)

    def digest(self) -> torch.Tensor:
        return digest(self.value.values)
