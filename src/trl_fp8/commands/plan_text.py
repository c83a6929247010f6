"""Text and JSON of a plan: the GPU memory that a training run needs, whether it fits, and the flags for it."""

import json
from collections.abc import Sequence
from dataclasses import fields
from math import ceil, gcd
from shlex import join

from trl import ModelConfig

from trl_fp8.config import FP8GRPOConfig
from trl_fp8.planning.capacity import LEAST_SEQUENCES, MOST_GPUS, RESERVED_BYTES, SIZES, Capacity, ServerCapacity
from trl_fp8.planning.overlap import StepTimes
from trl_fp8.planning.risks import risks
from trl_fp8.planning.trainer_memory import GIB
from trl_fp8.recipe.messages import format_bytes
from trl_fp8.recipe.names import MLA
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import adapter_targets


SMALLEST_SHOWN = GIB / 20  # bytes; fewer would print as 0.0 GiB
DEFAULTS = {item.name: item.default for kind in (FP8GRPOConfig, ModelConfig) for item in fields(kind)}
# Flags that save memory in training with adapters
SAVING = {name: value for group in FP8GRPOConfig.groups() for name, value in group.SAVING.items()}
SWITCHES = [name for group in FP8GRPOConfig.groups() for name in group.OFF_VALUES]  # flags that make something FP8
# Flags that a plan prints if their values differ from those in the run config, or else from the defaults
CHOSEN = (*SAVING, "dtype", "vllm_tensor_parallel_size", *SWITCHES, "fp8_weight_format")
TRAINER_PARTS = {  # field of `TrainerMemory` -> its name in the text
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "Adam",
    "reference": "reference",
    "copies": "BF16 copies",
    "inputs": "layer inputs",
    "head": "output head",
}


def _lora_targets(outline: Outline) -> list[str]:
    """Return `lora_target_modules`: PEFT's "all-linear", or the names of attention projections.

    Models with experts get names, because "all-linear" also adapts experts and routers, whose adapters dwarf all
    others. Latent attention (MLA) gets names, because an engine with an FP8 base takes no adapters on latents.
    """
    if outline.experts or any(name.endswith(MLA) for name in outline.linears):
        return adapter_targets(outline.linears)
    return ["all-linear"]


def recommended_flags(capacity: Capacity) -> dict[str, object]:
    """Return the flags of `trl-fp8 train` for a plan, with those that avert its risks; `{}` if the plan does not fit.

    A flag in `CHOSEN` is left out if it has its default value, unless the run config sets another value.
    """
    if capacity.why_not is not None:
        return {}
    flags = _training_flags(capacity, {"vllm_gpu_memory_utilization": capacity.utilization})
    for risk in risks(capacity.plan, capacity.setup):
        flags |= risk.flags
    return flags


def server_flags(capacity: ServerCapacity) -> dict[str, object]:
    """Return the flags of `trl-fp8 train` for the trainer beside a server; `{}` if the trainer does not fit."""
    if not capacity.trainer_fits:
        return {}
    flags = _training_flags(capacity.trainer, {"vllm_mode": "server"})
    flags.pop("vllm_tensor_parallel_size", None)  # the trainer asks the server for this size
    return flags


