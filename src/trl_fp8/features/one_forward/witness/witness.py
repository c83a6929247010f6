"""Comparison of the engine's modules with the policy's own, one by one, on the same inputs.

A policy that calls its engine has the engine's values, and so no mismatch, whatever model the engine's class computes.
For example, vLLM's Llama turns half of a head's channels where transformers turns all of them. So before anything is
sampled the policy runs one short sequence, and each module is compared with its own forward, as transformers wrote it:

    structure.py   windows, scaling and soft caps of attention, rotary angles, eps, activations       exactly
    values.py      outputs of all modules that call the engine, on the engine's inputs                within rounding

Values are compared of a policy that follows. Of others only structure is, for which no module of the engine is called.
Each module is compared while it runs, because sharded weights are gathered then.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.features.one_forward.modules.between import RotaryCall
from trl_fp8.features.one_forward.one_forward import OneForward, is_rotary
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.recipe.from_model import of_adapter
from trl_fp8.recipe.names import checkpoint_name

from .bounds import U8, U16
from .findings import Findings
from .structure import compare_activation, compare_angles, compare_eps, compare_window
from .values import Values


POSITIONS = 256  # at which angles are compared


class Witness:
    """`findings` on what ran inside of `watching`.

    Args:
        model: The policy, in whatever wrappings.
        hook: Of its attention.
        longest: Tokens of the longest sequence of the run.
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
        self._forward, self.findings = forward, Findings()
        self._names = {module: checkpoint_name(name) for name, module in model.named_modules()}
        self.values = None if forward is None else Values(forward, self._names, self.findings)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what runs in the block, which is without dropout and without gradients."""
        decoder, training = set(self._hook.base.get_decoder().modules()), self._model.training
        compared: dict[nn.Module, Callable] = {}
        for path, module in self._model.named_modules():
            if module in decoder and not of_adapter(path, self._model):
                if self._forward is None:  # of one that follows the values show both
                    compare_eps(self.findings, self._names[module], module, self._kernels)
                    compare_activation(self.findings, self._names[module], module, self._kernels)
                if is_rotary(module):
                    compared[module] = self._rotary
        for module in self._forward.modules.values() if self._forward else ():
            if (compare := self.values.of(module)) is not None:
                compared[module] = compare
        with torch.no_grad(), ExitStack() as handles, self._hook.watched(self._attention):
            handles.callback(self._model.train, training)
            self._model.eval()
            for module, compare in compared.items():
                # Before the hooks of FSDP2 and ZeRO-3, which shard the weights again
                hook = partial(self._call, compare)
                handles.enter_context(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
            yield

    def _call(self, compare: Callable, module: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
        """After a call of `module`: compare, and return what takes the place of `output`, None to keep it."""
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
        """One layer of attention; see `AttentionHook.watched`."""
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
        if mask is not None and (sees := vars(mask).get("sees")) is not None:
            compare_window(findings, name, sees, window, self._longest - 1, self._hook.device)
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
        """cos and sin at positions of the whole run; returns what turns q and k, and compares that."""
        x, position_ids, *layer_type = (*args, *kwargs.values())
        positions = torch.linspace(0, self._longest - 1, min(POSITIONS, self._longest), device=x.device).long()
        probe = positions.expand(*position_ids.shape[:-2], 1, len(positions))  # some models count in several ways
        made = own(x[:1, :1].float(), probe, *layer_type)
        if isinstance(made, Tensor):  # complex numbers, which no policy that follows has (DeepSeek-V2)
            return None
        cos_sin = tuple(part.reshape(-1, len(positions), part.shape[-1])[0] for part in made)
        types = getattr(module.config, "layer_types", None) or []
        layers, agree = {attention.layer_idx: self._names[attention] for attention in self._hook.attention}, True
        for layer in self._hook.kv_layers:
            concerned = not layer_type or layer_type[0] is None or types[layer] == layer_type[0]
            if concerned and (engine := self._kernels.angles(layer, positions)) is not None:
                agree &= compare_angles(self.findings, layers[layer], positions, cos_sin, engine)
        if self._forward is None or not agree:  # by other angles q and k are turned otherwise
            return None
        turn = WitnessedRotaryCall(output[0], partial(self.values.turn, self._names[module]))
        return turn, turn


class WitnessedRotaryCall(RotaryCall):
    """A `RotaryCall` that is compared."""

    def __init__(self, turn: RotaryCall, compare: Callable):
        self._turn, self._compare = turn, compare

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        turned = self._turn(apply, query, key)
        self._compare(apply, self._turn.cos_sin, (query, key), turned)
        return turned
