"""`trl-fp8 export | verify | push`: FP8 checkpoints without a training run."""

from argparse import ArgumentParser, Namespace

from trl_fp8.export.file_checksums import free_folder, verify_export
from trl_fp8.quantization.formats import FORMATS, SCALE_FORMATS
from trl_fp8.run.feature import Command


def _add_export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="model id or folder; an FP8 checkpoint is dequantized first")
    parser.add_argument("folder", help="folder to write to; it must be new or empty")
    parser.add_argument("--weight-format", choices=FORMATS, default="blocks")
    parser.add_argument("--scale-format", choices=SCALE_FORMATS, default="pow2")


def _export(options: Namespace) -> str:
    folder = free_folder(options.folder)
    # Imported here, because transformers takes seconds to import and the other commands do not need it
    import torch
    from transformers import AutoProcessor
    from trl.trainer.utils import create_model_from_path

    from trl_fp8.export.export import export_fp8
    from trl_fp8.planning.plan import plan_for_model
    from trl_fp8.policy.model import dequantizing_config
    from trl_fp8.recipe.recipe import recipe_for_model
    from trl_fp8.run.locations import model_config

    model_config(options.model)  # raises an error of one line if there is no such model
    dequantizing = dequantizing_config(options.model)
    # TRL's function creates the class that the config names. AutoModelForCausalLM would leave out a vision tower
    loading = {"dtype": torch.bfloat16, "quantization_config": dequantizing, "device_map": None}
    model = create_model_from_path(options.model, **loading)
    formats = {"weight_format": options.weight_format, "scale_format": options.scale_format}
    recipe = recipe_for_model(model, kv_cache_dtype="auto", **formats)
    export_fp8(model, AutoProcessor.from_pretrained(options.model), folder, recipe=recipe)
    return f"{plan_for_model(model, recipe).table()}\n\nwritten: {options.folder}"


def _add_verify_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder")


def _verify(options: Namespace) -> str:
    return f"{options.folder}: {verify_export(options.folder)} files are what was exported"


def _add_push_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", help="folder of an export; compared with its checksums first")
    parser.add_argument("repo_id", help="repository, as in user/name; it is created if it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="create it as a private repository")
    parser.add_argument("--revision", help="branch to commit to (default: the repository's main branch)")


def _push(options: Namespace) -> str:
    from trl_fp8.export.push import push_export

    commit = push_export(options.folder, options.repo_id, private=options.private, revision=options.revision)
    return f"pushed: {commit.commit_url}"


COMMANDS = (
    Command(
        "export", "write a model as an FP8 checkpoint that vLLM and transformers load", _add_export_arguments, _export
    ),
    Command("verify", "compare an exported checkpoint with its checksums", _add_verify_arguments, _verify),
    Command("push", "upload an exported checkpoint to the Hub", _add_push_arguments, _push),
)
