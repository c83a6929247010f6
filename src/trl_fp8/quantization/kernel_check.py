"""Are the GPU kernels what they were tested to be? Asked on the user's device, Triton and driver before an audit
relies on them: a kernel that gave the same checksum for everything would prove nothing, without a word.
"""

from importlib.metadata import version

import torch

from .blockwise import dequantize_weight, quantize_activation, quantize_weight
from .digest import digest
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
    return results
