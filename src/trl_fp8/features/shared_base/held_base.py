"""The frozen FP8 base of a policy: where its weights come from once, and who holds them from then on.

given as an object      `HeldBase` takes the weights out of the model, which then is as small as one that was
                        loaded without them (stored_base.py)
engine started          the weights are handed over one by one, quantized where the engine keeps them, and gone
shared                  the policy's layers get the engine's codes; where ranks share an engine, each of which has
                        a part, whole codes of their own
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.swapped import restore
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.recipe.from_model import linear_layers
from trl_fp8.recipe.names import TRANSFORMERS, expert_modules
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.weight_stream import by_scale

from .shared_modules import SharedExperts, SharedLinear, share_experts, share_linear
from .stored_base import StoredBase, load_without_base


Named = tuple[str, Tensor | Float8Tensor]
SHARED = SharedLinear, SharedExperts
SHARED_BEFORE = (
    "the model shared its FP8 base with the engine of a trainer before this one (fp8_base=True), and has a part"
)
ANEW = "Load the model anew, or give the trainer the flags that the first one had."


class Source(Protocol):
    """FP8 weights that a policy does without."""

    recipe: FP8Recipe  # which they are

    def tensors(self) -> Iterator[Named]:
        """Each of `recipe.fp8_tensors` by the policy's name: in high precision, or as codes."""


class HeldBase:
    """`Source` of a policy that was given with its weights; they are where it had them until they are asked for. One
    that shared its base with an engine before has the codes of that.
    """

    def __init__(self, model: nn.Module, recipe: FP8Recipe):
        self.recipe, self._model = recipe, model
        self._weights: dict[str, Tensor | Float8Tensor] = {}
        layers = _layers(model, recipe)
        require_own_weights(model, {module for _, module in layers})
        for name, module in layers:
            own = module.codes if isinstance(module, SHARED) else _weights(module)
            own = own if isinstance(own, dict) else {"weight": own}
            self._weights |= {f"{name}.{weight}": tensor for weight, tensor in own.items()}
        before = [each for each in self._weights.values() if isinstance(each, Float8Tensor)]
        if any(tuple(each.block_size[-2:]) != (recipe.format.weight_block or each.shape[-2:]) for each in before):
            raise ValueError(f"{SHARED_BEFORE} in another format. {ANEW}")
        share(model, recipe)

    def restore(self) -> None:
        """Make the policy what it was, as long as no engine has its weights."""
        for name, module in _layers(self._model, self.recipe) if self._weights else ():
            if isinstance(module, SHARED) and module.codes is None:
                restore(module)
                for parameter in ["weight"] if isinstance(module, nn.Linear) else TRANSFORMERS.fused:
                    module.register_parameter(parameter, self._weights[f"{name}.{parameter}"])

    def tensors(self) -> Iterator[Named]:
        if not self._weights:
            raise RuntimeError(
                "fp8_base=True: the base's FP8 weights live in the engine alone, and something changed them there. "
                "They came with the model that the trainer was given and are gone; start again from the last "
                "checkpoint, and pass the model by its name, so that they can be read again."
            )
        yield from ((name, weight.detach()) for name, weight in self._weights.items())

    def release(self) -> None:
        """Let go of the weights, which somebody holds in FP8."""
        self._weights.clear()


