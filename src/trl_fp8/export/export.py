"""FP8 checkpoints: the tensors that a sync sends, as files that vLLM and transformers load.

    folder/
      model-00001-of-00003.safetensors   e4m3 weights and their scales, experts separately; all other tensors in BF16
      model.safetensors.index.json       name of a tensor -> file
      config.json                        its `quantization_config` has the format and the layers that are not FP8
      checksums.json                     file -> SHA-256, see `file_checksums.py`
      generation_config.json, tokenizer files, README.md

Tensors are quantized one by one and written shard by shard, so only one shard is in memory. Files are written into a
temporary folder that is renamed at the end, so an export that exists is complete. `save_pretrained` of transformers
5.17 cannot write these checkpoints: on CPU it also quantizes embeddings and output head, and drops
`quantization_config`.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_fp8.planning.plan import plan_for_model
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.formats import BLOCKS
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.names import checkpoint_name, published_names
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.sync.policy_checks import require_finite
from trl_fp8.sync.weight_stream import weight_stream
from trl_fp8.sync.writer import NamedTensor

from .file_checksums import free_folder, write_checksums
from .model_card import export_card, merged_card


INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def export_fp8(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    kv_scales: KVScales | None = None,
    *,
    recipe: FP8Recipe | None = None,
    parameters: Iterable[NamedTensor] | None = None,
    card: str = "",
    merge: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `model` as an FP8 checkpoint and return `folder`.

    Args:
        model: A transformers causal LM of any floating point dtype. Its config and generation config are written too.
        tokenizer: The model's tokenizer, saved beside it.
        folder: An empty folder, or a path that does not exist yet.
        kv_scales: Scales of an FP8 KV cache, so that vLLM needs no calibration. None: the checkpoint has none.
        recipe: Says which tensors are FP8. None: all that can be.
        parameters: Pairs (checkpoint name, full tensor), for a model that is sharded or has adapters. None: the
            model's own parameters.
        card: The policy's model card, to which a section on the export is appended.
        merge: Sentences for the card about the adapters that are merged into `parameters`.
        shard_bytes: Size of a shard, in bytes.

    Raises:
        ValueError: `folder` holds files, `model` has nothing to quantize, or has adapters and `parameters` is None,
            vLLM could not read the format, or a weight is not finite.
        OSError: The checkpoint could not be written. Nothing of it is left.
    """
    if parameters is None:
        if any(".lora_" in name for name, _ in model.named_parameters()):
            raise ValueError(
                "model has adapters, which a checkpoint of the base model cannot hold. Export "
                "model.merge_and_unload(), or call trainer.save_fp8_model(folder)."
            )
        require_finite(model)  # callers that pass `parameters` have called it, on all ranks
        parameters = ((checkpoint_name(name), parameter) for name, parameter in model.named_parameters())
    recipe = recipe or recipe_for_model(model, kv_cache_dtype="auto" if kv_scales is None else "fp8")
    if recipe.format is BLOCKS and family_of(model.config.model_type).scales_renamed:
        raise ValueError(
            f"an export in 128x128 blocks of a model of type {model.config.model_type!r}: vLLM renames their "
            "scales to those of whole tensors, and could not read it. Train with fp8_weight_format='tensor', or call "
            "trainer.save_model(folder) and then trl-fp8 export FOLDER TARGET --weight-format tensor."
        )
    name = model.config.name_or_path
    base_model = name if name and not Path(name).exists() else None  # only an id of the Hub
    plan = plan_for_model(model, recipe).table()
    latent = any(cache.is_latent for cache in outline_of(model).caches)
    has_kv_scales = kv_scales is not None
    card = export_card(card, plan, recipe.format, has_kv_scales, base_model=base_model, merge=merge, latent=latent)
    stream = weight_stream(parameters, recipe, kv_scales, persistent_buffers(model))
    return _write(free_folder(folder), model, tokenizer, recipe, stream, card, shard_bytes)


def export_merged(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    parameters: Iterable[NamedTensor],
    *,
    card: str,
    merge: str,
) -> Path:
    """Write `parameters` as a BF16 checkpoint and return `folder`; arguments and errors are those of `export_fp8`."""
    recipe = recipe_for_model(model, fp8_weights=False, kv_cache_dtype="auto")
    stream = weight_stream(parameters, recipe, None, persistent_buffers(model))
    return _write(free_folder(folder), model, tokenizer, recipe, stream, merged_card(card, merge))


def _write(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: FP8Recipe,
    stream: Iterable[NamedTensor],
    card: str,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write all files of a checkpoint. `stream` yields its tensors under the engine's names (see `published`)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (unfinished / "README.md").write_text(card)
        _write_tensors(unfinished, _shards(stream, recipe, shard_bytes))
        _write_configs(unfinished, model, recipe)
        tokenizer.save_pretrained(unfinished)
        write_checksums(unfinished)
        unfinished.chmod(0o755)  # temporary folders are private
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def _write_tensors(folder: Path, shards: Iterable[dict[str, torch.Tensor]]) -> None:
    """Write shards and their index. Files get their names at the end, when the number of shards is known."""
    written = []  # (file, names of its tensors)
    total = 0  # bytes
    for shard in shards:
        path = folder / f"{len(written)}.safetensors"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors' error for a failing disk, not an OSError
            raise OSError(f"{path} could not be written: {error}") from error
        written.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
        # Free the shard before the generator fills the next one. Only one is then in memory, because the generator
        # drops its own reference, too
        del shard
    weight_map = {}
    for number, (path, names) in enumerate(written, start=1):
        final = f"model-{number:05}-of-{len(written):05}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_configs(folder: Path, model: PreTrainedModel, recipe: FP8Recipe) -> None:
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    if recipe.quantization_config is not None:
        config["quantization_config"] = recipe.quantization_config
    else:  # a model that was loaded from a quantized checkpoint has one
        config.pop("quantization_config", None)
    config |= family_of(model.config.model_type).engine_fields(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _shards(stream: Iterable[NamedTensor], recipe: FP8Recipe, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield groups of about `shard_bytes` of tensors on the host. A scale is in the group of the tensor before it."""
    shard = {}
    for name, tensor in published(stream, recipe):
        bytes_with_tensor = sum(each.nbytes for each in (*shard.values(), tensor))
        is_scale = name.endswith(recipe.format.scale_suffix)
        if shard and bytes_with_tensor > shard_bytes and not is_scale:
            yield shard
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous().clone()
    if shard:
        yield shard


def published(stream: Iterable[NamedTensor], recipe: FP8Recipe) -> Iterator[NamedTensor]:
    """Yield the stream under the names of published checkpoints. Split tensors of all experts, which most published
    checkpoints do not have.
    """
    for name, tensor in stream:
        # A name with a place for the expert's number, such as "...experts.{}.up_proj.weight", for each weight that is
        # fused in a tensor of all experts. Empty for other tensors
        patterns = published_names(name, recipe.format.scale_suffix, recipe.model_type)
        if not patterns:
            yield name, tensor
            continue
        for expert, fused in enumerate(tensor):
            for pattern, weight in zip(patterns, fused.chunk(len(patterns)), strict=True):
                yield pattern.format(expert), weight
