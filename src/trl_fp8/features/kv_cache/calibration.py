"""From what the policy's attention sees to the scales of the engine's next KV cache.

vLLM 0.31 has no calibration of its own. Two sources of magnitudes, `kv_calibration`:

    rollout   the old-log-prob pass over the latest rollouts, which TRL runs anyway: no forward is added, every token
              is seen, but with the weights of one optimizer step ago
    policy    the new weights are run over a bounded number of tokens: the coming prompts and the latest rollouts

The latest rollouts are all that training generated at one step; those of an evaluation are never among them. Before
the first ones there are only prompts, with either, and of images their tokens, not what a vision tower makes of them:
with images `policy`, too, takes the old-log-prob pass into account. The same pass shows how many elements the scales
in force did not hold; in training too many of them widen the margin.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.kv_scales import LOGIT_ERROR_LIMIT, QKV, KVScales, kv_scales_from_amax, outlier_layers
from trl_fp8.recipe.messages import listed

from .observation import QKVObservation


logger = logging.getLogger(__name__)

# Before the first rollouts only prompts can be observed, and completions reach further: 1.26 times the prompts'
# largest |q| on the addition demo. One more power of two costs a floating point format nothing.
PROMPTS_ONLY_MARGIN = 2.0
# Share of a layer's k or v elements beyond 448 * scale from which on the margin is doubled. A few clipped elements in
# a million do no harm; e4m3 has 15 powers of two to spare below them.
SATURATION_LIMIT = 1e-5
WIDEST_MARGIN_FACTOR = 16.0
STATE_FILE = "kv_calibration_{}.json"  # in a checkpoint, by rank


@dataclass(frozen=True)
class KVState:
    """What training's generations have shown. Beside it the next scales depend on weights and coming prompts alone, so
    that a run which resumes with it calibrates as the uninterrupted one.
    """

    step: int = -1  # at which training generated last; -1: it did not yet
    rollouts: list[list[int]] = field(default_factory=list)  # of that step, bounded; mode 'policy'
    amax_L3: Tensor | None = None  # over all rollouts of that step; None: not seen, or not used in mode 'policy'
    saturated_L2: Tensor | None = None  # share of k, v of the latest rollouts beyond the scales of their cache
    margin_factor: float = 1.0  # saturation widens the margin by it: 1, 2, 4, ... 16


@dataclass
class Watched:
    """New rollouts, until the trainer's forwards over them are accounted for."""

    observation: QKVObservation
    in_training: bool
    joins: bool  # the rollouts before them, as of the same step
    cause: str  # a sentence: why the scales that they were sampled under may be too small
    seen: bool = False  # by a forward

    @contextmanager
    def by(self, hook: AttentionHook) -> Iterator[None]:
        """Observe the forwards inside the block."""
        with hook.observing(self.observation):
            yield
        self.seen = True


