"""The check that the engine computes the policy's model: their modules are compared one by one, on the same inputs.

A policy that follows its engine has the engine's values, and so no mismatch, even if the engine computes another
model. For example, with `partial_rotary_factor=0.5` vLLM's Llama rotates half of a head's channels, and transformers
all of them. So after the first sync, before anything is sampled, the policy runs one short sequence, and two kinds of
quantities are compared:

    exactly            which keys a query sees; scaling and soft cap of scores; cos and sin of all angles, up to the
                       last position that a run can reach; eps of norms; act(gate) * up, by the engine's formula in
                       plain torch. These are read from the engine's model, without calling a kernel
    within rounding    outputs of all modules that call the engine, with those of transformers' forward of the same
                       module on the same inputs (values.py). Only for a policy that follows

A quantity is not compared if the engine does not have it, or stores it in an unknown place. `SameModel` calls
`compare_modules`, which scores a short text with the policy. Meanwhile `Witness.watching` compares each module right
after its call, because only then are sharded weights gathered. `Findings` (values.py) collects the differences.

With one forward a difference is an error, or a warning with fp8_forward_check='warn'. Values would come from one model
and gradients from another, and no mismatch would show it. Without one forward a difference is a warning, because
`mismatch/*` shows it, too.

Shape letters: P positions.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import AttentionHook, hooked
from trl_fp8.policy.swapped import scored_by
from trl_fp8.recipe.from_model import of_adapter
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.run.feature import Feature, as_rollouts_saw
from trl_fp8.sync.audit import all_reduce_max

from .between import RotaryCall
from .followed_head import followed_head
from .following import Following
from .one_forward import MLPS, OneForward, is_rotary, mlp_kind
from .values import U8, U16, Findings, Values, activation_bound


logger = get_logger(__name__)

TEXT = "In 1969 three people flew to the moon: 2 + 1 = 3. They came back after eight days, and the sea was calm."
TEXT_TOKENS = 32  # maximum number of tokens of `TEXT`
SHOWN = 6  # maximum number of differences in a message
POSITIONS = 256  # number of positions at which angles are compared
GATES = torch.linspace(-6, 6, 241)[:, None]  # inputs for activation functions


class SameModel(Feature):
    """Checks that the engine computes the policy's model.

    On a difference it raises `RuntimeError` if the policy follows the engine (unless fp8_forward_check='warn'), and
    warns otherwise.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self.witness: Witness | None = None  # made by the latest comparison
        self._is_compared = False

    def engine_part(self):
        if self.trainer.feature(Following):  # its engine part already provides the kernels
            return None
        from .engine_kernels import KernelsPart  # needs vllm

        return KernelsPart()

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        self._kernels = kernels

    def after_sync(self) -> None:
        if self._is_compared or self._kernels is None:  # without kernels there is nothing to compare with
            return
        following = self.trainer.feature(Following)
        forward = None if following is None else following.forward
        with hooked(self.trainer.model) as hook:
            self.witness = compare_modules(self.trainer, self._kernels, hook, forward)
        self._report(follows=following is not None)
        self._is_compared = True  # stays False if `_report` raises, so the next sync compares again

    def _report(self, follows: bool) -> None:
        """Raise or warn on every rank if any rank found a difference. Collective."""
        differences = torch.tensor(len(self.witness.findings.differences), device=self.trainer.accelerator.device)
        if self.trainer.accelerator.num_processes > 1:
            all_reduce_max(differences)
        if not differences:
            return
        named = listed(self.witness.findings.lines(), SHOWN, "\n  ") or "modules on another rank"
        kind = self.trainer.recipe.model_type
        if not follows:
            logger.warning(
                f"The engine computes a different model than the policy (type {kind!r}):\n  {named}\nRollouts will "
                "not be the policy's own, as mismatch/* will show. Train a model that both compute the same way."
            )
            return
        text = (
            f"fp8_forward='one_forward': the engine computes a different model than the policy (type {kind!r}). First "
            f"differences, on the same inputs:\n  {named}\nThe trainer would follow the engine's model, with no "
            "mismatch to show it. Set fp8_forward='off' (rollouts will still be those of a different model), or "
            "fp8_forward_check='warn' to go on."
        )
        if self.trainer.args.fp8_forward_check == "error":
            raise RuntimeError(text)
        logger.warning(text)


