"""`trl-fp8 plan`: what of a model would be FP8, and what fits on which GPUs, from its config.

A run config and flags are read and checked as by `trl-fp8 train`. A plan chooses what neither sets.
"""

import json
from argparse import SUPPRESS, ArgumentParser
from importlib.util import find_spec

from transformers import CONFIG_MAPPING

from trl_fp8.planning.capacity import LORA_RANK, SIZES, Planner
from trl_fp8.planning.server_capacity import server_capacity
from trl_fp8.planning.trainer_memory import BYTES, GIB, Setup
from trl_fp8.policy.model import dequantizing_config
from trl_fp8.quantization.formats import FORMATS
from trl_fp8.recipe import from_model
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import formats_for
from trl_fp8.recipe.servable import require_same_positions, require_servable
from trl_fp8.run.locations import model_config
from trl_fp8.scripts.arguments import Arguments, Parser, name_of
from trl_fp8.upstream.vllm import engine_class

from .plan_text import CHOSEN, SAVING, as_json, as_text, server_as_json, server_as_text


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
    "--gpu-memory": ("gpu_memory", "GIB", float, "memory of one GPU (80)"),
    "--gpu-memory-utilization": ("vllm_gpu_memory_utilization", "SHARE", float, "the engine's share (what fits)"),
    "--tensor-parallel-size": ("vllm_tensor_parallel_size", "N", int, "GPUs of an engine (the smallest that fits)"),
    "--context": ("vllm_max_model_length", "TOKENS", int, f"tokens of a prompt and its completion ({CONTEXT})"),
    "--completions": ("generation_batch_size", "N", int, f"completions a generation, all GPUs ({Setup.completions})"),
    "--lora": ("lora_r", "RANK", int, f"train adapters of a rank ({LORA_RANK})"),
    "--weight-format": ("fp8_weight_format", "|".join(FORMATS), str, "format of FP8 weights (blocks)"),
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


def _add_arguments(parser: ArgumentParser) -> None:
    """Add a plan's own flags, with dashes or underscores. They set the names of TRL's."""
    text = "id or folder; only its config is read"
    parser.add_argument("model_name_or_path", nargs="?", metavar="MODEL", help=text, default=SUPPRESS)
    for flag, (name, metavar, kind, text) in FLAGS.items():
        options = {"nargs": "?", "const": LORA_RANK} if flag == "--lora" else {}
        options |= {"dest": name, "type": kind, "metavar": metavar, "help": text, "default": SUPPRESS}
        parser.add_argument(*dict.fromkeys((flag, f"--{name_of(flag)}")), **options)
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="on CPU vLLM has no FP8 experts")
    parser.add_argument("--modules", action="store_true", help="which modules are FP8, and why others are not")
    parser.add_argument("--server", action="store_true", help="for an engine in a server, on GPUs of its own")
    parser.add_argument("--json", action="store_true", help="figures for scripts")


def _help() -> str:
    """Return what `trl-fp8 plan --help` says: TRL's flags are left out."""
    parser = ArgumentParser(
        prog="trl-fp8 plan",
        description="Say what of a model would be FP8, and what fits on which GPUs, with which flags.",
        epilog=f"It takes flags of `trl-fp8 train`, too: {', '.join(f'--{name}' for name in CHOSEN)}.",
    )
    _add_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="a run config of `trl-fp8 train`; flags here win")
    return parser.format_help()


def run(words: list[str]) -> str:
    """Return what a plan prints for the words of its command line.

    Raises:
        ValueError: A value is of no use, or does not go with another or with the model. The message names flag, value,
            reason and remedy.
        OSError: The model is out of reach.
    """
    if "-h" in words or "--help" in words:
        return _help()
    arguments = read_arguments(words)
    values = arguments.values
    outline = _outline(str(values.model_name_or_path))
    setup = _setup(arguments, outline)
    args = setup.args
    if args.base_in_engine and outline.stored_as == "mxfp4":
        raise ValueError(f"fp8_base=True with MODEL={outline.name!r}, a checkpoint in MXFP4. Set fp8_base=False.")
    can_share_base = outline.stored_as != "mxfp4" and not any(
        group.against_base(args, values) for group in args.groups()
    )
    require_same_positions(outline, setup.tokens)
    for group in args.groups():
        group.check_model(args, outline)
    is_chosen = arguments.sets("fp8_weights") or arguments.sets("fp8_weight_format") or args.base_in_engine
    if not is_chosen and args.fp8_weight_format not in formats_for(outline):
        setup = setup.with_flags({"fp8_weights": False})  # the plan says why
    options = setup.args.recipe_options() | {"expert_kernels": values.engine == "cuda"}
    sizes = SIZES[:1] if any(group.in_one_piece(args) for group in args.groups()) else SIZES
    planner = Planner(outline, options, sizes, SAVING if can_share_base else {})
    if setup.tensor_parallel_size and not planner.splits(setup.tensor_parallel_size):
        raise ValueError(
            f"{_shown(arguments, 'vllm_tensor_parallel_size')}: vLLM cannot divide the attention heads of "
            f"{outline.name} by it. Give --tensor-parallel-size 1, or a divisor of their number."
        )
    if values.server:
        server = server_capacity(planner, setup)
        if values.json:
            return json.dumps(server_as_json(server), indent=2)
        plan, text = server.server.plan, server_as_text(server)
    else:
        capacity = planner.capacity(setup)
        ways = [] if capacity.why_not is None else planner.ways(setup)
        if values.json:
            return json.dumps(as_json(capacity, ways), indent=2)
        machine = {"num_processes": "--gpus", "gpu_memory": "--gpu-memory"} if arguments.run_config is not None else {}
        assumed = [flag for name, flag in machine.items() if not arguments.sets(name)]
        plan, text = capacity.plan, as_text(capacity, ways, assumed)
    if values.modules:
        text = f"{plan.table()}\n\n{text}"
    uncounted = [name for name, counted in COUNTED.items() if getattr(values, name) not in counted]
    if uncounted:
        text += f"\nwatch: not counted: {', '.join(_shown(arguments, name) for name in uncounted)}."
    return text


