"""The policy in the engine's precision: FP8 linears, FP8 experts, and with a full FP8 forward BF16 between them."""

from torch import nn
from torchao.quantization import Float8Tensor

from trl_fp8.policy.attention.tap import AttentionTap
from trl_fp8.recipe.recipe import FP8Recipe

from .bf16_modules import BF16Modules
from .experts import FP8ExpertModules
from .flow import FP8Flow
from .linear import FP8Linears
from .swapped_modules import SwappedModules


class PrecisionFlow:
    """Installed on a policy, and told by the trainer when its weights change.

    Args:
        model: The policy before it is wrapped for training; changed in place, see `FP8Linears` and `BF16Modules`.
        recipe: Whose FP8 modules become FP8 linears, and FP8 experts.
        flow: What they compute.
        experts_flow: What experts compute, where the engine's kernels for them differ; None: `flow`.
        tap: The policy's attention tap, if its KV cache is FP8.

    Attributes:
        flow: As given.
        installed: FP8 experts and FP8 linears, by checkpoint name.
        keeps_weights: Whether a quantized weight lives until the weight changes, so that a sync's can be kept.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: FP8Recipe,
        flow: FP8Flow,
        tap: AttentionTap | None,
        experts_flow: FP8Flow | None = None,
    ):
        self.flow = flow
        self.keeps_weights = flow.cache_weights and flow.backend != "torchao"  # which quantizes by itself
        experts = FP8ExpertModules.install(model, recipe.fp8_experts, experts_flow or flow)
        linears = FP8Linears.install(model, recipe.fp8_modules, flow, recipe.tensor_parallel_size)
        self.installed = SwappedModules(experts.modules | linears.modules)
        if flow.forward == "full":
            BF16Modules.install(model)
            if tap is not None and tap.device.type == "cpu":  # as the engine's reference
                tap.sum_in_fp64()

    def weights_changed(self) -> None:
        """Quantized weights are made again when they are next needed."""
        self.installed.invalidate()

    def keep_weight(self, name: str, codes: Float8Tensor) -> None:
        """Compute with `codes`, Q(W) of a weight by checkpoint name that a sync has just made, until W changes."""
        module, _, parameter = name.rpartition(".")
        self.installed.modules[module].keep(codes, parameter)
