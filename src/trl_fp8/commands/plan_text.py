"""A plan in the ten lines that somebody reads who has a model and GPUs: what it takes, and what fits."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import gcd

from trl import ModelConfig

from trl_fp8.config import FP8GRPOConfig
from trl_fp8.planning.capacity import LEAST_SEQUENCES, MOST_GPUS, RESERVED_BYTES, SIZES, Capacity
from trl_fp8.planning.plan import GIB, format_bytes
from trl_fp8.planning.risks import Risk, risks
from trl_fp8.recipe.names import MLA
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import adapter_targets


LEAST_SHOWN = GIB / 20  # what is smaller would be 0.0 GiB
DEFAULTS = {item.name: item.default for kind in (FP8GRPOConfig, ModelConfig) for item in fields(kind)}
Flags = dict[str, str | int | float | bool]
Given = Mapping[str, object] | None  # lines of a run config, by name; None: there is none


def recommended_flags(capacity: Capacity, outline: Outline, given: Given = None) -> Flags:
    """Flags of `trl-fp8 train` for a plan that fits, and those of its risks; empty for one that does not. Defaults are
    left out unless `given` has other values.
    """
    setup, recipe = capacity.setup, capacity.plan.recipe
    training = setup.training
    if capacity.why_not is not None:
        return {}
    flags: Flags = {"accelerate_config": "fsdp2", "num_processes": training.gpus} if training.gpus > 1 else {}
    if training.lora_rank:
        # of experts PEFT's all-linear means their weights and routers, too, and those dwarf all other adapters
        is_whole = not outline.experts and not any(name.endswith(MLA) for name in outline.linears)
        targets = "all-linear" if is_whole else " ".join(adapter_targets(outline.linears))
        flags |= {"use_peft": True, "lora_r": training.lora_rank, "lora_target_modules": targets}
        flags["lora_dropout"] = 0.0  # TRL's is 0.05, and an engine has none
    flags["vllm_gpu_memory_utilization"] = capacity.utilization
    micro_batch = training.gpus * training.sequences
    whole = setup.group // gcd(setup.group, micro_batch)  # steps after which all groups are whole
    steps = -(-setup.completions // (micro_batch * whole)) * whole
    flags |= {"per_device_train_batch_size": training.sequences, "gradient_accumulation_steps": steps}
    flags |= {"max_completion_length": training.tokens - setup.prompt, "vllm_max_model_length": training.tokens}
    chosen = {
        "fp8_base": training.fp8_base,
        "dtype": training.dtype,
        "vllm_tensor_parallel_size": capacity.ranks,
        "fp8_weights": recipe.fp8_weights,
        "kv_cache_dtype": "fp8" if recipe.fp8_kv_cache else recipe.kv_cache_dtype,
        "fp8_weight_format": recipe.format.name,
    }
    usual = DEFAULTS | ({"dtype": "bfloat16"} if training.fp8_base else {})
    for name, value in chosen.items():
        is_otherwise = (given or {}).get(name) not in (None, value)  # in the run config
        if name in usual and (value != usual[name] or is_otherwise):
            flags[name] = value
    for risk in _risks(capacity, outline, given):
        flags |= {name: value for name, value in risk.flags.items() if name in DEFAULTS}
    return flags


def _risks(capacity: Capacity, outline: Outline, given: Given) -> list[Risk]:
    return risks(capacity.plan, outline, given, capacity.setup.training.fp8_base)


def as_json(capacity: Capacity, ways: list[Capacity], outline: Outline, given: Given) -> dict:
    """The plan's figures under fixed names, for scripts."""
    plan, recipe = capacity.plan, capacity.plan.recipe
    kept = [name for name, reason in recipe.kept_modules.items() if reason != "router"]
    experts = sum(name.endswith(".experts") for name in kept)
    return {
        "model": plan.model_name,
        "weights_gib": {"bf16": plan.bytes_before / GIB, "fp8": plan.bytes_after / GIB},
        "kv_bytes_per_token": {"bf16": plan.cache.token_bytes(False), "fp8": plan.cache.token_bytes(True)},
        "linears": {"fp8": len(recipe.fp8_modules), "high_precision": len(kept) - experts},
        "experts": {"fp8": len(recipe.fp8_experts), "high_precision": experts},
        "weight_format": recipe.format.name,
        "fp8_share_of_parameters": plan.fp8_share,
        "risks": [risk.text for risk in _risks(capacity, outline, given)],
        **_figures(capacity, outline, given),
        "fits_instead": [_figures(way, outline, given) for way in ways],
    }


