"""The frozen FP8 base of a policy: where its weights come from, and the engine's codes that replace them.

trainer constructed     `HeldBase` takes the weights out of a model object. Without them the object is as small as a
                        model that was loaded without its base (`StoredBase`, stored_base.py)
engine started          `SharedBase.tensors` yields the weights one by one, to be quantized into the engine's tensors
base shared             `SharedBase.share` gives the policy's layers the engine's codes, and drops the weights. If
                        several ranks share an engine, each rank has only a part of the engine's codes, so the layers
                        get whole codes of their own
adapters merged         `SharedBase.originals` yields the weights in high precision once more
"""

from collections.abc import Callable, Collection, Iterator

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
SHARED_BEFORE = "an earlier trainer shared this model's FP8 base with its engine (fp8_base=True)"
ANEW = "Load the model anew, or give the trainer the flags that the first one had."


class HeldBase:
    """The weights of a model object that become FP8, taken out of it. They stay on its device until `release`.

    If the model shared its base with an earlier engine, the weights are that engine's codes. `ValueError` if they have
    another format than `recipe`, or if `recipe` does not make all of them FP8.
    """

    def __init__(self, model: nn.Module, recipe: FP8Recipe):
        self.recipe = recipe
        self._weights: dict[str, Weight] = {}
        self._places = list(fp8_weights(model, recipe))  # (policy's name, module, module's parameter) of each weight
        require_own_weights(model, {module for _, module, _ in self._places})
        for name, module, parameter in self._places:
            if isinstance(module, HoldsCodes):  # the model shared its base with an earlier engine
                weight = _codes_of(module, parameter)
            else:
                weight = getattr(module, parameter)
            block = recipe.format.weight_block or weight.shape[-2:]
            if isinstance(weight, Float8Tensor) and tuple(weight.block_size[-2:]) != block:
                raise ValueError(f"{SHARED_BEFORE} in another format. {ANEW}")
            self._weights[name] = weight
        for _, module, _ in self._places:
            share(module)

    def restore(self) -> None:
        """Put the weights back into the policy. Does nothing after `release`."""
        if not self._weights:
            return
        for name, module, parameter in self._places:
            weight = self._weights[name]
            if isinstance(weight, Float8Tensor):  # codes of an earlier engine, which the module still has
                continue
            if isinstance(module, HoldsCodes):
                restore(module)
            module.register_parameter(parameter, weight)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Yield (policy's name, weight) of each of `recipe.fp8_tensors`; `RuntimeError` after `release`."""
        if not self._weights:
            raise RuntimeError(
                "fp8_base=True: the base's FP8 weights exist only in the engine, and something changed them there. "
                "The trainer was made with a model object, whose weights were dropped. Start again from the last "
                "checkpoint, and pass the model by its name, so that its weights can be read again."
            )
        for name, weight in self._weights.items():
            yield name, weight.detach()

    def release(self) -> None:
        """Drop the weights. Call it once the engine has them in FP8."""
        self._weights.clear()


class SharedBase:
    """The weights that a policy sends to its engine once. Afterwards the policy computes with the engine's codes.

    Args:
        device: The trainer's, where weights are quantized.
        is_served: Whether the engine is a server. The trainer then stages whole codes, even if several server ranks
            share a model.
    """

    def __init__(self, model: nn.Module, source: HeldBase | StoredBase, device: torch.device, is_served: bool = False):
        self.model = model
        self.recipe = source.recipe
        self._source = source
        self._device = device
        self._engine_codes_are_whole = is_served or self.recipe.tensor_parallel_size == 1
        self._own_codes: dict[str, Float8Tensor] = {}  # whole codes, kept if each engine rank has only a part
        self._original: StoredBase | None = None  # the checkpoint that `original` found

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Yield (policy's name, FP8 weight), to be sent. Keep whole codes if the engine's ranks have only parts."""
        if self._engine_codes_are_whole:
            for name, weight in self._source.tensors():
                yield name, weight.to(self._device)
            return
        for name, _, codes in self._quantized(self._source):
            self._own_codes[name] = codes
            yield name, codes

    def _quantized(self, source: HeldBase | StoredBase) -> Iterator[tuple[str, Weight, Float8Tensor]]:
        """Yield (name, weight, codes of the weight). Weights that share a scale are quantized together."""
        recipe = source.recipe
        on_device = ((name, weight.to(self._device)) for name, weight in source.tensors())
        for group in by_scale(on_device, recipe):
            weights = list(group.values())
            if isinstance(weights[0], Float8Tensor):  # an FP8 checkpoint stores codes
                codes = weights
            else:
                rounded = [weight.to(torch.bfloat16) for weight in weights]
                codes = quantize_fused(rounded, recipe.format, recipe.scale_format)
            yield from zip(group, weights, codes, strict=True)

    def share(self, codes: Callable[[str], Float8Tensor]) -> None:
        """Let the policy's layers compute with the engine's `codes(name)`, or the whole codes that `tensors` kept.

        Release the weights of a `HeldBase`.
        """
        for name, module, parameter in fp8_weights(self.model, self._source.recipe):
            value = self._own_codes[name] if self._own_codes else codes(name)  # see `tensors`
            if isinstance(module, nn.Linear):
                module.codes = value
            else:  # experts have several weights
                module.codes = (module.codes or {}) | {parameter: value}
        if isinstance(self._source, HeldBase):
            self._source.release()
        transformers_model(self.model).save_pretrained = _refuse_save

    def original(self) -> StoredBase | str:
        """Return the checkpoint with the weights in high precision, or the reason why it cannot be read.

        After a failure each call tries again: perhaps the Hub was out of reach.
        """
        if self._original is not None:
            return self._original
        if isinstance(self._source, StoredBase):
            stored = self._source
        else:
            model = transformers_model(self.model)
            recipe = self._source.recipe
            name = model.config.name_or_path
            commit = getattr(model.config, "_commit_hash", None)
            try:
                _, stored = load_without_base(type(model).from_pretrained, name, lambda _: recipe, revision=commit)
            except (ValueError, OSError, SafetensorError) as error:
                return f"the original weights cannot be read again: {error}"
        if any(weight.scales for weight in stored.weights):
            return "the checkpoint is FP8"
        self._original = stored
        return stored

    def originals(self) -> Iterator[tuple[str, Weight]]:
        """Yield (policy's name, weight in high precision) of each FP8 weight.

        The weights are read again from the checkpoint, or are dequantized codes if `original` returns a reason against
        reading. `ValueError` if a weight that was read again quantizes to other codes than the engine has.
        """
        places = fp8_weights(self.model, self._source.recipe)
        codes_by_name = {name: _codes_of(module, parameter) for name, module, parameter in places}
        original = self.original()
        if isinstance(original, str):
            for name, codes in codes_by_name.items():
                yield name, dequantize_weight(codes, torch.float32)
            return
        for name, weight, codes in self._quantized(original):
            if not _equal_codes(codes, codes_by_name[name]):
                raise ValueError(
                    f"the weights in model={self.model.config.name_or_path!r} are not those that the adapters were "
                    f"trained on: {name} quantizes to other codes than the engine has. The model was changed after it "
                    "was loaded, or its folder was. Write the adapters with trainer.save_model(), and merge them into "
                    "the model that they were trained on with PEFT's merge_and_unload()."
                )
            yield name, weight


def _codes_of(module: HoldsCodes, parameter: str) -> Float8Tensor | None:
    return module.codes[parameter] if isinstance(module.codes, dict) else module.codes


def _equal_codes(codes: Float8Tensor, engine_codes: Float8Tensor) -> bool:
    """Return whether two FP8 weights have the same codes and scales. The shapes and dtypes of scales may differ."""
    if not torch.equal(codes.qdata.view(torch.uint8), engine_codes.qdata.view(torch.uint8)):
        return False
    scale = codes.scale.view_as(engine_codes.scale)
    return torch.equal(scale.float(), engine_codes.scale.float())


def require_own_weights(model: nn.Module, skip: Collection[nn.Module] = ()) -> None:
    """Raise `ValueError` if a layer of a policy has lost its weights to an earlier engine, unless it is in `skip`."""
    if any(isinstance(module, HoldsCodes) and module not in skip for module in model.modules()):
        raise ValueError(f"{SHARED_BEFORE}, and this trainer does not share all of it. {ANEW}")


def _refuse_save(*args, **kwargs) -> None:
    raise ValueError(
        "fp8_base=True: the model does not hold its FP8 weights, so save_pretrained would leave them out. Use "
        "trainer.merge_and_export(folder) for a whole model, or trainer.save_model() for the adapters."
    )
