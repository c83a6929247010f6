"""How large q, k or v of an attention call are: the largest, and how many of them a scale does not hold.

Figures are added to what other calls gave, on the device, without a wait for it. A GPU reads the tensor once.

Shape letters: B sequences, H heads, T tokens, D head size.
"""

import torch


def add_magnitudes(
    states: torch.Tensor,
    real_BT: torch.Tensor,
    amax: torch.Tensor,
    elements: torch.Tensor,
    limit: torch.Tensor | None = None,
    beyond: torch.Tensor | None = None,
) -> None:
    """Account for one tensor of an attention call.

    Args:
        states: `[B, H, T, D]`, floating point, any strides.
        real_BT: Which tokens count, bool, any strides.
        amax: 0-d, fp32, not negative; raised to the largest magnitude, of which NaN is larger than all others.
        elements: 0-d, fp64; the number of elements is added.
        limit: 0-d, fp32, exact in the dtype of `states`.
        beyond: With `limit`: 0-d, fp64; the number of elements whose magnitude is above it is added.
    """
    if states.is_cuda:
        from trl_fp8.quantization.kernels.cache_kernels import add_magnitudes as by_kernel  # needs Triton

        by_kernel(states, real_BT, amax, elements, limit, beyond)
        return
    padded_BT = ~real_BT
    values = states.abs()  # vector_norm needs no temporary, but takes ten times as long on CPU
    # Padding is left out of the B x T results: to leave it out of the states would copy them once more
    largest = values.amax((1, 3)).masked_fill_(padded_BT, 0).amax().float()
    torch.maximum(amax, largest, out=amax)
    elements.add_(real_BT.sum() * (values.shape[1] * values.shape[3]))
    if limit is not None:
        beyond_BT = values.gt_(limit).sum((1, 3), dtype=torch.float32)  # ones and zeros, in the states' own dtype
        beyond.add_(beyond_BT.masked_fill_(padded_BT, 0).sum())