@dataclass(eq=False, repr=False)
class KVCalibrator:
    """Keeps what the next calibration needs, and how wide its margin is. The same on every rank."""

    hook: AttentionHook  # of the policy
    _: KW_ONLY
    mode: str  # flag kv_calibration
    margin: float  # flag kv_scale_margin
    max_tokens: int  # flag kv_calibration_tokens
    pad_token_id: int = 0  # see `observe_sequences`, as for `fused_lm_head`
    fused_lm_head: bool = False
    has_images: bool = False  # which token ids do not show
    reduce_max: Callable[[Tensor], None] | None = None  # makes a tensor its maximum over ranks; None on one process

    state: KVState = field(default_factory=KVState, init=False)
    margin_used: float | None = field(default=None, init=False)  # by the latest calibration
    coming_prompts: list[list[int]] = field(default_factory=list, init=False)
    _cause: str = field(default="", init=False)  # as in `Watched`, of the latest calibration
    _watched: Watched | None = field(default=None, init=False)
    _warned_of_evaluation: bool = field(default=False, init=False)

    @property
    def runs_prompts(self) -> bool:
        """The next scales depend on the coming prompts."""
        return self.mode == "policy" or self.state.amax_L3 is None

    def next_scales(self, model: nn.Module) -> KVScales:
        """Scales for the policy as it is now, run as the trainer calls it. Raises as `kv_scales_from_amax`."""
        self._harvest()
        state = self.state
        self.margin_used = self.margin * state.margin_factor
        if not self.runs_prompts:
            self._cause = (
                f"They were made from the rollouts of step {state.step}: the policy has changed since then, or these "
                "rollouts have tokens that those had not."
            )
            return kv_scales_from_amax(state.amax_L3, self.margin_used, self.hook.kv_layers)
        sequences = chain.from_iterable(zip_longest(self.coming_prompts, state.rollouts, fillvalue=[]))
        only_prompts = not state.rollouts  # once, before the first rollouts
        self._cause = (
            f"They were made from prompts{'' if only_prompts else ' and the latest rollouts'} with the same weights: "
            "these rollouts have tokens that those had not."
        )
        observation = observe_sequences(
            model,
            self.hook,
            list(sequences),
            pad_token_id=self.pad_token_id,
            max_tokens=self.max_tokens,
            fused_lm_head=self.fused_lm_head,
            moments=only_prompts,
            reduce_max=self.reduce_max,
        )
        amax_L3, error_L1 = observation.amax_L3, observation.logit_error_L[:, None]
        self._reduce(amax_L3, error_L1)
        if state.amax_L3 is not None:
            amax_L3 = torch.maximum(amax_L3, state.amax_L3.to(amax_L3.device))
        if only_prompts:
            self.margin_used *= PROMPTS_ONLY_MARGIN
            errors = outlier_layers(error_L1[:, 0])
            if errors := {layer: error for layer, error in errors.items() if layer not in self.hook.skip_layers}:
                logger.warning(outlier_message(errors))
        return kv_scales_from_amax(amax_L3, self.margin_used, self.hook.kv_layers)

    def expect(self, prompts: list[list[int]]) -> None:
        """Note the token ids of prompts that are about to be continued."""
        self.coming_prompts = prompts

    def rollouts_arrived(self, sequences: Sequence[Sequence[int]], scales: KVScales, step: int | None) -> None:
        """Note new rollouts (token ids of prompt and completion), the scales that they were sampled under, and at what
        step of training; None: in an evaluation.
        """
        self._harvest()
        joins = step == self.state.step
        if step is not None:
            latest = [*sequences, *(self.state.rollouts if joins else ())] if self.mode == "policy" else ()
            self.state = replace(self.state, step=step, rollouts=_bounded(latest, self.max_tokens))
        scales_L3 = scales.values.to(self.hook.device)
        observation = QKVObservation(self.hook.layers, self.hook.device, scales_L3=scales_L3)
        self._watched = Watched(observation, step is not None, joins, self._cause)

    def watching(self) -> AbstractContextManager[None]:
        """Around each forward of the trainer. New rollouts are observed until `saturation` or scales are asked for: in
        TRL's old-log-prob pass, which is over all of them, or without one in each forward of their loss.
        """
        return self._watched.by(self.hook) if self._watched else nullcontext()

    def saturation(self) -> Tensor | None:
        """Share `[L, 2]` of k and v beyond their scales, of the worst rank: of an evaluation's rollouts right after
        their old-log-prob pass, else of the latest ones of training. None if no forward saw them. A collective.
        """
        if self._watched is not None and not self._watched.in_training:
            saturated_L2 = self._harvest()
            self._watched = None  # without that pass an evaluation is not observed
            return saturated_L2
        self._harvest()
        return self.state.saturated_L2

    def save(self, folder: str | Path, rank: int) -> None:
        """Write `state_dict`: what a resumed run needs to calibrate as the uninterrupted one would."""
        Path(folder, STATE_FILE.format(rank)).write_text(json.dumps(self.state_dict()))

    def load(self, folder: str | Path, rank: int) -> None:
        """Read what `save` wrote; a checkpoint without it (made without an FP8 KV cache) leaves a fresh start."""
        # a rank that was not there before takes the first rank's state: ranks have to calibrate all or none
        paths = [path for number in (rank, 0) if (path := Path(folder, STATE_FILE.format(number))).exists()]
        if paths:
            self.load_state_dict(json.loads(paths[0].read_text()))

    def state_dict(self) -> dict:
        """`KVState`, tensors as lists."""
        self._harvest()
        values = vars(self.state).items()
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values}

    def load_state_dict(self, state: dict) -> None:
        tensors = {name: state[name] and torch.tensor(state[name]) for name in ("amax_L3", "saturated_L2")}
        self.state = KVState(**(state | tensors))

    def _harvest(self) -> Tensor | None:
        """Account for new rollouts if a forward saw them; returns their `saturation`."""
        watched, state = self._watched, self.state
        if watched is None or not watched.seen:
            return None
        self._watched = None
        amax_L3, fraction_L3 = watched.observation.amax_L3, watched.observation.saturated_fraction_L3
        self._reduce(amax_L3, fraction_L3)
        saturated_L2 = fraction_L3[:, 1:].cpu()
        too_small = saturated_L2.max() > SATURATION_LIMIT
        if too_small:
            self._warn(saturated_L2, watched)
        if watched.in_training:
            if self.mode == "policy" and not self.has_images:
                amax_L3 = None
            elif watched.joins and state.amax_L3 is not None:
                amax_L3 = torch.maximum(amax_L3, state.amax_L3.to(amax_L3.device))
            factor = min(2 * state.margin_factor, WIDEST_MARGIN_FACTOR) if too_small else state.margin_factor
            self.state = replace(state, amax_L3=amax_L3, saturated_L2=saturated_L2, margin_factor=factor)
        return saturated_L2

    def _reduce(self, *tensors: Tensor) -> None:
        """Maximum over ranks of `[L, n]` tensors, in place, in one collective."""
        if self.reduce_max is not None:
            packed = torch.cat(tensors, dim=1)
            self.reduce_max(packed)
            for tensor, reduced in zip(tensors, packed.split([t.shape[1] for t in tensors], dim=1), strict=True):
                tensor.copy_(reduced)

    def _warn(self, saturated_L2: Tensor, watched: Watched) -> None:
        beyond = [
            f"layer {layer} {QKV[1 + column]} ({saturated_L2[layer, column]:.2g})"
            for layer, column in (saturated_L2 > SATURATION_LIMIT).nonzero().tolist()
        ]
        rollouts, margin, factor = "the rollouts", self.margin, self.state.margin_factor
        if not watched.in_training:
            if self._warned_of_evaluation:
                return
            self._warned_of_evaluation, rollouts = True, "an evaluation's rollouts"
            remedy = (
                f"An evaluation does not widen the margin. To leave it more room, raise kv_scale_margin={margin:g}. "
                "This is said once; eval_fp8/kv_saturation_fraction has each evaluation's share."
            )
        elif factor < WIDEST_MARGIN_FACTOR:
            remedy = f"The margin is widened to {2 * factor * margin:g} from the next sync on."
        else:
            remedy = f"The margin is at its limit of {factor * margin:g} already. " + (
                "Set kv_calibration='policy', which runs the new weights over the coming prompts."
                if self.mode == "rollout"
                else f"Raise kv_scale_margin={margin:g} or kv_calibration_tokens={self.max_tokens}."
            )
        logger.warning(
            f"KV cache scales were too small for {rollouts}: share of saturated elements in {listed(beyond)}. "
            f"{watched.cause} {remedy}"
        )