class Witness:
    """Compares the modules that run inside `watching`, and collects the results in `findings`.

    Args:
        model: The policy, in any wrappers.
        hook: The hook on the policy's attention.
        longest: Number of tokens of the longest sequence of the run.
        forward: Lets the policy follow the engine; None: it does not follow.
    """

    def __init__(
        self,
        model: nn.Module,
        kernels: EngineKernels,
        hook: AttentionHook,
        longest: int,
        forward: OneForward | None = None,
    ):
        self._model = model
        self._kernels = kernels
        self._hook = hook
        self._longest = longest
        self._forward = forward
        self.findings = Findings()
        self._names = {module: checkpoint_name(name) for name, module in model.named_modules()}
        self.values = None if forward is None else Values(forward, self._names, self.findings)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare the modules that run in the block, without dropout and without gradients."""
        decoder = set(self._hook.base.get_decoder().modules())
        training = self._model.training
        compared: dict[nn.Module, Callable] = {}
        for path, module in self._model.named_modules():
            if module in decoder and not of_adapter(path, self._model):
                if self._forward is None:  # for a policy that follows, the comparison of outputs covers definitions
                    self._compare_definitions(self._names[module], module)
                if is_rotary(module):
                    compared[module] = self._rotary
        if self._forward is not None:
            for module in self._forward.modules.values():
                compare = self.values.of(module)
                if compare is not None:
                    compared[module] = compare
        with torch.no_grad(), ExitStack() as handles, self._hook.watched(self._attention):
            handles.callback(self._model.train, training)  # restores the mode after the block
            self._model.eval()
            for module, compare in compared.items():
                # Prepend this hook: it has to run before the hooks of FSDP2 and ZeRO-3, which shard the weights again
                hook = partial(self._call, compare)
                handles.enter_context(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
            yield

    def _compare_definitions(self, name: str, module: nn.Module) -> None:
        """Compare the eps of a norm, or the formula of act(gate) * up."""
        own_eps = vars(module).get("variance_epsilon", vars(module).get("eps"))  # transformers' names
        if own_eps is not None:
            engine_eps = self._kernels.eps(name)
            if engine_eps is not None:
                self.findings.compare_numbers(name, "eps", own_eps, engine_eps)
        mlp = mlp_kind(module)
        if mlp is not None:
            up = torch.ones_like(GATES)
            found = self._kernels.reference_activation(name, torch.cat([GATES, up], -1))
            if found is not None:
                act = getattr(module, MLPS[mlp][-1])
                product = act(GATES)  # act(gate) * up, because up is 1
                bound = activation_bound(product, GATES, up)
                self.findings.compare_outputs("activation", name, found, product, bound, "activation, act(gate) * up")

    def _call(self, compare: Callable, module: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
        """Call `compare` after a call of `module`. Return a replacement of `output`; None keeps `output`."""
        if self._forward is None:
            own_class = type(module)
            not_following = nullcontext()
        elif self._forward.on:
            own_class = module.before  # transformers' class, whose forward calls no engine
            not_following = self._forward.switched(on=False)
        else:
            # The comparison of an outer module is running transformers' forward, which called this module
            return None
        with not_following, torch.autocast(self._hook.device.type, enabled=False):
            return compare(module, partial(own_class.forward, module), args, kwargs, output)

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
        findings = self.findings
        name = self._names[module]
        layer = module.layer_idx
        scaling, window, softcap = self._kernels.scores(layer)
        own_scaling = options.get("scaling") or states[0].shape[-1] ** -0.5
        # A scaling of 1 may mean that the queries are already scaled, as OPT's are. No policy that follows does that
        if own_scaling != 1 or self._forward is not None:
            findings.compare_numbers(name, "scaling of scores", own_scaling, scaling)
        cap = options.get("softcap")
        quantity = "soft cap of scores"
        if cap and self._forward is None and self._hook.implementation == "sdpa":
            # torch's SDPA applies no soft cap, whatever the config says. A policy that follows does not use SDPA
            cap = None
            quantity = "soft cap of scores, for which attn_implementation has to be 'eager'"
        findings.compare_numbers(name, quantity, cap, softcap)
        if mask is not None and "sees" in vars(mask):
            compare_window(findings, name, mask.sees, window, self._longest - 1, self._hook.device)
        if self._forward is None:
            return
        with torch.autocast(self._hook.device.type, enabled=False):
            query, key, value = (state.float() for state in states)
            own = attend(module, query, key, value, mask, **options)[0]
            magnitudes = attend(module, query, key, value.abs(), mask, **options)[0]  # weighted means of |v|
        # The output is a weighted mean of v, and is rounded to BF16 twice. Over an FP8 cache, kernels also round the
        # weights to e4m3. Scores are FP32 sums, whose rounding changes a weight by less
        unit = 2 * U16
        in_fp8 = self._hook.scales_L3 is not None and layer not in self._hook.skip_layers
        if in_fp8:
            unit += U8
        bound = unit * magnitudes
        findings.compare_outputs("attention", name, output, own, bound, "output of attention")

    def _rotary(self, module: nn.Module, own: Callable, args: tuple, kwargs: dict, output: tuple) -> tuple | None:
        """Compare cos and sin at positions from 0 to the last position of the longest sequence.

        Return a replacement of `output` that also compares rotated q and k; None keeps `output`.
        """
        x, position_ids, *rest = (*args, *kwargs.values())  # transformers passes them by position or by name
        layer_type = rest[0] if rest else None
        positions = torch.linspace(0, self._longest - 1, min(POSITIONS, self._longest), device=x.device).long()
        # Some models have several kinds of positions, in leading dims of `position_ids`
        probe = positions.expand(*position_ids.shape[:-2], 1, len(positions))
        angles = own(x[:1, :1].float(), probe, *rest)
        if isinstance(angles, Tensor):  # complex numbers (DeepSeek-V2), which no policy that follows has
            return None
        # `[P, angles]` each. Take the first kind of positions, because `probe` has the same ones for each kind
        cos_sin = tuple(part.reshape(-1, len(positions), part.shape[-1])[0] for part in angles)
        types = getattr(module.config, "layer_types", None) or []
        names = {attention.layer_idx: self._names[attention] for attention in self._hook.attention}
        same = True
        for layer in self._hook.kv_layers:
            if layer_type is None or types[layer] == layer_type:
                engine = self._kernels.angles(layer, positions)
                if engine is not None:
                    same &= compare_angles(self.findings, names[layer], positions, cos_sin, engine)
        if self._forward is None or not same:  # if angles differ, rotated q and k differ, too
            return None
        call = WitnessedRotaryCall(output[0], partial(self.values.rotated, self._names[module]))
        return call, call  # in place of cos and sin, as `FollowedRotary` returns a `RotaryCall`


class WitnessedRotaryCall(RotaryCall):
    """A `RotaryCall` that also compares its result."""

    def __init__(self, call: RotaryCall, compare: Callable):
        self._call, self._compare = call, compare

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotated = self._call(apply, query, key)
        self._compare(apply, self._call.cos_sin, (query, key), rotated)
        return rotated


def compare_modules(trainer: Any, kernels: EngineKernels, hook: AttentionHook, forward: OneForward | None) -> Witness:
    """Run a short text through the policy, and return the comparison of its modules with the engine's.

    `forward` lets the policy follow the engine; None: it does not follow.
    """
    positions = hook.base.config.get_text_config().max_position_embeddings
    longest = trainer.args.vllm_max_model_length or positions
    witness = Witness(trainer.model, kernels, hook, longest, forward)
    with torch.no_grad(), ExitStack() as around:
        if forward is not None:
            # Follow the engine, with its rounding of the KV cache, and compare the output head, too
            around.enter_context(as_rollouts_saw(trainer.features))
            around.enter_context(forward.switched(on=True))
            around.enter_context(scored_by(followed_head(forward, witness.values.head)))
        around.enter_context(witness.watching())
        # The same short text on all ranks. `score_alone` calls TRL's own method, so no other feature observes the pass
        tokens = trainer._tokenizer(TEXT)["input_ids"][: min(TEXT_TOKENS, longest)]
        ids = torch.tensor([tokens], device=trainer.accelerator.device)
        mask = torch.ones_like(ids)
        trainer.score_alone(ids, mask, len(tokens) - 1)
    return witness


def compare_window(findings: Findings, name: str, sees: Callable, window: int | None, last: int, device) -> None:
    """Compare which keys a query sees, for queries at the first, middle and last positions and at the window's edge.

    Args:
        sees: The policy's rule; see `AttentionHook.watched`.
        window: Number of tokens that a query of the engine sees, its own included; None: all tokens up to its own.
        last: The last position of a run.
    """
    key = torch.arange(last + 1, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    positions = [0, 1, last // 2, last]
    if window is not None:
        positions += [window - 1, window, window + 1]
    for query in sorted({min(position, last) for position in positions}):
        own = sees(zero, zero, key[query], key).expand(key.shape)  # of sequence 0 and head 0
        engine = key <= query
        if window is not None:
            engine = engine & (key > query - window)
        counts = f"a query at position {query} sees {int(own.sum())} keys, the engine's {int(engine.sum())}"
        if not findings.note(torch.equal(own, engine), name, f"window of attention ({counts})"):
            return


def compare_angles(
    findings: Findings, name: str, positions: Tensor, own: tuple[Tensor, ...], engine: tuple[Tensor, ...]
) -> bool:
    """Compare cos and sin `[P, angles]` of both sides. Return whether they are the same.

    The engine has each angle once. transformers may have each angle twice, in two equal halves or interleaved.
    """
    width, angles = own[0].shape[-1], engine[0].shape[-1]
    turned = f"the policy turns {width} of a head, the engine {2 * angles}"
    if not findings.note(width in (angles, 2 * angles), name, f"turned channels ({turned})"):
        return False
    orders = [slice(None)]
    if width != angles:
        orders = [slice(angles), slice(None, None, 2)]  # one of two halves; one of two interleaved copies
    # The first term covers an engine that stores cos and sin in BF16. The second covers the angles: each side rounds
    # the FP32 frequency, and its product with the position
    bound = U16 * engine[0].abs().max().item() + 2.0**-22 * positions[:, None]
    best_P = None  # each position's largest ratio of an error to the bound, in the order that fits best
    for order in orders:
        errors = [(mine[:, order] - theirs.float()).abs() / bound for mine, theirs in zip(own, engine, strict=True)]
        error_P = torch.cat(errors, -1).amax(-1)
        if best_P is None or error_P.max() < best_P.max():
            best_P = error_P
    wrong = positions[best_P > 1].tolist()
    first_wrong = wrong[0] if wrong else None
    return findings.note(not wrong, name, f"rotary angles (from position {first_wrong} on)")
