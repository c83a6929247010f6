"""Comparison of the engine's modules with the policy's own, one by one, on the same inputs.

A policy that calls its engine has the engine's values, and so no mismatch, whatever model the engine's class computes.
For example, vLLM's Llama turns half of a head's channels where transformers turns all of them. So before anything is
sampled the policy runs one short sequence, and each module is compared with its own forward, as transformers wrote it:

    exactly            which keys a query sees, scaling and soft cap of scores; cos and sin of all angles, up to the
                       last position that a run can reach; eps of norms; act(gate) * up by the engine's definition of
                       it in plain torch. No module of the engine is called for these
    within rounding    outputs of all modules that call the engine, on the engine's inputs (values.py)

Values are compared only for a policy that follows. A quantity that the engine lacks, or keeps in another place, is not
compared. Each module is compared while it runs, because sharded weights are gathered then.

Shape letters: P positions.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.recipe.from_model import of_adapter
from trl_fp8.recipe.names import checkpoint_name

from .between import RotaryCall
from .one_forward import MLPS, OneForward, is_rotary, mlp_kind
from .values import U8, U16, Findings, Values, activation_bound


POSITIONS = 256  # at which angles are compared
EPS = "variance_epsilon", "eps"  # attributes of transformers' norms
GATES = torch.linspace(-6, 6, 241)[:, None]  # inputs of activation functions


class Witness:
    """Compares what runs inside of `watching`, and keeps the result in `findings`.

    `model` is the policy, in any wrappers, `hook` is on its attention, and `forward` lets it follow the engine
    (None: it does not). The longest sequence of the run has `longest` tokens.
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
        self._forward, self.findings = forward, Findings()
        self._names = {module: checkpoint_name(name) for name, module in model.named_modules()}
        self.values = None if forward is None else Values(forward, self._names, self.findings)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what runs in the block, without dropout and without gradients."""
        decoder, training = set(self._hook.base.get_decoder().modules()), self._model.training
        compared: dict[nn.Module, Callable] = {}
        for path, module in self._model.named_modules():
            if module in decoder and not of_adapter(path, self._model):
                if self._forward is None:  # else outputs show it
                    self._compare_definitions(self._names[module], module)
                if is_rotary(module):
                    compared[module] = self._rotary
        for module in self._forward.modules.values() if self._forward else ():
            compare = self.values.of(module)
            if compare is not None:
                compared[module] = compare
        with torch.no_grad(), ExitStack() as handles, self._hook.watched(self._attention):
            handles.callback(self._model.train, training)
            self._model.eval()
            for module, compare in compared.items():
                # Before the hooks of FSDP2 and ZeRO-3, which shard the weights again
                hook = partial(self._call, compare)
                handles.enter_context(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
            yield

    def _compare_definitions(self, name: str, module: nn.Module) -> None:
        """Compare the eps of a norm, or the definition of act(gate) * up."""
        own = next((vars(module)[attribute] for attribute in EPS if attribute in vars(module)), None)
        engine = None if own is None else self._kernels.eps(name)
        if engine is not None:
            self.findings.same(name, "eps", own, engine)
        if kind := mlp_kind(module):
            act, up = getattr(module, MLPS[kind][-1]), torch.ones_like(GATES)
            found, own = self._kernels.definition(name, torch.cat([GATES, up], -1)), act(GATES)
            if found is not None:
                bound = activation_bound(own, GATES, up)
                self.findings.values("activation", name, found, own, bound, "activation, act(gate) * up")

    def _call(self, compare: Callable, module: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
        """Compare after a call of `module`. Return what takes the place of `output`; None to keep it."""
        if self._forward is None:
            own, follows = type(module), nullcontext()
        elif self._forward.on:
            own, follows = module.before, self._forward.switched(on=False)
        else:  # inside of another module's own forward
            return None
        with follows, torch.autocast(self._hook.device.type, enabled=False):
            return compare(module, partial(own.forward, module), args, kwargs, output)

    def _attention(
        self,
        attend: Callable,
        module: nn.Module,
        states: tuple[Tensor, ...],
        mask: Tensor | None,
        options: dict,
        output: Tensor,
    ) -> None:
        """Compare one layer of attention; see `AttentionHook.watched`."""
        findings, name, layer = self.findings, self._names[module], module.layer_idx
        scaling, window, softcap = self._kernels.scores(layer)
        own_scaling = options.get("scaling") or states[0].shape[-1] ** -0.5
        if own_scaling != 1 or self._forward is not None:  # else its queries may come scaled, as OPT's do
            findings.same(name, "scaling of scores", own_scaling, scaling)
        cap, quantity = options.get("softcap"), "soft cap of scores"
        if cap and self._forward is None and self._hook.implementation == "sdpa":
            # torch's attention caps nothing, whatever a config says; a policy that follows never calls it
            cap, quantity = None, "soft cap of scores, for which attn_implementation has to be 'eager'"
        findings.same(name, quantity, cap, softcap)
        if mask is not None and "sees" in vars(mask):
            compare_window(findings, name, mask.sees, window, self._longest - 1, self._hook.device)
        if self._forward is None:
            return
        with torch.autocast(self._hook.device.type, enabled=False):
            query, key, value = (state.float() for state in states)
            own, magnitudes = (attend(module, query, key, v, mask, **options)[0] for v in (value, value.abs()))
        # The output is a weighted mean of v and is rounded to BF16 twice. Over an FP8 cache kernels round the weights
        # to e4m3, too. Scores are FP32 sums, which move a weight by less
        in_fp8 = self._hook.scales_L3 is not None and layer not in self._hook.skip_layers
        bound = (2 * U16 + (U8 if in_fp8 else 0)) * magnitudes
        findings.values("attention", name, output, own, bound, "output of attention")

    def _rotary(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> tuple | None:
        """Compare cos and sin at positions of the whole run. Return a call that also compares rotated q and k."""
        x, position_ids, *layer_type = (*args, *kwargs.values())
        positions = torch.linspace(0, self._longest - 1, min(POSITIONS, self._longest), device=x.device).long()
        probe = positions.expand(*position_ids.shape[:-2], 1, len(positions))  # some models count in several ways
        angles = own(x[:1, :1].float(), probe, *layer_type)
        if isinstance(angles, Tensor):  # complex numbers (DeepSeek-V2), in no policy that follows
            return None
        cos_sin = tuple(part.reshape(-1, len(positions), part.shape[-1])[0] for part in angles)
        types = getattr(module.config, "layer_types", None) or []
        names = {attention.layer_idx: self._names[attention] for attention in self._hook.attention}
        same = True
        for layer in self._hook.kv_layers:
            if not layer_type or layer_type[0] is None or types[layer] == layer_type[0]:
                engine = self._kernels.angles(layer, positions)
                if engine is not None:
                    same &= compare_angles(self.findings, names[layer], positions, cos_sin, engine)
        if self._forward is None or not same:  # with other angles q and k differ, too
            return None
        call = WitnessedRotaryCall(output[0], partial(self.values.rotated, self._names[module]))
        return call, call


class WitnessedRotaryCall(RotaryCall):
    """A `RotaryCall` whose result is compared."""

    def __init__(self, call: RotaryCall, compare: Callable):
        self._call, self._compare = call, compare

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotated = self._call(apply, query, key)
        self._compare(apply, self._call.cos_sin, (query, key), rotated)
        return rotated


def compare_window(findings: Findings, name: str, sees: Callable, window: int | None, last: int, device) -> None:
    """Compare which keys a query sees, at the first and last positions and around the edge of the window.

    `sees`: see `AttentionHook.watched`; `window`: tokens that the engine's queries see, None: all before them;
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
    """Compare cos and sin `[P, angles]` of both sides. Return whether they are the same.

    transformers may have each angle twice, one half after the other or interleaved.
    """
    width, angles = own[0].shape[-1], engine[0].shape[-1]
    turned = f"the policy turns {width} of a head, the engine {2 * angles}"
    if not findings.require(width in (angles, 2 * angles), name, f"turned channels ({turned})"):
        return False
    orders = [slice(None)] if width == angles else [slice(angles), slice(None, None, 2)]
    # The engine may hold cos and sin in BF16. An angle is its position times an FP32 number, and each side rounds that
    # number and the product
    bound = U16 * engine[0].abs().max().item() + 2.0**-22 * positions[:, None]
    best = None
    for order in orders:
        errors = [(mine[:, order] - theirs.float()).abs() / bound for mine, theirs in zip(own, engine, strict=True)]
        error_P = torch.cat(errors, -1).amax(-1)
        if best is None or error_P.max() < best.max():
            best = error_P
    wrong = positions[best > 1].tolist()
    return findings.require(not wrong, name, f"rotary angles (from position {wrong[0] if wrong else None} on)")