def _training_flags(capacity: Capacity, engine_flags: dict[str, object]) -> dict[str, object]:
    """Return the flags for the trainer of a plan, with `engine_flags` among them."""
    setup = capacity.setup
    outline = capacity.plan.outline
    args = setup.args
    run_config = setup.run_config or {}
    flags = {"accelerate_config": "fsdp2", "num_processes": setup.gpus} if setup.gpus > 1 else {}
    if setup.lora_rank:
        targets = " ".join(_lora_targets(outline))
        flags |= {"use_peft": True, "lora_r": setup.lora_rank, "lora_target_modules": targets}
        flags["lora_dropout"] = 0.0  # TRL's default is 0.05, but an engine has no dropout
    batch_size = setup.gpus * args.per_device_train_batch_size  # sequences, over all GPUs
    # The fewest batches that together have only complete groups (all completions of a prompt)
    batches_of_groups = args.num_generations // gcd(args.num_generations, batch_size)
    batches = ceil(setup.completions / (batch_size * batches_of_groups)) * batches_of_groups
    # Either flag sets how many batches a generation has. A run config may set only one of them
    accumulation = "steps_per_generation" if "steps_per_generation" in run_config else "gradient_accumulation_steps"
    flags |= {
        **engine_flags,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        accumulation: batches,
        "max_completion_length": args.max_completion_length,
        "vllm_max_model_length": setup.tokens,
    }
    values = vars(args) | {"dtype": setup.dtype, "vllm_tensor_parallel_size": capacity.ranks}
    base_defaults = {"dtype": "bfloat16"} if args.base_in_engine else {}
    defaults = DEFAULTS | base_defaults
    for name in CHOSEN:
        overrides = run_config.get(name) not in (None, values[name])
        if overrides or values[name] != defaults[name]:
            flags[name] = values[name]
    return flags


def watch_lines(capacity: Capacity) -> list[str]:
    """Return the warnings about a plan, without the "watch:" that its text puts before each."""
    lines = [risk.text for risk in risks(capacity.plan, capacity.setup)]
    sequences = capacity.cache_tokens // capacity.setup.tokens
    if capacity.why_not is None and sequences < min(capacity.sequences, 4 * LEAST_SEQUENCES):
        held_at_once = f"{sequences} of {capacity.sequences} sequences at full length at once"
        lines.append(f"the KV cache holds {held_at_once}; others wait.")
    return lines


def as_json(capacity: Capacity, alternatives: list[Capacity]) -> dict:
    """Return the plan's figures under fixed names, for scripts. For `alternatives` see `Planner.alternatives`."""
    plan = capacity.plan
    return {
        "model": plan.outline.name,
        "weights_gib": {"bf16": plan.bytes_before / GIB, "fp8": plan.bytes_after / GIB},
        "kv_bytes_per_token": {"bf16": plan.cache.token_bytes(False), "fp8": plan.cache.token_bytes(True)},
        "fp8_share_of_parameters": plan.fp8_share,
        "risks": watch_lines(capacity),
        **_figures(capacity),
        "fits_instead": [_figures(each) for each in alternatives],
    }


def _figures(capacity: Capacity) -> dict:
    """Return the figures of one capacity, of the plan itself or of an alternative."""
    return {
        "gpus": capacity.setup.gpus,
        "lora_rank": capacity.setup.lora_rank,
        "fp8_base": capacity.setup.args.base_in_engine,
        "tensor_parallel_size": capacity.ranks,
        "gib_per_gpu": {
            "trainer": _trainer_gib(capacity),
            "engine": capacity.engine_bytes / GIB,
            "engine_weights": capacity.weight_bytes / GIB,
            "total": capacity.total_bytes / GIB,
            "limit": capacity.limit_bytes / GIB,
        },
        "fits": capacity.why_not is None,
        "kv_tokens": capacity.kv_tokens,
        "flags": recommended_flags(capacity),
    }


def _trainer_gib(capacity: Capacity) -> dict[str, float]:
    """Return the trainer's memory on a GPU in GiB, by part."""
    return {name: getattr(capacity.trainer, name) / GIB for name in (*TRAINER_PARTS, "uncounted", "total")}


