"""`trl-fp8 plan`: what of a model would be FP8, and what fits on which GPUs, from its config.

It reads and checks a run config and flags as `trl-fp8 train` does, and chooses values that neither sets.
"""

import json
from argparse import SUPPRESS, ArgumentParser
from importlib.util import find_spec
from typing import Any

from transformers import CONFIG_MAPPING

from trl_fp8.planning.capacity import LORA_RANK, SIZES, Planner, server_capacity
from trl_fp8.planning.overlap import StepTimes
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


CONTEXT = Setup.tokens  # tokens of a sequence if no flag sets them
MOST_PROMPT = 512  # prompt tokens that a plan assumes if flags do not set the lengths of both prompt and completion
# Flag that changes the trainer's memory -> values for which planning/trainer_memory.py computes it
COUNTED = {
    "gradient_checkpointing": (True,),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "load_in_4bit": (False,),
    "load_in_8bit": (False,),
    "lora_modules_to_save": (None,),
    "lora_target_parameters": (None,),
}
# Flag of a plan -> (attribute that it sets, metavar, type, help). An attribute has the name of the flag of
# `trl-fp8 train` with the same meaning, if there is one
FLAGS = {
    "--gpus": ("num_processes", "N", int, "GPUs that the policy is sharded over, with FSDP2 (1)"),
    "--gpu-memory": ("gpu_memory", "GIB", float, "memory of one GPU (80)"),
    "--gpu-memory-utilization": (
        "vllm_gpu_memory_utilization",
        "SHARE",
        float,
        "the engine's share of a GPU (what fits)",
    ),
    "--tensor-parallel-size": ("vllm_tensor_parallel_size", "N", int, "GPUs of an engine (the smallest that fits)"),
    "--context": ("vllm_max_model_length", "TOKENS", int, f"longest prompt plus completion ({CONTEXT})"),
    "--completions": (
        "generation_batch_size",
        "N",
        int,
        f"completions of a generation, on all GPUs ({Setup.completions})",
    ),
    "--lora": ("lora_r", "RANK", int, f"train adapters of this rank ({LORA_RANK})"),
    "--weight-format": ("fp8_weight_format", "|".join(FORMATS), str, "format of FP8 weights (blocks)"),
}
SECONDS = {  # part of a step, measured in a run with a server -> help of its flag
    "rollout": "seconds of a step's rollouts in a run with a server, to say what asynchronous training gains",
    "train": "seconds of the rest of the step, without the sync",
    "sync": "seconds of its sync, fp8/sync_seconds (0)",
}
LIMITS = {  # name -> least and largest value
    **dict.fromkeys(("num_processes", "vllm_tensor_parallel_size", "max_completion_length"), (1, 2**20)),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"), (1, 2**20)),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), (1, 2**30)),
    "gpu_memory": (1, 4096),
    "vllm_gpu_memory_utilization": (0.01, 0.99),
    "vllm_max_model_length": (2, 2**26),
    "lora_r": (1, 4096),
    **{f"{part}_seconds": (0, 10**6) for part in SECONDS},
    "beta": (0, 2**20),
}


def _add_arguments(parser: ArgumentParser) -> None:
    """Add a plan's own flags, spelled with dashes or underscores. Each sets the attribute that `FLAGS` names."""
    model_help = "id or folder; only its config is read"
    parser.add_argument("model_name_or_path", nargs="?", metavar="MODEL", help=model_help, default=SUPPRESS)
    for flag, (name, metavar, value_type, text) in FLAGS.items():
        options = {"nargs": "?", "const": LORA_RANK} if flag == "--lora" else {}
        options |= {"dest": name, "type": value_type, "metavar": metavar, "help": text, "default": SUPPRESS}
        spellings = dict.fromkeys((flag, f"--{name_of(flag)}"))  # only one for a flag without dashes, such as --gpus
        parser.add_argument(*spellings, **options)
    for part, text in SECONDS.items():
        options = {"type": float, "metavar": "S", "help": text, "default": SUPPRESS}
        parser.add_argument(f"--{part}-seconds", f"--{part}_seconds", **options)
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="on CPU vLLM has no FP8 experts")
    parser.add_argument("--modules", action="store_true", help="which modules are FP8, and why others are not")
    parser.add_argument("--server", action="store_true", help="for an engine in a server, on GPUs of its own")
    parser.add_argument("--json", action="store_true", help="figures for scripts")


def _help() -> str:
    """Return the text of `trl-fp8 plan --help`, without TRL's flags."""
    parser = ArgumentParser(
        prog="trl-fp8 plan",
        description="Say what of a model would be FP8, and what fits on which GPUs, with which flags.",
        epilog=f"It takes flags of `trl-fp8 train`, too: {', '.join(f'--{name}' for name in CHOSEN)}.",
    )
    _add_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="a run config of `trl-fp8 train`; flags here win")
    return parser.format_help()


