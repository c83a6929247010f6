"""Loading of a policy without the weights that will be FP8, and reading of these weights from its checkpoint.

    transformers builds an empty model     -> its FP8 linears and experts lose their weights (shared_modules.py)
    transformers loads the checkpoint      -> it never reads tensors for which the model has no parameter
    `StoredBase.tensors`                   -> reads exactly these tensors, one weight at a time

So the whole base is never in memory in high precision. If a checkpoint has FP8 codes in 128x128 blocks, they are used
unchanged. transformers lets a quantizer change the empty model, so `_Loader` takes the place of any quantizer that
transformers would choose.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from operator import attrgetter
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


# safetensors' names of dtypes
_HIGH_PRECISION = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = "F8_E4M3"
_SCALES = ("F32", "BF16")
OpenFiles = Mapping[str, safe_open]  # files of a checkpoint, by path
_REMEDY = "Start from the high-precision checkpoint, or from an FP8 checkpoint in 128x128 blocks"


@dataclass(frozen=True)
class StoredBase:
    """The weights of a checkpoint that will be FP8. The policy was loaded without them."""

    # `fp8_tensors` names the weights. If a checkpoint has FP8 codes, these alone are FP8, in the codes' scale format
    recipe: FP8Recipe
    weights: tuple["StoredWeight", ...] = field(repr=False)

    def tensors(self) -> Iterator[tuple[str, Tensor | Float8Tensor]]:
        """Yield (policy's name, value) of each of `recipe.fp8_tensors`, on the host: `[N, K]`, or experts `[E, N, K]`.

        Values are in high precision, or codes as stored (e4m3, with fp32 scales of 128x128 blocks). A weight that is
        one tensor of a file is memory-mapped; a layer's experts are copied into one tensor. To keep one weight in
        memory at a time, drop each value before taking the next.
        """
        return ((weight.name, weight.value(opened)) for weight, opened in _file_by_file(self.weights))


def load_without_base(
    create: Callable[..., PreTrainedModel], model_id: str, recipe_for: Callable[[PreTrainedModel], FP8Recipe], **kwargs
) -> tuple[PreTrainedModel, StoredBase]:
    """Return a policy whose FP8 linears and experts hold no weights, and the stored base that has these weights.

    Args:
        create: TRL's `create_model_from_path`, or a function with the same arguments that loads one model by
            `from_pretrained`.
        model_id: Folder or id of a checkpoint in safetensors, in high precision or in 128x128 FP8 blocks.
        recipe_for: Returns the recipe of a model, which is on the meta device.
        kwargs: Further arguments of `create`. `dtype`, by default BF16, is that of all weights that are loaded.

    Raises:
        ValueError: The base cannot be read from this checkpoint. Nothing was loaded.
    """
    loader = _Loader(recipe_for)
    with substituted(modeling_utils, "get_hf_quantizer", loader.choose):
        model = create(model_id, **({"dtype": torch.bfloat16} | kwargs))
    return model, loader.base


class _Loader(HfQuantizer):
    """A quantizer for transformers that quantizes nothing. It takes the base out of a model that is being loaded."""

    is_trainable = True

    def __init__(self, recipe_for: Callable[[PreTrainedModel], FP8Recipe]):
        super().__init__(QuantizationConfigMixin("fp8_base"), pre_quantized=False)
        self._recipe_for = recipe_for
        self.base: StoredBase | None = None

    def choose(
        self, config: PreTrainedConfig, quantization: object, device_map: object, *_, gguf_file: str | None = None
    ) -> tuple[HfQuantizer, PreTrainedConfig, object]:
        """Return this quantizer for every config. Replaces `transformers.quantizers.auto.get_hf_quantizer`."""
        if quantization is not None or gguf_file is not None:
            user_flag = f"quantization_config={type(quantization).__name__}(...)"
            if gguf_file is not None:
                user_flag = f"gguf_file={gguf_file!r}"
            raise ValueError(
                f"fp8_base=True with {user_flag}: the base is quantized to FP8 for trainer and engine, and to nothing "
                "else. Remove it."
            )
        for each in (config, config.get_text_config(decoder=True)):
            # The loaded model is in high precision, so its config must not have the entry
            method = (vars(each).pop("quantization_config", None) or {}).get("quant_method", "fp8")
            if method != "fp8":
                raise ValueError(
                    f"fp8_base=True with a checkpoint whose quant_method is {method!r}: its weights are neither "
                    f"in high precision nor FP8 in 128x128 blocks. {_REMEDY}."
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
        # Else transformers would report the tensors of the base as unexpected
        absent = "|".join(map(re.escape, sorted(recipe.fp8_tensors)))
        self._unreported = rf"^({absent})({recipe.format.scale_suffix})?$"
        model._keys_to_ignore_on_load_unexpected.add(self._unreported)

    def postprocess_model(self, model: PreTrainedModel, **_: object) -> None:
        """Remove this quantizer's traces from the loaded model."""
        model._keys_to_ignore_on_load_unexpected.discard(self._unreported)
        del model.hf_quantizer

    def is_serializable(self) -> bool:
        return True


class StoredTensor(NamedTuple):
    """The header of one tensor of a checkpoint."""

    file: str
    dtype: str  # by safetensors' name
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredWeight:
    """The tensors in a checkpoint that make up one weight of the policy."""

    name: str  # in the policy
    shape: tuple[int, ...]  # `[N, K]`; of all experts `[E, N, K]`
    # Names of the checkpoint's tensors: one, or several for experts: of each expert in turn, gate before up along N
    parts: tuple[str, ...]
    scales: tuple[str, ...]  # names of the parts' scales; empty if the weight is in high precision
    checkpoint: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({self.checkpoint[name].file for name in (*self.parts, *self.scales)}))

    def value(self, opened: OpenFiles) -> Tensor | Float8Tensor:
        """Read the weight, in high precision or as codes. `opened` has all of `files`."""
        if not self.scales:
            return self._whole(self.parts, self.shape, _HIGH_PRECISION[self.checkpoint[self.parts[0]].dtype], opened)
        block = [1] * (len(self.shape) - 2) + list(BLOCKS.weight_block)
        codes = self._whole(self.parts, self.shape, E4M3, opened)
        return Float8Tensor(codes, self.scale(opened), block_size=block, dtype=torch.bfloat16)

    def scale(self, opened: OpenFiles) -> Tensor:
        """Read the scales of the weight's blocks as fp32, which represents stored BF16 scales exactly."""
        return self._whole(self.scales, BLOCKS.scale_shape(self.shape), torch.float32, opened)

    def _whole(self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, opened: OpenFiles) -> Tensor:
        """Read the tensors `names`, concatenate them, and return the result in `shape` and `dtype`."""
        tensors = (opened[self.checkpoint[name].file].get_tensor(name) for name in names)
        if len(names) == 1:
            return next(tensors).to(dtype).view(shape)
        whole = torch.empty(shape, dtype=dtype, device="cpu")  # "meta" is the default device while transformers loads
        for part, tensor in zip(whole.view(len(names), -1, shape[-1]), tensors, strict=True):
            part.copy_(tensor)
        return whole

    def unusable_form(self) -> str | None:
        """Return the name, dtype and shape of the first tensor that the engine cannot use; None if it can use all.

        Parts need one known dtype and an equal share of the rows. Their scales need the shape of 128x128 blocks.
        """
        rows = prod(self.shape[:-1]) // len(self.parts)
        columns = self.shape[-1]
        first = self.checkpoint[self.parts[0]]
        dtype = first.dtype
        scale_shape = BLOCKS.scale_shape((rows, columns))
        for part in self.parts:
            entry = self.checkpoint[part]
            is_equal_part = entry.dtype == dtype and entry.shape == (rows, columns)
            if not is_equal_part or dtype not in (_CODES, *_HIGH_PRECISION):
                return f"{part} ({entry.dtype} {list(entry.shape)})"
        for scale in self.scales:
            entry = self.checkpoint.get(scale)
            if entry is None:
                return f"{self.parts[0]} ({dtype}, without {scale.rpartition('.')[2]})"
            if entry.dtype not in _SCALES or entry.shape != scale_shape:
                return f"{scale} ({entry.dtype} {list(entry.shape)})"
        return None


