"""`trl-fp8`: questions that can be answered before a GPU is booked.

trl-fp8 plan MODEL     what of MODEL would be FP8, from its config alone (no weights are read)
"""

import argparse
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .flags.kv_cache import KV_CACHE_DTYPES
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
    plan.set_defaults(run=_plan)
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
    return plan_for_model(model, recipe).table()


if __name__ == "__main__":
    sys.exit(main())
