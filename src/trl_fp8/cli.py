"""`trl-fp8`: what needs no training run.

trl-fp8 plan MODEL              what of MODEL would be FP8, from its config alone (no weights are read)
trl-fp8 export MODEL FOLDER     MODEL as an FP8 checkpoint, without KV cache scales (those come from a training run)
trl-fp8 verify FOLDER           whether an exported checkpoint still is what was written
"""

import argparse
import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .capacity import GIB, Capacity, as_json, as_text
from .flags.kv_cache import KV_CACHE_DTYPES
from .numerics.e4m3 import SCALE_FORMATS
from .plan import plan_for_model
from .recipe import recipe_for_model


def main(words: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="trl-fp8", description="FP8 rollouts for TRL's GRPOTrainer")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="show which modules of a model would be FP8, and what that saves")
    plan.add_argument("model", help="model id or folder; only its config is read")
    plan.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    plan.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="fp8")
    plan.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="on CPU vLLM has no FP8 experts")
    plan.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of one GPU (default: 80)")
    plan.add_argument("--gpu-memory-utilization", type=float, default=0.6, metavar="SHARE", help="of the engine (0.6)")
    plan.add_argument("--json", action="store_true", help="figures for scripts instead of the table")
    plan.set_defaults(run=_plan)
    export = commands.add_parser("export", help="write a model as an FP8 checkpoint that vLLM and transformers load")
    export.add_argument("model", help="model id or folder; an FP8 checkpoint is dequantized first")
    export.add_argument("folder", help="must not exist yet")
    export.add_argument("--scale-format", choices=SCALE_FORMATS, default="pow2")
    export.set_defaults(run=_export)
    verify = commands.add_parser("verify", help="compare an exported checkpoint with its checksums")
    verify.add_argument("folder")
    verify.set_defaults(run=_verify)
    given = parser.parse_args(words)
    try:
        print(given.run(given))
    except (ValueError, OSError) as error:  # OSError: transformers found no such model
        print(f"trl-fp8: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(given: argparse.Namespace) -> str:
    config = AutoConfig.from_pretrained(given.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    recipe = recipe_for_model(
        model,
        kv_cache_dtype=given.kv_cache_dtype,
        tensor_parallel_size=given.tensor_parallel_size,
        expert_kernels=given.engine == "cuda",
    )
    plan = plan_for_model(model, recipe)
    capacity = Capacity(plan, int(given.gpu_memory * GIB), given.gpu_memory_utilization)
    if given.json:
        return json.dumps(as_json(capacity, config), indent=2)
    return f"{plan.table()}\n{as_text(capacity, config)}"


def _export(given: argparse.Namespace) -> str:
    from .hub import export_fp8  # TRL comes with it

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    recipe = recipe_for_model(model, kv_cache_dtype="auto", scale_format=given.scale_format)
    folder = export_fp8(model, AutoTokenizer.from_pretrained(given.model), given.folder, recipe=recipe)
    return f"{plan_for_model(model, recipe).table()}\n\nwritten: {folder}"


def _verify(given: argparse.Namespace) -> str:
    from .hub import verify_export

    return f"{given.folder}: {verify_export(given.folder)} files are what was exported"


if __name__ == "__main__":
    sys.exit(main())
