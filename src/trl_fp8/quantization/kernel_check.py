"""Are the GPU kernels what they were tested to be? Asked on the user's device, Triton and driver before an audit
relies on them: a kernel that gave the same checksum for everything would prove nothing, without a word.
"""

from importlib.metadata import version

import torch

from .blockwise import dequantize_weight, quantize_activation, quantize_weight
from .digest import digest
from .e4m3 import E4M3, casts_in_hardware
from .formats.blocks import WEIGHT_AMAX_FLOOR
from .formats.spec import SCALE_FORMATS


def require_exact_kernels(device: torch.device) -> None:
    """Raise `RuntimeError` unless `device` sums up a small tensor, and quantizes it, to the bytes that CPU gives."""
    if device.type == "cpu":
        return
    sample = torch.randn(160, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    sample[:4] *= torch.exp2(torch.arange(-10, 10, 5)).view(4, 1)
    expected, found = _results(sample), _results(sample.to(device))
    wrong = [name for name in expected if not torch.equal(found[name].cpu(), expected[name])]
    if wrong:
        raise RuntimeError(
            f"on {device}, Triton {version('triton')} gives other bytes than torch on CPU for: {', '.join(wrong)}. "
            "Weights would reach the engine changed, or unproven. Unset TRITON_* variables, and install the Triton "
            f"that torch {torch.__version__} asks for (pip show torch)."
        )


def _results(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    results = {"checksum": digest(sample), "checksum of a part": digest(sample[3:, :130])}
    for scale_format in SCALE_FORMATS:
        for kind, quantize in (("weights", quantize_weight), ("activations", quantize_activation)):
            quantized = quantize(sample, scale_format)
            results[f"{kind} ({scale_format})"] = quantized.qdata.view(torch.uint8)
            results[f"scales of {kind} ({scale_format})"] = quantized.scale
            results[f"{kind} from codes ({scale_format})"] = dequantize_weight(quantized)
    results |= _sent_unquantized(sample)
    return results | _quantized_in_place(sample)


def _between(sample: torch.Tensor) -> torch.Tensor:
    """FP32 values that BF16 rounds up and down. The product is exact; CUDA does not divide by a number exactly."""
    return sample.float() * (1 + 7 / 2048)


def _sent_unquantized(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = [_between(sample), sample, torch.full((2, 8), torch.finfo(torch.float32).max, device=sample.device)]
    if casts_in_hardware(sample.device):
        from .checksums import sum_sent  # Triton compiles for GPUs only

        sums, bad = sum_sent(tensors, [torch.bfloat16] * len(tensors))
    else:
        sums = torch.stack([digest(tensor, torch.bfloat16) for tensor in tensors])
        bad = torch.stack([~tensor.bfloat16().isfinite().all() for tensor in tensors]).long()
    return {"checksums of unquantized tensors": sums, "unquantized tensors that are not finite": bad}


def _quantized_in_place(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP32 values, rounded to BF16 and quantized into parts of larger tensors."""
    whole = torch.zeros(400, 340, dtype=torch.uint8, device=sample.device).view(E4M3)
    whole_scale = torch.zeros(5, 4, device=sample.device)
    parts = whole[200:360, 12:332], whole_scale[2:4, :3]
    if casts_in_hardware(sample.device):
        from .checksums import sum_table, table_of
        from .kernels import quantize_blocks

        sent, options = torch.zeros(2, dtype=torch.int64, device=sample.device), {"round_to_bf16": True, "into": parts}
        quantize_blocks(_between(sample), True, "fp32", WEIGHT_AMAX_FLOOR, **options, sums=sent)
        held = sum_table(table_of(parts))
    else:
        quantized = quantize_weight(_between(sample).bfloat16(), "fp32")
        parts[0].copy_(quantized.qdata)
        parts[1].copy_(quantized.scale)
        sent = held = torch.stack([digest(part) for part in parts])
    results = {"weights in place": whole.view(torch.uint8), "scales in place": whole_scale}
    return results | {"checksums of weights in place": sent, "checksums of views": held}