def _figures(capacity: Capacity, outline: Outline, given: Given) -> dict:
    trainer, training, recipe = capacity.trainer, capacity.setup.training, capacity.plan.recipe
    return {
        "gpus": training.gpus,
        "lora_rank": training.lora_rank,
        "fp8_base": training.fp8_base,
        "tensor_parallel_size": capacity.ranks,
        "gib_per_gpu": {
            "trainer": {name: size / GIB for name, size in vars(trainer).items()} | {"total": trainer.total / GIB},
            "engine": capacity.engine_bytes / GIB,
            "engine_weights": capacity.held_bytes(recipe.fp8_weights) / GIB,
            "total": capacity.total_bytes / GIB,
            "limit": capacity.limit_bytes / GIB,
        },
        "fits": capacity.why_not is None,
        "kv_tokens": capacity.kv_tokens,
        "flags": recommended_flags(capacity, outline, given),
    }


def as_text(
    capacity: Capacity, ways: list[Capacity], outline: Outline, given: Given, assumed: Sequence[str] = ()
) -> str:
    """The summary. `ways`: what fits instead; `given`: flags that need not be repeated, with their values; `assumed`:
    flags of the machine, of which nothing was said beside a run config.
    """
    lines = [_model(capacity), "", *_memory(capacity, assumed if given is not None else ()), ""]
    if capacity.why_not is None:
        words = _words(capacity, outline, given) or "none, the run config has them"
        lines += [_read(capacity), *_watch(capacity, outline, given), f"flags: {words}"]
    elif ways:
        lines += ["What fits instead:"]
        for way in ways:
            total = f"{way.total_bytes / GIB:.0f} of {way.limit_bytes / GIB:.0f} GiB"
            lines += [f"  {_how(way)}: {total}, {way.held_tokens:,} tokens of KV cache"]
            lines += [f"    flags: {_words(way, outline, given)}"]
        lines += [_read(ways[0]), *_watch(ways[0], outline, given)]
    else:
        tried = f"LoRA, an FP8 base, FSDP2 over up to {MOST_GPUS} GPUs, tensor parallel sizes up to {SIZES[-1]}"
        lines += [f"Nothing fits ({tried}). Take GPUs with more memory, a shorter context, or a smaller model."]
    return "\n".join(lines)


def _model(capacity: Capacity) -> str:
    plan, recipe = capacity.plan, capacity.plan.recipe
    weights, cache = format_bytes(plan.bytes_before), format_bytes(plan.cache.token_bytes(False))
    weights += f" -> {format_bytes(plan.bytes_after)}" if recipe.fp8_weights else ""
    cache += f" -> {format_bytes(plan.cache.token_bytes(True))}" if recipe.fp8_kv_cache else ""
    size = f"{plan.parameters / 1e9:.2f} B" if plan.parameters >= 1e8 else f"{plan.parameters / 1e6:.1f} M"
    windows = "".join(f", {count} layers keep {size:,} tokens at most" for size, count in plan.cache.windows.items())
    share = f"{plan.fp8_share:.1%} of them FP8 in the engine" if recipe.fp8_weights else "in BF16 in the engine"
    return f"{plan.model_name}: {size} parameters, {share}.\nWeights {weights}; KV cache {cache} per token{windows}."


def _memory(capacity: Capacity, assumed: Sequence[str]) -> list[str]:
    setup, trainer, plan = capacity.setup, capacity.trainer, capacity.plan
    training = setup.training
    states = {
        "weights": trainer.weights,
        "gradients": trainer.gradients,
        "Adam": trainer.optimizer,
        "reference": trainer.reference,
        "BF16 copies": trainer.copies,
        "layer inputs": trainer.inputs,
        "output head": trainer.head,
    }
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in states.items() if size >= LEAST_SHOWN)
    cache = _gib(max(0.0, capacity.kv_bytes(plan.recipe.fp8_weights)))
    tokens = capacity.kv_tokens
    room = f"{capacity.held_tokens:,} tokens"
    room += f" (BF16 engine: {tokens['bf16']:,})" if len(tokens) > 1 else ""
    shared = f", on {capacity.ranks} GPUs together" if capacity.ranks > 1 else ""
    held = capacity.held_bytes(plan.recipe.fp8_weights)
    adapters = f", adapters {_gib(capacity.adapter_bytes)}" if training.fp8_base else ""
    weights = f"weights {_gib(held - capacity.adapter_bytes)}{adapters}"
    engine = f"{weights}, vLLM {RESERVED_BYTES / GIB:.0f}, KV cache {cache}: {room}{shared}"
    machine = f"{training.gpus} x {setup.gpu_bytes / GIB:g} GiB"
    missing = f"; give {' and '.join(assumed)} of your machine (assumed: {machine})" if assumed else ""
    verdict = "fits" if capacity.why_not is None else f"DOES NOT FIT ({capacity.why_not}){missing}"
    free = 1 - capacity.limit_bytes / setup.gpu_bytes
    where = f"{capacity.limit_bytes / GIB:.0f} GiB ({free:.0%} stay free for what is not counted)"
    asleep = "the engine's are" if setup.weights_sleep else "its KV cache is"
    sleeping = f", of which {asleep} free while it trains" if setup.sleeps else ""
    codes, base = _gib(sum(row.bytes_after for row in plan.rows if row.precision == "fp8")), []
    if training.fp8_base and capacity.ranks > 1:
        base = [f"The trainer holds the FP8 base ({codes}) whole on each GPU, and each rank of the engine its part."]
    elif training.fp8_base:
        base = [f"The FP8 base ({codes}) is held once, by the engine; the trainer reads it there."]
    return [
        f"{_how(capacity)}, sequences of {training.tokens:,} tokens, {setup.completions:,} completions a generation.",
        "GiB per GPU, computed, not measured:",
        f"  trainer {_gib(trainer.total):>6}  {parts}".rstrip(),
        f"  engine  {_gib(capacity.engine_bytes):>6}  share {capacity.utilization:g}: {engine}",
        f"  total   {_gib(capacity.total_bytes):>6}  of {where}{sleeping}: {verdict}",
        *base,
    ]


