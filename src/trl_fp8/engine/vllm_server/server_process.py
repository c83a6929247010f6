"""The arguments and the environment of vLLM's own server for a recipe: those of a colocated engine, as its flags."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trl_fp8.engine.vllm.gemms import pinned_gemm
from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.recipe.recipe import recipe_for_model

from .plugin import BACKEND, FOLDER, SWITCH, TOKEN, WAIT


MOST_BATCHED_TOKENS = 4096  # as TRL sets it for its own engine


def server_arguments(
    model: str, *, max_num_seqs: int, max_model_len: int | None = None, **recipe_flags
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `vllm serve MODEL`, and environment variables, for what `recipe_flags` make FP8.

    Kernels are checked here and the fastest is pinned, as for a colocated engine: on the first GPU of this process.
    Raises `ValueError` as `recipe_for` and `Platform.arguments`, `RuntimeError` if no kernel passes its check.
    """
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
    recipe = recipe_for_model(policy, expert_kernels=torch.cuda.is_available(), **recipe_flags)
    platform = platform_of()
    arguments = platform.arguments(recipe, config, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    device = torch.device(platform.name, 0)
    with platform.ready(recipe):
        pinned = pinned_gemm(platform.linear_backends(recipe), recipe, policy, device, None, list, max_num_seqs)
    arguments |= pinned
    if max_model_len is not None:
        arguments["max_model_len"] = max_model_len
    arguments |= {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": MOST_BATCHED_TOKENS,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "tensor_parallel_size": recipe.tensor_parallel_size,
        "worker_extension_cls": "trl_fp8.engine.vllm_server.receiver.WorkerExtension",
        "middleware": "trl_fp8.engine.vllm_server.guard.Guard",
        "weight_transfer_config": {"backend": BACKEND},
    }
    environment = {SWITCH: "1", "VLLM_SERVER_DEV_MODE": "1"}  # without the latter vLLM has no /pause and no RPCs
    if recipe.tensor_parallel_size > 1 and platform.name == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(recipe.tensor_parallel_size)))
    return _as_flags(arguments), environment


def guarded(token: str, folder: str, wait: float) -> dict[str, str]:
    """Return the environment variables of a server's guard, and the folder that it reads."""
    return {TOKEN: token, FOLDER: folder, WAIT: f"{wait:g}"}


def _as_flags(arguments: dict) -> list[str]:
    """Return keyword arguments of `vllm.LLM` as words of vLLM's command line."""
    words = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
