"""Attention of a CPU engine's layer over whole sequences."""

from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from trl_fp8.engine.vllm.cpu.reference_attention import attend_packed
from trl_fp8.quantization.codec.e4m3 import cache_round_trip


class PackedAttention:
    """One layer's, see `engine.kernels.Attention`."""

    def __init__(self, layer: Attention):
        impl, self._fp8 = layer.impl, layer.kv_cache_dtype.startswith("fp8")
        self.scaling, self.window, self.softcap = impl.scale, impl.sliding_window, impl.logits_soft_cap
        self._sinks = impl.sinks

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        if self._fp8 != (scales is not None):
            raise RuntimeError(f"KV scales are {scales} for a layer whose cache is {'' if self._fp8 else 'not '}FP8.")
        if scales is not None:  # the CPU engine rounds no query
            key, value = cache_round_trip(key, scales[1]), cache_round_trip(value, scales[2])
        mask = self.scaling, self.window, self.softcap, self._sinks
        output, lse_HN = attend_packed(query, key, value, starts, *mask)
        return output, lse_HN, (query, key, value)
