"""A policy loaded without the weights that will be FP8, and a reader of those in its checkpoint.

    transformers builds the model, empty   -> its FP8 linears and experts get no weight (shared_modules.py)
    transformers loads the checkpoint      -> tensors without a place are never read
    `StoredBase.tensors`                   -> reads exactly those, one weight at a time

So the base is never in memory in high precision. Codes of a checkpoint in 128x128 blocks are taken as they are.
transformers lets a quantizer change the empty model; ours stands in for any that it would choose.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torchao.quantization import Float8Tensor
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.formats import BLOCKS
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import WRAPPED, WRAPPED_OTHERWISE, published_names
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import substituted

from .shared_modules import fp8_weights, share


_HIGH_PRECISION = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors' words
_SCALES, _CODES = ("F32", "BF16"), "F8_E4M3"
Opened = Mapping[str, safe_open]  # files of a checkpoint
_FROM = "Start from the high-precision checkpoint, or from an FP8 one in 128x128 blocks"


@dataclass(frozen=True)
class StoredBase:
    """The FP8 weights of a checkpoint that a policy was loaded without."""

    recipe: FP8Recipe  # says which; for stored codes it has their scales' format, and keeps all other weights
    weights: tuple["StoredWeight", ...] = field(repr=False)

    def tensors(self) -> Iterator[tuple[str, Tensor | Float8Tensor]]:
        """Yield (policy's name, value) of each of `recipe.fp8_tensors`, on the host: `[N, K]`, of experts `[E, N, K]`.

        Values are in high precision, or codes as stored (e4m3, with fp32 scales of 128x128 blocks). Weights that are
        stored whole stay in the file's pages, experts are gathered by layer. A consumer drops each before the next.
        """
        return ((weight.name, weight.value(opened)) for weight, opened in _file_by_file(self.weights))


def load_without_base(
    create: Callable[..., PreTrainedModel], model_id: str, recipe_for: Callable[[PreTrainedModel], FP8Recipe], **kwargs
) -> tuple[PreTrainedModel, StoredBase]:
    """Return a policy whose FP8 linears and experts hold no weight, and where those are stored.

    Args:
        create: TRL's `create_model_from_path`, or what is called like it and loads one model by `from_pretrained`.
        model_id: Folder or id of a checkpoint in safetensors, in high precision or in 128x128 FP8 blocks.
        recipe_for: Decides what is FP8 in a model on the meta device.
        kwargs: Arguments of `create`. `dtype`, of everything that is loaded, is BF16 by default.

    Raises:
        ValueError: The checkpoint cannot be taken without its base. Nothing was loaded.
    """
    loader = _Loader(recipe_for)
    with substituted(modeling_utils, "get_hf_quantizer", loader.chosen):
        model = create(model_id, **({"dtype": torch.bfloat16} | kwargs))
    return model, loader.base


class _Loader(HfQuantizer):
    """Quantizer that transformers calls while it loads a model."""

    is_trainable = True

    def __init__(self, recipe_for: Callable[[PreTrainedModel], FP8Recipe]):
        super().__init__(QuantizationConfigMixin("fp8_base"), pre_quantized=False)
        self._recipe_for = recipe_for
        self.base: StoredBase | None = None

    def chosen(
        self, config: PreTrainedConfig, quantization: object, device_map: object, *_, gguf_file: str | None = None
    ) -> tuple[HfQuantizer, PreTrainedConfig, object]:
        """Return this quantizer for every config. Replaces `transformers.quantizers.auto.get_hf_quantizer`."""
        if quantization is not None or gguf_file is not None:
            format_asked = f"quantization_config={type(quantization).__name__}(...)"
            if gguf_file is not None:
                format_asked = f"gguf_file={gguf_file!r}"
            raise ValueError(
                f"fp8_base=True with {format_asked}: the base is quantized to FP8 for trainer and engine, and to "
                "nothing else. Remove it."
            )
        for each in (config, config.get_text_config(decoder=True)):
            method = (vars(each).pop("quantization_config", None) or {}).get("quant_method", "fp8")
            if method != "fp8":
                raise ValueError(
                    f"fp8_base=True with a checkpoint whose quant_method is {method!r}: its weights are neither "
                    f"in high precision nor FP8 in 128x128 blocks. {_FROM}."
                )
        return self, config, device_map

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: object) -> None:
        """Take the FP8 weights out of the empty model."""
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
        self.base = _base_in(checkpoint_files or [], shapes, self._recipe_for(model), model.name_or_path)
        recipe = self.base.recipe
        for _, module, parameter in fp8_weights(model, recipe):
            share(module)
            placeholder = getattr(module, parameter)
            placeholder._is_hf_initialized = True  # else transformers would initialize it
        absent = "|".join(map(re.escape, sorted(recipe.fp8_tensors)))
        self._unreported = rf"^({absent})({recipe.format.scale_suffix})?$"
        model._keys_to_ignore_on_load_unexpected.add(self._unreported)

    def postprocess_model(self, model: PreTrainedModel, **_: object) -> None:
        """Leave a model like any other."""
        model._keys_to_ignore_on_load_unexpected.discard(self._unreported)
        del model.hf_quantizer

    def is_serializable(self) -> bool:
        return True


class Stored(NamedTuple):
    """One tensor of a checkpoint."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredWeight:
    """Place of a weight of the policy in a checkpoint."""

    name: str  # in the policy
    shape: tuple[int, ...]  # `[N, K]`; of all experts `[E, N, K]`
    parts: tuple[str, ...]  # names in the checkpoint: one, or for each expert those that follow each other along N
    scales: tuple[str, ...]  # of the parts; empty if the weight is in high precision
    checkpoint: Mapping[str, Stored] = field(repr=False)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({self.checkpoint[name].file for name in (*self.parts, *self.scales)}))

    def value(self, opened: Opened) -> Tensor | Float8Tensor:
        """Read the weight; `opened` are `files` by name."""
        if not self.scales:
            return self._whole(self.parts, self.shape, _HIGH_PRECISION[self.checkpoint[self.parts[0]].dtype], opened)
        block = [1] * (len(self.shape) - 2) + list(BLOCKS.weight_block)
        codes = self._whole(self.parts, self.shape, E4M3, opened)
        return Float8Tensor(codes, self.scale(opened), block_size=block, dtype=torch.bfloat16)

    def scale(self, opened: Opened) -> Tensor:
        """Read the scales of its blocks, fp32, in which BF16 is exact."""
        return self._whole(self.scales, BLOCKS.scale_shape(self.shape), torch.float32, opened)

    def _whole(self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, opened: Opened) -> Tensor:
        tensors = (opened[self.checkpoint[name].file].get_tensor(name) for name in names)
        if len(names) == 1:
            return next(tensors).to(dtype).view(shape)
        whole = torch.empty(shape, dtype=dtype, device="cpu")  # also while transformers makes all others on "meta"
        for place, tensor in zip(whole.view(len(names), -1, shape[-1]), tensors, strict=True):
            place.copy_(tensor)
        return whole

    def in_another_form(self) -> str | None:
        """Return the form in which it is stored, if the engine cannot take that form; else None."""
        rows = prod(self.shape[:-1]) // len(self.parts)
        columns = self.shape[-1]
        first = self.checkpoint[self.parts[0]]
        dtype = first.dtype
        scale_shape = BLOCKS.scale_shape((rows, columns))
        for part in self.parts:
            found = self.checkpoint[part]
            if found[1:] != (dtype, (rows, columns)) or dtype not in (_CODES, *_HIGH_PRECISION):
                return f"{part} ({found.dtype} {list(found.shape)})"
        for scale in self.scales:
            found = self.checkpoint.get(scale)
            if found is None:
                return f"{self.parts[0]} ({dtype}, without {scale.rpartition('.')[2]})"
            if found.dtype not in _SCALES or found.shape != scale_shape:
                return f"{scale} ({found.dtype} {list(found.shape)})"
        return None


