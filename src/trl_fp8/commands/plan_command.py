"""`trl-fp8 plan`: what of a model would be FP8, and what fits on which GPUs, from its config.

A run config is read and checked as by `trl-fp8 train`. Without one a plan chooses what TRL has defaults for.
"""

import json
import math
import reprlib
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from transformers import CONFIG_MAPPING
from trl import ModelConfig

from trl_fp8.config import FP8GRPOConfig
from trl_fp8.planning.capacity import COMPLETIONS, CONTEXT, LORA_RANK, MOST_PROMPT, SIZES, Planner, Setup
from trl_fp8.planning.plan import GIB, Plan, format_bytes, plan_for
from trl_fp8.planning.trainer_memory import BYTES, Training
from trl_fp8.quantization.formats import FORMATS
from trl_fp8.recipe import from_model
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import formats_for, recipe_for
from trl_fp8.recipe.servable import require_same_positions, require_servable
from trl_fp8.upstream.vllm import engine_class

from .arguments import Asked, make_parser
from .model_config import model_config
from .plan_text import as_json, as_text


# Line of a run config that changes the trainer's memory -> the values that are counted
COUNTED = {
    "gradient_checkpointing": (True,),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "load_in_4bit": (False,),
    "load_in_8bit": (False,),
}
MOST = 2**20
# Flag of a plan -> (the name that is set, what its value is called, its type, its help)
FLAGS = {
    "--gpus": ("num_processes", "N", int, "GPUs that the policy is sharded over, with FSDP2 (1)"),
    "--gpu-memory": ("gpu_memory", "GIB", float, "of one GPU (80)"),
    "--gpu-memory-utilization": ("vllm_gpu_memory_utilization", "SHARE", float, "the engine's, of a GPU (what fits)"),
    "--tensor-parallel-size": ("vllm_tensor_parallel_size", "N", int, "GPUs of an engine (the smallest that fits)"),
    "--context": ("vllm_max_model_length", "TOKENS", int, f"of a prompt and its completion ({CONTEXT})"),
    "--completions": ("generation_batch_size", "N", int, f"of a generation, on all GPUs ({COMPLETIONS})"),
    "--lora": ("lora_r", "RANK", int, f"train adapters of a rank ({LORA_RANK})"),
    "--weight-format": ("fp8_weight_format", "|".join(FORMATS), str, "of FP8 weights (blocks)"),
}
# Flag of `trl-fp8 train` that a plan takes, too -> its help
OF_TRAIN = {
    "fp8_base": "train adapters on FP8 weights that are the engine's, too",
    "dtype": "of the policy's weights, float32 or bfloat16 (float32, as TRL)",
    "kv_cache_dtype": "of the KV cache, fp8 or auto (fp8)",
}
LIMITS = {  # name -> least, most, what to give
    "num_processes": (1, MOST, "a number of GPUs, 1 or more"),
    "gpu_memory": (1, 4096, "the GiB of one GPU, e.g. 24, 80 or 141"),
    "vllm_gpu_memory_utilization": (0.01, 0.99, "a share of a GPU, e.g. 0.5"),
    "vllm_tensor_parallel_size": (1, MOST, "a number of GPUs that share an engine, 1 or more"),
    "vllm_max_model_length": (2, 2**26, "the tokens of a prompt and its completion together, 2 or more"),
    "max_completion_length": (1, MOST, "a number of tokens, 1 or more"),
    "per_device_train_batch_size": (1, MOST, "a number of sequences, 1 or more"),
    "gradient_accumulation_steps": (1, MOST, "a number of steps, 1 or more"),
    "steps_per_generation": (1, MOST, "a number of steps, 1 or more"),
    "generation_batch_size": (1, 2**40, "a number of completions, 1 or more"),
    "num_generations": (1, MOST, "a number of completions of a prompt, 1 or more"),
    "lora_r": (1, 4096, "the columns of an adapter, its rank, 1 or more"),
    "beta": (0, math.inf, "the weight of the KL penalty, 0 or more"),
}


