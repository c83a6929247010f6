"""Comparison of each module's own forward with what the engine computes, in a policy that follows the engine.

A comparison gets the module, its forward by transformers (`own`), the arguments of a call, and the engine's output.
While it runs, the policy does not follow. Both outputs may differ by what rounding explains. BF16
keeps 8 significant bits and e4m3 keeps 4. Rounding to nearest moves a value by half a step at most:

    |round(v) - v|  <=  u |v|        u = 2^-8 (BF16), 2^-4 (e4m3)

Below 2^-6 of its scale e4m3 has steps of 2^-9 of that scale. A scale is at most 2 amax / 448 (it may be rounded up to
a power of two), so that half a step is less than 2^-17 amax, which is u times 2^-13 amax.

A module that rounds each number a few times has a bound for each of its outputs. A matrix product adds up thousands of
roundings with independent signs, so that their squares add up. The sum of their absolute values would be a bound that
any output passes. FP32 sums round at 2^-24, which is below all of these bounds.

Shape letters: T tokens, K in-features, N out-features, E experts, V vocabulary, D draws.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from trl_fp8.policy.swapped import HoldsCodes, holding
from trl_fp8.quantization.codec.blockwise import dequantize_weight

from .between import FollowedEmbedding, FollowedFusedMLP, FollowedMLP, FollowedNorm, FollowedParallelLayer
from .followed_experts import FollowedExperts, FollowedRouter
from .followed_linear import FollowedAdapter, FollowedLinear, tokens_of
from .one_forward import OneForward


U8, U16 = 2.0**-4, 2.0**-8
SMALL = 2.0**-13  # of the largest value: a value of this size or less is rounded like one of this size
ROWS = 1024  # of a weight that are squared at a time
TINY = 2.0**-20  # mean square of rows that show a norm's eps
DRAWS = 4  # number of directions in which the input of experts is moved


class Findings:
    """The result of a comparison: what differs, and how near the rest came to its bounds."""

    def __init__(self):
        # Module -> the first quantity that differs, since others may follow from it, and what both sides have
        self.differences: dict[str, str] = {}
        self.excesses: dict[str, float] = {}  # kind of module -> the largest error over its bound
        self.compared = 0  # number of comparisons

    def lines(self) -> list[str]:
        return [f"{module}: {quantity}" for module, quantity in self.differences.items()]

    def values(
        self, kind: str, module: str, found: Tensor, own: Tensor, bound: Tensor, quantity: str = "output"
    ) -> bool:
        """Compare two outputs; `bound`: see `excess_of`. False if rounding does not explain the error."""
        excess = excess_of(found, own, bound)
        self.excesses[kind] = max(excess, self.excesses.get(kind, 0.0))
        relative = ((found.double() - own.double()).norm() / own.double().norm().clamp_min(1e-30)).item()
        apart = f"error {relative:.2g} of its size, {excess:.1f} times what rounding explains"
        return self.require(excess <= 1, module, f"{quantity} ({apart})")

    def same(self, module: str, quantity: str, own: float | None, engine: float | None) -> bool:
        """Compare two numbers up to the rounding of FP32; None or 0 where there is none."""
        is_close = abs((own or 0) - (engine or 0)) <= 1e-6 * abs(own or 0)
        of_policy, of_engine = (f"{value:.6g}" if value else "none" for value in (own, engine))
        return self.require(is_close, module, f"{quantity} (the policy's {of_policy}, the engine's {of_engine})")

    def require(self, same: bool, module: str, quantity: str) -> bool:
        """Note whether something is the same on both sides, and return that."""
        self.compared += 1
        if not same:
            self.differences.setdefault(module, quantity)
        return same


class Values:
    """Comparisons of a policy's modules, whose checkpoint names are `names`."""

    def __init__(self, forward: OneForward, names: dict[nn.Module, str], findings: Findings):
        self._forward, self._names, self._findings = forward, names, findings
        self._kinds = {
            FollowedAdapter: self._linear,
            FollowedLinear: self._linear,
            FollowedNorm: self._norm,
            FollowedMLP: self._mlp,
            FollowedFusedMLP: self._mlp,
            FollowedParallelLayer: self._sum,
            FollowedEmbedding: self._embedding,
            FollowedRouter: self._router,
            FollowedExperts: self._experts,
        }

    def of(self, module: nn.Module) -> Callable | None:
        """Return the function that compares `module`; None if its wrapper is compared, or it has no values."""
        if isinstance(module, FollowedLinear) and module.adapted:
            return None
        for kind, compare in self._kinds.items():
            if isinstance(module, kind):
                return compare
        return None

    def _note(self, kind: str, module: nn.Module, *compared: Tensor, quantity: str = "output") -> bool:
        return self._findings.values(kind, self._names[module], *compared, quantity)

    def _linear(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a linear layer, with its adapters: the engine computes with their sum, or with both."""
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        weight = dequantize_weight(base.codes, torch.float32) if isinstance(base, HoldsCodes) else base.weight
        if isinstance(module, BaseTunerLayer):
            for adapter in set(module.active_adapters) & set(module.lora_A):
                weight = weight.float() + module.get_delta_weight(adapter).float()
        computed = own(args[0].to(base.weight.dtype))
        x_TK, own_TN, found_TN = (rows.flatten(0, -2) for rows in (args[0], computed, output))
        bound_T = linear_bound(x_TK, weight, own_TN, U8 if base.is_fp8 else U16)
        self._note("FP8 linear" if base.is_fp8 else "linear", module, found_TN, own_TN, bound_T)

    def _norm(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a norm on its rows and on tiny rows: only those show with which eps the engine computes."""
        x = args[0].to(torch.bfloat16)
        shrink = (TINY / x.float().square().mean(-1, keepdim=True).clamp_min(1e-30)).sqrt()
        tiny = (x * shrink).to(torch.bfloat16)
        of_tiny = f"eps (output for rows whose mean square is {TINY:.1g})"
        for rows, found, quantity in (x, output, "output"), (tiny, module._value(tiny), of_tiny):
            with _in_bf16(module):
                computed = own(rows.float())
            # x times the inverse root, and that times the weight, are rounded to BF16, in either order and at most
            # twice each. The mean that a LayerNorm takes away is FP32
            bound = 4 * U16 * computed.abs() + 2.0**-16 * computed.abs().amax(-1, keepdim=True)
            if not self._note("norm", module, found, computed, bound, quantity=quantity):
                return

    def _mlp(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare the input of the last linear in `own`. Linears are compared by themselves."""
        x, seen = args[0].to(module.down_proj.weight.dtype), {}

        def round_output(linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
            seen[linear] = output.to(torch.bfloat16)
            return seen[linear].float()

        def note_product(linear: nn.Module, args: tuple) -> tuple[Tensor]:
            seen["product"] = args[0].flatten(0, -2)
            return (args[0].to(x.dtype),)

        fused = isinstance(module, FollowedFusedMLP)
        linears = [module.gate_up_proj] if fused else [module.gate_proj, module.up_proj]
        with ExitStack() as handles:
            for linear in linears:
                handles.enter_context(linear.register_forward_hook(round_output))
            handles.enter_context(module.down_proj.register_forward_pre_hook(note_product))
            own(x)
        gate_up = torch.cat([seen[linear] for linear in linears], -1).flatten(0, -2)
        bound = activation_bound(seen["product"], *gate_up.float().chunk(2, -1))
        found = module.engine(gate_up)
        self._note("activation", module, found, seen["product"], bound, quantity="activation, act(gate) * up")

    def _sum(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare the sum of a layer's input with the outputs of its attention and its MLP."""
        hidden = args[0].float()
        with self._forward.switched(on=True):  # the parts of the layer follow
            computed = own(hidden, *args[1:], **kwargs)
        # Both sums of `hidden + (attention + MLP)` are rounded to BF16
        self._note("residual sum", module, output, computed, U16 * (2 * computed.abs() + hidden.abs()))

    def _embedding(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare rows, which may be scaled."""
        computed = own(*args, **kwargs).float()
        # Rows, the number that they are multiplied by, and the product are BF16
        self._note("embedding", module, output, computed, 3 * U16 * computed.abs())

    def _router(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> None:
        """Compare logits, then the chosen experts, then the gate weights of tokens with the same experts."""
        x_TK = args[0].float().flatten(0, -2)
        with _in_bf16(module) as weights:
            own_TE, own_gates, own_chosen = own(x_TK)
        found_TE, gates, chosen = output
        bound_T = linear_bound(x_TK, weights["weight"], own_TE, U16)
        if not self._note("router", module, found_TE, own_TE, bound_T, quantity="logits"):
            return
        # Rounding may exchange experts whose logits differ by less than its bound
        behind_T = own_TE.gather(-1, own_chosen).amin(-1) - own_TE.gather(-1, chosen.long()).amin(-1)
        if not self._findings.require(bool((behind_T <= 2 * bound_T).all()), self._names[module], "chosen experts"):
            return
        experts, order = chosen.long().sort(-1)
        own_experts, own_order = own_chosen.long().sort(-1)
        same_T = (experts == own_experts).all(-1)
        found, computed = gates.gather(-1, order)[same_T], own_gates.gather(-1, own_order)[same_T]
        bound = computed * (torch.expm1(2 * bound_T[same_T, None]) + 4 * U16)  # of a softmax
        if len(found):
            self._note("router", module, found, computed, bound, quantity="gate weights")

    def _experts(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare the experts of a layer, for the engine's choice and gate weights."""
        x, chosen, gates = (*args, *kwargs.values())
        x, gates = (each.to(module.gate_up_proj.dtype) for each in (x, gates))
        in_fp8 = self._names[module] in self._forward.recipe.fp8_experts
        unit = U8 if in_fp8 else U16
        computed = own(x, chosen, gates)
        signs = torch.randint(2, (DRAWS, *x.shape), generator=torch.Generator().manual_seed(0)).to(x) * 2 - 1
        moved = torch.stack([own(x * (1 + unit * sign), chosen, gates) - computed for sign in signs])
        kind = "FP8 experts" if in_fp8 else "experts"
        self._note(kind, module, output, computed, experts_bound(moved, computed))

    def head(
        self,
        hidden_TK: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        found: Tensor,
    ) -> None:
        """Compare logits `[T, V]`; the engine's are `found`, transformers scales by `scale` and caps by `softcap`."""
        with torch.autocast(hidden_TK.device.type, enabled=False):
            x_TK = tokens_of(hidden_TK)
            own_TV = nn.functional.linear(x_TK.to(weight.dtype), weight, bias).float()
            bound_T = abs(scale) * linear_bound(x_TK, weight, own_TV, U16)
            own_TV = own_TV * scale
            if softcap is not None:  # a cap moves two numbers no further apart
                own_TV = softcap * torch.tanh(own_TV / softcap)
            bound_T = bound_T + 2 * U16 * own_TV.norm(dim=-1)
            found_TV = found[:, : len(weight)].float()
        self._findings.values("output head", "lm_head", found_TV, own_TV, bound_T, "logits, scaled and capped")

    def rotated(self, name: str, apply: Callable, cos_sin: tuple, states: tuple, rotated: tuple) -> None:
        """Compare q and k `[B, H, T, D]` after the engine's rotary embedding `name`; `states` are those before it."""
        with torch.autocast(cos_sin[0].device.type, enabled=False):
            own = apply(*(state.float() for state in states), *cos_sin)
        for which, state, found, computed in zip("qk", states, rotated, own, strict=True):
            # A channel is the sum of two channels times cos and sin. The angles, the products and the sum are rounded
            # to BF16. Only the policy's function knows which two, so the bound is that of any two
            largest = 2 * cos_sin[0].abs().max().item() * state.float().abs().amax(-1, keepdim=True)
            quantity = f"{which}, turned by its rotary embedding"
            self._findings.values("rotary", name, found, computed, 4 * U16 * largest, quantity)


@contextmanager
def _in_bf16(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace the module's own parameters, inside the block, by the BF16 numbers that the engine was sent, in FP32."""
    rounded = {name: p.to(torch.bfloat16).float() for name, p in module.named_parameters(recurse=False)}
    with holding(module, rounded):
        yield rounded


def linear_bound(x_TK: Tensor, weight_NK: Tensor, own_TN: Tensor, unit: float) -> Tensor:
    """Return the bound `[T]` on the norm of a token's errors in `y = x @ W.T` with both operands rounded by `unit`.

        |x w - round(x) round(w)|  <=  2 u |x w|          of each of K products
        bound^2  =  sum_NK (2 u x w)^2 + (2 u16 |y|)^2    the second: outputs and partial sums are BF16

    The first term takes the largest error of each product, whose mean square is a ninth of it. Rounding therefore
    stays below the bound, and the error of another weight, which is as large as y, does not.
    """
    x_TK, weight_NK = x_TK.double().abs(), weight_NK.detach()
    x_TK = (x_TK + SMALL * x_TK.amax(-1, keepdim=True)).square()
    small = SMALL * max(weight_NK.max().item(), -weight_NK.min().item())
    columns_K = torch.zeros(weight_NK.shape[1], dtype=torch.float64, device=weight_NK.device)
    for rows in weight_NK.split(ROWS):  # in FP64, without a copy of the whole weight
        columns_K += (rows.abs().double() + small).square().sum(0)
    return (4 * unit**2 * (x_TK @ columns_K) + (2 * U16 * own_TN.double().norm(dim=-1)).square()).sqrt()


def experts_bound(responses_DTK: Tensor, own_TK: Tensor) -> Tensor:
    """Return the bound `[T]` on the norm of a token's errors, for experts: two products with a function between them.

    `responses_DTK` are D changes of the output, each after every input moved by `u`, up or down at random. Four
    operands are rounded: input, both weights, and the activation between. Each has an effect like the input's, and
    the squares of four independent effects add up to the square of twice one.
    """
    response_T = responses_DTK.double().square().sum(-1).mean(0).sqrt()
    return 2 * response_T + 2 * U16 * own_TK.double().norm(dim=-1)


def activation_bound(own: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the bound of each output of act(gate) * up, where act and the product are rounded to BF16.

    Far below 0 a GELU is a difference of FP32 numbers that nearly cancel, hence the second term.
    """
    return 3 * U16 * own.abs() + 2.0**-20 * (gate * up).abs()


def excess_of(found: Tensor, own: Tensor, bound: Tensor) -> float:
    """Return the ratio of an error to its bound; infinite if an output is not a number.

    For a bound of each element it is the largest ratio, for a bound `[T]` of each token's norm the root mean square.
    """
    error, bound = found.double() - own.double(), bound.double().clamp_min(1e-30)
    if bound.dim() < error.dim():
        ratio = (error.norm(dim=-1) / bound).square().mean().sqrt()
    else:
        ratio = (error.abs() / bound).max()
    return ratio.nan_to_num(nan=float("inf")).item()
