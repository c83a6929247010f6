"""Check, with the user's device, Triton and driver, that GPU kernels give the same bytes as torch on CPU.

The audit of a sync relies on these kernels. With a kernel that gave the same checksum for everything, an audit would
pass and prove nothing.
"""

from importlib.metadata import version

import torch

from trl_fp8.quantization.formats import BLOCK, SCALE_FORMATS, WEIGHT_AMAX_FLOOR

from .blockwise import Destination, dequantize_weight, quantize_activation, quantize_into, quantize_weight
from .digest import Table, digest, digests_of_sent
from .e4m3 import E4M3, cache_round_trip
from .kv_scales import add_magnitudes


def require_exact_kernels(device: torch.device) -> None:
    """Raise `RuntimeError` unless every kernel gives the same bytes on `device` as on CPU, for a small tensor."""
    if device.type == "cpu":
        return
    # Neither size is a multiple of a block (128). A few rows are much larger or smaller than others, so scales differ
    sample = torch.randn(160, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    sample[:4] *= torch.exp2(torch.arange(-10, 10, 5)).view(4, 1)
    expected = results(sample)
    found = results(sample.to(device))
    wrong = [name for name in expected if not torch.equal(found[name].cpu(), expected[name])]
    if wrong:
        raise RuntimeError(
            f"on {device}, Triton {version('triton')} gives other bytes than torch on CPU for: {', '.join(wrong)}. "
            "Weights would reach the engine changed, or unproven. Unset TRITON_* variables, and install the Triton "
            f"that torch {torch.__version__} asks for (pip show torch)."
        )


def results(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return name -> result of each kernel for a sample, BF16 `[160, 320]`, on its device. Does not synchronize."""
    tensors = {"checksum": digest(sample), "checksum of a part": digest(sample[3:, :130])}
    for scale_format in SCALE_FORMATS:
        quantized_by_kind = {
            "weights": quantize_weight(sample, scale_format, check_finite=False),
            "activations": quantize_activation(sample, scale_format),
        }
        for kind, quantized in quantized_by_kind.items():
            tensors[f"{kind} ({scale_format})"] = quantized.qdata.view(torch.uint8)
            tensors[f"scales of {kind} ({scale_format})"] = quantized.scale
            tensors[f"{kind} from codes ({scale_format})"] = dequantize_weight(quantized)
    return tensors | _delivered(sample) | _cached(sample.view(2, 5, 32, 160))


def _delivered(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the kernels of a delivery, which quantize into parts of larger tensors and sum up unquantized tensors."""
    # FP32 values that lie between two BF16 numbers, so that a delivery has to round them. They are made by a product,
    # because a product has the same bits on every device. A division by a number has not: on a GPU torch multiplies by
    # the reciprocal
    between = sample.float() * (1 + 7 / 2048)
    whole = torch.zeros(400, 340, dtype=torch.uint8, device=sample.device).view(E4M3)
    whole_scale = torch.zeros(5, 4, dtype=torch.float32, device=sample.device)
    part = whole[200:360, 12:332]
    part_scale = whole_scale[2:4, :3]
    sent = quantize_into([Destination(between, part, part_scale)], "fp32", (BLOCK, BLOCK), WEIGHT_AMAX_FLOOR)
    overflowing = torch.full((2, 8), torch.finfo(torch.float32).max, device=sample.device)  # infinite in BF16
    copied = [between, sample, overflowing]
    sums, finite = digests_of_sent(copied, [torch.bfloat16] * len(copied))
    return {
        "weights in place": whole.view(torch.uint8),
        "scales in place": whole_scale,
        "checksums of weights in place": sent,
        "checksums of views": Table((part, part_scale)).sums(),
        "checksums of unquantized tensors": torch.where(finite, sums, 0),  # undefined if a tensor is not finite
        "unquantized tensors that are finite": finite,
    }


def _cached(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the kernels of a KV cache on `states` `[B, H, T, D]`."""
    real_BT = torch.arange(64, device=states.device).view(2, 32) % 3 > 0
    # One copy to the device. The kernels take three 0-d tensors
    amax, limit, scale = torch.tensor([0.0, 3.5, 0.01], dtype=torch.float32).to(states.device).unbind()
    counts = torch.zeros(2, dtype=torch.float64, device=states.device)
    add_magnitudes(states, real_BT, amax, elements=counts[0], limit=limit, beyond=counts[1])
    return {"KV amax": amax, "KV saturation": counts, "KV cache round trip": cache_round_trip(states, scale)}
