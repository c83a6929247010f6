"""The frozen FP8 base of a policy: where its weights come from once, and who holds them from then on.

given as an object      `HeldBase` takes the weights out of the model, which then is as small as one that was
                        loaded without them (stored.py)
engine started          the weights are handed over one by one, quantized where the engine keeps them, and gone
shared                  the policy's layers get the engine's codes; where ranks share an engine, each of which has
                        a part, whole codes of their own
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from trl_fp8.recipe.from_model import linear_layers
from trl_fp8.recipe.names import TRANSFORMERS, expert_modules
from trl_fp8.recipe.recipe import FP8Recipe

from .shared import share_experts, share_linear


Named = tuple[str, Tensor | Float8Tensor]


class Source(Protocol):
    """FP8 weights that a policy does without."""

    recipe: FP8Recipe  # which they are

    def tensors(self) -> Iterator[Named]:
        """Each of `recipe.fp8_tensors` by the policy's name: in high precision, or as codes."""


class HeldBase:
    """`Source` of a policy that was given with its weights; they are where it had them until they are asked for."""

    def __init__(self, model: nn.Module, recipe: FP8Recipe):
        self.recipe = recipe
        self._weights: dict[str, Tensor] = {}
        for name, module in _layers(model, recipe):
            for weight in [name for name, _ in module.named_parameters(recurse=False) if name != "bias"]:
                self._weights[f"{name}.{weight}"] = module._parameters[weight].detach()
        share(model, recipe)

    def tensors(self) -> Iterator[Named]:
        if not self._weights:
            raise RuntimeError(
                "fp8_base=True: the base's FP8 weights live in the engine alone, and something changed them there. "
                "They came with the model that the trainer was given and are gone; start again from the last "
                "checkpoint, and pass the model by its name, so that they can be read again."
            )
        for name in list(self._weights):
            yield name, self._weights.pop(name)


class SharedBase:
    """What a trainer's engine is handed, see `engine.vllm.generation.Base`."""

    def __init__(self, model: nn.Module, source: Source, device: torch.device):
        self._model, self._source, self._device = model, source, device
        self._own: dict[str, Float8Tensor] = {}  # whole codes, where ranks share an engine

    def tensors(self) -> Iterator[Named]:
        recipe, due = self._source.recipe, {}
        for name, tensor in self._source.tensors():
            tensor = tensor.to(self._device)
            if recipe.tensor_parallel_size == 1:
                yield name, tensor
                continue
            due[name], group = tensor, recipe.sharing_scale(name)
            if all(peer in due for peer in group):
                self._own |= zip(group, self._quantized([due.pop(peer) for peer in group]), strict=True)
                yield from ((peer, self._own[peer]) for peer in group)

    def _quantized(self, weights: list[Tensor | Float8Tensor]) -> list[Float8Tensor]:
        if isinstance(weights[0], Float8Tensor):
            return weights
        recipe = self._source.recipe
        return recipe.format.quantize_weights([weight.to(torch.bfloat16) for weight in weights], recipe.scale_format)

    def share(self, codes: Callable[[str], Float8Tensor]) -> None:
        """Let the policy's layers compute with `codes` of each weight, or their own."""

        def of(weight: str) -> Float8Tensor:
            return self._own[weight] if self._own else codes(weight)

        for name, module in _layers(self._model, self._source.recipe):
            if isinstance(module, nn.Linear):
                module.codes = of(f"{name}.weight")
            else:
                module.codes = {weight: of(f"{name}.{weight}") for weight in TRANSFORMERS.fused}


def share(model: nn.Module, recipe: FP8Recipe) -> None:
    """Take the FP8 weights of `recipe` out of a policy, which can be on the meta device."""
    for _, module in _layers(model, recipe):
        if isinstance(module, nn.Linear):
            share_linear(module)
        else:
            share_experts(module)


def _layers(model: nn.Module, recipe: FP8Recipe) -> list[tuple[str, nn.Module]]:
    """The linears and experts that are FP8, by checkpoint name."""
    linears = [(name, module) for name, module in linear_layers(model) if name in set(recipe.fp8_modules)]
    return linears + [(name, module) for name, module in expert_modules(model) if name in recipe.fp8_experts]
