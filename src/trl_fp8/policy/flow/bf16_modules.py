"""What lies between the FP8 linears, in the engine's BF16: embeddings, norms, residual stream, output head.

FP8 magnifies small differences. An activation that is off by one BF16 step (1/256) falls on the other side of an e4m3
rounding boundary (steps of 1/8) often enough that the error behind the next linear is as large as that of quantization
itself: in a policy of 2 layers a full FP8 forward with FP32 activations leaves nine tenths of the mismatch on CPU, one
with the engine's BF16 nothing (benchmarks/results/mismatch_ladder_cpu.json). These modules round where transformers
does. So does the CPU engine (engine/vllm/cpu/ops.py); vLLM's CUDA kernels for norms and rotary embedding round less
often. Nor is rounding all: where sums are FP32 the order in which GEMMs and attention add counts, too, the more the
deeper the policy (mismatch_depth_fp32_sums_cpu.json, there). On CPU both sides add in FP64, where it does not show.

Modules with parameters of their own compute with BF16 copies of them, on BF16 inputs; what has none (residual adds,
activation functions, rotary embedding) follows its inputs. Master weights stay what they are and get their gradients
through the cast, as under FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from trl_fp8.policy.model import transformers_model
from trl_fp8.recipe.names import full_shape, is_router

from .experts import FP8Experts
from .linear import FP8Linear
from .swapped_modules import SwappedModules, swapped_class


class _BF16Parameters:
    """Mixed into a module's class: its forward sees BF16 parameters and BF16 inputs."""

    def forward(self, *args, **kwargs):
        with _bf16_parameters(self):
            return super().forward(*map(_bf16, args), **{name: _bf16(value) for name, value in kwargs.items()})


class _BF16Experts:
    """Mixed into experts: as above, but gate weights stay FP32, as in the engine."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        with _bf16_parameters(self):
            return super().forward(_bf16(hidden_states), top_k_index, top_k_weights)


class _BF16Router(_BF16Parameters):
    """Mixed into routers: logits are BF16 numbers, and what is made of them is FP32, gate weights included."""

    def forward(self, *args, **kwargs):
        with _FP32AfterLinear():
            return super().forward(*args, **kwargs)


class _FP32AfterLinear(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output.float() if func is F.linear else output


class _BF16Output:
    """Mixed into embeddings: rounding the rows that were looked up is cheaper than rounding the table."""

    def forward(self, *args, **kwargs):
        return nn.Embedding.forward(self, *args, **kwargs).to(torch.bfloat16)


class _BF16ScaledOutput(_BF16Output):
    """Mixed into Gemma's embeddings, which multiply rows by the root of their size: BF16 times BF16, as in
    the engine.
    """

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * self.embed_scale.to(torch.bfloat16)


class BF16Modules(SwappedModules):
    """The modules of a policy that compute in BF16. FP8 linears, FP8 experts and LoRA adapters are not among them."""

    @classmethod
    def install(cls, model: nn.Module) -> "BF16Modules":
        """Turn the decoder and output head of `model` (a transformers causal LM or a PEFT wrapping), in place.

        Raises:
            ValueError: The model has an embedding that computes something else than rows or scaled rows.
        """
        base = transformers_model(model)
        candidates = dict(base.get_decoder().named_modules()) | {"lm_head": base.get_output_embeddings()}
        chosen = {name: module for name, module in candidates.items() if _computes(name, module)}
        for module in chosen.values():
            module.__class__ = swapped_class(_mixin_for(module), type(module), "BF16")
        return cls(chosen)


def _computes(name: str, module: nn.Module | None) -> bool:
    """Whether a module holds floating point parameters itself and is the policy's own."""
    if module is None or isinstance(module, (FP8Linear, FP8Experts)) or ".lora_" in f".{name}":
        return False
    return any(parameter.is_floating_point() for parameter in module.parameters(recurse=False))


def _mixin_for(module: nn.Module) -> type:
    if isinstance(module, nn.Embedding):
        return _embedding_mixin(module)
    if is_router(module):
        return _BF16Router
    return _BF16Experts if any(len(full_shape(p)) == 3 for p in module.parameters(recurse=False)) else _BF16Parameters


def _embedding_mixin(module: nn.Embedding) -> type:
    if type(module).forward is nn.Embedding.forward:
        return _BF16Output
    if type(module).__name__.endswith("ScaledWordEmbedding"):
        return _BF16ScaledOutput
    raise ValueError(
        f"fp8_forward='full': the model's embedding is a {type(module).__name__}, of which is not known where an "
        "engine rounds. Set fp8_forward='off'."
    )


@contextmanager
def _bf16_parameters(module: nn.Module) -> Iterator[None]:
    held = dict(module._parameters)
    try:
        module._parameters.update({name: _bf16(parameter) for name, parameter in held.items()})
        yield
    finally:
        module._parameters.update(held)


def _bf16(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value
