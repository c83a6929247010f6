"""Calibration: the scales of the engine's next KV cache, made from the q, k and v of the policy's attention.

vLLM 0.31 cannot calibrate scales itself. The flag `kv_calibration` chooses between two sources of magnitudes:

    rollout   the old-log-prob pass over the latest rollouts, which TRL runs anyway. No forward is added, and every
              token is seen, but with the weights before the latest optimizer step
    policy    forwards with the new weights over a bounded number of tokens: the coming prompts and the latest rollouts

The latest rollouts are those of the last step at which training generated, from all generations of that step.
Rollouts of an evaluation never count. Before the first rollouts both sources have only prompts.

The forwards of `policy` see token ids but no images. So for a model that takes images, `policy` uses the larger of two
magnitudes: that of its own forwards, and that of the old-log-prob pass.

The old-log-prob pass also measures saturation: the share of elements that the scales of the rollouts clipped. If the
share is too large in training, the margin is doubled.

Everything that changes during a run is in a `KVState`, which is immutable. These are the calls of a step, in order:

    state = state.expecting(prompts)                          before each call of the engine
    scales, state = next_scales(state, calibration, model)    in a sync, for the coming prompts
    state = state.after_rollouts(...)                         when all rollouts of a generation are there
    with state.watching(hook): ...                            around the trainer's forwards over the rollouts
    share, state = state.saturation(calibration)              when TRL's batch is complete
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import LOGIT_ERROR_LIMIT, QKV, KVScales, kv_scales_from_amax, outlier_layers

from .observation import QKVObservation, bounded, observe_sequences, reduce_together


logger = get_logger(__name__)

# Factor on the margin as long as there are no rollouts. These scales come from prompts alone, and completions have
# larger values: on the addition demo 1.26 times the prompts' largest |q|. A scale that is twice as large costs no
# precision, because the relative error of a floating-point format is the same for all normal numbers
PROMPTS_ONLY_MARGIN = 2.0
# Share of clipped elements (beyond 448 * scale) in a layer's k or v above which the margin is doubled. A few in a
# million do no harm
SATURATION_LIMIT = 1e-5
WIDEST_MARGIN_FACTOR = 16.0
STATE_FILE = "kv_calibration_{}.json"  # in a checkpoint, one for each rank
SAVED = ("step", "rollouts", "amax_L3", "saturated_L2", "margin_factor")  # fields of `KVState` in that file


@dataclass(frozen=True)
class Calibration:
    """Settings of a calibration. They do not change during a run, and are the same on every rank."""

    hook: AttentionHook  # the policy's
    mode: str  # flag kv_calibration
    margin: float  # flag kv_scale_margin
    max_tokens: int  # flag kv_calibration_tokens
    pad_token_id: int = 0  # this and `fused_lm_head`: see `observe_sequences`
    fused_lm_head: bool = False
    has_images: bool = False  # the model takes images, which a forward over token ids does not see
    reduce_max: Callable[[Tensor], None] | None = None  # see `reduce_together`
    forward: Callable[[nn.Module, list[list[int]]], None] | None = None  # see `observe_sequences`


@dataclass(frozen=True)
class NewRollouts:
    """Rollouts whose magnitudes are not part of the state yet."""

    observation: QKVObservation  # filled by the trainer's forwards over these rollouts
    in_training: bool
    same_step: bool  # training generated other rollouts at this step before
    margin_factor: float  # factor in the scales under which these rollouts were sampled


@dataclass(frozen=True, eq=False)
class KVState:
    """State of a calibration. The next scales depend on it and on the weights.

    Each rank has its own token ids. All other fields are the same on every rank.

    The fields in `SAVED` are what was learned from training's rollouts. A resumed run reads them back, so it
    calibrates as the uninterrupted run would.
    """

    step: int = -1  # step at which training generated last; -1: none yet
    rollouts: list[list[int]] = field(default_factory=list)  # mode 'policy': token ids of that step, bounded
    amax_L3: Tensor | None = None  # over all rollouts of that step; None: nothing was observed yet, or not needed
    saturated_L2: Tensor | None = None  # share of clipped k and v in training's latest rollouts
    margin_factor: float = 1.0  # factor on the margin of the next scales: 1, doubled up to 16 when rollouts saturate

    coming_prompts: list[list[int]] | None = None  # token ids; None: not known yet
    margin_in_use: float | None = None  # margin in the engine's present scales, with all factors; None: no scales
    factor_in_use: float = 1.0  # `margin_factor` of the engine's present scales
    new: NewRollouts | None = None
    evaluation_warned: bool = False  # a warning of saturation in an evaluation was given, once a run

    def expecting(self, prompts: list[list[int]]) -> "KVState":
        """Note the prompts that the engine is about to continue."""
        return replace(self, coming_prompts=prompts)

    def after_rollouts(
        self,
        calibration: Calibration,
        sequences: Sequence[Sequence[int]],
        scales: KVScales,
        step: int | None,
        margin_factor: float | None = None,
    ) -> "KVState":
        """Note new rollouts: token ids of prompt and completion, and the `scales` under which they were sampled.

        `step` is the step of training; None: an evaluation. `margin_factor` is that of `scales`; None: they are the
        engine's present scales. Raises `RuntimeError` if no scales were made yet, or if `observed` does.
        """
        if self.margin_in_use is None:
            raise RuntimeError("rollouts arrived before next_scales() has made any scales for the engine.")
        _, state = self.observed(calibration)  # before these rollouts replace the previous ones in `new`
        hook = calibration.hook
        same_step = step == state.step
        new = NewRollouts(
            observation=QKVObservation(hook.layers, hook.device, scales_L3=scales.values.to(hook.device)),
            in_training=step is not None,
            same_step=same_step,
            margin_factor=state.factor_in_use if margin_factor is None else margin_factor,
        )
        state = replace(state, new=new)
        if step is None:
            return state
        if calibration.mode != "policy":
            return replace(state, step=step, rollouts=[])
        latest = [*sequences, *state.rollouts] if same_step else sequences
        return replace(state, step=step, rollouts=bounded(latest, calibration.max_tokens))

    def watching(self, hook: AttentionHook) -> AbstractContextManager[None]:
        """Observe the new rollouts in a forward of the trainer.

        The forward is TRL's old-log-prob pass, which sees all new rollouts. Where TRL runs no such pass, each forward
        of the loss is observed, until `saturation` or `next_scales` is called.
        """
        return self.new.observation.watching(hook) if self.new else nullcontext()

    def observed(self, calibration: Calibration) -> tuple[Tensor | None, "KVState"]:
        """Merge the observation of the new rollouts into the state. Collective, if any forward has run over them.

        Returns the share `[L, 2]` of clipped k and v, the largest over ranks (None without a forward), and the next
        state. Raises `RuntimeError` inside such a forward.
        """
        new = self.new
        if new is not None and new.observation.under_way:
            raise RuntimeError("a forward over the new rollouts is under way: what it will show is not known yet.")
        if new is None or not new.observation.passes:
            return None, self
        amax_L3 = new.observation.amax_L3
        fraction_L3 = new.observation.saturated_fraction_L3
        reduce_together(calibration.reduce_max, amax_L3, fraction_L3)
        saturated_L2 = fraction_L3[:, 1:].cpu()
        for layer in calibration.hook.skip_layers:
            saturated_L2[layer] = 0  # the cache of this layer is BF16, which clips nothing
        clipped = bool(saturated_L2.max() > SATURATION_LIMIT)
        state = self._after_observation(calibration, amax_L3, saturated_L2, clipped)
        if clipped:
            self._warn(calibration, saturated_L2)
        return saturated_L2, state

    def _after_observation(
        self, calibration: Calibration, amax_L3: Tensor, saturated_L2: Tensor, clipped: bool
    ) -> "KVState":
        """Return the next state, in which the new rollouts' magnitudes and saturation are included."""
        new = self.new
        if not new.in_training:
            return replace(self, new=None, evaluation_warned=self.evaluation_warned or clipped)
        factor = self.margin_factor
        if clipped:
            # Double the factor of the scales that clipped, not the present one. If several generations share these
            # scales, the factor then doubles only once
            factor = max(factor, min(2 * new.margin_factor, WIDEST_MARGIN_FACTOR))
        if calibration.mode == "policy" and not calibration.has_images:
            amax_L3 = None  # `next_scales` measures magnitudes in forwards of its own
        elif new.same_step and self.amax_L3 is not None:
            amax_L3 = torch.maximum(amax_L3, self.amax_L3.to(amax_L3.device))
        return replace(self, new=None, amax_L3=amax_L3, saturated_L2=saturated_L2, margin_factor=factor)

    def _warn(self, calibration: Calibration, saturated_L2: Tensor) -> None:
        """Warn that k or v of the new rollouts were clipped."""
        # Name the layer and tensor of which most was clipped
        layer, column = divmod(int(saturated_L2.argmax()), 2)
        more = int((saturated_L2 > SATURATION_LIMIT).any(1).sum()) - 1
        percent = 100 * saturated_L2.max()
        clipped = f"{percent:.2g} % of layer {layer}'s {QKV[1 + column]} values were clipped in the KV cache"
        if more:
            layers = f"{more} other layers" if more > 1 else "another layer"
            clipped += f" (and a smaller share of {layers})"
        if self.new.in_training:
            if self.margin_factor > self.new.margin_factor:
                return  # these scales clipped in an earlier generation, too, which widened the margin and warned
            if self.margin_factor < WIDEST_MARGIN_FACTOR:
                remedy = "the next sync doubles the margin. Nothing to do unless it repeats."
            else:
                remedy = f"the margin is at its limit of {self.margin_factor * calibration.margin:g} already. "
                if calibration.mode == "rollout":
                    remedy += "Set kv_calibration='policy', which runs the new weights over the coming prompts."
                else:
                    tokens = calibration.max_tokens
                    remedy += f"Raise kv_scale_margin={calibration.margin:g} or kv_calibration_tokens={tokens}."
            logger.warning(f"{clipped}; {remedy}")
        elif not self.evaluation_warned:
            logger.warning(
                f"{clipped} in an evaluation, which widens no margin. To leave it more room, raise "
                f"kv_scale_margin={calibration.margin:g}. This warning comes once; eval_fp8/kv_saturation_fraction "
                "has each evaluation's share."
            )

    def saturation(self, calibration: Calibration) -> tuple[Tensor | None, "KVState"]:
        """Return the share `[L, 2]` of clipped k and v, the largest over ranks, and the next state. Collective.

        In an evaluation the share is that of its latest rollouts; call this after their old-log-prob pass. In training
        it is that of the latest rollouts over which a forward has run. None if no forward has run.
        """
        saturated_L2, state = self.observed(calibration)
        if self.new is not None and not self.new.in_training:
            # An evaluation runs no later forward over its rollouts, so drop them even if none has run
            return saturated_L2, replace(state, new=None)
        return state.saturated_L2, state

    def save(self, folder: str | Path, rank: int) -> None:
        """Write the fields in `SAVED`. Raises `RuntimeError` after a forward that `observed` has not added yet."""
        if self.new is not None and self.new.observation.passes:
            raise RuntimeError("this state lacks what the latest forward has shown: call observed() before save().")
        values = {}
        for name in SAVED:
            value = getattr(self, name)
            values[name] = value.tolist() if isinstance(value, Tensor) else value
        Path(folder, STATE_FILE.format(rank)).write_text(json.dumps(values))

    def loaded(self, folder: str | Path, rank: int) -> "KVState":
        """Return the saved state. Return this state if a run without an FP8 KV cache made the checkpoint."""
        path = Path(folder, STATE_FILE.format(rank))
        if not path.exists():
            # The saved run had fewer ranks: read the first rank's state. Without a state this rank would calibrate in
            # a forward that the other ranks do not run, and wait for them forever
            path = Path(folder, STATE_FILE.format(0))
        if not path.exists():
            return self
        values = json.loads(path.read_text())
        for name in ("amax_L3", "saturated_L2"):
            if values[name] is not None:
                values[name] = torch.tensor(values[name])
        return replace(self, **values)


