"""Properties of the modules of both sides that are compared exactly: none of the engine's modules is called.

    attention    which keys a query sees
    rotary       cos and sin of all angles, up to the last position that a run can reach
    norms        eps
    activation   act(gate) * up, by the engine's definition of it in plain torch

A quantity that the engine lacks, or keeps in another place, is not compared.

Shape letters: P positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.features.one_forward.one_forward import MLPS

from . import bounds
from .findings import Findings


EPS = "variance_epsilon", "eps"  # what transformers' norms call it
GATES = torch.linspace(-6, 6, 241)[:, None]


def compare_window(findings: Findings, name: str, sees: Callable, window: int | None, last: int, device) -> None:
    """`sees`: see `AttentionHook.watched`; `window`: tokens that the engine's queries see, None: all before them;
    `last`: the last position of a run.
    """
    key, zero = torch.arange(last + 1, device=device), torch.zeros((), dtype=torch.long, device=device)
    edges = () if window is None else (window - 1, window, window + 1)
    for query in sorted({min(position, last) for position in (0, 1, last // 2, last, *edges)}):
        own = sees(zero, zero, key[query], key).expand(key.shape)
        engine = key <= query if window is None else (key <= query) & (key > query - window)
        counts = f"a query at position {query} sees {int(own.sum())} keys, the engine's {int(engine.sum())}"
        if not findings.require(torch.equal(own, engine), name, f"window of attention ({counts})"):
            return


def compare_angles(
    findings: Findings, name: str, positions: Tensor, own: tuple[Tensor, ...], engine: tuple[Tensor, ...]
) -> bool:
    """cos and sin `[P, angles]`; transformers may have each angle twice, one half after the other or in turns."""
    width, angles = own[0].shape[-1], engine[0].shape[-1]
    turned = f"the policy turns {width} of a head, the engine {2 * angles}"
    if not findings.require(width in (angles, 2 * angles), name, f"turned channels ({turned})"):
        return False
    forms = [slice(None)] if width == angles else [slice(angles), slice(None, None, 2)]
    # The engine may hold cos and sin in BF16. An angle is its position times an FP32 number, and each side rounds that
    # number and the product
    bound = bounds.U16 * engine[0].abs().max().item() + 2.0**-22 * positions[:, None]
    pairs = list(zip(own, engine, strict=True))
    errors = [
        torch.cat([(mine[:, form] - theirs.float()).abs() / bound for mine, theirs in pairs], -1) for form in forms
    ]
    error_P = min((error.amax(-1) for error in errors), key=lambda error: error.max().item())
    wrong = positions[error_P > 1].tolist()
    return findings.require(not wrong, name, f"rotary angles (from position {wrong[0] if wrong else None} on)")


def compare_eps(findings: Findings, name: str, module: nn.Module, kernels: EngineKernels) -> None:
    own = next((vars(module)[attribute] for attribute in EPS if attribute in vars(module)), None)
    if own is not None and (engine := kernels.eps(name)) is not None:
        findings.same(name, "eps", own, engine)


def compare_activation(findings: Findings, name: str, module: nn.Module, kernels: EngineKernels) -> None:
    for parts in MLPS.values():
        if all(hasattr(module, part) for part in parts):
            up = torch.ones_like(GATES)
            own = getattr(module, parts[-1])(GATES)
            found = kernels.definition(name, torch.cat([GATES, up], -1))
            if found is not None:
                bound = bounds.activation_bound(own, GATES, up)
                findings.values("activation", name, found, own, bound, "activation, act(gate) * up")
