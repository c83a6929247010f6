"""What lies between the FP8 linears, in the engine's BF16: embeddings, norms, residual stream, output head.

FP8 magnifies small differences. An activation that is off by one BF16 step (1/256) falls on the other side of an e4m3
rounding boundary (steps of 1/8) often enough that the error behind the next linear is as large as that of quantization
itself: with FP32 activations a full FP8 forward leaves nine tenths of the mismatch, with the engine's BF16 nothing
(benchmarks/results/mismatch_ladder_cpu.json).

Modules with parameters of their own compute with BF16 copies of them, on BF16 inputs; what has none (residual adds,
activation functions, rotary embedding) follows its inputs. Master weights stay what they are and get their gradients
through the cast, as under FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.
"""

from functools import cache

import torch
from torch import nn

from .attention_tap import transformers_model
from .fp8_linear import FP8Linear


class _BF16Parameters:
    """Mixed into a module's class: its forward sees BF16 parameters and BF16 inputs."""

    def forward(self, *args, **kwargs):
        held = dict(self._parameters)
        try:
            self._parameters.update({name: _bf16(parameter) for name, parameter in held.items()})
            return super().forward(*map(_bf16, args), **{name: _bf16(value) for name, value in kwargs.items()})
        finally:
            self._parameters.update(held)


class _BF16Output:
    """Mixed into embeddings: rounding the rows that were looked up is cheaper than rounding the table."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).to(torch.bfloat16)


class BF16Modules:
    """The modules of a policy that compute in BF16; `install` and `remove`. FP8 linears and LoRA adapters are not among them.

    Attributes:
        modules: What was turned, in model order.
    """

    def __init__(self, modules: list[nn.Module]):
        self.modules = modules

    @classmethod
    def install(cls, model: nn.Module) -> "BF16Modules":
        """Turn the decoder and output head of `model` (a transformers causal LM or a PEFT wrapping), in place."""
        base = transformers_model(model)
        candidates = dict(base.get_decoder().named_modules()) | {"lm_head": base.get_output_embeddings()}
        chosen = [module for name, module in candidates.items() if _computes(name, module)]
        for module in chosen:
            mixin = _BF16Output if isinstance(module, nn.Embedding) else _BF16Parameters
            module.__class__ = _mixed(mixin, type(module))
        return cls(chosen)

    def remove(self) -> None:
        """Turn the modules back into what they were."""
        for module in self.modules:
            module.__class__ = type(module).__mro__[2]


def _computes(name: str, module: nn.Module | None) -> bool:
    """Whether a module holds floating point parameters itself and is the policy's own."""
    if module is None or isinstance(module, FP8Linear) or ".lora_" in f".{name}":
        return False
    return any(parameter.is_floating_point() for parameter in module.parameters(recurse=False))


@cache
def _mixed(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"BF16{cls.__name__}", (mixin, cls), {"__module__": cls.__module__})


def _bf16(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value
