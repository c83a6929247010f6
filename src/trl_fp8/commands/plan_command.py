"""`trl-fp8 plan`: what of a model would be FP8, what fits on which GPUs and what it may gain, from its config."""

import json
import reprlib
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar, get_args, get_origin

from trl_fp8.features.kv_cache.kv_cache_flags import KV_CACHE_DTYPES, KVCacheFlags
from trl_fp8.features.one_forward.forward_flags import ForwardFlags, require_followed
from trl_fp8.features.router_replay.router_flags import RouterFlags
from trl_fp8.planning.capacity import LORA_RANK, SIZES, Planner
from trl_fp8.planning.plan import Plan, format_bytes, plan_for
from trl_fp8.planning.settings import COMPLETIONS, CONTEXT, Settings
from trl_fp8.planning.summary import as_json, as_text
from trl_fp8.quantization.facts import FORMATS
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import formats_for, recipe_for
from trl_fp8.recipe.servable import Resolve, require_same_positions, require_servable

from .model_config import model_config
from .words import did_you_mean, known_names, read


FlagGroup = TypeVar("FlagGroup", KVCacheFlags, ForwardFlags, RouterFlags)
# Key of a recipe that changes the trainer's memory -> the values that are counted, the first by default
COUNTED = {
    "gradient_checkpointing": (True,),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "load_in_4bit": (False,),
    "load_in_8bit": (False,),
}
# Key of a recipe that adapters on an FP8 base do not go with -> why
NOT_ON_FP8_BASE = {
    "use_dora": "the engine computes Q(W) x + B A x and nothing else",
    "lora_target_parameters": "the engine has adapters beside linear layers alone",
    "load_in_4bit": "the base is quantized to FP8",
    "load_in_8bit": "the base is quantized to FP8",
}
# TRL's name -> the flag here
FLAGS = {
    "num_processes": "--gpus",
    "gpu_memory": "--gpu-memory",
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_tensor_parallel_size": "--tensor-parallel-size",
    "lora_r": "--lora",
    "fp8_base": "--fp8-base",
    "dtype": "--dtype",
    "vllm_max_model_length": "--context",
    "generation_batch_size": "--completions",
    "fp8_weight_format": "--weight-format",
    "kv_cache_dtype": "--kv-cache-dtype",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model id or folder; only its config is read")
    parser.add_argument(
        "--config", metavar="RECIPE", help="a file of `trl-fp8 train`, read for memory and FP8; flags here win"
    )
    numbers = {
        "num_processes": ("N", int, "GPUs that the policy is sharded over, with FSDP2 (1)"),
        "gpu_memory": ("GIB", float, "of one GPU (80)"),
        "vllm_gpu_memory_utilization": ("SHARE", float, "of a GPU that the engine gets (what fits best)"),
        "vllm_tensor_parallel_size": ("N", int, "GPUs that share an engine (the smallest that fits)"),
        "vllm_max_model_length": ("TOKENS", int, f"of a prompt and its completion ({CONTEXT})"),
        "generation_batch_size": ("N", int, f"completions of a generation, on all GPUs ({COMPLETIONS})"),
    }
    for key, (metavar, kind, text) in numbers.items():
        _add_flag(parser, key, type=kind, metavar=metavar, help=text)
    lora = {"nargs": "?", "const": LORA_RANK, "metavar": "RANK", "help": f"train adapters of a rank ({LORA_RANK})"}
    _add_flag(parser, "lora_r", type=int, **lora)
    base = {"nargs": "?", "const": "true", "type": str.lower, "choices": ("true", "false"), "metavar": "true"}
    _add_flag(parser, "fp8_base", **base, help="train adapters on FP8 weights that are the engine's, too")
    _add_flag(parser, "dtype", choices=("float32", "bfloat16"), help="of the policy's weights (float32, as TRL)")
    _add_flag(parser, "fp8_weight_format", choices=FORMATS, help="of FP8 weights (blocks)")
    choices = (*KV_CACHE_DTYPES, "fp8_e4m3")
    _add_flag(parser, "kv_cache_dtype", choices=choices, help="of the KV cache (fp8)")
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="on CPU vLLM has no FP8 experts")
    parser.add_argument("--modules", action="store_true", help="which modules are FP8, and why others are not")
    parser.add_argument("--json", action="store_true", help="figures for scripts")


def _add_flag(parser: ArgumentParser, key: str, **options: Any) -> None:
    """A flag under its name here and, unlisted, under TRL's; with dashes or underscores."""
    name = FLAGS[key]
    parser.add_argument(name, dest=key, **options)
    underscored = {f"--{key}", "--" + name[2:].replace("-", "_")}
    others = underscored | {"--" + one[2:].replace("_", "-") for one in underscored}
    if others := sorted(others - {name}):
        parser.add_argument(*others, dest=key, **options | {"help": SUPPRESS, "default": SUPPRESS})


