"""Arguments and environment of vLLM's own server for a recipe: a colocated engine's arguments, as flags."""

import json
from collections.abc import Sequence
from typing import NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from trl_fp8.engine.vllm.gemms import pinned_gemm
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.recipe.recipe import recipe_for_model

from .plugin import BACKEND, FOLDER, SCALES, SWITCH, TOKEN, WAIT


# Default by which `names_set_by` recognizes a flag that is not set. It is a list, because vLLM's parser appends to a
# copy of the default of some flags
UNSET = []
MOST_BATCHED_TOKENS = 4096  # as TRL sets it for its own engine


def server_arguments(
    model: str,
    *,
    revision: str | None = None,
    max_num_seqs: int,
    max_model_len: int | None = None,
    parts: Sequence[EnginePart] = (),
    **recipe_flags,
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `vllm serve MODEL` and its environment variables.

    `recipe_flags` are those of `recipe_for`. Features add arguments and variables by their `parts`. As for a colocated
    engine, kernels are checked and the fastest is pinned, here on the first GPU of this process. Raises the
    `ValueError`s of `recipe_for` and `Platform.arguments`, and `RuntimeError` if no kernel passes its check.
    """
    config = AutoConfig.from_pretrained(model, revision=revision)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
    recipe = recipe_for_model(policy, expert_kernels=torch.cuda.is_available(), **recipe_flags)
    platform = platform_of()
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    arguments = platform.arguments(recipe, config, **sizes, parts=parts)
    if revision is not None:
        arguments.setdefault("revision", revision)  # of a config in which transformers keeps no commit
    with platform.ready(recipe):
        arguments |= pinned_gemm(
            platform.linear_backends(recipe),
            recipe,
            policy,
            device=torch.device(platform.name, 0),
            user=None,
            agree=list,
            max_num_seqs=max_num_seqs,
        )
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
    environment = {SWITCH: "1", SCALES: recipe.scale_format}
    for part in parts:
        environment |= part.environment(recipe, config)
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # without it vLLM has no /pause and no RPCs
    if recipe.tensor_parallel_size > 1 and platform.name == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(recipe.tensor_parallel_size)))
    return _as_flags(arguments), environment


def guard_environment(token: str, folder: str, wait: float) -> dict[str, str]:
    """Return the environment variables that guard.py reads.

    `folder`: of trainers' files. `wait`: seconds that requests wait for the end of an update.
    """
    return {TOKEN: token, FOLDER: folder, WAIT: f"{wait:g}"}


def _as_flags(arguments: dict) -> list[str]:
    """Return keyword arguments of `vllm.LLM` as words of vLLM's command line."""
    words = []
    for name, value in arguments.items():
        flag_name = name.replace("_", "-")
        if value is False:
            words.append(f"--no-{flag_name}")
            continue
        words.append(f"--{flag_name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words.append(str(value))
    return words


class RefusingParser(FlexibleArgumentParser):
    """vLLM's parser, which raises `ValueError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"trl-fp8 serve passes further flags on to vLLM, which refuses them: {message}")


def names_set_by(words: list[str]) -> set[str]:
    """Return the names of vLLM's arguments that `words` set, however their flags are spelled: short, abbreviated, with
    `--no-`, with underscores, or with a key as in `--compilation-config.mode`.

    Raises `ValueError` for words that vLLM's parser refuses, and for a word that belongs to no flag.
    """
    if "--config" in words:
        return {"config"}  # the parser would read this file
    parser = make_arg_parser(RefusingParser())
    names = vars(parser.parse_args([])).keys()
    parser.set_defaults(**dict.fromkeys(names, UNSET))
    options = vars(parser.parse_args(words))
    if options["model_tag"] is not UNSET:  # "model_tag" is vLLM's name for a word without a flag
        raise ValueError(f"trl-fp8 serve takes one MODEL, and {options['model_tag']!r} belongs to no flag. Remove it.")
    return {name for name, value in options.items() if value is not UNSET}
