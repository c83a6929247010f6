"""Calibration: the scales of the engine's next KV cache, made of what the policy's attention sees.

vLLM 0.31 has no calibration of its own. Two sources of magnitudes, `kv_calibration`:

    rollout   the old-log-prob pass over the latest rollouts, which TRL runs anyway: no forward is added, every token
              is seen, but with the weights of one optimizer step ago
    policy    the new weights are run over a bounded number of tokens: the coming prompts and the latest rollouts

The latest rollouts are all that training generated at one step, never those of an evaluation. Before the first ones
both sources have only prompts. Of images they see the tokens, not the output of a vision tower, so with images
`policy` also uses the old-log-prob pass. That pass also counts the elements beyond the scales in force; in training
too many of them widen the margin.

What changes from call to call is one immutable `KVState`. Each of these returns the next one:

    state.expecting(prompts)              before each call of the engine
    next_scales(state, calibration, ...)  in a sync, for the coming prompts
    state.after_rollouts(...)             when all rollouts of a generation are there
    with state.watching(hook): ...        around the trainer's forwards over them (returns nothing)
    state.saturation(calibration)         when TRL's batch is complete
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import LOGIT_ERROR_LIMIT, QKV, KVScales, kv_scales_from_amax, outlier_layers

from .observation import QKVObservation, bounded, observe_sequences, reduce_together


logger = get_logger(__name__)

# Before the first rollouts only prompts can be observed, and completions reach further: 1.26 times the prompts'
# largest |q| on the addition demo. One more power of two costs a floating point format nothing.
PROMPTS_ONLY_MARGIN = 2.0
# Share of a layer's k or v elements beyond 448 * scale from which on the margin is doubled. A few clipped elements in
# a million do no harm; e4m3 has 15 powers of two to spare below them.
SATURATION_LIMIT = 1e-5
WIDEST_MARGIN_FACTOR = 16.0
STATE_FILE = "kv_calibration_{}.json"  # in a checkpoint, by rank
SAVED = ("step", "rollouts", "amax_L3", "saturated_L2", "margin_factor")  # fields of `KVState`


@dataclass(frozen=True)
class Calibration:
    """Settings of a calibration; the same during a run and on every rank."""

    hook: AttentionHook  # of the policy
    mode: str  # flag kv_calibration
    margin: float  # flag kv_scale_margin
    max_tokens: int  # flag kv_calibration_tokens
    pad_token_id: int = 0  # see `observe_sequences`, as for `fused_lm_head`
    fused_lm_head: bool = False
    has_images: bool = False  # which token ids do not show
    reduce_max: Callable[[Tensor], None] | None = None  # as for `reduce_together`


@dataclass(frozen=True)
class NewRollouts:
    """Rollouts that are not accounted for yet."""

    observation: QKVObservation  # of the trainer's forwards over them
    in_training: bool
    joins: bool  # the rollouts before them are of the same step
    margin_factor: float  # of the scales that they were sampled under


@dataclass(frozen=True, eq=False)
class KVState:
    """State that the next scales depend on, beside the weights. All but token ids is the same on every rank.

    The fields in `SAVED` are what training's generations have shown. A resumed run reads them back, and then
    calibrates as the uninterrupted one.
    """

    step: int = -1  # at which training generated last; -1: it did not yet
    rollouts: list[list[int]] = field(default_factory=list)  # of that step, bounded; mode 'policy'
    amax_L3: Tensor | None = None  # over all rollouts of that step; None: not seen, or not used in mode 'policy'
    saturated_L2: Tensor | None = None  # share of k, v of the latest rollouts beyond the scales of their cache
    margin_factor: float = 1.0  # saturation widens the margin by it: 1, 2, 4, ... 16

    coming_prompts: list[list[int]] | None = None  # token ids; None: not known yet
    margin: float | None = None  # of the latest scales; None: none were made yet
    factor_in_force: float = 1.0  # the `margin_factor` of the latest scales
    new: NewRollouts | None = None
    evaluation_warned: bool = False  # of saturation in an evaluation, once a run

    def expecting(self, prompts: list[list[int]]) -> "KVState":
        """Note the prompts that the engine is about to continue."""
        return replace(self, coming_prompts=prompts)

    def after_rollouts(
        self, calibration: Calibration, sequences: Sequence[Sequence[int]], scales: KVScales, step: int | None
    ) -> "KVState":
        """Note rollouts (token ids of prompt and completion), the scales that they were sampled under, and at what
        step of training; None: in an evaluation. Raises `RuntimeError` if no scales were made yet, and as `observed`.
        """
        if self.margin is None:
            raise RuntimeError("rollouts arrived before next_scales() has made any scales for the engine.")
        _, state = self.observed(calibration)
        joins = step == state.step
        hook = calibration.hook
        observation = QKVObservation(hook.layers, hook.device, scales_L3=scales.values.to(hook.device))
        state = replace(state, new=NewRollouts(observation, step is not None, joins, state.factor_in_force))
        if step is None:
            return state
        latest = [*sequences, *(state.rollouts if joins else ())] if calibration.mode == "policy" else ()
        return replace(state, step=step, rollouts=bounded(latest, calibration.max_tokens))

    def watching(self, hook: AttentionHook) -> AbstractContextManager[None]:
        """Enclose each forward of the trainer. New rollouts are observed until `saturation` or scales are asked for:
        in TRL's old-log-prob pass, which is over all of them, or without one in each forward of their loss.
        """
        return self.new.observation.watching(hook) if self.new else nullcontext()

    def observed(self, calibration: Calibration) -> tuple[Tensor | None, "KVState"]:
        """Account for new rollouts if a forward saw them; a collective then.

        Returns the share `[L, 2]` of k and v beyond their scales, of the worst rank, or None without such a forward;
        and the state. Raises `RuntimeError` while a forward over them is under way.
        """
        new = self.new
        if new is not None and new.observation.under_way:
            raise RuntimeError("a forward over the new rollouts is under way: what it will have shown is not known.")
        if new is None or not new.observation.passes:
            return None, self
        amax_L3 = new.observation.amax_L3
        fraction_L3 = new.observation.saturated_fraction_L3
        reduce_together(calibration.reduce_max, amax_L3, fraction_L3)
        saturated_L2 = fraction_L3[:, 1:].cpu()
        clipped = bool(saturated_L2.max() > SATURATION_LIMIT)
        state = self._accounted(calibration, amax_L3, saturated_L2, clipped)
        if clipped:
            self._warn(calibration, saturated_L2, state.margin_factor)
        return saturated_L2, state

    def _accounted(self, calibration: Calibration, amax_L3: Tensor, saturated_L2: Tensor, clipped: bool) -> "KVState":
        """Return the state with what the new rollouts have shown."""
        new = self.new
        if not new.in_training:
            return replace(self, new=None, evaluation_warned=self.evaluation_warned or clipped)
        factor = self.margin_factor
        if clipped:  # twice that of their scales: several generations between two syncs widen the margin once
            factor = max(factor, min(2 * new.margin_factor, WIDEST_MARGIN_FACTOR))
        if calibration.mode == "policy" and not calibration.has_images:
            amax_L3 = None
        elif new.joins and self.amax_L3 is not None:
            amax_L3 = torch.maximum(amax_L3, self.amax_L3.to(amax_L3.device))
        return replace(self, new=None, amax_L3=amax_L3, saturated_L2=saturated_L2, margin_factor=factor)

    def _warn(self, calibration: Calibration, saturated_L2: Tensor, factor: float) -> None:
        """Warn that the new rollouts were clipped; `factor` is that of the next margin."""
        if self.new.in_training:
            if factor > self.margin_factor or factor == WIDEST_MARGIN_FACTOR:
                logger.warning(f"{_clipped(saturated_L2)}; {_remedy(calibration, self.margin_factor)}")
        elif not self.evaluation_warned:
            logger.warning(
                f"{_clipped(saturated_L2)} in an evaluation, which widens no margin. To leave it more room, raise "
                f"kv_scale_margin={calibration.margin:g}. This is said once; eval_fp8/kv_saturation_fraction has each "
                "evaluation's share."
            )

    def saturation(self, calibration: Calibration) -> tuple[Tensor | None, "KVState"]:
        """Return the share `[L, 2]` of k and v beyond their scales, of the worst rank: of an evaluation's rollouts
        right after their old-log-prob pass, else of the latest ones of training. None if no forward saw them. A
        collective.
        """
        saturated_L2, state = self.observed(calibration)
        if self.new is not None and not self.new.in_training:
            return saturated_L2, replace(state, new=None)  # without that pass an evaluation is not observed
        return state.saturated_L2, state

    def save(self, folder: str | Path, rank: int) -> None:
        """Write the fields in `SAVED`. Raises `RuntimeError` if `observed` has not accounted for a forward yet."""
        if self.new is not None and self.new.observation.passes:
            raise RuntimeError("a forward has shown what is not in this state yet: call observed() before save().")
        values = {name: getattr(self, name) for name in SAVED}
        values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
        Path(folder, STATE_FILE.format(rank)).write_text(json.dumps(values))

    def loaded(self, folder: str | Path, rank: int) -> "KVState":
        """Read what `save` wrote; a checkpoint without it (made without an FP8 KV cache) changes nothing."""
        # a rank that was not there before takes the first rank's state: ranks have to calibrate all or none
        path = Path(folder, STATE_FILE.format(rank))
        if not path.exists():
            path = Path(folder, STATE_FILE.format(0))
        if not path.exists():
            return self
        values = json.loads(path.read_text())
        tensors = {name: values[name] and torch.tensor(values[name]) for name in ("amax_L3", "saturated_L2")}
        return replace(self, **(values | tensors))


def next_scales(state: KVState, calibration: Calibration, model: nn.Module) -> tuple[KVScales, KVState]:
    """Make the scales for the policy as it is now; `model` is what the trainer calls. A collective.

    Raises:
        ValueError: As `kv_scales_from_amax`, or no sequence has a token.
        RuntimeError: The coming prompts are needed and not known, or a forward over new rollouts is under way.
    """
    _, state = state.observed(calibration)
    margin = calibration.margin * state.margin_factor
    if calibration.mode == "rollout" and state.amax_L3 is not None:
        amax_L3 = state.amax_L3
    else:  # run the coming prompts, with the rollouts that there are
        only_prompts = not state.rollouts  # once, before the first rollouts
        if only_prompts and state.coming_prompts is None:
            raise RuntimeError("next_scales() needs the coming prompts, and expecting() was not called yet.")
        observation = observe_sequences(
            model,
            calibration.hook,
            list(chain.from_iterable(zip_longest(state.coming_prompts or (), state.rollouts, fillvalue=[]))),
            pad_token_id=calibration.pad_token_id,
            max_tokens=calibration.max_tokens,
            fused_lm_head=calibration.fused_lm_head,
            moments=only_prompts,
            reduce_max=calibration.reduce_max,
        )
        amax_L3 = observation.amax_L3
        if state.amax_L3 is not None:
            amax_L3 = torch.maximum(amax_L3, state.amax_L3.to(amax_L3.device))
        if only_prompts:
            margin *= PROMPTS_ONLY_MARGIN
            errors = outlier_layers(observation.logit_error_L)
            errors = {layer: error for layer, error in errors.items() if layer not in calibration.hook.skip_layers}
            if errors:
                logger.warning(outlier_message(errors))
    scales = kv_scales_from_amax(amax_L3, margin, calibration.hook.kv_layers)
    return scales, replace(state, margin=margin, factor_in_force=state.margin_factor)


def _clipped(saturated_L2: Tensor) -> str:
    """Return which layer's k or v have the largest share beyond their scales."""
    layer, column = divmod(int(saturated_L2.argmax()), 2)
    more = int((saturated_L2 > SATURATION_LIMIT).any(1).sum()) - 1
    share = (
        f"{100 * saturated_L2.max():.2g} % of layer {layer}'s {QKV[1 + column]} values were clipped in the KV cache"
    )
    return f"{share} (fewer of {more} more layers)" if more else share


def _remedy(calibration: Calibration, factor: float) -> str:
    """Return what happens next in training, or what to do; `factor` is that of the margin so far."""
    if factor < WIDEST_MARGIN_FACTOR:
        return "the next sync doubles the margin. Nothing to do unless it repeats."
    if calibration.mode == "rollout":
        remedy = "Set kv_calibration='policy', which runs the new weights over the coming prompts."
    else:
        remedy = f"Raise kv_scale_margin={calibration.margin:g} or kv_calibration_tokens={calibration.max_tokens}."
    return f"the margin is at its limit of {factor * calibration.margin:g} already. {remedy}"


def outlier_message(errors: dict[int, float]) -> str:
    """Return the warning about layers whose k has outliers; `errors` as from `outlier_layers`."""
    layers = ", ".join(f"{layer} ({error:.2g})" for layer, error in errors.items())
    return (
        f"k has outliers in layers (expected error of the attention logits in an FP8 KV cache): {layers}. Rollouts "
        f"will drift from the policy beyond {LOGIT_ERROR_LIMIT:g}; models with a bias on k and no normalization, such "
        f"as Qwen2, are known for it. Keep the KV cache of these layers in BF16: kv_cache_skip_layers={list(errors)}, "
        "or 'auto'."
    )