def run(given: Namespace) -> str:
    recipe = None if given.config is None else _recipe(given.config)
    words = {key: value for key in FLAGS if (value := getattr(given, key)) is not None}
    settings = Settings(words, FLAGS, recipe)
    if not (model := given.model or settings.value("model_name_or_path")):
        raise ValueError("no model: give its id or folder, or a --config that has model_name_or_path.")
    options, forward, router = _checked_flags(settings)
    outline = _outline(str(model), settings.truth("fp8_base"))
    asked = any(settings.value(key) is not None for key in ("fp8_weights", "fp8_weight_format"))
    asked = asked or settings.truth("fp8_base")
    if not asked and options["weight_format"] not in formats_for(outline):
        options["fp8_weights"] = False  # which its flags then say
    setup = settings.setup(outline.context)
    require_same_positions(outline, setup.training.tokens)
    _check_model(forward, router, outline, setup.tensor_parallel_size)

    @cache
    def plan_at(ranks: int) -> Plan:
        kernels = given.engine == "cuda"
        return plan_for(outline, recipe_for(outline, **options, tensor_parallel_size=ranks, expert_kernels=kernels))

    in_one_piece = router.routes_returned or (forward.fp8_flow_on and (outline.experts or setup.training.lora_rank))
    may_share = outline.stored_as != "mxfp4" and _against_base(settings) is None
    planner = Planner(outline, plan_at, SIZES[:1] if in_one_piece else SIZES, may_share)
    if setup.tensor_parallel_size and not planner.splits(setup.tensor_parallel_size):
        raise ValueError(
            f"{settings.shown('vllm_tensor_parallel_size')}: vLLM cannot divide the attention heads of {model} by it. "
            "Give --tensor-parallel-size 1, or a divisor of their number."
        )
    capacity = planner.capacity(setup)
    ways = [] if capacity.why_not is None else planner.ways(setup)
    if given.json:
        return json.dumps(as_json(capacity, ways, outline, recipe), indent=2)
    table = f"{capacity.plan.table()}\n\n" if given.modules else ""
    text = as_text(capacity, ways, outline, recipe, settings.assumed)
    given_otherwise = {key: settings.value(key, counted[0]) for key, counted in COUNTED.items()}
    uncounted = [f"{key}={value!r}" for key, value in given_otherwise.items() if value not in COUNTED[key]]
    return f"{table}{text}" + (f"\nwatch: not counted: {', '.join(uncounted)}." if uncounted else "")


