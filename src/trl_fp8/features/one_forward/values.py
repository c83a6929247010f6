"""Comparison of the engine's outputs with transformers' forward of each module, in a policy that follows the engine.

A comparison gets the module, transformers' forward of it (`own`), the arguments of a call, and the engine's output.
While it runs, the policy does not follow. In this file `found` is what the engine computed, and `own` or `computed`
what transformers' forward computed. The two may differ by no more than rounding explains. BF16 keeps 8 significant
bits and e4m3 keeps 4. Rounding to nearest changes a value by at most half a step:

    |round(v) - v|  <=  u |v|        u = 2^-8 (BF16), 2^-4 (e4m3)

Values below 2^-6 times the scale are an exception, because there e4m3 has steps of 2^-9 times the scale. A scale is at
most 2 amax / 448, since it may be rounded up to a power of two. So half a step is less than 2^-17 amax, which is u
times 2^-13 amax (`SMALL`).

If a module rounds each number only a few times, each of its outputs has a bound. A matrix product adds up thousands of
errors with independent signs, so their squares add up, and the norm of each token's errors has a bound. (A bound from
the sum of absolute errors would be so large that any output passes.) FP32 sums round at 2^-24, which is far below all
of these bounds.

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


U8, U16 = 2.0**-4, 2.0**-8  # u of e4m3 and of BF16
SMALL = 2.0**-13  # fraction of amax: a smaller value has at most the rounding error of a value of this size
ROWS = 1024  # number of a weight's rows that are squared at a time
TINY = 2.0**-20  # mean square of rows that are so small that they show a norm's eps
DRAWS = 4  # number of random directions in which the input of experts is changed


class Findings:
    """The results of all comparisons: the differences, and how close the errors came to their bounds."""

    def __init__(self):
        # Module -> the first quantity that differs, with its values. Further differences may only be consequences
        self.differences: dict[str, str] = {}
        self.excesses: dict[str, float] = {}  # kind of module -> the largest ratio of an error to its bound
        self.compared = 0  # number of comparisons

    def lines(self) -> list[str]:
        return [f"{module}: {quantity}" for module, quantity in self.differences.items()]

    def compare_outputs(
        self, kind: str, module: str, found: Tensor, own: Tensor, bound: Tensor, quantity: str = "output"
    ) -> bool:
        """Return whether rounding explains the difference of two outputs. `bound`: see `excess_of`."""
        excess = excess_of(found, own, bound)
        self.excesses[kind] = max(excess, self.excesses.get(kind, 0.0))
        relative = ((found.double() - own.double()).norm() / own.double().norm().clamp_min(1e-30)).item()
        apart = f"error {relative:.2g} of its size, {excess:.1f} times what rounding explains"
        return self.note(excess <= 1, module, f"{quantity} ({apart})")

    def compare_numbers(self, module: str, quantity: str, own: float | None, engine: float | None) -> bool:
        """Return whether two numbers are equal up to the rounding of FP32. None and 0 are equal: both mean none."""
        is_close = abs((own or 0) - (engine or 0)) <= 1e-6 * abs(own or 0)
        of_policy, of_engine = (f"{value:.6g}" if value else "none" for value in (own, engine))
        return self.note(is_close, module, f"{quantity} (the policy's {of_policy}, the engine's {of_engine})")

    def note(self, same: bool, module: str, quantity: str) -> bool:
        """Count a comparison. If the sides are not the `same`, note the quantity. Return `same`."""
        self.compared += 1
        if not same:
            self.differences.setdefault(module, quantity)
        return same


class Values:
    """Comparisons of the outputs of a policy's modules. `names` are the modules' checkpoint names."""

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
        """Return the method that compares the output of `module`; None if no method does."""
        if isinstance(module, FollowedLinear) and module.adapted:  # PEFT's wrapper around it is compared instead
            return None
        for kind, compare in self._kinds.items():
            if isinstance(module, kind):
                return compare
        return None

    def _compare(self, kind: str, module: nn.Module, *compared: Tensor, quantity: str = "output") -> bool:
        return self._findings.compare_outputs(kind, self._names[module], *compared, quantity)

    def _linear(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a linear layer with its adapters."""
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        weight = dequantize_weight(base.codes, torch.float32) if isinstance(base, HoldsCodes) else base.weight
        if isinstance(module, BaseTunerLayer):
            for adapter in set(module.active_adapters) & set(module.lora_A):
                weight = weight.float() + module.get_delta_weight(adapter).float()
        computed = own(args[0].to(base.weight.dtype))
        x_TK, own_TN, found_TN = (rows.flatten(0, -2) for rows in (args[0], computed, output))
        bound_T = linear_bound(x_TK, weight, own_TN, U8 if base.is_fp8 else U16)
        self._compare("FP8 linear" if base.is_fp8 else "linear", module, found_TN, own_TN, bound_T)

    def _norm(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a norm on its input, and on its input scaled to tiny rows, which alone show the engine's eps."""
        x = args[0].to(torch.bfloat16)
        shrink = (TINY / x.float().square().mean(-1, keepdim=True).clamp_min(1e-30)).sqrt()
        tiny = (x * shrink).to(torch.bfloat16)
        of_tiny = f"eps (output for rows whose mean square is {TINY:.1g})"
        for rows, found, quantity in (x, output, "output"), (tiny, module._engine_value(tiny), of_tiny):
            with _in_bf16(module):
                computed = own(rows.float())
            # The output is x times the inverse root times the weight. Each of the two products is rounded to BF16 at
            # most twice. The second term covers the mean, which a LayerNorm subtracts in FP32
            bound = 4 * U16 * computed.abs() + 2.0**-16 * computed.abs().amax(-1, keepdim=True)
            if not self._compare("norm", module, found, computed, bound, quantity=quantity):
                return

    def _mlp(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare act(gate) * up, the input of the last linear layer. `_linear` compares the MLP's linear layers."""
        x = args[0].to(module.down_proj.weight.dtype)
        outputs: dict[nn.Module, Tensor] = {}  # those of gate and up, rounded to BF16 as in the engine
        products: list[Tensor] = []  # act(gate) * up by transformers

        def round_output(linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
            outputs[linear] = output.to(torch.bfloat16)
            return outputs[linear].float()

        def note_product(linear: nn.Module, args: tuple) -> tuple[Tensor]:
            products.append(args[0].flatten(0, -2))
            return (args[0].to(x.dtype),)

        fused = isinstance(module, FollowedFusedMLP)
        linears = [module.gate_up_proj] if fused else [module.gate_proj, module.up_proj]
        with ExitStack() as handles:
            for linear in linears:
                handles.enter_context(linear.register_forward_hook(round_output))
            handles.enter_context(module.down_proj.register_forward_pre_hook(note_product))
            own(x)
        gate_up = torch.cat([outputs[linear] for linear in linears], -1).flatten(0, -2)
        bound = activation_bound(products[0], *gate_up.float().chunk(2, -1))
        found = module.engine(gate_up)
        self._compare("activation", module, found, products[0], bound, quantity="activation, act(gate) * up")

    def _sum(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare the sum of a layer's input, the output of its attention and that of its MLP."""
        hidden = args[0].float()
        with self._forward.switched(on=True):  # so that attention and MLP follow
            computed = own(hidden, *args[1:], **kwargs)
        # The engine rounds both sums in `hidden + (attention + MLP)` to BF16
        self._compare("residual sum", module, output, computed, U16 * (2 * computed.abs() + hidden.abs()))

    def _embedding(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare embeddings, which may be scaled."""
        computed = own(*args, **kwargs).float()
        # Three roundings to BF16: of the rows, of the scale, and of their product
        self._compare("embedding", module, output, computed, 3 * U16 * computed.abs())

    def _router(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> None:
        """Compare logits, then the chosen experts, then the gate weights of tokens for which both chose the same."""
        x_TK = args[0].float().flatten(0, -2)
        with _in_bf16(module) as weights:
            own_TE, own_gates, own_chosen = own(x_TK)
        found_TE, gates, chosen = output
        bound_T = linear_bound(x_TK, weights["weight"], own_TE, U16)
        if not self._compare("router", module, found_TE, own_TE, bound_T, quantity="logits"):
            return
        # Rounding may exchange experts if their logits differ by less than twice the bound
        behind_T = own_TE.gather(-1, own_chosen).amin(-1) - own_TE.gather(-1, chosen.long()).amin(-1)
        if not self._findings.note(bool((behind_T <= 2 * bound_T).all()), self._names[module], "chosen experts"):
            return
        experts, order = chosen.long().sort(-1)
        own_experts, own_order = own_chosen.long().sort(-1)
        same_T = (experts == own_experts).all(-1)
        found, computed = gates.gather(-1, order)[same_T], own_gates.gather(-1, own_order)[same_T]
        # If each logit changes by at most b, a softmax changes by at most the factor exp(2 b)
        bound = computed * (torch.expm1(2 * bound_T[same_T, None]) + 4 * U16)
        if len(found):
            self._compare("router", module, found, computed, bound, quantity="gate weights")

    def _experts(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare the output of a layer's experts. Both sides get the engine's chosen experts and gate weights."""
        x, chosen, gates = (*args, *kwargs.values())
        x, gates = (each.to(module.gate_up_proj.dtype) for each in (x, gates))
        in_fp8 = self._names[module] in self._forward.recipe.fp8_experts
        unit = U8 if in_fp8 else U16
        computed = own(x, chosen, gates)
        signs = torch.randint(2, (DRAWS, *x.shape), generator=torch.Generator().manual_seed(0)).to(x) * 2 - 1
        moved = torch.stack([own(x * (1 + unit * sign), chosen, gates) - computed for sign in signs])
        kind = "FP8 experts" if in_fp8 else "experts"
        self._compare(kind, module, output, computed, experts_bound(moved, computed))

    def head(
        self,
        hidden_TK: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        found: Tensor,
    ) -> None:
        """Compare the engine's logits `found` `[T, V]` with transformers', times `scale` and capped at `softcap`."""
        with torch.autocast(hidden_TK.device.type, enabled=False):
            x_TK = tokens_of(hidden_TK)
            own_TV = nn.functional.linear(x_TK.to(weight.dtype), weight, bias).float()
            bound_T = abs(scale) * linear_bound(x_TK, weight, own_TV, U16)
            own_TV = own_TV * scale
            if softcap is not None:  # capping increases no difference, so the bound stays
                own_TV = softcap * torch.tanh(own_TV / softcap)
            bound_T = bound_T + 2 * U16 * own_TV.norm(dim=-1)
            found_TV = found[:, : len(weight)].float()
        self._findings.compare_outputs(
            "output head", "lm_head", found_TV, own_TV, bound_T, "logits, scaled and capped"
        )

    def rotated(self, name: str, apply: Callable, cos_sin: tuple, states: tuple, rotated: tuple) -> None:
        """Compare q and k `[B, H, T, D]` after the rotary embedding `name`.

        `states` are q and k before it, `rotated` after the engine's. `apply` is transformers' function.
        """
        with torch.autocast(cos_sin[0].device.type, enabled=False):
            own = apply(*(state.float() for state in states), *cos_sin)
        for which, state, found, computed in zip("qk", states, rotated, own, strict=True):
            # A rotated channel is the sum of two channels times cos and sin. The angles, the products and the sum are
            # rounded to BF16. Only `apply` knows which two, so the bound holds for any two channels
            largest = 2 * cos_sin[0].abs().max().item() * state.float().abs().amax(-1, keepdim=True)
            quantity = f"{which}, turned by its rotary embedding"
            self._findings.compare_outputs("rotary", name, found, computed, 4 * U16 * largest, quantity)


@contextmanager
def _in_bf16(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Round the module's direct parameters to BF16, as in the engine, inside the block. Yield them as FP32 tensors."""
    rounded = {name: p.to(torch.bfloat16).float() for name, p in module.named_parameters(recurse=False)}
    with holding(module, rounded):
        yield rounded


def linear_bound(x_TK: Tensor, weight_NK: Tensor, own_TN: Tensor, unit: float) -> Tensor:
    """Return the bound `[T]` on the norm of a token's errors in `y = x @ W.T`, if both operands are rounded.

    `unit` is u of these operands. The error of each product, and the bound from all of them, are

        |x w - round(x) round(w)|  <=  2 u |x w|
        bound^2  =  sum_NK (2 u x w)^2 + (2 u16 |y|)^2

    The second term covers outputs and partial sums, which are BF16. The first takes the largest error of each product.
    If rounding errors are spread evenly over a step, the mean square of a product's error is at most a sixth of that
    error's square, so rounding stays below the bound. If the engine had another weight, the error would be as large as
    y, and exceed the bound.
    """
    x_TK, weight_NK = x_TK.double().abs(), weight_NK.detach()
    x_TK = (x_TK + SMALL * x_TK.amax(-1, keepdim=True)).square()
    small = SMALL * max(weight_NK.max().item(), -weight_NK.min().item())
    columns_K = torch.zeros(weight_NK.shape[1], dtype=torch.float64, device=weight_NK.device)
    for rows in weight_NK.split(ROWS):  # in FP64, without a copy of the whole weight
        columns_K += (rows.abs().double() + small).square().sum(0)
    return (4 * unit**2 * (x_TK @ columns_K) + (2 * U16 * own_TN.double().norm(dim=-1)).square()).sqrt()


def experts_bound(responses_DTK: Tensor, own_TK: Tensor) -> Tensor:
    """Return the bound `[T]` on the norm of a token's errors in the output of experts.

    Experts are two products with an activation function between them, so four operands are rounded: the input, both
    weights, and the activation. `responses_DTK` are D changes of the output after every element of the input was
    changed by the fraction u, up or down at random. Each of the four roundings has about this effect. They are
    independent, so their squares add up, to four times the square of one: hence the factor 2.
    """
    response_T = responses_DTK.double().square().sum(-1).mean(0).sqrt()
    return 2 * response_T + 2 * U16 * own_TK.double().norm(dim=-1)


def activation_bound(own: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the bound of each output `own` of act(gate) * up, if act and the product are rounded to BF16.

    The second term covers GELU, which far below 0 is the difference of two nearly equal FP32 numbers.
    """
    return 3 * U16 * own.abs() + 2.0**-20 * (gate * up).abs()


def excess_of(found: Tensor, own: Tensor, bound: Tensor) -> float:
    """Return the ratio of an error to its bound; infinity if an output is not a number.

    If `bound` has the shape of the outputs, the result is the largest ratio of an element. If `bound` `[T]` is for the
    norm of each token's errors, the result is the root mean square of the tokens' ratios.
    """
    error, bound = found.double() - own.double(), bound.double().clamp_min(1e-30)
    if bound.dim() < error.dim():
        ratio = (error.norm(dim=-1) / bound).square().mean().sqrt()
    else:
        ratio = (error.abs() / bound).max()
    return ratio.nan_to_num(nan=float("inf")).item()