def _base_in(files: list[str], shapes: Mapping[str, tuple[int, ...]], recipe: FP8Recipe, model: str) -> StoredBase:
    """Return the base that a checkpoint has for a policy whose parameters have these `shapes`.

    `ValueError` if the base cannot be read from this checkpoint.
    """
    where = f"fp8_base=True with model={model!r}"
    if not recipe.fp8_weights:
        raise ValueError(f"{where}: nothing of it is FP8, so there is no base to share. Set fp8_base=False.")
    if not files or any(not file.endswith(".safetensors") for file in files):
        raise ValueError(
            f"{where}: FP8 weights are read one by one, from *.safetensors, and not from "
            f"{listed([Path(file).name for file in files], 2) or 'a state_dict'}. Write the model anew with "
            "from_pretrained and save_pretrained, or set fp8_base=False."
        )
    checkpoint = dict(_headers(files))
    # A checkpoint of a vision-language model may have another name of its decoder
    decoder = recipe.decoder
    if decoder == WRAPPED and f"{decoder}.embed_tokens.weight" not in checkpoint:
        for other in WRAPPED_OTHERWISE:
            if f"{other}.embed_tokens.weight" in checkpoint:
                decoder = other
                break
    parts = {name: _names(name, shape, recipe, decoder) for name, shape in shapes.items()}
    missing = [part for name in sorted(recipe.fp8_tensors) for part in parts[name] if part not in checkpoint]
    if missing:
        raise ValueError(
            f"{where}: the checkpoint lacks {len(missing)} weights under their usual names, such as "
            f"{listed(missing, 2)}; it has for example {listed(checkpoint, 2)}. Load the model yourself with "
            "from_pretrained and pass the object to the trainer, which then takes the weights from it."
        )
    codes = {name for name, stored in checkpoint.items() if stored.dtype == _CODES}
    coded = {name for name, names in parts.items() if not codes.isdisjoint(names)}  # parameters stored as codes
    if coded:
        in_high_precision = {name.rpartition(".")[0] for name in recipe.fp8_tensors - coded}
        recipe = recipe.keeping(in_high_precision, "in high precision in the checkpoint")
        _check_codes(coded, recipe, where)
    suffix = recipe.format.scale_suffix
    weights = []
    for name, shape in shapes.items():
        if name in recipe.fp8_tensors:
            scale_names = _names(name, shape, recipe, decoder, suffix) if coded else ()
            weights.append(StoredWeight(name, shape, parts[name], scale_names, checkpoint))
    forms = [weight.unusable_form() for weight in weights]
    unusable = [form for form in forms if form is not None]
    if unusable:
        raise ValueError(
            f"{where}: {len(unusable)} of its tensors have a dtype or shape that cannot be used: "
            f"{listed(unusable, 3)}. {_REMEDY}."
        )
    scales = (weight.scale(opened) for weight, opened in _file_by_file(weights)) if coded else ()
    if any((scale.frexp().mantissa != 0.5).any() for scale in scales):  # a power of two has the mantissa 0.5
        recipe = replace(recipe, scale_format="fp32")
    return StoredBase(recipe, tuple(weights))


