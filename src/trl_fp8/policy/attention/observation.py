"""How large q, k and v of real tokens are, per layer: what the scales of a KV cache are made from.

Shape letters: L layers, B sequences, H heads, T tokens, D head size; columns as in `kv_scales.QKV`.
"""

import torch
from torch import Tensor

from trl_fp8.quantization.e4m3 import E4M3_MAX
from trl_fp8.quantization.kv_scales import logit_error


class QKVObservation:
    """Magnitudes of real tokens, accumulated over forwards, on the model's device.

    With `scales_L3`, fp32 `[L, 3]`, elements beyond `448 * scale` are counted; with `moments` mean squares of q and k
    per channel are taken, which `logit_error_L` needs.
    """

    def __init__(self, layers: int, device: torch.device, *, scales_L3: Tensor | None = None, moments: bool = False):
        self.limits_L3 = None if scales_L3 is None else E4M3_MAX * scales_L3
        self.amax_L3 = torch.zeros(layers, 3, device=device)  # 0 where a layer was not run
        # Elements beyond 448 * scale, and all elements, of real tokens
        self.saturated_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.elements_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.logit_error_L = torch.zeros(layers, device=device) if moments else None  # the largest over forwards

    @property
    def saturated_fraction_L3(self) -> Tensor:
        """Share `[L, 3]` of elements that the scales do not hold; 0 where a layer was not run."""
        return (self.saturated_L3 / self.elements_L3.clamp_min(1)).float()

    def add(self, layer: int, states: tuple[Tensor, ...], real_BT: Tensor, scaling: float) -> None:
        """Account for one attention call: q, k, v `[B, H, T, D]`, of which tokens with `real_BT` count."""
        tokens = real_BT.sum()
        for column, tensor in enumerate(states):
            values = tensor.detach().abs()  # vector_norm needs no temporary, but takes ten times as long on CPU
            largest = values.amax((1, 3)).masked_fill(~real_BT, 0).amax().float()
            self.amax_L3[layer, column] = torch.maximum(self.amax_L3[layer, column], largest)
            self.elements_L3[layer, column] += tokens * (values.shape[1] * values.shape[3])
            if self.limits_L3 is not None and column > 0:  # q is not cached
                beyond_BT = values.gt_(self.limits_L3[layer, column]).sum((1, 3), dtype=torch.float32)
                self.saturated_L3[layer, column] += beyond_BT.masked_fill(~real_BT, 0).sum()
        if self.logit_error_L is not None:
            q_HD, k_HD = (_mean_squares(tensor.detach(), real_BT, tokens) for tensor in states[:2])
            self.logit_error_L[layer] = torch.maximum(self.logit_error_L[layer], logit_error(q_HD, k_HD, scaling))


def _mean_squares(values: Tensor, real_BT: Tensor, tokens: Tensor) -> Tensor:
    return values.float().square().mul_(real_BT[:, None, :, None]).sum((0, 2)) / tokens
