"""Block quantization of weights and activations, see `trl_fp8.quantization.blockwise`."""

from trl_fp8.quantization.blockwise import dequantize_weight, quantize_activation, quantize_weight


__all__ = ["dequantize_weight", "quantize_activation", "quantize_weight"]
