"""Layers of a policy that hold no weight: they compute with its FP8 codes, which an engine keeps.

Whoever makes such layers derives their class from `HoldsCodes`; whoever reads the weights of a policy asks for it.
"""

from torchao.quantization import Float8Tensor


class HoldsCodes:
    """Mixed into the class of a linear layer, or of all experts of a layer.

    Experts have `dequantized`, too, with the arguments of their forward: what they compute with weights that are
    dequantized for the call, in the dtype of the hidden states.
    """

    codes: Float8Tensor | dict[str, Float8Tensor] | None  # of experts by parameter; None until the engine holds them