def next_scales(state: KVState, calibration: Calibration, model: nn.Module) -> tuple[KVScales, KVState]:
    """Return the scales for the policy as it is now, and the next state. Collective.

    `model` is the policy as the trainer calls it, with its wrappers (PEFT, DDP, FSDP2).

    Raises:
        ValueError: `kv_scales_from_amax` raises it, or every sequence is empty.
        RuntimeError: The coming prompts are needed but not known, or a forward over new rollouts is under way.
    """
    _, state = state.observed(calibration)
    margin = calibration.margin * state.margin_factor
    if calibration.mode == "rollout" and state.amax_L3 is not None:
        amax_L3 = state.amax_L3
    else:  # run forwards over the coming prompts and the latest rollouts
        only_prompts = not state.rollouts  # before the first rollouts
        if only_prompts and state.coming_prompts is None:
            raise RuntimeError("next_scales() needs the coming prompts, but expecting() was not called yet.")
        # Alternate both kinds: only the first `max_tokens` tokens are run, and neither kind may use them all up
        pairs = zip_longest(state.coming_prompts or (), state.rollouts)
        sequences = [sequence for pair in pairs for sequence in pair if sequence]
        observation = observe_sequences(
            model,
            calibration.hook,
            sequences,
            pad_token_id=calibration.pad_token_id,
            max_tokens=calibration.max_tokens,
            fused_lm_head=calibration.fused_lm_head,
            # Outliers of k are a property of the model, and finding them takes more operations: look only at the start
            moments=only_prompts,
            reduce_max=calibration.reduce_max,
            forward=calibration.forward,
        )
        amax_L3 = observation.amax_L3
        if state.amax_L3 is not None:  # from the old-log-prob pass, which also sees images
            amax_L3 = torch.maximum(amax_L3, state.amax_L3.to(amax_L3.device))
        if only_prompts:
            margin *= PROMPTS_ONLY_MARGIN
            errors = outlier_layers(observation.logit_error_L)
            for layer in calibration.hook.skip_layers:
                errors.pop(layer, None)
            if errors:
                logger.warning(outlier_message(errors))
    scales = kv_scales_from_amax(amax_L3, margin, calibration.hook.kv_layers)
    return scales, replace(state, margin_in_use=margin, factor_in_use=state.margin_factor)


def outlier_message(errors: dict[int, float]) -> str:
    """Return the warning about layers whose k has outliers; `errors` is the result of `outlier_layers`."""
    layers = ", ".join(f"{layer} ({error:.2g})" for layer, error in errors.items())
    return (
        f"k has outliers in layers (expected error of the attention logits in an FP8 KV cache): {layers}. With an "
        f"error above {LOGIT_ERROR_LIMIT:g} rollouts drift from the policy. Models with a bias on k and no "
        "normalization, such as Qwen2, are known for it. Keep the KV cache of these layers in BF16: "
        f"kv_cache_skip_layers={list(errors)}, or 'auto'."
    )
