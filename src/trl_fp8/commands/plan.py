"""`trl-fp8 plan`: what of a model would be FP8, and what fits into a GPU then, from its config.json."""

import json
import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from importlib.util import find_spec

from trl_fp8.flags.kv_cache import KV_CACHE_DTYPES
from trl_fp8.planning.capacity import GIB, Capacity, as_json, as_text
from trl_fp8.planning.plan import plan_for
from trl_fp8.quantization.formats import FORMATS
from trl_fp8.recipe.outline import Outline, outline_of_config
from trl_fp8.recipe.recipe import recipe_for
from trl_fp8.recipe.servable import require_servable

from .model_config import model_config


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="model id or folder; only its config is read")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--weight-format", choices=FORMATS, default="blocks")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="fp8")
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="on CPU vLLM has no FP8 experts")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of one GPU (default: 80)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6, metavar="SHARE", help="engine's (0.6)")
    parser.add_argument("--json", action="store_true", help="figures for scripts instead of the table")


def run(given: Namespace) -> str:
    outline = _outline(given.model)
    flags = {name: getattr(given, name) for name in ("weight_format", "kv_cache_dtype", "tensor_parallel_size")}
    plan = plan_for(outline, recipe_for(outline, **flags, expert_kernels=given.engine == "cuda"))
    capacity = Capacity(plan, int(given.gpu_memory * GIB), given.gpu_memory_utilization)
    if given.json:
        return json.dumps(as_json(capacity, outline), indent=2)
    return f"{plan.table()}\n{as_text(capacity, outline)}"


def _outline(model: str) -> Outline:
    config = model_config(model)
    if (outline := outline_of_config(config, model)) is not None:
        require_servable(outline)
        return outline
    from trl_fp8.upstream.vllm import engine_class  # torch comes with it, which a plan from a config does without

    with redirect_stdout(sys.stderr):  # DeepSpeed, for one, logs to stdout, which --json is alone on
        outline = _outline_by_transformers(model, config)
        require_servable(outline, engine_class if find_spec("vllm") else None)  # vLLM knows best what it knows
    return outline


def _outline_by_transformers(model: str, config: dict) -> Outline:
    """Any other architecture: from the model itself, without weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    from trl_fp8.recipe.from_model import outline_of

    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"MODEL={model!r}: models of type {config.get('model_type')!r} bring their own code (auto_map), which a "
            "plan does not run. FP8GRPOTrainer runs it with trust_remote_code=True, and says at its start whether "
            "vLLM can serve the model."
        )
    with torch.device("meta"):
        return outline_of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
