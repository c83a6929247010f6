"""How large q, k and v of real tokens are, per layer: what the scales of a KV cache are made from.

Shape letters: L layers, B sequences, H heads, T tokens, D head size; columns as in `kv_scales.QKV`.
"""

import torch
from torch import Tensor

from trl_fp8.quantization.codec.kv_scales import logit_error
from trl_fp8.quantization.codec.magnitudes import add_magnitudes
from trl_fp8.quantization.facts.scaling import E4M3_MAX


class QKVObservation:
    """Magnitudes of real tokens, accumulated over forwards, on the model's device.

    With `scales_L3`, fp32 `[L, 3]`, elements beyond `448 * scale` are counted; with `moments` mean squares of q and k
    per channel are taken, which `logit_error_L` needs. On a GPU each of q, k and v is one kernel; mean squares, which
    are taken once before the first rollouts, are torch's operations.
    """

    def __init__(self, layers: int, device: torch.device, *, scales_L3: Tensor | None = None, moments: bool = False):
        self.limits_L3 = None if scales_L3 is None else E4M3_MAX * scales_L3
        self.amax_L3 = torch.zeros(layers, 3, device=device)  # 0 where a layer was not run
        # Elements beyond 448 * scale, and all elements, of real tokens
        self.saturated_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.elements_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.logit_error_L = torch.zeros(layers, device=device)  # the largest over forwards; 0 without `moments`
        self._moments = moments
        self._real = torch.ones((), dtype=torch.bool, device=device)

    @property
    def saturated_fraction_L3(self) -> Tensor:
        """Share `[L, 3]` of elements that the scales do not hold; 0 where a layer was not run."""
        return (self.saturated_L3 / self.elements_L3.clamp_min(1)).float()

    def add(
        self, layer: int, states: tuple[Tensor, ...], real_BT: Tensor | None, scaling: float, key: Tensor | None = None
    ) -> None:
        """Account for one attention call: q, k, v `[B, H, T, D]`, of which tokens with `real_BT` count; None: all.

        k and v are as they are cached. `key` is k as q meets it, which `logit_error_L` takes to be what is rounded.
        """
        states = tuple(tensor.detach() for tensor in states)
        if real_BT is None:
            real_BT = self._real.expand(states[1].shape[0], states[1].shape[2])
        for column, tensor in enumerate(states):
            cells = [self.amax_L3[layer, column], self.elements_L3[layer, column]]
            if self.limits_L3 is not None and column > 0:  # q is not cached
                cells += [self.limits_L3[layer, column], self.saturated_L3[layer, column]]
            add_magnitudes(tensor, real_BT, *cells)
        if self._moments:
            key = states[1] if key is None else key.detach()
            q_HD, k_HD = (_mean_squares(tensor, real_BT) for tensor in (states[0], key))
            error = self.logit_error_L[layer]
            torch.maximum(error, logit_error(q_HD, k_HD, scaling), out=error)


def _mean_squares(values: Tensor, real_BT: Tensor) -> Tensor:
    return values.float().square().mul_(real_BT[:, None, :, None]).sum((0, 2)) / real_BT.sum()