def read_arguments(words: list[str]) -> Arguments:
    """Return the arguments of a plan. `ValueError` for a flag that is none of its own, and a number out of range."""
    parser = Parser()
    _add_arguments(parser)
    # accelerate's name, and in a run config a key whose type is checked
    parser.by_name["num_processes"] = parser.add_argument("--num_processes", "--num-processes", type=int)
    arguments = parser.read(words)
    own_flags = {name for name, *_ in FLAGS.values()}.union(CHOSEN, ("engine", "modules", "json", "server"))
    for name, word in arguments.spelled.items():
        if name not in own_flags:
            raise ValueError(f"{word} is no flag of a plan. Put it into a run config, and give that with --config.")
    if arguments.other_words:
        raise ValueError(f"{arguments.other_words[0]!r} belongs to no flag.")
    if not arguments.values.model_name_or_path:
        raise ValueError("no model: give its id or folder, or a --config that has model_name_or_path.")
    for name, (least, most) in LIMITS.items():
        value = getattr(arguments.values, name, None)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{_shown(arguments, name)}: give a number from {least:,} to {most:,}.")
    return arguments


def _setup(arguments: Arguments, outline: Outline) -> Setup:
    """Return what to plan for. Values that neither a run config nor a word sets are a plan's, not TRL's."""
    values, spelled = arguments.values, arguments.spelled
    is_alone = arguments.run_config is None
    # Without a run config a plan chooses what no word sets; beside one it is TRL's default
    chosen = {"vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "max_completion_length"}
    stated = {name: None if is_alone and name not in spelled else getattr(values, name) for name in chosen}
    ranks = stated["vllm_tensor_parallel_size"] or 1
    if values.server:
        ranks = 1  # of the engine on the trainer's GPUs: it has none there
        # TRL's defaults, and the share in a run config, are those of an engine beside the trainer
        if "vllm_gpu_memory_utilization" not in spelled:
            stated["vllm_gpu_memory_utilization"] = None
        if not arguments.sets("vllm_tensor_parallel_size"):
            stated["vllm_tensor_parallel_size"] = None
    gpus = values.num_processes or ranks
    if gpus % ranks:
        raise ValueError(
            f"{_shown(arguments, 'vllm_tensor_parallel_size')} on {gpus} GPUs: each engine runs on that many training "
            f"processes. Give --gpus {ranks}, or a multiple of it."
        )
    tokens = values.vllm_max_model_length
    completions = values.generation_batch_size if "generation_batch_size" in spelled else None
    changes = {"tf32": None, "deepspeed": None}  # what only the host that trains may have
    completion = stated["max_completion_length"]
    if completion is None:
        tokens = tokens or min(CONTEXT, outline.context or CONTEXT)
        changes["max_completion_length"] = tokens - min(MOST_PROMPT, tokens // 2)
    if is_alone:  # steps with which groups are whole on any number of GPUs
        changes |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": values.num_generations}
        changes |= {} if "lora_r" in spelled else {"lora_r": LORA_RANK}
    if "lora_r" in spelled or any(name in spelled and getattr(values, name) for name in SAVING):
        changes["use_peft"] = True
    if completions:
        changes["generation_batch_size"] = None  # the plan finds the steps that come to it
    mode = "server" if values.server else "colocate"
    if not arguments.sets("vllm_mode"):
        changes["vllm_mode"] = mode  # with which the config refuses what needs the other one
    vars(values).update(changes)
    _, args, model, _ = arguments.configs(gpus)
    for name, is_fine in ("vllm_mode", args.vllm_mode == mode), ("use_vllm", args.use_vllm):
        if not is_fine and arguments.sets(name):
            raise ValueError(
                f"{_shown(arguments, name)}: a plan is of an engine that shares its GPUs with the trainer, or of one "
                "in a server, with --server."
            )
    dtype = model.dtype or "bfloat16"  # of what is beside an FP8 base
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
        tensor_parallel_size=stated["vllm_tensor_parallel_size"],
        utilization=stated["vllm_gpu_memory_utilization"],
        run_config=arguments.run_config,
    )


def _shown(arguments: Arguments, name: str) -> str:
    """Return flag and value, for messages."""
    value = getattr(arguments.values, name)
    return f"{arguments.spelled[name]} {value}" if name in arguments.spelled else f"{name}={value!r}"


def _outline(model: str) -> Outline:
    """Return the outline of a model that the trainer takes and an engine can serve; `ValueError` for others."""
    config = model_config(model)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"MODEL={model!r}: models of type {config.get('model_type')!r} bring their own code (auto_map), which a "
            "plan does not run. FP8GRPOTrainer does, with trust_remote_code=True, and says whether vLLM can serve it."
        )
    dequantizing_config(model)  # raises for what it cannot dequantize
    outline = from_model.outline_of_pretrained(model)
    # only vLLM knows all its models, but it takes seconds to import
    asks_vllm = find_spec("vllm") and not family_of(outline.config_type).tested
    require_servable(outline, engine_class if asks_vllm else None)
    return outline