def text_of(words: list[str]) -> str:
    """Return the text of a plan for the words of its command line.

    Raises:
        ValueError: A value is out of range, or does not go with another value or with the model. The message names
            flag, value, reason and remedy.
        OSError: The model is not in the cache, and the Hub cannot be reached.
    """
    if "-h" in words or "--help" in words:
        return _help()
    arguments = read_arguments(words)
    values = arguments.values
    times = _step_times(arguments)
    if values.json and values.modules:
        raise ValueError("--modules with --json: the figures for scripts have no table of modules. Leave one out.")
    outline = _outline(str(values.model_name_or_path), values.model_revision)
    setup = _setup(arguments, outline)
    args = setup.args
    if args.base_in_engine and outline.stored_as == "mxfp4":
        raise ValueError(f"fp8_base=True with MODEL={outline.name!r}, a checkpoint in MXFP4. Set fp8_base=False.")
    # Whether an alternative that fits may have an FP8 base, though the flags do not ask for one
    can_share_base = outline.stored_as != "mxfp4" and not any(
        group.flag_ruling_out_fp8_base(args, values) for group in args.groups()
    )
    require_same_positions(outline, setup.tokens)
    for group in args.groups():
        group.check_model(args, outline)
    wants_fp8_weights = arguments.sets("fp8_weights") or arguments.sets("fp8_weight_format") or args.base_in_engine
    if not wants_fp8_weights and args.fp8_weight_format not in formats_for(outline):
        setup = setup.with_flags({"fp8_weights": False})  # no error, but the plan says why no weight can be FP8
    options = setup.args.recipe_options() | {"expert_kernels": values.engine == "cuda"}
    needs_one_rank = any(group.rules_out_tensor_parallelism(args) for group in args.groups())
    sizes = SIZES[:1] if needs_one_rank else SIZES
    saving = SAVING if can_share_base else {}
    planner = Planner(outline, options, sizes, saving)
    if setup.tensor_parallel_size and not planner.divides_heads(setup.tensor_parallel_size):
        raise ValueError(
            f"{_shown(arguments, 'vllm_tensor_parallel_size')}: vLLM cannot divide the attention heads of "
            f"{outline.name} by it. Give --tensor-parallel-size 1, or a divisor of their number."
        )
    if values.server and args.policy_calls_engine:
        raise ValueError(
            f"{_shown(arguments, 'fp8_forward')} with --server: a plan is of GPUs, where a trainer refuses both "
            "(docs/servers.md). Leave one of them out."
        )
    # Flags with values for which the trainer's memory is not counted
    uncounted = [name for name, counted in COUNTED.items() if getattr(values, name) not in counted]
    if values.server:
        server = server_capacity(planner, setup)
        if values.json:
            return json.dumps(server_as_json(server, times) | {"uncounted": uncounted}, indent=2)
        plan = server.server.plan
        text = server_as_text(server, times)
    else:
        capacity = planner.capacity(setup)
        alternatives = [] if capacity.why_not is None else planner.alternatives(setup)
        if values.json:
            return json.dumps(as_json(capacity, alternatives) | {"uncounted": uncounted}, indent=2)
        assumed = []  # flags of the machine that are not set; a run config need not have them
        if arguments.run_config is not None:
            machine_flags = {"num_processes": "--gpus", "gpu_memory": "--gpu-memory"}
            assumed = [flag for name, flag in machine_flags.items() if not arguments.sets(name)]
        plan = capacity.plan
        text = as_text(capacity, alternatives, assumed)
    if values.modules:
        text = f"{plan.table()}\n\n{text}"
    if uncounted:
        text += f"\nwatch: not counted: {', '.join(_shown(arguments, name) for name in uncounted)}."
    return text


def read_arguments(words: list[str]) -> Arguments:
    """Return the arguments of a plan. Raise `ValueError` for a flag that a plan does not take, or a bad number."""
    parser = Parser()
    _add_arguments(parser)
    # accelerate calls --gpus num_processes. With this entry in `by_name` a run config may set it, as an integer
    parser.by_name["num_processes"] = parser.add_argument("--num_processes", "--num-processes", type=int)
    arguments = parser.read(words)
    own_flags = {name for name, *_ in FLAGS.values()}.union(CHOSEN, ("engine", "modules", "json", "server"))
    own_flags |= {f"{part}_seconds" for part in SECONDS}
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


def _step_times(arguments: Arguments) -> StepTimes | None:
    """Return the seconds of the parts of a step that flags set, or None if no flag sets any.

    Raises `ValueError` if --server is missing, or if --rollout-seconds or --train-seconds is missing or 0.
    """
    values = arguments.values
    seconds = {part: getattr(values, f"{part}_seconds") for part in SECONDS if f"{part}_seconds" in arguments.spelled}
    if not seconds:
        return None
    first_part = next(iter(seconds))
    shown = _shown(arguments, f"{first_part}_seconds")
    if not values.server:
        raise ValueError(f"{shown}: rollouts overlap with training where a server samples them. Add --server.")
    if not seconds.get("rollout") or not seconds.get("train"):
        raise ValueError(
            f"{shown}: what asynchronous training gains depends on both parts of a step. Give --rollout-seconds and "
            "--train-seconds, each above 0."
        )
    return StepTimes(**seconds)