def help_text() -> str:
    """What `trl-fp8 plan --help` says."""
    parser = ArgumentParser(
        prog="trl-fp8 plan",
        description="Say what of a model would be FP8, and what fits on which GPUs, with which flags.",
    )
    _add_arguments(parser)
    for name, text in OF_TRAIN.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="VALUE", help=text)
    parser.add_argument("--config", metavar="FILE", help="a run config of `trl-fp8 train`; flags here win")
    return parser.format_help()


def _add_arguments(parser: ArgumentParser) -> None:
    """A plan's own flags, with dashes or underscores. Beside TRL's they set the same names."""
    model = {"metavar": "MODEL", "help": "id or folder; only its config is read", "default": SUPPRESS}
    parser.add_argument("model_name_or_path", nargs="?", **model)
    for flag, (name, metavar, kind, text) in FLAGS.items():
        options = {"dest": name, "type": kind, "metavar": metavar, "default": SUPPRESS}
        options |= {"nargs": "?", "const": LORA_RANK} if flag == "--lora" else {}
        spellings = dict.fromkeys((flag, "--" + flag[2:].replace("-", "_")))
        parser.add_argument(*spellings, help=text, **options)
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="on CPU vLLM has no FP8 experts")
    parser.add_argument("--modules", action="store_true", help="which modules are FP8, and why others are not")
    parser.add_argument("--json", action="store_true", help="figures for scripts")


def run(words: list[str]) -> str:
    """What a plan prints for the words of its command line.

    Raises:
        ValueError: A value is of no use, or does not go with another or with the model. The message names flag, value,
            reason and remedy.
        OSError: The model is out of reach.
    """
    parser = make_parser()
    _add_arguments(parser)
    # accelerate's name, and in a run config a key whose type is checked
    parser.by_name["num_processes"] = parser.add_argument("--num_processes", "--num-processes", type=int)
    asked = parser.read(words, launches=False)
    values = asked.values
    # What only the host that trains may have. No plan counts it
    vars(values).update(tf32=None, deepspeed=None)
    known = {name for name, *_ in FLAGS.values()}.union(OF_TRAIN, ("engine", "modules", "json"))
    if others := [word for name, word in asked.spelled.items() if name not in known]:
        raise ValueError(f"{others[0]} is no flag of a plan. Put it into a run config, and give that with --config.")
    if not values.model_name_or_path:
        raise ValueError("no model: give its id or folder, or a --config that has model_name_or_path.")
    gpus = _complete(asked)
    completions = values.generation_batch_size
    if "generation_batch_size" in asked.spelled:
        vars(values)["generation_batch_size"] = None  # a plan finds the steps that come to it
    _, args, model, _ = asked.made(gpus)
    _check_flags(asked, args, model)
    outline = _outline(str(values.model_name_or_path), args.base_in_engine)
    setup = _setup(asked, args, model, gpus, completions, outline.context)
    require_same_positions(outline, setup.training.tokens)
    for group in args.groups():
        group.check_model(args, outline)
    options = args.recipe_options() | {"expert_kernels": values.engine == "cuda"}
    is_chosen = asked.sets("fp8_weights") or asked.sets("fp8_weight_format") or args.base_in_engine
    if not is_chosen and args.fp8_weight_format not in formats_for(outline):
        options["fp8_weights"] = False  # which its flags then say

    @cache
    def plan_at(ranks: int) -> Plan:
        return plan_for(outline, recipe_for(outline, **options | {"tensor_parallel_size": ranks}))

    in_one_piece = any(group.in_one_piece(args, outline, model.use_peft) for group in args.groups())
    may_share = hasattr(args, "fp8_base") and outline.stored_as != "mxfp4" and _against_base(args, model) is None
    planner = Planner(outline, plan_at, SIZES[:1] if in_one_piece else SIZES, may_share)
    if setup.tensor_parallel_size and not planner.splits(setup.tensor_parallel_size):
        raise ValueError(
            f"{_shown(asked, 'vllm_tensor_parallel_size')}: vLLM cannot divide the attention heads of {outline.name} "
            "by it. Give --tensor-parallel-size 1, or a divisor of their number."
        )
    capacity = planner.capacity(setup)
    ways = [] if capacity.why_not is None else planner.ways(setup)
    if values.json:
        return json.dumps(as_json(capacity, ways, outline, asked.given), indent=2)
    table = f"{capacity.plan.table()}\n\n" if values.modules else ""
    machine = {"num_processes": "--gpus", "gpu_memory": "--gpu-memory"}
    assumed = [flag for name, flag in machine.items() if not asked.sets(name)]
    text = as_text(capacity, ways, outline, asked.given, assumed)
    uncounted = [
        name for name, counted in COUNTED.items() if asked.sets(name) and getattr(values, name) not in counted
    ]
    watch = f"\nwatch: not counted: {', '.join(_shown(asked, name) for name in uncounted)}." if uncounted else ""
    return f"{table}{text}{watch}"


