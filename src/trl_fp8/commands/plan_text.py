"""A plan in ten lines, for somebody who has a model and GPUs: what training takes, and what fits."""

from collections.abc import Sequence
from dataclasses import fields
from math import ceil, gcd
from shlex import join

from trl import ModelConfig

from trl_fp8.config import FP8GRPOConfig
from trl_fp8.planning.capacity import LEAST_SEQUENCES, MOST_GPUS, RESERVED_BYTES, SIZES, Capacity
from trl_fp8.planning.risks import risks
from trl_fp8.planning.server_capacity import ServerCapacity
from trl_fp8.planning.trainer_memory import GIB
from trl_fp8.recipe.messages import format_bytes
from trl_fp8.recipe.names import MLA
from trl_fp8.recipe.recipe import adapter_targets


LEAST_SHOWN = GIB / 20  # anything smaller would print as 0.0 GiB
DEFAULTS = {item.name: item.default for kind in (FP8GRPOConfig, ModelConfig) for item in fields(kind)}
# Flags with which a policy with adapters needs less memory
SAVING = {name: value for group in FP8GRPOConfig.groups() for name, value in group.SAVING.items()}
# Flags that a plan prints if a run would not have these values anyway
CHOSEN = (
    *(*SAVING, "dtype", "vllm_tensor_parallel_size"),
    *(name for group in FP8GRPOConfig.groups() for name in group.FP8),
    "fp8_weight_format",
)
PARTS = {  # of the trainer's memory -> what the text calls it
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "Adam",
    "reference": "reference",
    "copies": "BF16 copies",
    "inputs": "layer inputs",
    "head": "output head",
}


def recommended_flags(capacity: Capacity) -> dict[str, object]:
    """Return flags of `trl-fp8 train` for a plan that fits, those against its risks included; `{}` if it does not fit.
    Defaults are left out unless the run config has other values.
    """
    if capacity.why_not is not None:
        return {}
    setup, outline = capacity.setup, capacity.plan.outline
    args, run_config = setup.args, setup.run_config or {}
    flags = {"accelerate_config": "fsdp2", "num_processes": setup.gpus} if setup.gpus > 1 else {}
    if setup.lora_rank:
        # PEFT's all-linear would also adapt experts and routers, whose adapters dwarf all others
        is_whole = not outline.experts and not any(name.endswith(MLA) for name in outline.linears)
        targets = "all-linear" if is_whole else " ".join(adapter_targets(outline.linears))
        flags |= {"use_peft": True, "lora_r": setup.lora_rank, "lora_target_modules": targets}
        flags["lora_dropout"] = 0.0  # TRL's default is 0.05, and an engine drops nothing
    step = setup.gpus * args.per_device_train_batch_size  # sequences
    whole = args.num_generations // gcd(args.num_generations, step)  # the fewest steps that make whole groups
    # Both say how many batches a generation has; a run config may set one of them alone
    accumulation = "steps_per_generation" if "steps_per_generation" in run_config else "gradient_accumulation_steps"
    flags |= {
        "vllm_gpu_memory_utilization": capacity.utilization,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        accumulation: ceil(setup.completions / (step * whole)) * whole,
        "max_completion_length": args.max_completion_length,
        "vllm_max_model_length": setup.tokens,
    }
    values = vars(args) | {"dtype": setup.dtype, "vllm_tensor_parallel_size": capacity.ranks}
    defaults = DEFAULTS | ({"dtype": "bfloat16"} if args.base_in_engine else {})
    for name in CHOSEN:
        overrides = run_config.get(name) not in (None, values[name])
        if overrides or values[name] != defaults[name]:
            flags[name] = values[name]
    for risk in risks(capacity.plan, setup):
        flags |= risk.flags
    return flags


def warnings(capacity: Capacity) -> list[str]:
    """Return what to watch in a plan."""
    found = [risk.text for risk in risks(capacity.plan, capacity.setup)]
    sequences = capacity.held_tokens // capacity.setup.tokens
    if capacity.why_not is None and sequences < min(capacity.sequences, 4 * LEAST_SEQUENCES):
        room = f"holds {sequences} of {capacity.sequences} sequences at full length at once"
        found.append(f"the KV cache {room}; others wait.")
    return found


def as_json(capacity: Capacity, ways: list[Capacity]) -> dict:
    """Return the plan's figures under fixed names, for scripts."""
    plan = capacity.plan
    return {
        "model": plan.outline.name,
        "weights_gib": {"bf16": plan.bytes_before / GIB, "fp8": plan.bytes_after / GIB},
        "kv_bytes_per_token": {"bf16": plan.cache.token_bytes(False), "fp8": plan.cache.token_bytes(True)},
        "fp8_share_of_parameters": plan.fp8_share,
        "risks": warnings(capacity),
        **_figures(capacity),
        "fits_instead": [_figures(way) for way in ways],
    }