def _setup(arguments: Arguments, outline: Outline) -> Setup:
    """Return the setup to plan for. Without a run config, a plan has its own defaults for some of TRL's flags."""
    values = arguments.values
    on_command_line = arguments.spelled
    has_run_config = arguments.run_config is not None

    def stated(name: str) -> Any:
        """Return a flag's value, or None if the plan chooses it. With a run config TRL's defaults count as values."""
        return getattr(values, name) if has_run_config or name in on_command_line else None

    completion = stated("max_completion_length")
    tensor_parallel_size = stated("vllm_tensor_parallel_size")
    utilization = stated("vllm_gpu_memory_utilization")
    ranks = tensor_parallel_size or 1  # ranks of an engine that shares the trainer's GPUs
    if values.server:
        ranks = 1
        # The share in a run config, and TRL's defaults, are for an engine that shares GPUs with the trainer
        if "vllm_gpu_memory_utilization" not in on_command_line:
            utilization = None
        if not arguments.sets("vllm_tensor_parallel_size"):
            tensor_parallel_size = None
    gpus = values.num_processes or ranks
    if gpus % ranks:
        raise ValueError(
            f"{_shown(arguments, 'vllm_tensor_parallel_size')} on {gpus} GPUs: each engine runs on that many training "
            f"processes. Give --gpus {ranks}, or a multiple of it."
        )
    tokens = values.vllm_max_model_length
    completions = values.generation_batch_size if "generation_batch_size" in on_command_line else None
    changes = {"tf32": None, "deepspeed": None}  # the GPU and the DeepSpeed file may exist only where the run trains
    if completion is None:
        tokens = tokens or min(CONTEXT, outline.context or CONTEXT)
        changes["max_completion_length"] = tokens - min(MOST_PROMPT, tokens // 2)
    elif not tokens:
        tokens = completion + MOST_PROMPT
    if not has_run_config:  # these two flags make all groups of completions complete on any number of GPUs
        changes |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": values.num_generations}
        if "lora_r" not in on_command_line:
            changes["lora_r"] = LORA_RANK
    saves_memory = any(name in on_command_line and getattr(values, name) for name in SAVING)
    if "lora_r" in on_command_line or saves_memory:  # flags that only a run with adapters has
        changes["use_peft"] = True
    if completions:
        changes["generation_batch_size"] = None  # the plan computes accumulation steps from `completions` instead
    mode = "server" if values.server else "colocate"
    if not arguments.sets("vllm_mode"):
        changes["vllm_mode"] = mode  # so that the config refuses flags of the other mode
    vars(values).update(changes)
    _, args, model, _ = arguments.configs(gpus)
    for name, planned in {"vllm_mode": mode, "use_vllm": True}.items():
        if getattr(args, name) != planned and arguments.sets(name):
            raise ValueError(
                f"{_shown(arguments, name)}: a plan is of an engine that shares its GPUs with the trainer, or of one "
                "in a server, with --server."
            )
    dtype = model.dtype or "bfloat16"  # None only with an FP8 base: then the weights beside the base are BF16
    if dtype not in BYTES:
        raise ValueError(f"dtype={dtype!r}: a plan counts {listed(BYTES)}. Give one of them.")
    if not completions:
        completions = args.generation_batch_size if has_run_config else Setup.completions
    return Setup(
        args,
        tokens=tokens,
        completions=completions,
        gpus=gpus,
        gpu_bytes=getattr(values, "gpu_memory", 80.0) * GIB,
        lora_rank=model.lora_r if model.use_peft else None,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        utilization=utilization,
        run_config=arguments.run_config,
    )


def _shown(arguments: Arguments, name: str) -> str:
    """Return a flag with its value for a message, as the user wrote them."""
    value = getattr(arguments.values, name)
    return f"{arguments.spelled[name]} {value}" if name in arguments.spelled else f"{name}={value!r}"


def _outline(model: str, revision: str) -> Outline:
    """Return the outline of a model. Raise `ValueError` if the trainer cannot train it or no engine can serve it."""
    config = model_config(model, revision)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"MODEL={model!r}: models of type {config.get('model_type')!r} bring their own code (auto_map), which a "
            "plan does not run. FP8GRPOTrainer does, with trust_remote_code=True, and says whether vLLM can serve it."
        )
    dequantizing_config(model, revision)  # raises for a quantization that transformers cannot undo
    outline = from_model.outline_of_pretrained(model, revision)
    # vLLM knows all models that it serves, but takes seconds to import, so import it only for untested families
    asks_vllm = find_spec("vllm") and not family_of(outline.config_type).tested
    require_servable(outline, engine_class if asks_vllm else None)
    return outline
