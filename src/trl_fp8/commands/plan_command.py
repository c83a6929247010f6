"""`trl-fp8 plan`: what of a model would be FP8, and what fits on which GPUs, from its config.

A run config and flags are read and checked as by `trl-fp8 train`. What neither sets a plan chooses.
"""

import json
import reprlib
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from transformers import CONFIG_MAPPING

from trl_fp8.planning.capacity import LORA_RANK, SIZES, Planner
from trl_fp8.planning.trainer_memory import BYTES, GIB, Setup
from trl_fp8.quantization.formats import FORMATS
from trl_fp8.recipe import from_model
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import formats_for
from trl_fp8.recipe.servable import require_same_positions, require_servable
from trl_fp8.run.locations import model_config
from trl_fp8.scripts.arguments import Arguments, make_parser
from trl_fp8.upstream.vllm import engine_class

from .plan_text import CHOSEN, SAVING, as_json, as_text


CONTEXT, MOST_PROMPT = Setup.tokens, 512  # planned for where nothing is set
# Flag that changes the trainer's memory -> the values that are counted
COUNTED = {
    "gradient_checkpointing": (True,),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "load_in_4bit": (False,),
    "load_in_8bit": (False,),
}
# Flag of a plan -> (the name that is set, what its value is called, its type, its help)
FLAGS = {
    "--gpus": ("num_processes", "N", int, "GPUs that the policy is sharded over, with FSDP2 (1)"),
    "--gpu-memory": ("gpu_memory", "GIB", float, "of one GPU (80)"),
    "--gpu-memory-utilization": ("vllm_gpu_memory_utilization", "SHARE", float, "the engine's, of a GPU (what fits)"),
    "--tensor-parallel-size": ("vllm_tensor_parallel_size", "N", int, "GPUs of an engine (the smallest that fits)"),
    "--context": ("vllm_max_model_length", "TOKENS", int, f"of a prompt and its completion ({CONTEXT})"),
    "--completions": ("generation_batch_size", "N", int, f"of a generation, on all GPUs ({Setup.completions})"),
    "--lora": ("lora_r", "RANK", int, f"train adapters of a rank ({LORA_RANK})"),
    "--weight-format": ("fp8_weight_format", "|".join(FORMATS), str, "of FP8 weights (blocks)"),
}
LIMITS = {  # least and most
    **dict.fromkeys(("num_processes", "vllm_tensor_parallel_size", "max_completion_length"), (1, 2**20)),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"), (1, 2**20)),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), (1, 2**30)),
    "gpu_memory": (1, 4096),
    "vllm_gpu_memory_utilization": (0.01, 0.99),
    "vllm_max_model_length": (2, 2**26),
    "lora_r": (1, 4096),
    "beta": (0, 2**20),
}


def help_text() -> str:
    """Return what `trl-fp8 plan --help` says."""
    parser = ArgumentParser(
        prog="trl-fp8 plan",
        description="Say what of a model would be FP8, and what fits on which GPUs, with which flags.",
        epilog=f"It takes flags of `trl-fp8 train`, too: {', '.join(f'--{name}' for name in CHOSEN)}.",
    )
    _add_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="a run config of `trl-fp8 train`; flags here win")
    return parser.format_help()


def _add_arguments(parser: ArgumentParser) -> None:
    """Add a plan's own flags, with dashes or underscores. They set the names of TRL's."""
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
    """Return what a plan prints for the words of its command line.

    Raises:
        ValueError: A value is of no use, or does not go with another or with the model. The message names flag, value,
            reason and remedy.
        OSError: The model is out of reach.
    """
    parser = make_parser()
    _add_arguments(parser)
    # accelerate's name, and in a run config a key whose type is checked
    parser.by_name["num_processes"] = parser.add_argument("--num_processes", "--num-processes", type=int)
    asked = parser.read(words)
    values = asked.values
    known = {name for name, *_ in FLAGS.values()}.union(CHOSEN, ("engine", "modules", "json"))
    if others := [word for name, word in asked.spelled.items() if name not in known]:
        raise ValueError(f"{others[0]} is no flag of a plan. Put it into a run config, and give that with --config.")
    if asked.other_words:
        raise ValueError(f"{asked.other_words[0]!r} belongs to no flag.")
    if not values.model_name_or_path:
        raise ValueError("no model: give its id or folder, or a --config that has model_name_or_path.")
    for name, (least, most) in LIMITS.items():
        if (value := getattr(values, name, None)) is not None and not least <= value <= most:
            raise ValueError(f"{_shown(asked, name)}: give a number from {least:,} to {most:,}.")
    outline = _outline(str(values.model_name_or_path))
    setup = _setup(asked, outline)
    args = setup.args
    # What goes against adapters on a shared base, in words
    against = next(filter(None, (group.against_base(args, values) for group in args.groups())), None)
    if outline.stored_as == "mxfp4":
        against = f"MODEL={outline.name!r}, a checkpoint in MXFP4."
    if args.base_in_engine and against:
        raise ValueError(f"fp8_base=True with {against} Change it, or leave the FP8 base out.")
    require_same_positions(outline, setup.tokens)
    for group in args.groups():
        group.check_model(args, outline)
    is_chosen = asked.sets("fp8_weights") or asked.sets("fp8_weight_format") or args.base_in_engine
    if not is_chosen and args.fp8_weight_format not in formats_for(outline):
        setup = setup.with_flags({"fp8_weights": False})  # the plan says why
    options = setup.args.recipe_options() | {"expert_kernels": values.engine == "cuda"}
    sizes = SIZES[:1] if any(group.in_one_piece(args) for group in args.groups()) else SIZES
    planner = Planner(outline, options, sizes, {} if against else SAVING)
    if setup.tensor_parallel_size and not planner.splits(setup.tensor_parallel_size):
        raise ValueError(
            f"{_shown(asked, 'vllm_tensor_parallel_size')}: vLLM cannot divide the attention heads of {outline.name} "
            "by it. Give --tensor-parallel-size 1, or a divisor of their number."
        )
    capacity = planner.capacity(setup)
    ways = [] if capacity.why_not is None else planner.ways(setup)
    if values.json:
        return json.dumps(as_json(capacity, ways), indent=2)
    machine = {"num_processes": "--gpus", "gpu_memory": "--gpu-memory"} if setup.run_config is not None else {}
    text = as_text(capacity, ways, [flag for name, flag in machine.items() if not asked.sets(name)])
    uncounted = [_shown(asked, name) for name, counted in COUNTED.items() if getattr(values, name) not in counted]
    watch = f"\nwatch: not counted: {', '.join(uncounted)}." if uncounted else ""
    table = f"{capacity.plan.table()}\n\n" if values.modules else ""
    return f"{table}{text}{watch}"