def _figures(capacity: Capacity) -> dict:
    """Return the figures of one way to train."""
    return {
        "gpus": capacity.setup.gpus,
        "lora_rank": capacity.setup.lora_rank,
        "fp8_base": capacity.setup.args.base_in_engine,
        "tensor_parallel_size": capacity.ranks,
        "gib_per_gpu": {
            "trainer": {name: getattr(capacity.trainer, name) / GIB for name in (*PARTS, "uncounted", "total")},
            "engine": capacity.engine_bytes / GIB,
            "engine_weights": capacity.weight_bytes / GIB,
            "total": capacity.total_bytes / GIB,
            "limit": capacity.limit_bytes / GIB,
        },
        "fits": capacity.why_not is None,
        "kv_tokens": capacity.kv_tokens,
        "flags": recommended_flags(capacity),
    }


def as_text(capacity: Capacity, ways: list[Capacity], assumed: Sequence[str] = ()) -> str:
    """Return the summary. `ways`: what fits instead; `assumed`: flags of the machine that the user did not set."""
    lines = [*_model(capacity), "", *_memory(capacity, assumed), ""]
    if capacity.why_not is None:
        lines += [f"watch: {text}" for text in warnings(capacity)]
        lines.append(f"flags: {_words(capacity) or 'none, the run config has them'}")
    elif ways:
        lines.append("What fits instead:")
        for way in ways:
            total = f"{way.total_bytes / GIB:.0f} of {way.limit_bytes / GIB:.0f} GiB"
            lines.append(f"  {_kind(way)}: {total}, {way.held_tokens:,} tokens of KV cache")
            lines.append(f"    flags: {_words(way)}")
        lines += [f"watch: {text}" for text in warnings(ways[0])]
    else:
        saving = ", an FP8 base" if SAVING else ""
        tried = f"LoRA{saving}, FSDP2 over up to {MOST_GPUS} GPUs, tensor parallel sizes up to {SIZES[-1]}"
        lines.append(f"Nothing fits ({tried}). Take GPUs with more memory, a shorter context, or a smaller model.")
    return "\n".join(lines)


def server_as_json(capacity: ServerCapacity) -> dict:
    """Return the figures of a server and its trainer under fixed names, for scripts."""
    server, trainer = capacity.server, capacity.trainer
    return {
        "model": server.plan.outline.name,
        "server": {
            "gpus": server.ranks,
            "gib_per_gpu": {"engine": server.engine_bytes / GIB, "weights": server.weight_bytes / GIB},
            "kv_tokens": server.kv_tokens,
            "fits": server.why_no_cache is None,
            "command": serve_words(capacity),
        },
        "trainer": {
            "gpus": trainer.setup.gpus,
            "gib_per_gpu": {name: getattr(trainer.trainer, name) / GIB for name in (*PARTS, "uncounted", "total")},
            "limit": trainer.limit_bytes / GIB,
            "staged_gib": capacity.staged_bytes / GIB,
            "fits": capacity.trainer_fits,
        },
    }


def server_as_text(capacity: ServerCapacity) -> str:
    """Return the summary of a trainer with a server: what moves to the server, and what stays."""
    server, trainer = capacity.server, capacity.trainer
    limit = f"{_gib(trainer.limit_bytes)} GiB"
    verdict = "fits" if capacity.trainer_fits else f"DOES NOT FIT ({_gib(capacity.trainer_bytes)} GiB are more)"
    gpus = f"{server.ranks} GPUs" if server.ranks > 1 else "1 GPU"
    served = "fits" if server.why_no_cache is None else f"DOES NOT FIT ({server.why_no_cache})"
    lines = [
        *_model(server),
        "",
        f"{_kind(trainer)}, and a server on {gpus} of its own. GiB per GPU, computed, not measured:",
        f"  trainer {_gib(capacity.trainer_bytes):>6}  {_trainer_parts(trainer)}, staged FP8 weights "
        f"{_gib(capacity.staged_bytes)}, of {limit}: {verdict}",
        f"  server  {_gib(server.engine_bytes):>6}  {_engine_parts(server)}: {served}",
        f"Shared memory of the host: {_gib(capacity.staged_bytes)} GiB, the staged weights once more.",
        "",
        "moves to the server: weights of the engine, KV cache, vLLM. Stays: the policy, its training, the scoring.",
        "watch: vllm_mode='server' with FP8 has run on CPUs only; trainer and server share a host (docs/servers.md)",
        f"serve: {serve_words(capacity)}",
        f"flags: --vllm_mode server --vllm_max_model_length {server.setup.tokens}",
    ]
    return "\n".join(lines)


def serve_words(capacity: ServerCapacity) -> str:
    """Return the command that starts the server of a plan."""
    server = capacity.server
    recipe, args = server.plan.recipe, server.setup.args
    words = ["trl-fp8", "serve", server.plan.outline.name, "--max-model-len", str(server.setup.tokens)]
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
    return join([*words, "--gpu-memory-utilization", f"{server.utilization:g}"])


def _trainer_parts(capacity: Capacity) -> str:
    """Return the trainer's memory on a GPU, part by part."""
    sizes = {name: getattr(capacity.trainer, part) for part, name in PARTS.items()}
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size >= LEAST_SHOWN)


