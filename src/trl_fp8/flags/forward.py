"""Flags of the trainer's own forward and backward in FP8."""

from dataclasses import dataclass

from . import flag


FP8_FORWARDS = ("off", "weights", "full")


@dataclass
class ForwardFlags:
    """How much of the engine's precision flow the trainer's linear layers share."""

    fp8_forward: str = flag(
        "off",
        "Whether the trainer's forward runs in the engine's FP8: 'off', 'weights' (linear layers compute "
        "with the quantized weights that the engine holds) or 'full' (activations quantized too, as the engine's "
        "kernel does, and everything between in the engine's BF16, whose roundings the engine then keeps when it "
        "is compiled). Lowers the mismatch instead of correcting it, 'full' with simulate_kv_cache far more than "
        "any part: on CPU to nothing in the models that were measured, on a GPU nothing has been measured "
        "(docs/unified_flow.md). Master weights and checkpoints stay as they are.",
    )
    fp8_backward: str = flag(
        "bf16",
        "Backward of the FP8 linear layers: 'bf16' (straight through: gradients of the unquantized layer, "
        "in the trainer's dtype) or 'fp8' (both GEMMs with quantized operands, as in Jet-RL). Only "
        "with fp8_forward.",
    )
    fp8_gemm_backend: str = flag(
        "fake_quant",
        "How FP8 GEMMs of the trainer are computed: 'fake_quant' (dequantized operands in the trainer's "
        "dtype, any device), 'scaled_mm' (cuBLASLt block scaling, Hopper) or 'torchao' (its prototype of FP8 "
        "training, Hopper, fp32 scales, with fp8_backward='fp8').",
    )

    @property
    def fp8_flow_on(self) -> bool:
        return self.fp8_forward != "off"

    @property
    def flow(self) -> dict[str, str]:
        """What the flags say of an `FP8Flow`."""
        return {"forward": self.fp8_forward, "backward": self.fp8_backward, "backend": self.fp8_gemm_backend}

    def check_forward(self, fp8_weights: bool, fp16: bool) -> None:
        """Raise `ValueError` for what cannot be, as far as `FP8Flow` does not check it itself."""
        if self.fp8_forward not in FP8_FORWARDS:
            raise ValueError(
                f"fp8_forward={self.fp8_forward!r} is not a precision flow. Use one of {list(FP8_FORWARDS)}."
            )
        if self.fp8_flow_on and not fp8_weights:
            raise ValueError(
                f"fp8_forward={self.fp8_forward!r} with fp8_weights=False: the trainer would compute in FP8 what the "
                "engine does not, and add mismatch instead of removing it. Set fp8_weights=True or fp8_forward='off'."
            )
        if self.fp8_forward == "full" and fp16:
            raise ValueError(
                "fp8_forward='full' with fp16=True: a full FP8 forward shares the engine's activations, which are "
                "BF16. Set bf16=True, or fp8_forward='off' (FP16 training with FP8 rollouts works)."
            )
        given = {
            "fp8_backward": (self.fp8_backward, "bf16"),
            "fp8_gemm_backend": (self.fp8_gemm_backend, "fake_quant"),
        }
        for name, (value, default) in given.items():
            if value != default and not self.fp8_flow_on:
                raise ValueError(
                    f"{name}={value!r} with fp8_forward='off': there are no FP8 linear layers that it would concern. "
                    f"Set fp8_forward='full', or remove {name}."
                )