def _setup(asked: Arguments, outline: Outline) -> Setup:
    """Return what to plan for. What neither a run config nor a word sets is as plans have it, not as TRL."""
    values, is_alone = asked.values, asked.run_config is None

    def stated(name: str) -> Any:
        """Return a value that a plan does not choose; beside a run config, all that nothing sets are TRL's."""
        return None if is_alone and name not in asked.spelled else getattr(values, name)

    ranks = stated("vllm_tensor_parallel_size") or 1
    gpus = values.num_processes or ranks
    if gpus % ranks:
        raise ValueError(
            f"{_shown(asked, 'vllm_tensor_parallel_size')} on {gpus} GPUs: each engine runs on that many training "
            f"processes. Give --gpus {ranks}, or a multiple of it."
        )
    tokens, completion = values.vllm_max_model_length, stated("max_completion_length")
    completions = values.generation_batch_size if "generation_batch_size" in asked.spelled else None
    changes: dict[str, Any] = {"tf32": None, "deepspeed": None}  # what only the host that trains may have
    if completion is None:
        tokens = tokens or min(CONTEXT, outline.context or CONTEXT)
        changes["max_completion_length"] = tokens - min(MOST_PROMPT, tokens // 2)
    if is_alone:  # steps with which groups are whole on any number of GPUs
        changes |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": values.num_generations}
        changes |= {} if "lora_r" in asked.spelled else {"lora_r": LORA_RANK}
    if "lora_r" in asked.spelled or any(name in asked.spelled and getattr(values, name) for name in SAVING):
        changes["use_peft"] = True
    if completions:
        changes["generation_batch_size"] = None  # the plan finds the steps that come to it
    vars(values).update(changes)
    _, args, model, _ = asked.configs(gpus)
    if args.vllm_mode != "colocate" or (asked.sets("use_vllm") and not args.use_vllm):
        name = "vllm_mode" if args.vllm_mode != "colocate" else "use_vllm"
        raise ValueError(f"{_shown(asked, name)}: a plan is of an engine that shares its GPUs with the trainer.")
    dtype = "bfloat16" if args.base_in_engine and not asked.sets("dtype") else model.dtype
    if dtype not in BYTES:
        raise ValueError(f"dtype={dtype!r}: a plan counts {listed(BYTES)}. Give one of them.")
    return Setup(
        args,
        tokens=tokens or completion + MOST_PROMPT,
        completions=completions or (Setup.completions if is_alone else args.generation_batch_size),
        gpus=gpus,
        gpu_bytes=getattr(values, "gpu_memory", 80.0) * GIB,
        lora_rank=model.lora_r if model.use_peft else None,
        dtype=dtype,
        tensor_parallel_size=stated("vllm_tensor_parallel_size"),
        utilization=stated("vllm_gpu_memory_utilization"),
        run_config=asked.run_config,
    )


def _shown(asked: Arguments, name: str) -> str:
    """Return flag and value, for messages."""
    value = getattr(asked.values, name)
    return f"{asked.spelled[name]} {value}" if name in asked.spelled else f"{name}={value!r}"


def _outline(model: str) -> Outline:
    """Return the outline of a model that the trainer takes and an engine can serve; `ValueError` for others."""
    config = model_config(model)
    stored = config.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    has_blocks = method != "fp8" or stored.get("weight_block_size") is not None
    if method not in (None, "fp8", "mxfp4") or not has_blocks:
        kind = reprlib.repr(method).strip("'") if has_blocks else "fp8 without weight_block_size"
        raise ValueError(
            f"MODEL={model!r} is quantized ({kind}): trained are checkpoints in high precision, block FP8 and MXFP4. "
            "Start from the one that it was made of."
        )
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"MODEL={model!r}: models of type {config.get('model_type')!r} bring their own code (auto_map), which a "
            "plan does not run. FP8GRPOTrainer does, with trust_remote_code=True, and says whether vLLM can serve it."
        )
    outline = from_model.outline_of_pretrained(model)
    # vLLM knows best what it knows, and takes seconds to import
    asks_vllm = find_spec("vllm") and not family_of(outline.config_type).tested
    require_servable(outline, engine_class if asks_vllm else None)
    return outline
