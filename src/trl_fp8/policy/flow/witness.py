"""Whether the engine computes what the policy's own modules compute, module by module, on the same inputs.

A policy that calls its engine has the engine's values, and so no mismatch, whatever model the engine's class computes:
vLLM's Llama turns all channels of a head where transformers turns half of them, say. So before anything is sampled the
policy runs one short sequence, and each module is compared with the forward that transformers wrote for it:

    structure    window, scaling and soft cap of attention, angles of rotary embeddings     exactly
    values       all modules that call the engine, each on the engine's inputs              within rounding (bounds.py)

Values are there only for a policy that follows. Of others structure is compared, which calls no module of the engine.
Each module is compared while it runs: weights that are sharded are there then, and none is copied.

Shape letters: B sequences, T tokens, H heads, D head size, K in-features, N out-features, P positions, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from trl_fp8.policy.attention.hook import AttentionHook
from trl_fp8.policy.base.shared import SharedLinear
from trl_fp8.quantization.blockwise import dequantize_weight
from trl_fp8.recipe.names import checkpoint_name

from . import bounds
from .adapter import FollowedAdapter
from .between import (
    FollowedEmbedding,
    FollowedFusedMLP,
    FollowedMLP,
    FollowedNorm,
    FollowedParallelLayer,
    FollowedRotary,
    Turn,
    side_by_side,
)
from .experts import FollowedExperts, FollowedRouter
from .kernels import EngineKernels
from .linear import FollowedLinear, tokens_of
from .one_forward import OneForward, is_rotary
from .own_gradient import holding
from .swapped import restore, swap


POSITIONS = 256  # at which angles are compared, spread over all that a run can reach
TINY = 2.0**-20  # mean square of rows that show a norm's eps
DRAWS = 4


@dataclass(frozen=True)
class Difference:
    """What the engine computes otherwise."""

    module: str  # checkpoint name
    quantity: str  # of that module, with what both sides have

    def __str__(self) -> str:
        return f"{self.module}: {self.quantity}"


@dataclass(frozen=True)
class Agreement:
    """How near the outputs of one kind of module came."""

    module: str  # the one with the largest `excess`
    excess: float  # error over its bound
    relative: float  # norm of the error over that of the output


class Witness:
    """`differences` of the modules that ran inside of `watching`.

    Args:
        model: The policy, in whatever wrappings.
        hook: Of its attention.
        longest: Tokens of the longest sequence of the run: beyond it nothing matters.
        forward: What lets the policy follow the engine; None if it does not.
    """

    def __init__(
        self,
        model: nn.Module,
        kernels: EngineKernels,
        hook: AttentionHook,
        longest: int,
        forward: OneForward | None = None,
    ):
        self._model, self._kernels, self._hook, self._longest = model, kernels, hook, longest
        self._forward, self._busy = forward, False
        self.differences: list[Difference] = []
        self.agreements: dict[str, Agreement] = {}  # by kind of module
        self.compared = 0  # comparisons that were made
        self._names = {module: checkpoint_name(name) for name, module in model.named_modules()}
        self._attention = ""  # the layer that runs

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what runs in the block."""
        swapped = []
        before = {module: module.training for module in self._model.modules()}
        self._model.eval()  # no dropout
        try:
            for module, compare in self._compared():
                swap(module, Witnessed, witness=self, compare=compare)
                swapped.append(module)
            with self._hook.watched(self._attend):
                yield
        finally:
            for module in swapped:
                restore(module)
            for module, training in before.items():
                module.training = training

    def _compared(self) -> Iterator[tuple[nn.Module, Callable]]:
        if self._forward is None:
            rotary = [module for module in self._hook.base.get_decoder().modules() if is_rotary(module)]
            yield from ((module, self._rotary) for module in rotary)
            return
        for module in self._forward.modules.values():
            if isinstance(module, FollowedLinear) and module.adapted:
                continue  # its wrapper is compared
            yield module, next(compare for kind, compare in self._kinds.items() if isinstance(module, kind))

    @property
    def _kinds(self) -> dict[type, Callable]:
        return {
            FollowedAdapter: self._linear,
            FollowedLinear: self._linear,
            FollowedNorm: self._norm,
            FollowedMLP: self._mlp,
            FollowedFusedMLP: self._mlp,
            FollowedParallelLayer: self._sum,
            FollowedEmbedding: self._embedding,
            FollowedRotary: self._rotary,
            FollowedRouter: self._router,
            FollowedExperts: self._experts,
        }

    def note(self, module: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
        """`output`, which `module` has computed, or what stands for it."""
        if self._busy:  # within another module's own forward
            return output
        original = type(module).before if self._forward is None else type(module).before.before
        follows = self._forward.switched(on=False) if self._forward else nullcontext()
        self._busy = True
        try:
            with torch.no_grad(), torch.autocast(self._hook.device.type, enabled=False), follows:
                made = module.compare(module, partial(original.forward, module), args, kwargs, output)
        finally:
            self._busy = False
        return output if made is None else made

    # structure

    def _attend(
        self,
        attend: Callable,
        module: nn.Module,
        states: tuple[Tensor, ...],
        mask: Tensor | None,
        options: dict,
        out: Tensor,
    ) -> None:
        """Attention of one layer, after it ran; see `AttentionHook.watched`."""
        if self._busy:
            return
        name, (of_engine, window, softcap) = self._names[module], self._kernels.scores(module.layer_idx)
        scaling = options.get("scaling")
        own = {
            "scaling of scores": states[0].shape[-1] ** -0.5 if scaling is None else scaling,
            "soft cap of scores": options.get("softcap") if self._caps else None,
        }
        theirs = {"scaling of scores": of_engine, "soft cap of scores": softcap}
        for quantity, value in own.items():
            self.compared += 1
            if abs((value or 0) - (theirs[quantity] or 0)) > 1e-6 * abs(value or 0):
                self._differs(name, f"{quantity} ({_of(value)}, the engine's {_of(theirs[quantity])})")
        if mask is not None and "sees" in vars(mask):
            self._window(name, mask.sees, window)
        if self._forward is None:
            return
        self._busy = True
        try:
            with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
                query, key, value = (state.float() for state in states)
                own_output, magnitudes = (
                    attend(module, query, key, of, mask, **options)[0] for of in (value, value.abs())
                )
        finally:
            self._busy = False
        cached = self._hook.scales_L3 is not None and module.layer_idx not in self._hook.skip_layers
        bound = bounds.attention_bound(magnitudes, cached)
        self._values("attention", name, "output of attention", out, own_output, bounds.excess(out, own_output, bound))

    @property
    def _caps(self) -> bool:
        """Whether the policy's scores are capped where its config wants it: torch's attention does not, but a policy
        that follows never calls it.
        """
        return self._forward is not None or self._hook.implementation != "sdpa"

    def _window(self, name: str, sees: Callable, window: int | None) -> None:
        """`window`: tokens that the engine's queries see; None: all before them."""
        last = self._longest - 1
        widths = [width for width in (window,) if width is not None]
        queries = sorted({min(q, last) for q in (0, 1, last // 2, last, *(w + d for w in widths for d in (-1, 0, 1)))})
        self.compared += 1
        for query in queries:
            key = torch.arange(last + 1, device=self._hook.device)
            zero, position = key.new_zeros(()), key.new_tensor(query)
            own = sees(zero, zero, position, key)
            theirs = (key <= query) if window is None else (key <= query) & (key > query - window)
            if not torch.equal(own.expand(theirs.shape), theirs):
                seen = f"a query at position {query} sees {int(own.sum())} keys, the engine's {int(theirs.sum())}"
                self._differs(name, f"window ({seen})")
                return

    def _rotary(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> tuple | None:
        x, position_ids, *layer_type = *args, *kwargs.values()
        positions = torch.linspace(0, self._longest - 1, min(POSITIONS, self._longest), device=x.device).long()
        probe = positions.expand(*position_ids.shape[:-2], 1, len(positions))
        cos, sin = (
            part.reshape(-1, len(positions), part.shape[-1])[0] for part in own(x[:1, :1].float(), probe, *layer_type)
        )
        types = getattr(module.config, "layer_types", None) or []
        wanted = [n for n in self._hook.kv_layers if not layer_type or types[n] == layer_type[0]]
        for layer in wanted:
            if (found := self._kernels.angles(layer, positions)) is not None:
                self.compared += 1
                self._angles(f"{self._names[module]}, layer {layer}", positions, (cos, sin), found)
        if self._forward is None:
            return None
        turn = WitnessedTurn(self, *output[0].parts)
        return turn, turn

    def _angles(self, name: str, positions: Tensor, own: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
        """cos and sin `[P, channels]`; transformers may have each angle twice, in halves or in turns."""
        width, theirs = own[0].shape[-1], found[0].shape[-1]
        forms = [lambda t: t] if width == theirs else [lambda t: t[:, :theirs], lambda t: t[:, ::2]]
        if width not in (theirs, 2 * theirs):
            self._differs(name, f"turned channels (the policy turns {width} of a head, the engine {2 * theirs})")
            return
        bound = bounds.angle_bound(positions, found[0].abs().max().item())
        errors = [
            torch.cat([(form(mine) - its.float()).abs() / bound for mine, its in zip(own, found, strict=True)], -1)
            for form in forms
        ]
        error_P = min(errors, key=lambda error: error.max().item()).amax(-1)
        if error_P.max() > 1:
            first = int((error_P > 1).nonzero()[0])
            self._differs(name, f"angles (from position {int(positions[first])} on)")

    # values

    def _linear(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        weight = dequantize_weight(base.codes, torch.float32) if isinstance(base, SharedLinear) else base.weight
        for adapter in getattr(module, "active_adapters", ()):
            if adapter in module.lora_A:
                weight = weight.float() + module.get_delta_weight(adapter).float()
        computed = own(args[0].to(base.weight.dtype))
        x_TK, own_TN, found_TN = (rows.flatten(0, -2) for rows in (args[0], computed, output))
        unit = bounds.U8 if base.is_fp8 else bounds.U16
        bound_T = bounds.linear_bound(x_TK, weight, own_TN, unit)
        kind = "FP8 linear" if base.is_fp8 else "linear"
        excess = bounds.excess_of_rows(found_TN, own_TN, bound_T)
        self._values(kind, base.name, "output", found_TN, own_TN, excess)

    def _norm(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        [x] = args
        x = x.to(torch.bfloat16)
        tiny = x * (TINY / x.float().square().mean(-1, keepdim=True).clamp_min(1e-30)).sqrt()
        for rows, quantity in (x, "output"), (tiny.to(torch.bfloat16), "eps"):
            found = module._value(rows)
            with _in_bf16(module):
                computed = own(rows.float())
            excess = bounds.excess(found, computed, bounds.norm_bound(computed))
            said = quantity if quantity == "output" else f"eps (output for rows whose mean square is {TINY:.1g})"
            if not self._values("norm", self._names[module], said, found, computed, excess):
                return

    def _mlp(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        x, seen = args[0].to(module.down_proj.weight.dtype), {}

        def rounded(linear: nn.Module, args: tuple, output: Tensor) -> Tensor:
            seen[linear] = output.to(torch.bfloat16)
            return seen[linear].float()

        def reached(linear: nn.Module, args: tuple) -> tuple[Tensor]:
            seen["act"] = args[0]
            return (args[0].to(x.dtype),)

        names = ("gate_up_proj",) if isinstance(module, FollowedFusedMLP) else ("gate_proj", "up_proj")
        linears = [getattr(module, name) for name in names]
        handles = [linear.register_forward_hook(rounded) for linear in linears]
        handles.append(module.down_proj.register_forward_pre_hook(reached))
        try:
            own(x)
        finally:
            for handle in handles:
                handle.remove()
        parts = [seen[linear] for linear in linears]
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        found, computed = module.engine(side_by_side(gate, up)), seen["act"].flatten(0, -2)
        gate, up = gate.flatten(0, -2).float(), up.flatten(0, -2).float()
        excess = bounds.excess(found, computed, bounds.activation_bound(computed, gate, up))
        self._values("activation", self._names[module], "activation, act(gate) * up", found, computed, excess)

    def _sum(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        hidden = args[0].float()
        with self._forward.switched(on=True):
            computed = own(hidden, *args[1:], **kwargs)
        excess = bounds.excess(output, computed, bounds.sum_bound(computed, hidden))
        self._values("residual sum", self._names[module], "output", output, computed, excess)

    def _embedding(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        computed = own(*args, **kwargs).float()
        excess = bounds.excess(output, computed, bounds.lookup_bound(computed))
        self._values("embedding", self._names[module], "output", output, computed, excess)

    def _router(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> None:
        name, x = self._names[module], args[0].float()
        with _in_bf16(module) as weights:
            logits_TE, own_TK, chosen_TK = own(x)
        found_TE, gates_TK, used_TK = output
        bound_T = bounds.linear_bound(x.flatten(0, -2), weights["weight"], logits_TE, bounds.U16)
        excess = bounds.excess_of_rows(found_TE, logits_TE, bound_T)
        if not self._values("router", name, "logits", found_TE, logits_TE, excess):
            return
        # Two experts whose logits are within rounding may stand for each other
        least_T = logits_TE.gather(-1, chosen_TK).amin(-1)
        worst_T = logits_TE.gather(-1, used_TK.long()).amin(-1)
        excess = ((least_T - worst_T) / (2 * bound_T)).max().item()
        if excess > 1:
            self._differs(name, "chosen experts")
            return
        order, own_order = (chosen.long().sort(-1) for chosen in (used_TK, chosen_TK))
        same_T = (order.values == own_order.values).all(-1)
        gates, own_gates = gates_TK.gather(-1, order.indices)[same_T], own_TK.gather(-1, own_order.indices)[same_T]
        bound = own_gates * (torch.expm1(2 * bound_T[same_T, None]) + 4 * bounds.U16)
        if len(gates):
            self._values("router", name, "gate weights", gates, own_gates, bounds.excess(gates, own_gates, bound))

    def _experts(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: Tensor) -> None:
        name, (x, chosen, weights) = self._names[module], (*args, *kwargs.values())
        dtype, in_fp8 = module.gate_up_proj.dtype, self._names[module] in self._forward.recipe.fp8_experts
        x, weights = x.to(dtype), weights.to(dtype)
        computed = own(x, chosen, weights)
        unit = bounds.U8 if in_fp8 else bounds.U16
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (DRAWS, *x.shape), generator=generator).to(x) * 2 - 1
        responses = torch.stack([own(x * (1 + unit * sign), chosen, weights) - computed for sign in signs])
        bound_T = bounds.experts_bound(responses, computed)
        excess = bounds.excess_of_rows(output, computed, bound_T)
        self._values("FP8 experts" if in_fp8 else "experts", name, "output", output, computed, excess)

    def head(
        self, hidden_TK: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
    ) -> None:
        """The output head: what transformers makes of it is the product, times `scale`, and capped by `softcap`."""
        with torch.no_grad(), torch.autocast(hidden_TK.device.type, enabled=False):
            x_TK, found_TV = tokens_of(hidden_TK), self._kernels.logits(tokens_of(hidden_TK)).float()
            found_TV = found_TV[:, : len(weight)]
            computed = nn.functional.linear(x_TK.to(weight.dtype), weight, bias).float() * scale
            bound_T = bounds.linear_bound(x_TK, weight, computed / scale, bounds.U16) * abs(scale)
            if softcap is not None:
                computed = softcap * torch.tanh(computed / softcap)  # moves no value by more than it was moved
            excess = bounds.excess_of_rows(found_TV, computed, bound_T + 2 * bounds.U16 * computed.norm(dim=-1))
        self._values("output head", "lm_head", "logits, scaled and capped", found_TV, computed, excess)

    def turned(self, apply: Callable, cos_sin: tuple, states: tuple[Tensor, ...], turned: tuple[Tensor, ...]) -> None:
        """q and k, after the engine turned them."""
        if self._busy:
            return
        name, largest = "rotary embedding", cos_sin[0].abs().max().item()
        with torch.autocast(cos_sin[0].device.type, enabled=False):
            own = apply(*(state.float() for state in states), *cos_sin)
        for which, state, found, computed in zip("qk", states, turned, own, strict=True):
            excess = bounds.excess(found, computed, bounds.turned_bound(state.float(), largest))
            self._values("rotary", name, f"turned {which}", found, computed, excess)

    def _values(self, kind: str, module: str, quantity: str, found: Tensor, own: Tensor, excess: float) -> bool:
        """Note how near two outputs are; False if rounding does not explain it."""
        self.compared += 1
        relative = ((found.double() - own.double()).norm() / own.double().norm().clamp_min(1e-30)).item()
        if kind not in self.agreements or excess > self.agreements[kind].excess:
            self.agreements[kind] = Agreement(module, excess, relative)
        if excess <= 1:
            return True
        self._differs(
            module, f"{quantity} (error {relative:.2g} of its size, {excess:.1f} times what rounding explains)"
        )
        return False

    def _differs(self, module: str, quantity: str) -> None:
        self.differences.append(Difference(module, quantity))


class Witnessed:
    """Mixed into the class of a module that is compared."""

    witness: Witness
    compare: Callable

    def forward(self, *args, **kwargs):
        return self.witness.note(self, args, kwargs, super().forward(*args, **kwargs))


class WitnessedTurn(Turn):
    """A `Turn` that is compared."""

    def __init__(self, witness: Witness, *parts):
        super().__init__(*parts)
        self._witness = witness

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        turned = super().__call__(apply, query, key)
        self._witness.turned(apply, self._cos_sin, (query, key), turned)
        return turned


@contextmanager
def _in_bf16(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside the block the module's own parameters are what the engine was sent, BF16 numbers, in FP32."""
    rounded = {name: p.to(torch.bfloat16).float() for name, p in module.named_parameters(recurse=False)}
    with holding(module, rounded):
        yield rounded


def _of(value: float | None) -> str:
    return "none" if not value else f"{value:.6g}"
