"""LoRA on a policy that calls its engine: values of the merged weight, gradients of base and adapters apart.

    forward    y = engine(x)                          which holds Q(W + s B A), or Q(W) and A, s B beside it
    backward   that of x W.T + s drop(x) A.T B.T      PEFT's own, so that A and B are trained as they would be without

Dropout has no part in the forward. This is one function with two values, so its gradient is that of a sum. Where an
adapter does anything but add to what the base computes, its gradient would need what the base alone computes, and
that the engine never does.
"""

from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from trl_fp8.engine.kernels import Adapter
from trl_fp8.policy.own_gradient import with_value
from trl_fp8.policy.swapped import HoldsCodes
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import TRANSFORMERS, checkpoint_name, is_router


class FollowedAdapter:
    """Mixed into PEFT's wrapper of a followed linear: the engine holds base and adapter, merged or side by side."""

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        base = self.base_layer
        if not base.one_forward.on:
            return super().forward(x, *args, **kwargs)
        value = base.value(x, self._active())
        return with_value(super().forward(x, *args, **kwargs), value)

    def _active(self) -> Adapter | None:
        """The adapter in force, if this layer has it."""
        for name in () if self.disable_adapters else self.active_adapters:
            if name in self.lora_A:
                a, b = self.lora_A[name].weight.detach(), self.lora_B[name].weight.detach()
                return self.base_layer.name, a, b * self.scaling[name]
        return None


def require_sums(model: nn.Module, tensor_parallel_size: int) -> None:
    """Raise `ValueError` for adapters whose layers are not followed."""
    shared = any(isinstance(module, HoldsCodes) for module in model.modules())
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if adapters and tensor_parallel_size > 1 and not shared:
        raise ValueError(
            f"fp8_forward='one_forward' with adapters and vllm_tensor_parallel_size={tensor_parallel_size}: the "
            "engine quantizes the sum of base and adapters, of which each rank has a part. Set fp8_base=True, "
            "vllm_tensor_parallel_size=1, or fp8_forward='off'."
        )
    kinds = {checkpoint_name(name): _other_than_sum(module) for name, module in adapters.items()}
    if others := [f"{name} ({kind})" for name, kind in kinds.items() if kind is not None]:
        raise ValueError(
            "fp8_forward='one_forward' with adapters that are not plain LoRA on linear layers, experts or routers: "
            f"{listed(others, 3)}. The engine holds them merged, and only of a sum is the gradient known without what "
            "the base alone computes. Use LoRA on these, without variants such as use_dora, or set fp8_forward='off'."
        )


def _other_than_sum(module: BaseTunerLayer) -> str | None:
    """What an adapter is, unless it adds to a linear layer's output, or to the weights of experts or a router."""
    if type(module) is ParamWrapper:
        routes = module.parameter_name in TRANSFORMERS.fused or is_router(module.get_base_layer())
        return None if routes else f"of the parameter {module.parameter_name}"
    if type(module) is not LoraLinear:
        return f"{type(module).__module__.split('.')[-2]}.{type(module).__name__}"
    return next((type(variant).__name__ for variant in module.lora_variant.values()), None)