def layers_with_outliers(
    model: nn.Module,
    hook: AttentionHook,
    prompts: Sequence[Sequence[int]],
    reduce_max: Callable[[Tensor], None] | None = None,
    fused_lm_head: bool = False,
) -> dict[int, float]:
    """Layers of the policy whose k has outliers on `prompts` (token ids): number -> expected error of the logits."""
    options = {"fused_lm_head": fused_lm_head, "reduce_max": reduce_max}
    error_L = observe_sequences(model, hook, prompts, **options).logit_error_L
    if reduce_max is not None:
        reduce_max(error_L)
    return outlier_layers(error_L)


def outlier_message(errors: dict[int, float]) -> str:
    """What a user should know and do about `errors`, as from `outlier_layers`."""
    listed = ", ".join(f"{layer} ({error:.2g})" for layer, error in errors.items())
    return (
        f"k has outliers in layers (expected error of the attention logits in an FP8 KV cache): {listed}. Rollouts "
        f"will drift from the policy beyond {LOGIT_ERROR_LIMIT:g}; models with a bias on k and no normalization, such "
        f"as Qwen2, are known for it. Keep the KV cache of these layers in BF16: kv_cache_skip_layers={list(errors)}, "
        "or 'auto'."
    )


def observe_sequences(
    model: nn.Module,
    hook: AttentionHook,
    sequences: Sequence[Sequence[int]],
    *,
    pad_token_id: int = 0,
    max_tokens: int = 8192,
    fused_lm_head: bool = False,
    moments: bool = True,
    reduce_max: Callable[[Tensor], None] | None = None,
) -> QKVObservation:
    """Run `sequences` through the policy and observe q, k, v of their tokens.

    Args:
        model, hook: The policy as the trainer calls it (in PEFT, DDP or FSDP2 wrappings), and its hook.
        sequences: Token ids, one list a sequence, the most telling ones first. Repeated sequences are run once.
        pad_token_id: Any valid token id; padding is masked.
        max_tokens: Bound on the tokens of all forwards without padding, and on those of each forward with it.
        fused_lm_head: The model has TRL's fused output head, which is then asked for no token at all.
        moments: Measure `logit_error_L`, too.
        reduce_max: Makes a tensor its maximum over ranks, which then run the same number of forwards: each is a
            collective for a sharded policy. None on one process.
    """
    batches = _batches(_bounded(sequences, max_tokens), max_tokens)
    if not batches:
        raise ValueError("KV cache scales cannot be calibrated: there is no prompt with at least one token.")
    forwards = len(batches)
    if reduce_max is not None:
        reduce_max(most := torch.tensor(forwards, device=hook.device))
        forwards = int(most)
    observation = QKVObservation(hook.layers, hook.device, moments=moments)
    with torch.no_grad(), hook.observing(observation):
        for number in range(forwards):
            rows = batches[min(number, len(batches) - 1)]  # the smallest again: it changes no maximum
            length = len(rows[0])
            padding = [length - len(row) for row in rows]
            ids = [row + [pad_token_id] * pad for row, pad in zip(rows, padding, strict=True)]
            mask = [[1] * (length - pad) + [0] * pad for pad in padding]
            ids, mask = torch.tensor(ids, device=hook.device), torch.tensor(mask, device=hook.device)
            # ZeRO-3 fetches modules ahead in the order of the last forward, and in TRL's own forwards the head is no
            # module call: a forward that made it one would have the next one gather it twice
            unused = {"labels": torch.full_like(ids, -100), "fused_lm_head": True}
            head = unused if fused_lm_head else {"logits_to_keep": 1}
            model(input_ids=ids, attention_mask=mask, use_cache=False, **head)
    return observation


def _bounded(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The first different ones of `sequences` that together have at most `max_tokens`, each cut to as many."""
    rows, left = [], max_tokens
    for row in dict.fromkeys(tuple(sequence[:max_tokens]) for sequence in sequences):
        if row and len(row) <= left:
            rows.append(list(row))
            left -= len(row)
    return rows


def _batches(rows: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """`rows`, the longest first, in batches that have at most `max_tokens` when padded to their first row."""
    batches = []
    for row in sorted(rows, key=len, reverse=True):
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0]) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