def _check_codes(coded: set[str], recipe: FP8Recipe, where: str) -> None:
    """Raise `ValueError` unless the recipe has the format of the stored codes, and makes all `coded` weights FP8."""
    if recipe.format is not BLOCKS:
        raise ValueError(
            f"{where} and fp8_weight_format={recipe.format.name!r}: the checkpoint has FP8 codes with scales of "
            "128x128 blocks, which are used unchanged. Remove fp8_weight_format, or set fp8_base=False."
        )
    refused = sorted(coded - recipe.fp8_tensors)
    if refused:
        reasons = (f"{name} ({recipe.kept_modules.get(name.rpartition('.')[0], 'no projection')})" for name in refused)
        raise ValueError(
            f"{where}: {len(refused)} weights are FP8 in the checkpoint, but not in this run: {listed(reasons, 3)}. "
            "Set fp8_base=False, which dequantizes them; or name none of them in fp8_ignored_modules."
        )


def _headers(files: Iterable[str]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name and the header of each tensor, without reading the tensor."""
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                tensor = opened.get_slice(name)
                yield name, StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))


def _names(name: str, shape: tuple[int, ...], recipe: FP8Recipe, decoder: str, suffix: str = "") -> tuple[str, ...]:
    """Return the names in a checkpoint of the tensors that make up a parameter of the policy: several for experts.

    Args:
        decoder: The checkpoint's name of the decoder.
        suffix: The scales' suffix, to get the names of the parameter's scales.
    """
    stored = recipe.stored_name(name + suffix)
    if stored.startswith(f"{recipe.decoder}."):
        stored = decoder + stored.removeprefix(recipe.decoder)
    parts = published_names(stored, BLOCKS.scale_suffix, recipe.model_type)
    return tuple(part.format(expert) for expert in range(shape[0]) for part in parts) or (stored,)


def _file_by_file(weights: Iterable[StoredWeight]) -> Iterator[tuple[StoredWeight, OpenFiles]]:
    """Yield each weight and its open files. Weights in the same files follow each other, and share the open files."""
    files_of = attrgetter("files")
    for files, together in groupby(sorted(weights, key=files_of), files_of):
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
            yield from ((weight, opened) for weight in together)
