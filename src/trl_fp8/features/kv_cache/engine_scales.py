"""`EngineScales`: what each sync carries to an engine with an FP8 KV cache."""

from collections.abc import Callable

import torch

from trl_fp8.engine.protocol import KVScaleStore
from trl_fp8.engine.vllm.colocated import Generation
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KV_SCALES, KVScales


class EngineScales(EnginePart):
    """`sync.records.CarriedValue`: the scales of an FP8 KV cache, which `calibrate` makes for the policy as it is."""

    name = KV_SCALES

    def __init__(self, calibrate: Callable[[], KVScales]):
        """Keep `calibrate`, which raises `ValueError` if the policy cannot be calibrated, and may be a collective."""
        self.calibrate = calibrate
        self.value: KVScales | None = None
        self._copies: KVScaleStore | None = None

    def carried(self, generation: Generation) -> "EngineScales":
        """Return itself. `RuntimeError` if the engine's cache cannot be recalibrated."""
        self._copies = generation.engine.kv_scales()
        return self

    def resume(self, scales_L3: torch.Tensor) -> None:
        """Send these with the weights of the first sync: a run resumed with rollouts that it had left, which were
        sampled under them. Do nothing after a sync.
        """
        if self.value is None:
            self.value = KVScales(scales_L3.cpu())

    def prepare(self) -> None:
        self.value = self.calibrate()

    def write(self) -> None:
        self._copies.write(self.value)

    def verify(self) -> None:
        self._copies.verify(self.value)

    def digest(self) -> torch.Tensor:
        return digest(self.value.values)