class SharedBase:
    """What a trainer's engine is handed: weights of a policy that does without them as soon as the engine has them."""

    def __init__(self, model: nn.Module, source: Source, device: torch.device):
        self.model, self._source, self._device = model, source, device
        self._own: dict[str, Float8Tensor] = {}  # whole codes, where ranks share an engine

    def tensors(self) -> Iterator[Named]:
        if self._source.recipe.tensor_parallel_size == 1:
            yield from ((name, tensor.to(self._device)) for name, tensor in self._source.tensors())
            return
        for group in self._by_scale(self._source):
            self._own |= zip(group, self._quantized(list(group.values())), strict=True)
            yield from ((name, self._own[name]) for name in group)

    def _by_scale(self, source: Source) -> Iterator[dict[str, Tensor | Float8Tensor]]:
        """Weights that share a scale, together."""
        return by_scale(((name, tensor.to(self._device)) for name, tensor in source.tensors()), source.recipe)

    def _quantized(self, weights: list[Tensor | Float8Tensor]) -> list[Float8Tensor]:
        if isinstance(weights[0], Float8Tensor):
            return weights
        recipe = self._source.recipe
        return quantize_fused([weight.to(torch.bfloat16) for weight in weights], recipe.format, recipe.scale_format)

    def share(self, codes: Callable[[str], Float8Tensor]) -> None:
        """Let the policy's layers compute with `codes` of each weight, or their own. Weights that came with the policy
        are gone then.
        """

        def of(weight: str) -> Float8Tensor:
            return self._own[weight] if self._own else codes(weight)

        for name, module in _layers(self.model, self._source.recipe):
            if isinstance(module, nn.Linear):
                module.codes = of(f"{name}.weight")
            else:
                module.codes = {weight: of(f"{name}.{weight}") for weight in TRANSFORMERS.fused}
        if isinstance(self._source, HeldBase):
            self._source.release()
        transformers_model(self.model).save_pretrained = _lacks_weights

    @cached_property
    def original(self) -> "StoredBase | str":
        """Where the weights are in high precision, to be read again; or why they are not."""
        source, model = self._source, transformers_model(self.model)
        if not isinstance(source, StoredBase):
            create, recipe = type(model).from_pretrained, source.recipe
            try:
                _, source = load_without_base(create, model.config.name_or_path, lambda _: recipe)
            except (ValueError, OSError, SafetensorError) as error:
                return f"the original ones cannot be read again: {error}"
        if any(weight.scales for weight in source.weights):
            return "the checkpoint is FP8"
        return source

    def originals(self) -> Iterator[Named]:
        """Each weight as it was before it was FP8, or dequantized if `original` is a reason.

        `ValueError` if what was read again is not what the engine's codes were made of.
        """
        codes, original = self._codes(), self.original
        if isinstance(original, str):
            yield from ((name, dequantize_weight(held, torch.float32)) for name, held in codes.items())
            return
        for group in self._by_scale(original):
            for (name, weight), found in zip(group.items(), self._quantized(list(group.values())), strict=True):
                if not _same(found, codes[name]):
                    raise ValueError(
                        f"the weights in model={self.model.config.name_or_path!r} are not those that were trained "
                        f"on: {name} quantizes to other codes than the engine has. The model was changed after it was "
                        "loaded, or its folder since then. Write the adapters with trainer.save_model(), and merge "
                        "them into the model that they were trained on with PEFT's merge_and_unload()."
                    )
                yield name, weight

    def _codes(self) -> dict[str, Float8Tensor]:
        found = {}
        for name, module in _layers(self.model, self._source.recipe):
            held = {"weight": module.codes} if isinstance(module, nn.Linear) else module.codes
            found |= {f"{name}.{weight}": codes for weight, codes in held.items()}
        return found


def _same(one: Float8Tensor, other: Float8Tensor) -> bool:
    return torch.equal(one.qdata.view(torch.uint8), other.qdata.view(torch.uint8)) and torch.equal(
        one.scale.view_as(other.scale), other.scale
    )


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.named_parameters(recurse=False) if name != "bias"}


def require_own_weights(model: nn.Module, but: Collection[nn.Module] = ()) -> None:
    """Raise `ValueError` if layers of a policy, other than `but`, hold no weights."""
    if any(isinstance(module, SHARED) and module not in but for module in model.modules()):
        raise ValueError(f"{SHARED_BEFORE} that is not shared now. {ANEW}")


def share(model: nn.Module, recipe: FP8Recipe) -> None:
    """Take the FP8 weights of `recipe` out of a policy, which can be on the meta device."""
    for _, module in _layers(model, recipe):
        if isinstance(module, nn.Linear):
            share_linear(module)
        else:
            share_experts(module)


def _layers(model: nn.Module, recipe: FP8Recipe) -> list[tuple[str, nn.Module]]:
    """The linears and experts that are FP8, by checkpoint name."""
    fp8 = {*recipe.fp8_modules, *recipe.fp8_experts}
    return [(name, module) for name, module in (*linear_layers(model), *expert_modules(model)) if name in fp8]


def _lacks_weights(*args, **kwargs) -> None:
    raise ValueError(
        "fp8_base=True: the model does not hold its FP8 weights, so that save_pretrained would leave them out. Use "
        "trainer.merge_and_export(folder) for a whole model, or trainer.save_model() for the adapters."
    )
