"""Whether the engine computes what the policy's own modules compute, module by module, on the same inputs.

A policy that calls its engine has the engine's values, and so no mismatch, whatever model the engine's class computes:
vLLM's Llama turns half of a head's channels where transformers turns all of them, say. So before anything is sampled
the policy runs one short sequence, and each module is compared with the forward that transformers wrote for it:

    structure.py   windows, scaling and soft caps of attention, rotary angles, eps, activations       exactly
    values.py      outputs of all modules that call the engine, on the engine's inputs                within rounding

Values are there for a policy that follows. Of others structure is compared, for which no module of the engine is
called. Each module is compared while it runs: weights that are sharded are there then, and none is copied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.features.one_forward.modules.between import Turn
from trl_fp8.features.one_forward.one_forward import OneForward, is_rotary
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.policy.swapped import restore, swap
from trl_fp8.recipe.from_model import of_adapter
from trl_fp8.recipe.names import checkpoint_name

from . import bounds
from .findings import Findings
from .structure import POSITIONS, compare_angles, compare_layers, compare_window
from .values import Values


class Witness:
    """`findings` on what ran inside of `watching`.

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
        self._forward, self.findings = forward, Findings()
        self._names = {module: checkpoint_name(name) for name, module in model.named_modules()}
        self.values = None if forward is None else Values(forward, self._names, self.findings)
        self._layers = {module.layer_idx: self._names[module] for module in hook.attention}
        self._running: str | None = None  # layer of attention
        self._busy = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what runs in the block; without dropout."""
        decoder = set(self._hook.base.get_decoder().modules())
        inside = {
            self._names[module]: module
            for name, module in self._model.named_modules()
            if module in decoder and not of_adapter(name, self._model)
        }
        if self._forward is None:
            compare_layers(self.findings, inside, self._kernels)
        training = self._model.training
        self._model.eval()
        handles = [module.register_forward_pre_hook(self._enter) for module in self._hook.attention]
        swapped = []
        try:
            for module, compare in self._comparisons(inside):
                swap(module, Witnessed, witness=self, compare=compare)
                swapped.append(module)
            with self._hook.watched(self._attention):
                yield
        finally:
            for module in swapped:
                restore(module)
            for handle in handles:
                handle.remove()
            self._model.train(training)

    def _comparisons(self, inside: dict[str, nn.Module]) -> Iterator[tuple[nn.Module, Callable]]:
        yield from ((module, self._rotary) for module in inside.values() if is_rotary(module))
        for module in self._forward.modules.values() if self._forward else ():
            if (compare := self.values.of(module)) is not None:
                yield module, compare

    def note(self, module: "Witnessed", args: tuple, kwargs: dict, output: object) -> object:
        """What `module` gives in place of `output`, which it has computed."""
        if self._busy:  # inside of another module's own forward
            return output
        own = type(module).before if self._forward is None else type(module).before.before
        follows = self._forward.switched(on=False) if self._forward else nullcontext()
        with self._alone(), follows:
            made = module.compare(module, partial(own.forward, module), args, kwargs, output)
        return output if made is None else made

    def turned(self, apply: Callable, cos_sin: tuple, states: tuple, turned: tuple) -> None:
        if not self._busy:
            self.values.turn(self._running, apply, cos_sin, states, turned)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside the block nothing else is compared."""
        self._busy = True
        try:
            with torch.no_grad(), torch.autocast(self._hook.device.type, enabled=False):
                yield
        finally:
            self._busy = False

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._running = self._names[module]

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
        if self._busy:
            return
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
        with self._alone():
            query, key, value = (state.float() for state in states)
            own, magnitudes = (attend(module, query, key, v, mask, **options)[0] for v in (value, value.abs()))
        cached = self._hook.scales_L3 is not None and layer not in self._hook.skip_layers
        excess = bounds.excess(output, own, bounds.attention_bound(magnitudes, cached))
        findings.values("attention", name, "output of attention", output, own, excess)

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
        for layer in self._hook.kv_layers:
            concerned = not layer_type or layer_type[0] is None or types[layer] == layer_type[0]
            if concerned and (engine := self._kernels.angles(layer, positions)) is not None:
                compare_angles(self.findings, self._layers[layer], positions, cos_sin, engine)
        if self._forward is None:
            return None
        turn = WitnessedTurn(self, output[0])
        return turn, turn


class Witnessed:
    """Mixed into the class of a module that is compared."""

    witness: Witness
    compare: Callable

    def forward(self, *args, **kwargs):
        return self.witness.note(self, args, kwargs, super().forward(*args, **kwargs))


class WitnessedTurn(Turn):
    """A `Turn` that is compared."""

    def __init__(self, witness: Witness, turn: Turn):
        self._witness, self._turn = witness, turn

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        turned = self._turn(apply, query, key)
        self._witness.turned(apply, self._turn.cos_sin, (query, key), turned)
        return turned
