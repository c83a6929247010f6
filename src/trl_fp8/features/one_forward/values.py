"""Comparison of the engine's outputs with transformers' forward of each module, in a policy that follows the engine.

`Values` has one method for each kind of module, and `Values.of` finds the method. same_model.py calls the method after
each call of the module, with the module, transformers' forward of the module (`own`), the arguments of the call, and
the engine's output. The method computes transformers' output and a bound, and `Findings.compare_outputs` compares the
two outputs. While a comparison runs, the policy does not follow the engine.

In this file `found` is what the engine computed, and `own` or `computed` what transformers' forward computed. The two
may differ by no more than rounding explains. BF16 keeps 8 significant bits and e4m3 keeps 4. Rounding to nearest
changes a value by at most half a step:

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
        error = (found.double() - own.double()).norm()
        relative = (error / own.double().norm().clamp_min(1e-30)).item()
        apart = f"error {relative:.2g} of its size, {excess:.1f} times what rounding explains"
        return self.note(excess <= 1, module, f"{quantity} ({apart})")

    def compare_numbers(self, module: str, quantity: str, own: float | None, engine: float | None) -> bool:
        """Return whether two settings are equal up to the rounding of FP32. Both None and 0 mean: not set."""
        own_number = own or 0.0
        engine_number = engine or 0.0
        is_close = abs(own_number - engine_number) <= 1e-6 * abs(own_number)
        of_policy = f"{own:.6g}" if own else "none"
        of_engine = f"{engine:.6g}" if engine else "none"
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
        self._forward = forward
        self._names = names
        self._findings = findings
        # Class that is mixed into a module -> the method that compares the module
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
        if isinstance(module, FollowedLinear) and module.adapted:
            return None  # PEFT's wrapper around this linear layer is compared instead
        for kind, compare in self._kinds.items():
            if isinstance(module, kind):
                return compare
        return None

    def _compare(
        self, kind: str, module: nn.Module, found: Tensor, own: Tensor, bound: Tensor, quantity: str = "output"
    ) -> bool:
        return self._findings.compare_outputs(kind, self._names[module], found, own, bound, quantity)

    def _linear(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a linear layer with its adapters."""
        has_adapters = isinstance(module, BaseTunerLayer)
        base = module.get_base_layer() if has_adapters else module
        if isinstance(base, HoldsCodes):
            weight_NK = dequantize_weight(base.codes, torch.float32)
        else:
            weight_NK = base.weight
        if has_adapters:
            for adapter in set(module.active_adapters) & set(module.lora_A):
                weight_NK = weight_NK.float() + module.get_delta_weight(adapter).float()
        x = args[0]
        computed = own(x.to(base.weight.dtype))
        own_TN = computed.flatten(0, -2)
        found_TN = output.flatten(0, -2)
        kind = "FP8 linear" if base.is_fp8 else "linear"
        unit = U8 if base.is_fp8 else U16
        bound_T = linear_bound(x.flatten(0, -2), weight_NK, own_TN, unit)
        self._compare(kind, module, found_TN, own_TN, bound_T)

    def _norm(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a norm on its input, and on its input scaled to tiny rows. Only tiny rows show the engine's eps."""
        x = args[0].to(torch.bfloat16)
        mean_square = x.float().square().mean(-1, keepdim=True).clamp_min(1e-30)
        tiny = (x * (TINY / mean_square).sqrt()).to(torch.bfloat16)
        compared = [
            (x, output, "output"),
            (tiny, module._engine_value(tiny), f"eps (output for rows whose mean square is {TINY:.1g})"),
        ]
        for rows, found, quantity in compared:
            with _in_bf16(module):
                computed = own(rows.float())
            # The output is x times the inverse root of the mean square times the weight. Each of these two products
            # is rounded to BF16 at most twice: 4 * U16. The second term covers the mean, which a LayerNorm subtracts
            # in FP32
            bound = 4 * U16 * computed.abs() + 2.0**-16 * computed.abs().amax(-1, keepdim=True)
            if not self._compare("norm", module, found, computed, bound, quantity=quantity):
                return

    def _mlp(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare act(gate) * up, the input of the last linear layer. `_linear` compares the MLP's linear layers.

        Hooks on the linear layers read gate and up, and the product that transformers computes from them. The engine's
        activation then gets the same gate and up.
        """
        x = args[0].to(module.down_proj.weight.dtype)
        outputs: dict[nn.Module, Tensor] = {}  # gate and up, rounded to BF16 as in the engine
        products: list[Tensor] = []  # transformers' act(gate) * up

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
        gate, up = gate_up.float().chunk(2, -1)
        [product] = products
        bound = activation_bound(product, gate, up)
        found = module.engine(gate_up)
        self._compare("activation", module, found, product, bound, quantity="activation, act(gate) * up")

    def _sum(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare a layer's output: the sum of its input, its attention's output and its MLP's output."""
        hidden = args[0].float()
        with self._forward.switched(on=True):  # attention and MLP follow the engine, so only the sums can differ
            computed = own(hidden, *args[1:], **kwargs)
        # The engine rounds both sums in `hidden + (attention + MLP)` to BF16
        self._compare("residual sum", module, output, computed, U16 * (2 * computed.abs() + hidden.abs()))

    def _embedding(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare embeddings, which may be scaled."""
        computed = own(*args, **kwargs).float()
        # Three roundings to BF16: of the rows, of the scale, and of their product
        self._compare("embedding", module, output, computed, 3 * U16 * computed.abs())

    def _router(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> None:
        """Compare logits, then the chosen experts, then the gate weights. Stop at the first difference.

        Gate weights are compared for the tokens for which both sides chose the same experts.
        """
        x_TK = args[0].float().flatten(0, -2)
        with _in_bf16(module) as weights:
            own_TE, own_gates, own_chosen = own(x_TK)
        found_TE, gates, chosen = output
        bound_T = linear_bound(x_TK, weights["weight"], own_TE, U16)
        if not self._compare("router", module, found_TE, own_TE, bound_T, quantity="logits"):
            return
        # Rounding may exchange two experts if their logits differ by at most twice the bound. So the lowest of
        # transformers' logits among the engine's experts may be that much below the lowest among its own experts
        lowest_own_T = own_TE.gather(-1, own_chosen).amin(-1)
        lowest_engine_T = own_TE.gather(-1, chosen.long()).amin(-1)
        is_explained = bool((lowest_own_T - lowest_engine_T <= 2 * bound_T).all())
        if not self._findings.note(is_explained, self._names[module], "chosen experts"):
            return
        # Sort each token's experts, because the two sides may list the same experts in different orders
        experts, order = chosen.long().sort(-1)
        own_experts, own_order = own_chosen.long().sort(-1)
        same_T = (experts == own_experts).all(-1)
        found = gates.gather(-1, order)[same_T]
        computed = own_gates.gather(-1, own_order)[same_T]
        # If each logit changes by at most b, a softmax changes by at most the factor exp(2 b)
        bound = computed * (torch.expm1(2 * bound_T[same_T, None]) + 4 * U16)
        if len(found):
            self._compare("router", module, found, computed, bound, quantity="gate weights")

    def _experts(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        """Compare the output of a layer's experts. Both sides get the engine's chosen experts and gate weights."""
        x, chosen, gates = (*args, *kwargs.values())  # transformers passes them by position or by name
        dtype = module.gate_up_proj.dtype
        x = x.to(dtype)
        gates = gates.to(dtype)
        in_fp8 = self._names[module] in self._forward.recipe.fp8_experts
        kind = "FP8 experts" if in_fp8 else "experts"
        unit = U8 if in_fp8 else U16
        computed = own(x, chosen, gates)
        # Change each element of the input up or down by the fraction `unit`, `DRAWS` times
        generator = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(2, (DRAWS, *x.shape), generator=generator).to(x) - 1
        responses = [own(x * (1 + unit * sign), chosen, gates) - computed for sign in signs]
        bound_T = experts_bound(torch.stack(responses), computed)
        self._compare(kind, module, output, computed, bound_T)

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

        `states` are q and k before the rotation, `rotated` are q and k after the engine's rotation. `apply` is
        transformers' function that rotates q and k by `cos_sin`.
        """
        with torch.autocast(cos_sin[0].device.type, enabled=False):
            own = apply(*(state.float() for state in states), *cos_sin)
        for which, state, found, computed in zip("qk", states, rotated, own, strict=True):
            # A rotated channel is the sum of two channels times cos and sin. The angles, the products and the sum are
            # rounded to BF16. Only `apply` knows which two channels it adds, so the bound holds for any two channels
            largest_cos = cos_sin[0].abs().max().item()
            largest = 2 * largest_cos * state.float().abs().amax(-1, keepdim=True)
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

    The first term assumes the largest possible error of each product. If rounding errors are spread evenly over a
    step, the mean square of a product's error is at most a sixth of the largest error's square, so rounding stays
    below the bound. The second term covers outputs and partial sums, which are BF16. If the engine had another weight,
    the error would be as large as y, and exceed the bound.

    In the formula |x| and |w| are larger than in the operands, by `SMALL` times the amax of the token and of the
    weight: that covers the rounding errors of small values.
    """
    weight_NK = weight_NK.detach()
    size_TK = x_TK.double().abs()
    x_squares_TK = (size_TK + SMALL * size_TK.amax(-1, keepdim=True)).square()
    weight_amax = max(weight_NK.max().item(), -weight_NK.min().item())
    weight_squares_K = torch.zeros(weight_NK.shape[1], dtype=torch.float64, device=weight_NK.device)  # sum over N
    for rows in weight_NK.split(ROWS):  # in FP64, without a copy of the whole weight
        weight_squares_K += (rows.abs().double() + SMALL * weight_amax).square().sum(0)
    of_operands_T = 4 * unit**2 * (x_squares_TK @ weight_squares_K)
    of_outputs_T = (2 * U16 * own_TN.double().norm(dim=-1)).square()
    return (of_operands_T + of_outputs_T).sqrt()


def experts_bound(responses_DTK: Tensor, own_TK: Tensor) -> Tensor:
    """Return the bound `[T]` on the norm of a token's errors in the output of experts.

    Experts are two products with an activation function between them, so four operands are rounded: the input, both
    weights, and the activation. `responses_DTK` are D changes of the output after every element of the input was
    changed by the fraction u, up or down at random. Each of the four roundings changes the output about as much. The
    four changes are independent, so their squares add up, to four times the square of one change: hence the factor 2.
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
    error = found.double() - own.double()
    bound = bound.double().clamp_min(1e-30)
    if bound.dim() < error.dim():
        ratio = (error.norm(dim=-1) / bound).square().mean().sqrt()
    else:
        ratio = (error.abs() / bound).max()
    return ratio.nan_to_num(nan=float("inf")).item()
