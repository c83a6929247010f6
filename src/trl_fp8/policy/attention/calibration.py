"""From what the policy's attention sees to the scales of the engine's next KV cache.

vLLM 0.31 has no calibration of its own. Two sources of magnitudes, `kv_calibration`:

    rollout   the old-log-prob pass over the latest rollouts, which TRL runs anyway: no forward is added, every token
              is seen, but with the weights of one optimizer step ago
    policy    the new weights are run over a bounded number of tokens: the coming prompts and the latest rollouts

Before the first rollouts there are only prompts, with either, and of images their tokens, not what a vision tower
makes of them: with images `policy`, too, takes the old-log-prob pass into account. The same pass shows how many
elements the scales in force did not hold; too many of them widen the margin.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from trl_fp8.quantization.kv_scales import LOGIT_ERROR_LIMIT, QKV, KVScales, kv_scales_from_amax, outlier_layers
from trl_fp8.recipe.names import listed

from .hook import AttentionHook
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

    margin_factor: float = field(default=1.0, init=False)  # saturation widens the margin by it: 1, 2, 4, ... 16
    margin_used: float | None = field(default=None, init=False)  # by the latest calibration
    saturated_L2: Tensor | None = field(default=None, init=False)  # share of k, v beyond the latest rollouts' scales
    coming_prompts: list[list[int]] = field(default_factory=list, init=False)
    _rollouts: list[list[int]] = field(default_factory=list, init=False)
    _rollout_amax_L3: Tensor | None = field(default=None, init=False)
    _due: KVScales | None = field(default=None, init=False)  # of rollouts that no forward has seen
    _seen: QKVObservation | None = field(default=None, init=False)
    _saturation: float | None = field(default=None, init=False)

    def next_scales(self, model: nn.Module) -> KVScales:
        """Scales for the policy as it is now, run as the trainer calls it. Raises as `kv_scales_from_amax`."""
        self._harvest()
        self.margin_used = self.margin * self.margin_factor
        if self._rollout_amax_L3 is not None and self.mode == "rollout":
            return kv_scales_from_amax(self._rollout_amax_L3, self.margin_used, self.hook.kv_layers)
        sequences = chain.from_iterable(zip_longest(self.coming_prompts, self._rollouts, fillvalue=[]))
        only_prompts = not self._rollouts  # once, before the first rollouts
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
        if self._rollout_amax_L3 is not None:
            amax_L3 = torch.maximum(amax_L3, self._rollout_amax_L3.to(amax_L3.device))
        if only_prompts:
            self.margin_used *= PROMPTS_ONLY_MARGIN
            errors = outlier_layers(error_L1[:, 0])
            if errors := {layer: error for layer, error in errors.items() if layer not in self.hook.skip_layers}:
                logger.warning(outlier_message(errors))
        return kv_scales_from_amax(amax_L3, self.margin_used, self.hook.kv_layers)

    def expect(self, prompts: list[list[int]]) -> None:
        """Note the token ids of prompts that are about to be continued."""
        self.coming_prompts = prompts

    def rollouts_arrived(self, sequences: Sequence[Sequence[int]], scales: KVScales) -> None:
        """Note new rollouts (token ids of prompt and completion) and the scales they were sampled under."""
        if self.mode == "policy":
            self._rollouts = _bounded(sequences, self.max_tokens)
        self._due = scales

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around each forward of the trainer: the first one over new rollouts is observed, later ones are not."""
        if self._due is None:
            yield
            return
        scales_L3, self._due = self._due.values.to(self.hook.device), None
        observation = QKVObservation(self.hook.layers, self.hook.device, scales_L3=scales_L3)
        with self.hook.observing(observation):
            yield
        self._seen = observation

    def saturation(self) -> float | None:
        """Share of k and v beyond the scales in force, of the worst rank; None if nothing is new. A collective."""
        self._harvest()
        saturation, self._saturation = self._saturation, None
        return saturation

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
        self._harvest()
        amax = None if self._rollout_amax_L3 is None else self._rollout_amax_L3.tolist()
        return {"margin_factor": self.margin_factor, "rollouts": self._rollouts, "rollout_amax": amax}

    def load_state_dict(self, state: dict) -> None:
        self.margin_factor, self._rollouts = state["margin_factor"], state["rollouts"]
        self._rollout_amax_L3 = None if (amax := state["rollout_amax"]) is None else torch.tensor(amax)

    def _harvest(self) -> None:
        """Take over what was observed; double the margin if a layer is beyond `SATURATION_LIMIT`."""
        if self._seen is None:
            return
        amax_L3, fraction_L3 = self._seen.amax_L3, self._seen.saturated_fraction_L3
        self._seen = None
        self._reduce(amax_L3, fraction_L3)
        if self.mode == "rollout" or self.has_images:
            self._rollout_amax_L3 = amax_L3
        fraction_L2 = fraction_L3[:, 1:].cpu()
        if fraction_L2.max() > SATURATION_LIMIT:
            self._widen(fraction_L2)
        self._saturation, self.saturated_L2 = fraction_L2[list(self.hook.kv_layers)].mean().item(), fraction_L2

    def _reduce(self, *tensors: Tensor) -> None:
        """Maximum over ranks of `[L, n]` tensors, in place, in one collective."""
        if self.reduce_max is not None:
            packed = torch.cat(tensors, dim=1)
            self.reduce_max(packed)
            for tensor, reduced in zip(tensors, packed.split([t.shape[1] for t in tensors], dim=1), strict=True):
                tensor.copy_(reduced)

    def _widen(self, fraction_L2: Tensor) -> None:
        beyond = [
            f"layer {layer} {QKV[1 + column]} ({fraction_L2[layer, column]:.2g})"
            for layer, column in (fraction_L2 > SATURATION_LIMIT).nonzero().tolist()
        ]
        widest = self.margin_factor >= WIDEST_MARGIN_FACTOR
        self.margin_factor = min(2 * self.margin_factor, WIDEST_MARGIN_FACTOR)
        now = self.margin * self.margin_factor
        remedy = f"The margin is widened to {now:g} from the next sync on."
        if widest:
            remedy = (
                f"The margin is at its limit of {now:g} already: the policy changes faster than it is calibrated. "
                "Lower learning_rate, or set kv_calibration='policy'."
            )
        logger.warning(
            "KV cache scales were too small for the rollouts: share of saturated elements in "
            f"{listed(beyond)}. {remedy}"
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