def _engine_parts(capacity: Capacity) -> str:
    """Return the engine's memory on a GPU, part by part, and the tokens in its KV cache."""
    in_engine = capacity.trainer.in_engine
    adapters = f", adapters {_gib(in_engine)}" if in_engine else ""
    tokens = f"{capacity.held_tokens:,} tokens"
    if len(capacity.kv_tokens) > 1:
        tokens += f" (BF16 engine: {capacity.kv_tokens['bf16']:,})"
    tokens += f", on {capacity.ranks} GPUs together" if capacity.ranks > 1 else ""
    weights = f"weights {_gib(capacity.weight_bytes - in_engine)}{adapters}, vLLM {RESERVED_BYTES / GIB:.0f}"
    return f"share {capacity.utilization:g}: {weights}, KV cache {_gib(max(0.0, capacity.kv_bytes))}: {tokens}"


def _model(capacity: Capacity) -> list[str]:
    """Return two lines on the model in the engine."""
    plan, recipe = capacity.plan, capacity.plan.recipe
    size = f"{plan.parameters / 1e9:.2f} B" if plan.parameters >= 1e8 else f"{plan.parameters / 1e6:.1f} M"
    share = "in BF16 in the engine"
    weights, cache = format_bytes(plan.bytes_before), format_bytes(plan.cache.token_bytes(False))
    if recipe.fp8_weights:
        share = f"{plan.fp8_share:.1%} of them FP8 in the engine"
        weights += f" -> {format_bytes(plan.bytes_after)}"
    if recipe.fp8_kv_cache:
        cache += f" -> {format_bytes(plan.cache.token_bytes(True))}"
    windows = "".join(f", {count} layers keep {most:,} tokens at most" for most, count in plan.cache.windows.items())
    model = f"{plan.outline.name}: {size} parameters, {share}."
    return [model, f"Weights {weights}; KV cache {cache} per token{windows}."]


def _memory(capacity: Capacity, assumed: Sequence[str]) -> list[str]:
    """Return the table of a GPU's memory, with the verdict in its last row."""
    setup, trainer, ranks = capacity.setup, capacity.trainer, capacity.ranks
    free = 1 - capacity.limit_bytes / setup.gpu_bytes
    limit = f"{_gib(capacity.limit_bytes)} GiB ({free:.0%} stay free for what is not counted)"
    if setup.args.vllm_enable_sleep_mode:
        asleep = "the engine's are" if capacity.weights_sleep else "its KV cache is"
        limit += f", of which {asleep} free while the policy trains"
    verdict = "fits"
    if capacity.why_not is not None:
        verdict = f"DOES NOT FIT ({capacity.why_not})"
        machine = f"assumed: {setup.gpus} x {setup.gpu_bytes / GIB:g} GiB"
        verdict += f"; give {' and '.join(assumed)} of your machine ({machine})" if assumed else ""
    lines = [
        f"{_kind(capacity)}, sequences of {setup.tokens:,} tokens, {setup.completions:,} completions a generation.",
        "GiB per GPU, computed, not measured:",
        f"  trainer {_gib(trainer.total):>6}  {_trainer_parts(capacity)}".rstrip(),
        f"  engine  {_gib(capacity.engine_bytes):>6}  {_engine_parts(capacity)}",
        f"  total   {_gib(capacity.total_bytes):>6}  of {limit}: {verdict}",
    ]
    if setup.args.base_in_engine:
        size = sum(row.bytes_after for row in capacity.plan.rows if row.precision == "fp8")
        base = f"FP8 base ({_gib(size)})"
        if ranks == 1:
            lines.append(f"The {base} is held once, by the engine; the trainer reads it there.")
        else:
            lines.append(f"The trainer holds the {base} whole on each GPU, and each rank of the engine its part.")
    return lines


def _gib(size: float) -> str:
    return "< 0.1" if 0 < size < LEAST_SHOWN else f"{size / GIB:.1f}"


def _kind(capacity: Capacity) -> str:
    """Return a line such as `Full training (policy in FP32) on 8 GPUs of 80 GiB, FSDP2`."""
    setup = capacity.setup
    kind = f"LoRA, rank {setup.lora_rank}" if setup.lora_rank else "Full training"
    dtype = {"float32": "FP32", "bfloat16": "BF16"}[setup.dtype]
    policy = f"on an FP8 base, rest in {dtype}" if setup.args.base_in_engine else f"policy in {dtype}"
    gpus = f"{setup.gpus} GPUs" if setup.gpus > 1 else "1 GPU"
    sharded = ", FSDP2" if setup.gpus > 1 else ""
    split = f", tensor parallel size {capacity.ranks}" if capacity.ranks > 1 else ""
    return f"{kind} ({policy}) on {gpus} of {setup.gpu_bytes / GIB:g} GiB{sharded}{split}"


def _words(capacity: Capacity) -> str:
    """Return the flags as words, without those that a run config has already."""
    flags = recommended_flags(capacity)
    run_config = capacity.setup.run_config
    if run_config is not None:
        flags = {name: value for name, value in flags.items() if run_config.get(name) != value}
    return " ".join(f"--{name} {value}" for name, value in flags.items())
