"""FP8 checkpoints: what the engine was sent, as files that vLLM and transformers load.

    folder/
      model-00001-of-00003.safetensors   e4m3 `weight` with fp32 `weight_scale_inv` (of each expert too),
                                         the rest in BF16
      model.safetensors.index.json       name -> file
      config.json                        with `quantization_config`: the format, exact names of what is not FP8
      checksums.json                     file -> SHA-256, for `verify_export`
      generation_config.json, tokenizer files, README.md

Tensors are quantized one after another and written shard by shard, so that at most one shard is in memory. Everything
goes to a temporary folder beside the target, which is renamed at the end: a folder that exists is complete.

Saved here because transformers cannot do it: a model loaded from an FP8 checkpoint on CPU is saved by
`save_pretrained` with embeddings and output head quantized too, and without `quantization_config` (transformers 5.17).
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from trl_fp8.planning.plan import plan_for_model
from trl_fp8.quantization.kv_scales import KVScales
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.sync.policy_checks import require_finite
from trl_fp8.sync.weight_stream import Named, WeightStream

from .model_card import export_card


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKSUMS = "checksums.json"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Fused tensor of experts, as the engine loads it -> what an expert's parts are called in published checkpoints
EXPERT_PROJECTIONS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "w13": ("w1", "w3"),
    "w2": ("w2",),
}


def export_fp8(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    folder: str | Path,
    kv_scales: KVScales | None = None,
    *,
    recipe: FP8Recipe | None = None,
    parameters: Iterable[Named] | None = None,
    card: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `model` as an FP8 checkpoint.

    Args:
        model: A transformers causal LM, any floating point dtype; its config and generation config are
            written with it.
        tokenizer: Saved beside it.
        folder: Must not exist, or be empty.
        kv_scales: Scales of an FP8 KV cache; vLLM then needs no calibration. None: none are written.
        recipe: What is FP8; None: all that can be.
        parameters: `(checkpoint name, full tensor)` where the model does not hold them itself (sharded, with
            adapters); None: the model's own.
        card: Model card of the policy, which the export's own continues.
        shard_bytes: Size at which a shard is closed.

    Returns:
        `folder`.

    Raises:
        ValueError: `folder` holds files, the policy has nothing to quantize or is a PEFT model without `parameters`,
            or a weight is not finite.
        OSError: It could not be written. Nothing is left then.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"folder={str(folder)!r} is not empty. An export is written whole or not at all; name a new folder."
        )
    if parameters is None:
        if any(".lora_" in name for name, _ in model.named_parameters()):
            raise ValueError(
                "model has adapters, which a checkpoint of the base model cannot hold. Export "
                "model.merge_and_unload(), or call trainer.save_fp8_model(folder)."
            )
        parameters = ((checkpoint_name(name), parameter) for name, parameter in model.named_parameters())
        require_finite(model)
    recipe = recipe or recipe_for_model(model, kv_cache_dtype="auto" if kv_scales is None else "fp8")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    plan = plan_for_model(model, recipe)
    try:
        (unfinished / "README.md").write_text(
            export_card(card, plan.table(), recipe.format, kv_scales is not None, _hub_id(model))
        )
        stream = WeightStream(parameters, recipe, kv_scales, buffers=persistent_buffers(model))
        _write(unfinished, model, tokenizer, stream, recipe, shard_bytes)
        unfinished.chmod(0o755)  # temporary folders are private
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def push_export(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Upload FP8 checkpoint",
) -> str:
    """Upload an export, whole or not at all: files first, then one commit that also removes weights of
    earlier exports.

    Repeat it after an interruption: files that had arrived are recognized by their hash and not sent again.

    Args:
        folder: Written by `export_fp8`; compared with its checksums before anything is sent.
        repo_id: `user/name`; made if it does not exist, `private` or not.
        token: Of the Hub; None: the one that `hf auth login` left.
        revision: Branch to commit to; None: the main branch.
        message: Of the commit.

    Returns:
        URL of the commit.

    Raises:
        ValueError: `folder` is no whole export.
        OSError: The Hub could not be reached or refused (`huggingface_hub.errors`); what to do is said.
    """
    verify_export(folder)
    hub = HfApi(token=token)
    try:
        name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=message,
            revision=revision,
            delete_patterns="*.safetensors",
        )
    except (OSError, RuntimeError, httpx.HTTPError) as error:  # RuntimeError: the client's, around a broken upload
        raise OSError(
            f"{folder} was not pushed to {repo_id}: {error.__cause__ or error}. Nothing was committed; repeat it with "
            f"'trl-fp8 push {folder} {repo_id}'."
        ) from error
    return commit.commit_url


def verify_export(folder: str | Path) -> int:
    """Compare every file of an export with its checksum; returns their number.

    Raises:
        ValueError: Files are missing or differ, or there are others beside them (hidden ones do not count); the
            message names them. Or the folder is no export.
    """
    folder = Path(folder)
    if not (folder / CHECKSUMS).exists():
        raise ValueError(
            f"folder={str(folder)!r} has no {CHECKSUMS}: it was not written by export_fp8, or not completely."
        )
    expected = json.loads((folder / CHECKSUMS).read_text())
    if outside := [name for name in expected if not (folder / name).resolve().is_relative_to(folder.resolve())]:
        raise ValueError(
            f"folder={str(folder)!r}: {CHECKSUMS} names files outside of the folder: {', '.join(outside)}."
        )
    # a loader would take weights or code that lie beside the export; what a Hub client leaves behind is hidden
    there = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    visible = {str(path) for path in there if not any(part.startswith(".") for part in path.parts)}
    if added := sorted(visible - expected.keys() - {CHECKSUMS}):
        raise ValueError(
            f"folder={str(folder)!r} holds files that were not exported: {', '.join(added)}. A loader may take them "
            "for the model's. Remove them, or export again."
        )
    broken = [
        name for name, digest in expected.items() if not (folder / name).exists() or _sha256(folder / name) != digest
    ]
    if broken:
        raise ValueError(
            f"folder={str(folder)!r}: {', '.join(broken)} are not what was exported. Fetch or export them again."
        )
    return len(expected)


def _write(
    folder: Path,
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    stream: Iterable[Named],
    recipe: FP8Recipe,
    shard_bytes: int,
) -> None:
    shards, total = [], 0
    suffix = recipe.format.scale_suffix
    for shard in _shards(_published(stream, suffix), suffix, shard_bytes):
        path = folder / f"{len(shards)}.safetensors"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:  # no OSError, although it is one of the disk
            raise OSError(f"{path} could not be written: {error}") from error
        shards.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
        del shard  # the generator's reference ends with its next step
    weight_map = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": recipe.quantization_config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = {str(path.relative_to(folder)): _sha256(path) for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")


def _hub_id(model: nn.Module) -> str | None:
    name = model.config.name_or_path
    return name if name and not Path(name).exists() else None


def _shards(stream: Iterable[Named], scale_suffix: str, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors on the host, in groups of about `shard_bytes`; a weight and its scale stay together."""
    shard, size = {}, 0
    for name, tensor in stream:
        if size + tensor.nbytes > shard_bytes and shard and not name.endswith(scale_suffix):
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    if shard:
        yield shard


def _published(stream: Iterable[Named], scale_suffix: str) -> Iterator[Named]:
    """Fused experts taken apart: published checkpoints, and whatever reads them, name each expert's projections."""
    for name, tensor in stream:
        layer, fused, kind = name.partition(".experts.")
        kind, is_scale, _ = kind.partition(scale_suffix)
        if not fused or kind not in EXPERT_PROJECTIONS:
            yield name, tensor
            continue
        suffix = f"weight{scale_suffix}" if is_scale else "weight"
        projections = EXPERT_PROJECTIONS[kind]
        for expert, own in enumerate(tensor):
            for projection, part in zip(projections, own.chunk(len(projections)), strict=True):
                yield f"{layer}.experts.{expert}.{projection}.{suffix}", part


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
