"""The policy in the engine's precision: FP8 linears, and with a full FP8 forward the engine's BF16 between them."""

import torch
from torch import nn
from torchao.quantization import Float8Tensor
from transformers import TrainerCallback

from ..recipe import FP8Recipe
from .attention_tap import AttentionTap
from .bf16_modules import BF16Modules
from .fp8_flow import FP8Flow
from .fp8_linear import FP8Linears


class PrecisionFlow(TrainerCallback):
    """Installed on a policy, and told by the trainer when its weights change.

    Args:
        model: The policy before it is wrapped for training; changed in place, see `FP8Linears` and `BF16Modules`.
        recipe: Whose FP8 modules become FP8 linears.
        flow: What they compute.
        tap: The policy's attention tap, if its KV cache is FP8.

    Attributes:
        flow: As given.
        keeps_weights: Whether a quantized weight lives until the weight changes, so that a sync can share it.
    """

    def __init__(self, model: nn.Module, recipe: FP8Recipe, flow: FP8Flow, tap: AttentionTap | None):
        self.flow = flow
        self.keeps_weights = flow.cache_weights
        self._linears = FP8Linears.install(model, recipe.fp8_modules, flow, recipe.tensor_parallel_size)
        if flow.forward == "full":
            BF16Modules.install(model)
            if tap is not None:  # the engine's CPU reference attends in FP32
                tap.attend_in_fp32 = tap.device == torch.device("cpu")

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.weights_changed()

    def weights_changed(self) -> None:
        """Quantized weights are made again when they are next needed."""
        self._linears.invalidate()

    def quantized_weight(self, name: str) -> Float8Tensor | None:
        """An FP8 linear's weight by checkpoint name, quantized: kept, or made now and kept. None: not a linear's."""
        linear = self._linears.modules.get(name.removesuffix(".weight"))
        return linear and linear.quantized_weight()
