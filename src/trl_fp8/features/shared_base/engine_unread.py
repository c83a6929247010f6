"""Adapters that a compiled engine holds and does not compute with: tried before the first rollout.

vLLM looks for compiled code under a hash that has the room for adapters in it (`engine_base.py`). A user can still
point vLLM at one folder for all (`compilation_config={"cache_dir": ...}`), and vLLM may change what it hashes. An
engine with adapters would then run what was compiled without: its tensors are right, and its code never reads them. So
other values in an adapter have to move log-probs.
"""

import re
from collections.abc import Callable

import torch
from torch import nn
from vllm import envs

from .adapter_tensors import A
from .engine_adapters import ADAPTERS


TOKENS = list(range(8))  # a prompt to try them with: attention needs a few, and every vocabulary has these


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
        if kind in tried or not hasattr(module, ADAPTERS[A]):
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