def as_text(capacity: Capacity, alternatives: list[Capacity], assumed: Sequence[str] = ()) -> str:
    """Return a summary of about ten lines.

    Args:
        alternatives: Other plans that fit, if this one does not.
        assumed: Flags that describe the machine and that the user did not set.
    """
    lines = [*_model_lines(capacity), "", *_memory_lines(capacity, assumed), ""]
    if capacity.why_not is None:
        lines += [f"watch: {text}" for text in watch_lines(capacity)]
        lines.append(f"flags: {_flag_words(recommended_flags(capacity), capacity)}")
    elif alternatives:
        lines.append("What fits instead:")
        for each in alternatives:
            total = f"{each.total_bytes / GIB:.0f} of {each.limit_bytes / GIB:.0f} GiB"
            lines.append(f"  {_setup_text(each)}: {total}, {each.cache_tokens:,} tokens of KV cache")
            lines.append(f"    flags: {_flag_words(recommended_flags(each), each)}")
        lines += [f"watch: {text}" for text in watch_lines(alternatives[0])]
    else:
        saving = ", an FP8 base" if SAVING else ""
        tried = f"LoRA{saving}, FSDP2 over up to {MOST_GPUS} GPUs, tensor parallel sizes up to {SIZES[-1]}"
        lines.append(f"Nothing fits ({tried}). Take GPUs with more memory, a shorter context, or a smaller model.")
    return "\n".join(lines)


def server_as_json(capacity: ServerCapacity, times: StepTimes | None = None) -> dict:
    """Return the figures of a server and its trainer under fixed names, for scripts. `times`: measured seconds."""
    server, trainer = capacity.server, capacity.trainer
    figures = {
        "model": server.plan.outline.name,
        "server": {
            "gpus": server.ranks,
            "gib_per_gpu": {"engine": server.engine_bytes / GIB, "weights": server.weight_bytes / GIB},
            "kv_tokens": server.kv_tokens,
            "fits": server.why_no_cache is None,
            "command": serve_command(capacity),
        },
        "trainer": {
            "gpus": trainer.setup.gpus,
            "gib_per_gpu": _trainer_gib(trainer),
            "limit_gib_per_gpu": trainer.limit_bytes / GIB,
            "staged_gib": capacity.staged_bytes / GIB,
            "fits": capacity.trainer_fits,
            "flags": server_flags(capacity),
        },
    }
    if times is not None:
        figures["seconds_per_step"] = {"synchronous": times.synchronous, "asynchronous": times.asynchronous}
    return figures


def server_as_text(capacity: ServerCapacity, times: StepTimes | None = None) -> str:
    """Return the summary of a trainer and its server: the memory of each, whether it fits, and the commands.

    With `times`, the measured seconds of a step, the summary also says what asynchronous training gains.
    """
    server, trainer = capacity.server, capacity.trainer
    limit = f"{_gib(trainer.limit_bytes)} GiB"
    trainer_verdict = "fits" if capacity.trainer_fits else f"DOES NOT FIT ({_gib(capacity.trainer_bytes)} GiB needed)"
    gpus = f"{server.ranks} GPUs" if server.ranks > 1 else "1 GPU"
    server_verdict = "fits" if server.why_no_cache is None else f"DOES NOT FIT ({server.why_no_cache})"
    lines = [
        *_model_lines(server),
        "",
        f"{_setup_text(trainer)}, and a server on {gpus} of its own. GiB per GPU, computed, not measured:",
        f"  trainer {_gib(capacity.trainer_bytes):>6}  {_trainer_parts(trainer)}, staged FP8 weights "
        f"{_gib(capacity.staged_bytes)}, of {limit}: {trainer_verdict}",
        f"  server  {_gib(server.engine_bytes):>6}  {_engine_parts(server)}: {server_verdict}",
        f"Shared memory of the host: {_gib(capacity.staged_bytes)} GiB, the staged weights once more.",
        "",
        "moves to the server: weights of the engine, KV cache, vLLM. Stays: the policy, its training, the scoring.",
        "watch: vllm_mode='server' with FP8 has run on CPUs of one host only (docs/servers.md)",
        f"serve: {serve_command(capacity)}",
    ]
    if capacity.trainer_fits:
        lines.append(f"flags: {_flag_words(server_flags(capacity), trainer)}")
    if times is not None:
        lines += _overlap_lines(times, server.ranks + trainer.setup.gpus)
    return "\n".join(lines)