def _complete(asked: Asked) -> int:
    """Fill in what plans assume otherwise than TRL, and return the number of GPUs."""
    values = asked.values
    for name, (least, most, wanted) in LIMITS.items():
        if (value := getattr(values, name, None)) is not None and not least <= value <= most:
            raise ValueError(f"{_shown(asked, name)}: give {wanted}.")
    if "lora_r" in asked.spelled or ("fp8_base" in asked.spelled and values.fp8_base):
        vars(values)["use_peft"] = True
    if asked.given is None:
        whole = values.num_generations  # steps with which groups are whole on any number of GPUs
        alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": whole}
        if "lora_r" not in asked.spelled:
            alone["lora_r"] = LORA_RANK
        if tokens := values.vllm_max_model_length:
            alone["max_completion_length"] = tokens - min(MOST_PROMPT, tokens // 2)
        vars(values).update(alone)
    ranks = _stated(asked, "vllm_tensor_parallel_size") or 1
    gpus = values.num_processes or ranks
    if gpus % ranks:
        raise ValueError(
            f"{_shown(asked, 'vllm_tensor_parallel_size')} on {gpus} GPUs: each engine runs on that many training "
            f"processes. Give --gpus {ranks}, or a multiple of it."
        )
    return gpus


def _setup(
    asked: Asked, args: FP8GRPOConfig, model: ModelConfig, gpus: int, completions: int | None, model_context: int
) -> Setup:
    """What to plan for. `completions` of a generation that a word asks for; `model_context`: most tokens of a
    sequence, 0 if not known.
    """
    completion = _stated(asked, "max_completion_length")
    default = min(CONTEXT, model_context or CONTEXT) if completion is None else completion + MOST_PROMPT
    tokens = args.vllm_max_model_length or default
    if completions is None:
        completions = COMPLETIONS if asked.given is None else args.generation_batch_size
    elif asked.given is not None and completions % args.num_generations:
        raise ValueError(
            f"--completions {completions} with num_generations={args.num_generations}: TRL wants whole groups. Give a "
            "multiple of it."
        )
    training = Training(
        gpus=gpus,
        lora_rank=model.lora_r if model.use_peft else None,
        dtype=_dtype(asked, args, model),
        sequences=args.per_device_train_batch_size,
        tokens=tokens,
        has_reference=args.beta > 0,
        fp8_base=args.base_in_engine,
    )
    return Setup(
        training=training,
        gpu_bytes=getattr(asked.values, "gpu_memory", 80.0) * GIB,
        prompt=tokens - completion if completion and completion < tokens else min(MOST_PROMPT, tokens // 2),
        completions=completions,
        group=args.num_generations,
        tensor_parallel_size=_stated(asked, "vllm_tensor_parallel_size"),
        utilization=_stated(asked, "vllm_gpu_memory_utilization"),
        sleeps=args.vllm_enable_sleep_mode,
        shares_kernels=args.policy_calls_engine,
    )


def _stated(asked: Asked, name: str) -> Any:
    """What a word or a run config says, which has TRL's defaults; None where a plan is free to choose."""
    return getattr(asked.values, name) if asked.given is not None or name in asked.spelled else None


def _shown(asked: Asked, name: str) -> str:
    """Flag and value, for messages."""
    value = getattr(asked.values, name)
    return f"{asked.spelled[name]} {value}" if name in asked.spelled else f"{name}={value!r}"


def _dtype(asked: Asked, args: FP8GRPOConfig, model: ModelConfig) -> str:
    """Of the policy's weights: what is beside an FP8 base is BF16 if nothing is said."""
    return model.dtype if asked.sets("dtype") or not args.base_in_engine else "bfloat16"


def _check_flags(asked: Asked, args: FP8GRPOConfig, model: ModelConfig) -> None:
    """Raise `ValueError` for what the config allows, and a plan cannot count or the trainer refuses."""
    if args.vllm_mode != "colocate" or (asked.sets("use_vllm") and not args.use_vllm):
        name = "vllm_mode" if args.vllm_mode != "colocate" else "use_vllm"
        raise ValueError(f"{_shown(asked, name)}: a plan is of an engine that shares its GPUs with the trainer.")
    if (dtype := _dtype(asked, args, model)) not in BYTES:
        raise ValueError(f"dtype={dtype!r}: a plan counts {listed(BYTES)}. Give one of them.")
    if args.base_in_engine and (against := _against_base(args, model)):
        raise ValueError(f"fp8_base=True with {against} Change it, or leave the FP8 base out.")


def _against_base(args: FP8GRPOConfig, model: ModelConfig) -> str | None:
    """What adapters on an FP8 base do not go with, and why."""
    return next(filter(None, (group.against_base(args, model) for group in args.groups())), None)


def _outline(model: str, fp8_base: bool) -> Outline:
    """The outline of a model that the trainer takes and an engine can serve; `ValueError` for others."""
    config = model_config(model)
    stored, kind = config.get("quantization_config"), config.get("model_type")
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if method not in (None, "fp8", "mxfp4") or (method == "fp8" and stored.get("weight_block_size") is None):
        kind = "fp8 without weight_block_size" if method == "fp8" else reprlib.repr(method).strip("'")
        raise ValueError(
            f"MODEL={model!r} is quantized ({kind}): trained are checkpoints in high precision, block FP8 and MXFP4. "
            "Start from the one that it was made of."
        )
    if fp8_base and method == "mxfp4":
        raise ValueError(f"--fp8-base with MODEL={model!r}, a checkpoint in MXFP4: leave the FP8 base out.")
    if not isinstance(kind, str):
        raise ValueError(f"MODEL={model!r}: its config.json has no model_type. Give the folder of a whole checkpoint.")
    if "auto_map" in config and kind not in CONFIG_MAPPING:
        raise ValueError(
            f"MODEL={model!r}: models of type {kind!r} bring their own code (auto_map), which a plan does not run. "
            "FP8GRPOTrainer runs it with trust_remote_code=True, and says at its start whether vLLM can serve it."
        )
    outline = from_model.outline_of_pretrained(model)
    # vLLM knows best what it knows, and takes seconds to import
    knows = engine_class if find_spec("vllm") and not family_of(outline.config_type).tested else None
    try:
        require_servable(outline, knows)
    except ValueError as error:  # which says what the model takes in BF16, too
        plan = plan_for(outline, recipe_for(outline, fp8_weights=False, kv_cache_dtype="auto"))
        size, token = format_bytes(plan.bytes_before), format_bytes(plan.cache.token_bytes(False))
        in_bf16 = f"In BF16 {outline.name} takes {size} of weights, and {token} of KV cache per token."
        raise ValueError(f"{error} {in_bf16}") from error
    return outline
