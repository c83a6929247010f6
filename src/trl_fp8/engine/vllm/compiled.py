"""What of ours a compiled engine runs: told to vLLM's compile cache, and tried before the first rollout.

vLLM looks for compiled code under a hash of its environment variables, its config and the model's class, and does not
trace the model again where it finds some. Two things of ours change what is traced and stand in none of these: the
layers of adapters, which the model gets after vLLM made it, and the kernels and layers that are registered in place of
vLLM's. Without them in the hash an engine with adapters would run what was compiled without: its tensors are right,
and its code never reads them. `additional_config` is hashed, and of this entry nobody reads anything.

A user can still point vLLM at one folder for all (`compilation_config={"cache_dir": ...}`), and vLLM may change what
it hashes. So the adapters of a compiled engine are tried: other values in one of them have to move log-probs.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.layers.linear import LinearBase

from trl_fp8.features.shared_base.adapter_tensors import A

from .layout import ADAPTERS


ENTRY = "trl_fp8"
TOKENS = list(range(8))  # a prompt to try them with: attention needs a few, and every vocabulary has these


def traced(adapters: Mapping[str, int]) -> dict[str, object]:
    """`additional_config` for `vllm.LLM(...)`; `adapters`: layer -> rank of those that the engine has room for."""
    return {ENTRY: {"source": _source(), "adapters": dict(adapters)}}


@cache
def _source() -> str:
    """Digest of this folder: another version of the package, or an edited one, may trace something else."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def unread_adapters(model: nn.Module, log_probs: Callable[[], torch.Tensor]) -> list[str]:
    """Linear layers of an engine's `model` whose adapters it does not compute with.

    Of layers that differ in their number alone the first one is tried. Adapters are as they were when this returns.

    Args:
        model: With weights, for what is computed of random ones may be too small to show anything.
        log_probs: Of one sequence, as the engine computes them now.
    """
    before = log_probs()
    noise = (log_probs() - before).abs().max()  # kernels that add in no fixed order
    unread, tried = [], set()
    for name, module in model.named_modules():
        kind = re.sub(r"\.\d+\.", ".", name)
        if kind in tried or not (isinstance(module, LinearBase) and hasattr(module, ADAPTERS[A])):
            continue
        tried.add(kind)
        weights = [module.get_submodule(attribute).weight.data for attribute in ADAPTERS.values()]
        held = [weight.clone() for weight in weights]
        generator = torch.Generator().manual_seed(0)
        for weight in weights:  # A too: it may be what starts at zero
            random = torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
            weight.copy_(random)
        try:
            moved = (log_probs() - before).abs().max()
        finally:
            for weight, old in zip(weights, held, strict=True):
                weight.copy_(old)
        if moved <= noise:
            unread.append(name)
    return unread


def stale(unread: list[str]) -> RuntimeError:
    """`unread`: layers that `unread_adapters` found on this rank; empty if another one did."""
    where = ", ".join(unread) or "layers of another rank, see its log"
    return RuntimeError(
        f"fp8_base=True: whatever adapters the engine holds, its log-probs stay the same ({where}). Rollouts would "
        "come from the base. The engine runs code that was compiled for one without these adapters: vLLM took it from "
        f"its compile cache ({envs.VLLM_CACHE_ROOT}/torch_compile_cache, unless vllm_engine_kwargs sets "
        "compilation_config cache_dir). Delete that folder, or set VLLM_DISABLE_COMPILE_CACHE=1 in the environment, "
        "and start again."
    )