def _base_in(files: list[str], shapes: Mapping[str, tuple[int, ...]], recipe: FP8Recipe, model: str) -> StoredBase:
    """Return the base in the checkpoint of a policy whose parameters have these shapes."""
    where = f"fp8_base=True with model={model!r}"
    if not recipe.fp8_weights:
        raise ValueError(f"{where}: nothing of it is FP8, so there is no base to share. Set fp8_base=False.")
    if not files or any(not file.endswith(".safetensors") for file in files):
        raise ValueError(
            f"{where}: FP8 weights are read one by one, from *.safetensors, and not from "
            f"{listed([Path(file).name for file in files], 2) or 'a state_dict'}. Write it anew with from_pretrained "
            "and save_pretrained, or set fp8_base=False."
        )
    checkpoint = dict(_headers(files))
    decoders = (recipe.decoder, *(WRAPPED_OTHERWISE if recipe.decoder == WRAPPED else ()))
    decoder = next((one for one in decoders if f"{one}.embed_tokens.weight" in checkpoint), recipe.decoder)
    parts = {name: _names(name, shape, recipe, decoder) for name, shape in shapes.items()}
    missing = [part for name in sorted(recipe.fp8_tensors) for part in parts[name] if part not in checkpoint]
    if missing:
        raise ValueError(
            f"{where}: it lacks {len(missing)} weights under the names that are looked for, such as "
            f"{listed(missing, 2)}; it has for example {listed(checkpoint, 2)}. Load the model yourself with "
            "from_pretrained and pass it to the trainer: its weights are then taken from it."
        )
    codes = {name for name, stored in checkpoint.items() if stored.dtype == _CODES}
    coded = {name for name, own in parts.items() if not codes.isdisjoint(own)}
    if coded:
        in_high_precision = {name.rpartition(".")[0] for name in recipe.fp8_tensors - coded}
        recipe = recipe.keeping(in_high_precision, "in high precision in the checkpoint")
        _check_codes(coded, recipe, where)
    suffix = recipe.format.scale_suffix
    weights = []
    for name, shape in shapes.items():
        if name in recipe.fp8_tensors:
            of_scales = _names(name, shape, recipe, decoder, suffix) if coded else ()
            weights.append(StoredWeight(name, shape, parts[name], of_scales, checkpoint))
    unusable = list(filter(None, (weight.in_another_form() for weight in weights)))
    if unusable:
        raise ValueError(
            f"{where}: {len(unusable)} of its tensors are of no use here: {listed(unusable, 3)}. {_FROM}."
        )
    scales = (weight.scale(opened) for weight, opened in _file_by_file(weights)) if coded else ()
    if any((scale.frexp().mantissa != 0.5).any() for scale in scales):  # no powers of two
        recipe = replace(recipe, scale_format="fp32")
    return StoredBase(recipe, tuple(weights))


