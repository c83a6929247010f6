"""What can be read off the modules of both sides, and is compared exactly: nothing of the engine is called.

    attention    which keys a query sees, the scaling and the soft cap of scores
    rotary       cos and sin of all angles, up to the last position that a run can reach
    norms        eps
    activation   act(gate) * up, by the engine's definition of it in plain torch

Of an engine that has no such thing, or has it elsewhere, nothing is said.

Shape letters: P positions.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.features.one_forward.one_forward import MLPS

from . import bounds
from .findings import Findings


POSITIONS = 256  # at which angles are compared
EPS = "variance_epsilon", "eps"  # what transformers' norms call it
GATES = torch.linspace(-6, 6, 241)


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
) -> None:
    """cos and sin `[P, angles]`; transformers may have each angle twice, one half after the other or in turns."""
    width, angles = own[0].shape[-1], engine[0].shape[-1]
    turned = f"the policy turns {width} of a head, the engine {2 * angles}"
    if not findings.require(width in (angles, 2 * angles), name, f"turned channels ({turned})"):
        return
    forms = [lambda t: t] if width == angles else [lambda t: t[:, :angles], lambda t: t[:, ::2]]
    bound = bounds.angle_bound(positions, engine[0].abs().max().item())

    def errors_P(form: Callable) -> Tensor:
        pairs = zip(own, engine, strict=True)
        return torch.cat([(form(mine) - theirs.float()).abs() / bound for mine, theirs in pairs], -1).amax(-1)

    error_P = min(map(errors_P, forms), key=lambda error: error.max().item())
    wrong = positions[error_P > 1].tolist()
    findings.require(not wrong, name, f"rotary angles (from position {wrong[0] if wrong else None} on)")


def compare_layers(findings: Findings, modules: dict[str, nn.Module], kernels: EngineKernels) -> None:
    """eps and activation of all `modules` of a decoder, by their names, that have one on both sides."""
    for name, own, engine in _both(modules, kernels):
        findings.same(name, "eps", own, engine)
    for name, module in modules.items():
        for names in MLPS.values():
            if all(hasattr(module, part) for part in names):
                _compare_activation(findings, name, getattr(module, names[-1]), kernels)


def _both(modules: dict[str, nn.Module], kernels: EngineKernels) -> Iterator[tuple[str, float, float]]:
    for name, module in modules.items():
        own = next((vars(module)[attribute] for attribute in EPS if attribute in vars(module)), None)
        engine = None if own is None else kernels.eps(name)
        if engine is not None:
            yield name, own, engine


def _compare_activation(findings: Findings, name: str, act: nn.Module, kernels: EngineKernels) -> None:
    up = torch.ones_like(GATES)
    found = kernels.definition(name, torch.stack([GATES, up], -1))
    if found is not None:
        own = act(GATES[:, None])
        excess = bounds.excess(found, own, bounds.activation_bound(own, GATES[:, None], up[:, None]))
        findings.values("activation", name, "activation, act(gate) * up", found, own, excess)