def _recipe(path: str) -> dict[str, Any]:
    """The keys of a recipe, all of which `trl-fp8 train` knows, whether they are a plan's business or not."""
    found = read(["--config", path]).in_file
    if find_spec("trl") and (unknown := [key for key in found if key not in (known := known_names())]):
        raise ValueError(f"--config {path}: unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return found


def _checked_flags(settings: Settings) -> tuple[dict[str, Any], ForwardFlags, RouterFlags]:
    """What `recipe_for` takes, and two groups of flags, after the trainer's checks that need neither torch nor TRL."""
    blind = None
    if settings.truth("mask_truncated_completions"):
        blind = "mask_truncated_completions=True"
    if not settings.truth("vllm_importance_sampling_correction", True):
        blind = "vllm_importance_sampling_correction=False"
    fp8_weights = settings.truth("fp8_weights", True)
    if settings.truth("fp8_base") and (against := _against_base(settings)):
        raise ValueError(f"{settings.shown('fp8_base')} with {against} Change it, or leave the FP8 base out.")
    cache, forward, router = (_made(kind, settings) for kind in (KVCacheFlags, ForwardFlags, RouterFlags))
    others = {name: settings.truth(name) for name in ("use_liger_kernel", "cast_lm_head_to_fp32")}
    forward.check_forward(fp8_weights, settings.truth("fp16"), cache.simulate_kv_cache, others)
    cache.resolve_kv_cache(blind, alone=forward.fp8_flow_on or not fp8_weights)
    if settings.value("vllm_mode", "colocate") != "colocate" or not settings.truth("use_vllm", True):
        named = "vllm_mode" if settings.truth("use_vllm", True) else "use_vllm"
        raise ValueError(f"{settings.shown(named)}: a plan is of an engine that shares its GPUs with the trainer.")
    router.check_router(settings.truth("use_vllm", True), settings.value("vllm_mode", "colocate"), blind)
    options = {
        "fp8_weights": fp8_weights,
        "kv_cache_dtype": cache.kv_cache_dtype,
        "kv_cache_skip_layers": cache.skip_layers or (),
        "weight_format": settings.choice("fp8_weight_format", "blocks", tuple(FORMATS)),
        "ignored_modules": tuple(settings.names("fp8_ignored_modules") or ()),
    }
    return options, forward, router


def _against_base(settings: Settings) -> str | None:
    """What adapters on an FP8 base do not go with, and why."""
    if not settings.truth("fp8_weights", True):
        return "fp8_weights=False: the base that trainer and engine share is the engine's FP8 weights."
    if settings.value("kv_cache_skip_layers") == "auto":
        return "kv_cache_skip_layers='auto': the policy's k is looked at before there is an engine with the base."
    found = (key for key in NOT_ON_FP8_BASE if settings.value(key))
    return next((f"{settings.shown(key)}: {NOT_ON_FP8_BASE[key]}." for key in found), None)


def _made(kind: type[FlagGroup], settings: Settings) -> FlagGroup:
    """A group of flags with the values that were given for it, of the types that it declares."""
    read = {int: settings.any_number, float: settings.any_number, bool: settings.truth, str: settings.text}
    found = {}
    for field in fields(kind):
        if settings.value(field.name) is not None:
            # A parser of TRL's in this process has made `list[str]` of `list[str] | None`
            kinds = () if get_origin(field.type) is list else (field.type, *get_args(field.type))
            declared = next((one for one in read if one in kinds), None)
            found[field.name] = read.get(declared, settings.names)(field.name)
    return kind(**found)


def _check_model(forward: ForwardFlags, router: RouterFlags, outline: Outline, ranks: int | None) -> None:
    """What else the trainer refuses of a model, as far as it shows here."""
    if forward.fp8_flow_on:
        require_followed(outline)
    if router.routes_returned and not outline.experts:
        raise ValueError(
            f"router_replay={router.router_replay!r} with a model of type {outline.model_type!r}: it has no routers, "
            "so there is nothing to replay. Set router_replay='off'."
        )
    if router.routes_returned and (ranks or 1) > 1:
        raise ValueError(
            f"router_replay={router.router_replay!r} with vllm_tensor_parallel_size={ranks}: only the first rank of "
            "an engine returns the experts that it chose. Set vllm_tensor_parallel_size=1, or router_replay='off'."
        )


def _outline(model: str, fp8_base: bool) -> Outline:
    config = model_config(model)
    _check_stored(model, config, fp8_base)
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(kind, str):
        raise ValueError(f"MODEL={model!r}: its config.json has no model_type. Give the folder of a whole checkpoint.")
    with redirect_stdout(sys.stderr):  # DeepSpeed, for one, logs to stdout, which --json is alone on
        from transformers import CONFIG_MAPPING  # seconds, which `trl-fp8 --help` does without

        from trl_fp8.recipe.from_model import outline_of_pretrained
        from trl_fp8.upstream.vllm import engine_class

        if "auto_map" in config and kind not in CONFIG_MAPPING:
            raise ValueError(
                f"MODEL={model!r}: models of type {kind!r} bring their own code (auto_map), which a plan does not "
                "run. FP8GRPOTrainer runs it with trust_remote_code=True, and says at its start whether vLLM can "
                "serve it."
            )
        outline = outline_of_pretrained(model)
        # vLLM knows best what it knows, and takes seconds to import
        knows = engine_class if find_spec("vllm") and not family_of(outline.config_type).tested else None
        return _served(outline, knows)


def _check_stored(model: str, config: Any, fp8_base: bool) -> None:
    """Raise `ValueError` for a checkpoint that is quantized, and not as the trainer takes it."""
    stored = config.get("quantization_config") if isinstance(config, Mapping) else None
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if method not in (None, "fp8", "mxfp4") or (method == "fp8" and stored.get("weight_block_size") is None):
        kind = "fp8 without weight_block_size" if method == "fp8" else reprlib.repr(method).strip("'")
        raise ValueError(
            f"MODEL={model!r} is quantized ({kind}): trained are checkpoints in high precision, block FP8 and MXFP4. "
            "Start from the one that it was made of."
        )
    if fp8_base and method == "mxfp4":
        raise ValueError(f"--fp8-base with MODEL={model!r}, a checkpoint in MXFP4: leave the FP8 base out.")


def _served(outline: Outline, resolve: Resolve | None) -> Outline:
    """The outline, if an engine can serve the model; the error says what it takes in BF16, too."""
    try:
        require_servable(outline, resolve)
    except ValueError as error:
        plan = plan_for(outline, recipe_for(outline, fp8_weights=False, kv_cache_dtype="auto"))
        size, token = format_bytes(plan.bytes_before), format_bytes(plan.cache.token_bytes(False))
        in_bf16 = f"In BF16 {outline.name} takes {size} of weights, and {token} of KV cache per token."
        raise ValueError(f"{error}\n{in_bf16}") from error
    return outline
