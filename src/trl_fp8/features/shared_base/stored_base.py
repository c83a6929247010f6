"""Loading of a policy without the weights that will be FP8, and reading of these weights from its checkpoint.

    transformers builds an empty model     `_Loader` takes the weights out of its FP8 linears and experts
    transformers loads the checkpoint      it never reads tensors for which the model has no parameter
    the base is sent to an engine          `StoredBase.tensors` reads exactly these tensors, one weight at a time

So the whole base is never in memory in high precision. If a checkpoint has FP8 codes in 128x128 blocks, the codes are
used unchanged. `_Loader` is a quantizer of transformers, because transformers lets a quantizer change the empty model.
It takes the place of any quantizer that transformers would choose. `_base_in` finds the tensors of the base in the
checkpoint's files (`StoredWeight`), and refuses checkpoints that do not have them.
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

    # `recipe.fp8_tensors` names the weights. If the checkpoint has FP8 codes, these are exactly the weights with
    # codes, and the recipe has the scale format of the codes
    recipe: FP8Recipe
    weights: tuple["StoredWeight", ...] = field(repr=False)

    def tensors(self) -> Iterator[tuple[str, Tensor | Float8Tensor]]:
        """Yield (policy's name, value) of each of `recipe.fp8_tensors`, on the host: `[N, K]`, or experts `[E, N, K]`.

        Values are in high precision, or codes as stored (e4m3, with fp32 scales of 128x128 blocks). A weight that is
        one tensor of a file is memory-mapped; a layer's experts are copied into one tensor. To keep one weight in
        memory at a time, drop each value before taking the next.
        """
        for weight, opened in _file_by_file(self.weights):
            yield weight.name, weight.value(opened)


def load_without_base(
    create: Callable[..., PreTrainedModel], model_id: str, recipe_for: Callable[[PreTrainedModel], FP8Recipe], **kwargs
) -> tuple[PreTrainedModel, StoredBase]:
    """Return a policy whose FP8 linears and experts hold no weights, and the stored base that has these weights.

    Args:
        create: TRL's `create_model_from_path`, or a function with the same arguments that loads one model by
            `from_pretrained`.
        model_id: Folder or id of a checkpoint in safetensors, in high precision or in 128x128 FP8 blocks.
        recipe_for: Returns the recipe of a model, which is on the meta device.
        kwargs: Further arguments of `create`. All weights that are loaded get the dtype `dtype`, by default BF16.

    Raises:
        ValueError: The base cannot be read from this checkpoint. Nothing was loaded.
    """
    loader = _Loader(recipe_for)
    options = {"dtype": torch.bfloat16} | kwargs
    with substituted(modeling_utils, "get_hf_quantizer", loader.choose):
        model = create(model_id, **options)
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
            stored = vars(each).pop("quantization_config", None) or {}
            method = stored.get("quant_method", "fp8")  # a checkpoint in high precision passes, too
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
            placeholder._is_hf_initialized = True  # otherwise transformers would initialize the placeholder
        # Without this pattern transformers would report the tensors of the base as unexpected
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
    # Names of the checkpoint's tensors. A linear layer has one tensor. Experts may have several: the tensors of expert
    # 0, then those of expert 1, and so on; of each expert gate before up
    parts: tuple[str, ...]
    scales: tuple[str, ...]  # names of the parts' scales; empty if the weight is in high precision
    checkpoint: Mapping[str, StoredTensor] = field(repr=False)  # header of each tensor of the checkpoint

    @property
    def files(self) -> tuple[str, ...]:
        names = (*self.parts, *self.scales)
        return tuple(sorted({self.checkpoint[name].file for name in names}))

    def value(self, opened: OpenFiles) -> Tensor | Float8Tensor:
        """Read the weight, in high precision or as codes. `opened` has all of `files`."""
        if not self.scales:
            stored_dtype = self.checkpoint[self.parts[0]].dtype  # the same for all parts, see `unusable_form`
            return self._whole(self.parts, self.shape, _HIGH_PRECISION[stored_dtype], opened)
        block = [1] * (len(self.shape) - 2) + list(BLOCKS.weight_block)
        codes = self._whole(self.parts, self.shape, E4M3, opened)
        return Float8Tensor(codes, self.scale(opened), block_size=block, dtype=torch.bfloat16)

    def scale(self, opened: OpenFiles) -> Tensor:
        """Read the scales of the weight's blocks as fp32, which represents stored BF16 scales exactly."""
        return self._whole(self.scales, BLOCKS.scale_shape(self.shape), torch.float32, opened)

    def _whole(self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, opened: OpenFiles) -> Tensor:
        """Read the tensors `names`, concatenate them, and return the result in `shape` and `dtype`."""

        def read(name: str) -> Tensor:
            return opened[self.checkpoint[name].file].get_tensor(name)

        if len(names) == 1:
            return read(names[0]).to(dtype).view(shape)
        whole = torch.empty(shape, dtype=dtype, device="cpu")  # "meta" is the default device while transformers loads
        parts = whole.view(len(names), -1, shape[-1])
        for part, name in zip(parts, names, strict=True):
            part.copy_(read(name))
        return whole

    def unusable_form(self) -> str | None:
        """Return the name, dtype and shape of the first tensor that the engine cannot use; None if it can use all.

        Parts need one known dtype and an equal share of the rows. Their scales need the shape of 128x128 blocks.
        """
        rows = prod(self.shape[:-1]) // len(self.parts)  # of each part
        columns = self.shape[-1]
        dtype = self.checkpoint[self.parts[0]].dtype  # which all parts must have
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
    decoder = _stored_decoder(checkpoint, recipe)
    parts = {name: _names(name, shape, recipe, decoder) for name, shape in shapes.items()}
    missing = []
    for name in sorted(recipe.fp8_tensors):
        missing += [part for part in parts[name] if part not in checkpoint]
    if missing:
        raise ValueError(
            f"{where}: the checkpoint lacks {len(missing)} weights under their usual names, such as "
            f"{listed(missing, 2)}; it has for example {listed(checkpoint, 2)}. Load the model yourself with "
            "from_pretrained and pass the object to the trainer, which then takes the weights from it."
        )
    codes = {name for name, stored in checkpoint.items() if stored.dtype == _CODES}
    coded = {name for name, names in parts.items() if not codes.isdisjoint(names)}  # parameters stored as codes
    if coded:  # then the recipe makes FP8 what the checkpoint has in FP8
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
    if coded and not _have_pow2_scales(weights):
        recipe = replace(recipe, scale_format="fp32")
    return StoredBase(recipe, tuple(weights))


def _stored_decoder(checkpoint: Mapping[str, StoredTensor], recipe: FP8Recipe) -> str:
    """Return the checkpoint's name of the decoder. Vision-language models may have another name there."""
    if recipe.decoder == WRAPPED:
        for name in (WRAPPED, *WRAPPED_OTHERWISE):
            if f"{name}.embed_tokens.weight" in checkpoint:
                return name
    return recipe.decoder


def _have_pow2_scales(weights: Iterable[StoredWeight]) -> bool:
    """Return whether the stored scales of all `weights` are powers of two. Reads the scales."""
    for weight, opened in _file_by_file(weights):
        mantissas = weight.scale(opened).frexp().mantissa
        if (mantissas != 0.5).any():  # a power of two has the mantissa 0.5
            return False
    return True


def _check_codes(coded: set[str], recipe: FP8Recipe, where: str) -> None:
    """Raise `ValueError` unless the recipe has the format of the stored codes, and makes all `coded` weights FP8."""
    if recipe.format is not BLOCKS:
        raise ValueError(
            f"{where} and fp8_weight_format={recipe.format.name!r}: the checkpoint has FP8 codes with scales of "
            "128x128 blocks, which are used unchanged. Remove fp8_weight_format, or set fp8_base=False."
        )
    refused = sorted(coded - recipe.fp8_tensors)
    if refused:
        reasons = []
        for name in refused:
            module = name.rpartition(".")[0]
            reasons.append(f"{name} ({recipe.kept_modules.get(module, 'no projection')})")
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
    published = published_names(stored, BLOCKS.scale_suffix, recipe.model_type)
    if not published:  # a linear layer, or experts that the checkpoint has in one tensor
        return (stored,)
    names: list[str] = []
    for expert in range(shape[0]):
        names += [name.format(expert) for name in published]
    return tuple(names)


def _file_by_file(weights: Iterable[StoredWeight]) -> Iterator[tuple[StoredWeight, OpenFiles]]:
    """Yield each weight with its open files. Weights in the same files are yielded in succession, so that each file is
    opened once for them.
    """
    files_of = attrgetter("files")
    for files, together in groupby(sorted(weights, key=files_of), files_of):
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
            yield from ((weight, opened) for weight in together)