def _overlap_lines(times: StepTimes, gpus: int) -> list[str]:
    """Return two lines: the seconds of a step without and with overlap, and when overlap pays."""
    waits = times.asynchronous - times.train - times.sync
    is_waiting = times.rollout > times.train
    idle = f"the trainer waits {waits:.3g} s of it" if is_waiting else "the trainer never waits"
    return [
        f"overlap: a step takes {times.synchronous:.3g} s synchronous, {times.asynchronous:.3g} s asynchronous "
        f"({times.speedup:.2f} times as fast; {idle}).",
        f"  It pays if a step with vllm_mode='colocate' on the same {gpus} GPUs takes longer, and if rollouts "
        "that are some steps old do no harm (docs/async.md).",
    ]


def serve_command(capacity: ServerCapacity) -> str:
    """Return the command that starts the server of a plan."""
    server = capacity.server
    recipe = server.plan.recipe
    args = server.setup.args
    run_config = server.setup.run_config or {}
    words = ["trl-fp8", "serve", server.plan.outline.name, "--max-model-len", str(server.setup.tokens)]
    if run_config.get("model_revision") not in (None, DEFAULTS["model_revision"]):
        words += ["--revision", str(run_config["model_revision"])]
    if server.ranks > 1:
        words += ["--tensor-parallel-size", str(server.ranks)]
    if not recipe.fp8_weights:
        words.append("--no-fp8-weights")
    else:
        if recipe.format.name != DEFAULTS["fp8_weight_format"]:
            words += ["--weight-format", recipe.format.name]
        if recipe.scale_format != DEFAULTS["fp8_scale_format"]:
            words += ["--scale-format", recipe.scale_format]
        if args.fp8_ignored_modules:
            words += ["--ignored-modules", *args.fp8_ignored_modules]
    if not recipe.fp8_kv_cache:
        words += ["--kv-cache-dtype", "auto"]
    elif recipe.kv_cache_skip_layers:
        words += ["--kv-cache-skip-layers", *map(str, recipe.kv_cache_skip_layers)]
    if args.base_in_engine:
        targets = run_config.get("lora_target_modules", _lora_targets(server.plan.outline))
        if targets == ["all-linear"]:
            targets = "all-linear"  # PEFT knows this word as text, not in a list
        lora = {"r": server.setup.lora_rank, "target_modules": targets}
        words += ["--lora", json.dumps(lora)]
    return join([*words, "--gpu-memory-utilization", f"{server.utilization:g}"])


def _trainer_parts(capacity: Capacity) -> str:
    """Return the parts of the trainer's memory on a GPU, in GiB."""
    parts = {name: getattr(capacity.trainer, part) for part, name in TRAINER_PARTS.items()}  # bytes
    return ", ".join(f"{name} {_gib(count)}" for name, count in parts.items() if count >= SMALLEST_SHOWN)


def _engine_parts(capacity: Capacity) -> str:
    """Return the parts of the engine's memory on a GPU, in GiB, and the tokens that its KV cache holds."""
    in_engine = capacity.trainer.in_engine
    parts = [f"weights {_gib(capacity.weight_bytes - in_engine)}"]
    if in_engine:
        parts.append(f"adapters {_gib(in_engine)}")
    parts += [f"vLLM {RESERVED_BYTES / GIB:.0f}", f"KV cache {_gib(max(0.0, capacity.kv_bytes))}"]
    tokens = f"{capacity.cache_tokens:,} tokens"
    if len(capacity.kv_tokens) > 1:
        tokens += f" (BF16 engine: {capacity.kv_tokens['bf16']:,})"
    if capacity.ranks > 1:
        tokens += f", on {capacity.ranks} GPUs together"
    return f"share {capacity.utilization:g}: {', '.join(parts)}: {tokens}"