def _check_codes(coded: set[str], recipe: FP8Recipe, where: str) -> None:
    """Raise `ValueError` if weights that are stored as codes are not to be FP8, or in another format."""
    if recipe.format is not BLOCKS:
        raise ValueError(
            f"{where} and fp8_weight_format={recipe.format.name!r}: the checkpoint has scales of 128x128 blocks, with "
            f"which it is taken as it is. Remove fp8_weight_format, or set fp8_base=False."
        )
    refused = sorted(coded - recipe.fp8_tensors)
    if refused:
        reasons = (f"{name} ({recipe.kept_modules.get(name.rpartition('.')[0], 'no projection')})" for name in refused)
        raise ValueError(
            f"{where}: {len(refused)} weights are FP8 in the checkpoint and not here: {listed(reasons, 3)}. Set "
            "fp8_base=False, which dequantizes them; or name none of them in fp8_ignored_modules."
        )


def _headers(files: Iterable[str]) -> Iterator[tuple[str, Stored]]:
    """Yield (name, what is known without reading it) of each tensor."""
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                tensor = opened.get_slice(name)
                yield name, Stored(file, tensor.get_dtype(), tuple(tensor.get_shape()))


def _names(name: str, shape: tuple[int, ...], recipe: FP8Recipe, decoder: str, suffix: str = "") -> tuple[str, ...]:
    """Return the names of a parameter of the policy, or with a suffix of its scales, in a checkpoint with decoder
    layers in `decoder`: several if it belongs to experts.
    """
    sent = recipe.stored_name(name + suffix)
    if sent.startswith(f"{recipe.decoder}."):
        sent = decoder + sent.removeprefix(recipe.decoder)
    parts = published_names(sent, BLOCKS.scale_suffix, recipe.model_type)
    return tuple(part.format(expert) for expert in range(shape[0]) for part in parts) or (sent,)


def _file_by_file(weights: Iterable[StoredWeight]) -> Iterator[tuple[StoredWeight, Opened]]:
    """Yield weights and their open files, in an order that goes through each file once."""
    for files, together in groupby(sorted(weights, key=lambda one: one.files), lambda one: one.files):
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
            yield from ((weight, opened) for weight in together)
