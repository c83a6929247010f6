"""The frozen FP8 base of a policy: the source of its weights, and their holder once the engine has started.

model object            `HeldBase` takes the weights out of the model, which then is as small as one that was
                        loaded without them (stored_base.py)
engine started          the weights are handed over one by one, quantized into the engine's tensors, and dropped
shared                  the policy's layers get the engine's codes; if ranks share an engine, each has only a part,
                        and the layers get whole codes of their own
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.swapped import HoldsCodes, restore
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.weight_stream import by_scale

from .shared_modules import fp8_weights, share
from .stored_base import StoredBase, load_without_base


Weight = Tensor | Float8Tensor  # in high precision, or codes
SHARED_BEFORE = (
    "the model shared its FP8 base with the engine of a trainer before this one (fp8_base=True), and has a part"
)
ANEW = "Load the model anew, or give the trainer the flags that the first one had."


class HeldBase:
    """Weights taken out of a model object; they stay on its device until they are read. A model that shared its base
    with an earlier engine has codes instead.
    """

    def __init__(self, model: nn.Module, recipe: FP8Recipe):
        self.recipe = recipe
        self._weights: dict[str, Weight] = {}
        self._places = list(fp8_weights(model, recipe))
        require_own_weights(model, {module for _, module, _ in self._places})
        for name, module, parameter in self._places:
            weight = _codes_of(module, parameter) if isinstance(module, HoldsCodes) else getattr(module, parameter)
            block = recipe.format.weight_block or weight.shape[-2:]
            if isinstance(weight, Float8Tensor) and tuple(weight.block_size[-2:]) != block:
                raise ValueError(f"{SHARED_BEFORE} in another format. {ANEW}")
            self._weights[name] = weight
        for _, module, _ in self._places:
            share(module)

    def restore(self) -> None:
        """Put the weights back into the policy, unless an engine has them."""
        for name, module, parameter in self._places if self._weights else ():
            if not isinstance(self._weights[name], Float8Tensor):
                if isinstance(module, HoldsCodes):
                    restore(module)
                module.register_parameter(parameter, self._weights[name])

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Yield each of `recipe.fp8_tensors` by the policy's name."""
        if not self._weights:
            raise RuntimeError(
                "fp8_base=True: the base's FP8 weights live in the engine alone, and something changed them there. "
                "They came with the model that the trainer was given and are gone; start again from the last "
                "checkpoint, and pass the model by its name, so that they can be read again."
            )
        yield from ((name, weight.detach()) for name, weight in self._weights.items())

    def release(self) -> None:
        """Drop the weights, which the engine holds in FP8."""
        self._weights.clear()


class SharedBase:
    """Weights that a policy hands to its engine; afterwards it computes with the engine's codes."""

    def __init__(self, model: nn.Module, source: HeldBase | StoredBase, device: torch.device):
        self.model = model
        self._source = source
        self._device = device
        self._own: dict[str, Float8Tensor] = {}  # whole codes, where ranks share an engine

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        if self._source.recipe.tensor_parallel_size == 1:
            yield from self._on_device(self._source)
            return
        for name, _, codes in self._quantized(self._source):
            self._own[name] = codes
            yield name, codes

    def _on_device(self, source: HeldBase | StoredBase) -> Iterator[tuple[str, Weight]]:
        return ((name, tensor.to(self._device)) for name, tensor in source.tensors())

    def _quantized(self, source: HeldBase | StoredBase) -> Iterator[tuple[str, Weight, Float8Tensor]]:
        """Yield (name, weight, its codes); weights that share a scale are quantized together."""
        recipe = source.recipe
        for group in by_scale(self._on_device(source), recipe):
            weights = list(group.values())
            codes = weights
            if not isinstance(weights[0], Float8Tensor):
                rounded = [weight.to(torch.bfloat16) for weight in weights]
                codes = quantize_fused(rounded, recipe.format, recipe.scale_format)
            yield from zip(group, weights, codes, strict=True)

    def share(self, codes: Callable[[str], Float8Tensor]) -> None:
        """Let the policy's layers compute with `codes` of each weight, or their own, and drop weights that came
        with the policy.
        """
        for name, module, parameter in fp8_weights(self.model, self._source.recipe):
            value = self._own[name] if self._own else codes(name)
            module.codes = value if isinstance(module, nn.Linear) else (module.codes or {}) | {parameter: value}
        if isinstance(self._source, HeldBase):
            self._source.release()
        transformers_model(self.model).save_pretrained = _lacks_weights

    @cached_property
    def original(self) -> StoredBase | str:
        """Return the place of the weights in high precision, to be read again, or the reason why there is none."""
        source = self._source
        model = transformers_model(self.model)
        if not isinstance(source, StoredBase):
            recipe = source.recipe
            try:
                _, source = load_without_base(type(model).from_pretrained, model.config.name_or_path, lambda _: recipe)
            except (ValueError, OSError, SafetensorError) as error:
                return f"the original ones cannot be read again: {error}"
        if any(weight.scales for weight in source.weights):
            return "the checkpoint is FP8"
        return source

    def originals(self) -> Iterator[tuple[str, Weight]]:
        """Yield each weight as it was before it was FP8, or dequantized if `original` is a reason.

        `ValueError` if what was read again is not what the engine's codes were made of.
        """
        places = fp8_weights(self.model, self._source.recipe)
        codes_by_name = {name: _codes_of(module, parameter) for name, module, parameter in places}
        if isinstance(self.original, str):
            yield from ((name, dequantize_weight(codes, torch.float32)) for name, codes in codes_by_name.items())
            return
        for name, weight, codes in self._quantized(self.original):
            if not _same(codes, codes_by_name[name]):
                raise ValueError(
                    f"the weights in model={self.model.config.name_or_path!r} are not those that were trained on: "
                    f"{name} quantizes to other codes than the engine has. The model was changed after it was "
                    "loaded, or its folder since then. Write the adapters with trainer.save_model(), and merge "
                    "them into the model that they were trained on with PEFT's merge_and_unload()."
                )
            yield name, weight


def _codes_of(module: HoldsCodes, parameter: str) -> Float8Tensor | None:
    return module.codes[parameter] if isinstance(module.codes, dict) else module.codes


def _same(one: Float8Tensor, other: Float8Tensor) -> bool:
    return torch.equal(one.qdata.view(torch.uint8), other.qdata.view(torch.uint8)) and torch.equal(
        one.scale.view_as(other.scale).float(), other.scale.float()
    )


def require_own_weights(model: nn.Module, but: Collection[nn.Module] = ()) -> None:
    """Raise `ValueError` if layers of a policy, other than `but`, hold no weights."""
    if any(isinstance(module, HoldsCodes) and module not in but for module in model.modules()):
        raise ValueError(f"{SHARED_BEFORE} that is not shared now. {ANEW}")


def _lacks_weights(*args, **kwargs) -> None:
    raise ValueError(
        "fp8_base=True: the model does not hold its FP8 weights, so that save_pretrained would leave them out. Use "
        "trainer.merge_and_export(folder) for a whole model, or trainer.save_model() for the adapters."
    )