def _model_lines(capacity: Capacity) -> list[str]:
    """Return two lines: parameters of the model, and its weights and KV cache in the engine."""
    plan = capacity.plan
    recipe = plan.recipe
    parameters = f"{plan.parameters / 1e9:.2f} B" if plan.parameters >= 1e8 else f"{plan.parameters / 1e6:.1f} M"
    share = "in BF16 in the engine"
    weights = format_bytes(plan.bytes_before)
    cache = format_bytes(plan.cache.token_bytes(fp8=False))
    if recipe.fp8_weights:
        share = f"{plan.fp8_share:.1%} of them FP8 in the engine"
        weights += f" -> {format_bytes(plan.bytes_after)}"
    if recipe.fp8_kv_cache:
        cache += f" -> {format_bytes(plan.cache.token_bytes(fp8=True))}"
    windows = "".join(
        f", {count} layers keep {length:,} tokens at most" for length, count in plan.cache.windows.items()
    )
    model = f"{plan.outline.name}: {parameters} parameters, {share}."
    return [model, f"Weights {weights}; KV cache {cache} per token{windows}."]


def _memory_lines(capacity: Capacity, assumed: Sequence[str]) -> list[str]:
    """Return the table of a GPU's memory. Its row `total` says whether the plan fits."""
    setup = capacity.setup
    trainer = capacity.trainer
    free_share = 1 - capacity.limit_bytes / setup.gpu_bytes
    limit = f"{_gib(capacity.limit_bytes)} GiB ({free_share:.0%} stay free for what is not counted)"
    if setup.args.vllm_enable_sleep_mode:
        asleep = "weights and KV cache" if capacity.weights_sleep else "KV cache"
        limit += f", and the engine frees its {asleep} while the policy trains"
    verdict = "fits"
    if capacity.why_not is not None:
        verdict = f"DOES NOT FIT ({capacity.why_not})"
        if assumed:
            machine = f"assumed: {setup.gpus} x {setup.gpu_bytes / GIB:g} GiB"
            verdict += f"; give {' and '.join(assumed)} of your machine ({machine})"
    lines = [
        f"{_setup_text(capacity)}, sequences of {setup.tokens:,} tokens, "
        f"{setup.completions:,} completions a generation.",
        "GiB per GPU, computed, not measured:",
        f"  trainer {_gib(trainer.total):>6}  {_trainer_parts(capacity)}".rstrip(),
        f"  engine  {_gib(capacity.engine_bytes):>6}  {_engine_parts(capacity)}",
        f"  total   {_gib(capacity.total_bytes):>6}  of {limit}: {verdict}",
    ]
    if setup.args.base_in_engine:
        base_bytes = sum(row.bytes_after for row in capacity.plan.rows if row.precision == "fp8")
        base = f"FP8 base ({_gib(base_bytes)})"
        if capacity.ranks == 1:
            lines.append(f"The {base} is held once, by the engine; the trainer reads it there.")
        else:
            lines.append(f"The trainer holds the {base} whole on each GPU, and each rank of the engine its part.")
    return lines


def _gib(count: float) -> str:
    """Return a number of bytes as GiB with one decimal."""
    return "< 0.1" if 0 < count < SMALLEST_SHOWN else f"{count / GIB:.1f}"


def _setup_text(capacity: Capacity) -> str:
    """Return a line such as `Full training (policy in FP32) on 8 GPUs of 80 GiB, FSDP2`."""
    setup = capacity.setup
    kind = f"LoRA, rank {setup.lora_rank}" if setup.lora_rank else "Full training"
    dtype = {"float32": "FP32", "bfloat16": "BF16"}[setup.dtype]
    policy = f"on an FP8 base, rest in {dtype}" if setup.args.base_in_engine else f"policy in {dtype}"
    gpus = f"{setup.gpus} GPUs" if setup.gpus > 1 else "1 GPU"
    text = f"{kind} ({policy}) on {gpus} of {setup.gpu_bytes / GIB:g} GiB"
    if setup.gpus > 1:
        text += ", FSDP2"
    if capacity.ranks > 1:
        text += f", tensor parallel size {capacity.ranks}"
    return text


def _flag_words(flags: dict[str, object], capacity: Capacity) -> str:
    """Return flags as on a command line, without those to which the run config assigns the same value."""
    run_config = capacity.setup.run_config or {}
    words = [f"--{name} {value}" for name, value in flags.items() if run_config.get(name) != value]
    return " ".join(words) or "none, the run config has them"