def _gib(size: float) -> str:
    return "< 0.1" if 0 < size < LEAST_SHOWN else f"{size / GIB:.1f}"


def _how(capacity: Capacity) -> str:
    """`Full training (policy in FP32) on 8 GPUs of 80 GiB, FSDP2`."""
    setup, training = capacity.setup, capacity.setup.training
    kind = f"LoRA, rank {training.lora_rank}" if training.lora_rank else "Full training"
    dtype = {"float32": "FP32", "bfloat16": "BF16"}[training.dtype]
    policy = f"on an FP8 base, rest in {dtype}" if training.fp8_base else f"policy in {dtype}"
    gpus = f"{training.gpus} GPUs" if training.gpus > 1 else "1 GPU"
    sharded = ", FSDP2" if training.gpus > 1 else ""
    split = f", tensor parallel size {capacity.ranks}" if capacity.ranks > 1 else ""
    return f"{kind} ({policy}) on {gpus} of {setup.gpu_bytes / GIB:g} GiB{sharded}{split}"


def _read(capacity: Capacity) -> str:
    """What a decoding step reads on each GPU, in a BF16 engine and in the plan's."""
    plan, recipe, tokens = capacity.plan, capacity.plan.recipe, capacity.setup.training.tokens
    weights = format_bytes(plan.read_bytes(fp8=False) / capacity.ranks)
    if recipe.fp8_weights:
        weights += f" -> {format_bytes(plan.read_bytes(fp8=True) / capacity.ranks + capacity.adapter_bytes)}"
    cache = format_bytes(plan.cache.sequence_bytes(tokens, fp8=False))
    if recipe.fp8_kv_cache:
        cache += f" -> {format_bytes(plan.cache.sequence_bytes(tokens, fp8=True))}"
    most = "at most " if recipe.has_experts else ""
    of_cache = f"{cache} of KV cache for each sequence of {tokens:,} tokens"
    return f"A decoding step reads {most}{weights} of weights, and {of_cache}."


def _watch(capacity: Capacity, outline: Outline, given: Given) -> list[str]:
    found = [f"watch: {risk.text}" for risk in _risks(capacity, outline, given)]
    held = capacity.held_tokens // capacity.setup.training.tokens
    if held < capacity.sequences and held < 4 * LEAST_SEQUENCES:
        text = f"the KV cache holds {held} of {capacity.sequences} sequences at full length at once; others wait."
        found.append(f"watch: {text}")
    training = capacity.setup.training
    if training.lora_rank and training.dtype == "bfloat16" and not training.fp8_base:
        may_share = capacity.plan.recipe.fp8_weights and outline.stored_as != "mxfp4"
        remedy = "; --fp8_base True merges nothing" if may_share else ""
        text = f"each sync merges adapters into the BF16 base and takes them out, which wears it{remedy}."
        found.append(f"watch: {text}")
    return found


def _words(capacity: Capacity, outline: Outline, given: Given) -> str:
    """Flags as words, without those that a run config has already."""
    flags = recommended_flags(capacity, outline, given)
    if given is not None:
        named = "steps_per_generation" if "steps_per_generation" in given else "gradient_accumulation_steps"
        flags[named] = flags.pop("gradient_accumulation_steps")
        flags = {name: value for name, value in flags.items() if given.get(name) != value}
    return " ".join(f"--{name} {value}" for name, value in flags.items())
