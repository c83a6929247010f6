"""From what the policy's attention sees to the scales of the engine's next KV cache.

vLLM 0.31 has no calibration of its own. Two sources of magnitudes, `kv_calibration`:

    rollout   the old-log-prob pass over the latest rollouts, which TRL runs anyway: no forward is added, every token
              is seen, but with the weights of one optimizer step ago
    policy    a forward of the new weights over a bounded number of tokens: the coming prompts and the latest rollouts

Before the first rollouts there are only prompts, with either. The same old-log-prob pass shows how many elements the
scales in force did not hold; too many of them widen the margin.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import nn

from trl_fp8.quantization.kv_scales import LOGIT_ERROR_LIMIT, QKV, KVScales, kv_scales_from_amax, outlier_layers
from trl_fp8.recipe.names import listed

from .observation import QKVObservation
from .tap import AttentionTap


logger = logging.getLogger(__name__)

# Before the first rollouts only prompts can be observed, and completions reach further: 1.26 times the prompts'
# largest |q| on the addition demo. One more power of two costs a floating point format nothing.
PROMPTS_ONLY_MARGIN = 2.0
# Share of a layer's k or v elements beyond 448 * scale from which on the margin is doubled. A few clipped elements in
# a million do no harm; e4m3 has 15 powers of two to spare below them.
SATURATION_LIMIT = 1e-5
WIDEST_MARGIN_FACTOR = 16.0


class KVCalibrator:
    """Keeps what the next calibration needs, and how wide its margin is. The same on every rank.

    Args:
        tap: The policy's attention tap.
        mode, margin, max_tokens: Flags `kv_calibration`, `kv_scale_margin` and `kv_calibration_tokens`.
        pad_token_id, fused_lm_head: See `observe_sequences`.
        reduce_max: Replaces a tensor by its maximum over ranks, in place. None on one process.

    Attributes:
        margin_factor: Saturation widens the margin by this: 1, 2, 4, ... at most 16.
        margin_used: The latest calibration multiplied magnitudes by this; None before the first.
        saturated_L2: Share of k and v that the scales of the latest rollouts did not hold, on the host.
    """

    def __init__(
        self,
        tap: AttentionTap,
        *,
        mode: str,
        margin: float,
        max_tokens: int,
        pad_token_id: int = 0,
        fused_lm_head: bool = False,
        reduce_max: Callable[[torch.Tensor], None] | None = None,
    ):
        self.tap, self.mode, self.margin, self.max_tokens = tap, mode, margin, max_tokens
        self.pad_token_id, self.fused_lm_head, self.reduce_max = pad_token_id, fused_lm_head, reduce_max
        self.margin_factor = 1.0
        self.margin_used: float | None = None
        self.coming_prompts: list[list[int]] = []
        self._rollouts: list[list[int]] = []
        self._rollout_amax_L3: torch.Tensor | None = None
        self._due: KVScales | None = None
        self._seen: QKVObservation | None = None
        self._saturation: float | None = None
        self.saturated_L2: torch.Tensor | None = None

    def next_scales(self, model: nn.Module) -> KVScales:
        """Scales for the policy as it is now, run as the trainer calls it. Raises as `kv_scales_from_amax`."""
        self._harvest()
        self.margin_used = self.margin * self.margin_factor
        if self._rollout_amax_L3 is not None:
            return kv_scales_from_amax(self._rollout_amax_L3, self.margin_used)
        sequences = chain.from_iterable(zip_longest(self.coming_prompts, self._rollouts, fillvalue=[]))
        observation = observe_sequences(
            model,
            self.tap,
            list(sequences),
            pad_token_id=self.pad_token_id,
            max_tokens=self.max_tokens,
            fused_lm_head=self.fused_lm_head,
        )
        amax_L3, error_L1 = observation.amax_L3, observation.logit_error_L[:, None]
        self._reduce(amax_L3, error_L1)
        if not self._rollouts:  # once, before the first rollouts
            self.margin_used *= PROMPTS_ONLY_MARGIN
            self._warn_of_outliers(error_L1[:, 0])
        return kv_scales_from_amax(amax_L3, self.margin_used)

    def expect(self, prompts: list[list[int]]) -> None:
        """Note the tokens of prompts that are about to be continued."""
        self.coming_prompts = prompts

    def rollouts_arrived(self, sequences: Sequence[Sequence[int]], scales: KVScales) -> None:
        """Note the tokens of new rollouts (prompt and completion) and the scales that they were sampled under."""
        if self.mode == "policy":
            self._rollouts = _bounded(sequences, self.max_tokens)
        self._due = scales

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around each forward of the trainer: the first one over new rollouts is observed, later ones are not."""
        if self._due is None:
            yield
            return
        scales_L3, self._due = self._due.values.to(self.tap.device), None
        observation = QKVObservation(self.tap.layers, self.tap.device, scales_L3=scales_L3)
        with self.tap.observing(observation):
            yield
        self._seen = observation

    def saturation(self) -> float | None:
        """Share of k and v beyond the scales in force, of the worst rank; None if nothing is new. A collective."""
        self._harvest()
        saturation, self._saturation = self._saturation, None
        return saturation

    def save(self, folder: str | Path, rank: int) -> None:
        """Write `state_dict`: what a resumed run needs to calibrate as the uninterrupted one would."""
        _state_file(folder, rank).write_text(json.dumps(self.state_dict()))

    def load(self, folder: str | Path, rank: int) -> None:
        """Read what `save` wrote; a checkpoint without it (made without an FP8 KV cache) leaves a fresh start."""
        # a rank that was not there before takes the first rank's state: ranks have to calibrate all or none
        paths = [path for number in (rank, 0) if (path := _state_file(folder, number)).exists()]
        if paths:
            self.load_state_dict(json.loads(paths[0].read_text()))

    def state_dict(self) -> dict:
        self._harvest()
        amax = self._rollout_amax_L3
        return {
            "margin_factor": self.margin_factor,
            "rollouts": self._rollouts,
            "rollout_amax": None if amax is None else amax.tolist(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.margin_factor, self._rollouts = state["margin_factor"], state["rollouts"]
        amax = state["rollout_amax"]
        self._rollout_amax_L3 = None if amax is None else torch.tensor(amax)

    def _harvest(self) -> None:
        """Take over what was observed; double the margin if a layer is beyond `SATURATION_LIMIT`."""
        if self._seen is None:
            return
        amax_L3, fraction_L3 = self._seen.amax_L3, self._seen.saturated_fraction_L3
        self._seen = None
        self._reduce(amax_L3, fraction_L3)
        if self.mode == "rollout":
            self._rollout_amax_L3 = amax_L3
        fraction_L2 = fraction_L3[:, 1:].cpu()
        if fraction_L2.max() > SATURATION_LIMIT:
            self._widen(fraction_L2)
        self._saturation, self.saturated_L2 = fraction_L2.mean().item(), fraction_L2

    def _reduce(self, *tensors: torch.Tensor) -> None:
        """Maximum over ranks of `[L, n]` tensors, in place, in one collective."""
        if self.reduce_max is not None:
            packed = torch.cat(tensors, dim=1)
            self.reduce_max(packed)
            for tensor, reduced in zip(tensors, packed.split([t.shape[1] for t in tensors], dim=1), strict=True):
                tensor.copy_(reduced)

    def _widen(self, fraction_L2: torch.Tensor) -> None:
        beyond = [
            f"layer {layer} {QKV[1 + column]} ({fraction_L2[layer, column]:.2g})"
            for layer, column in (fraction_L2 > SATURATION_LIMIT).nonzero().tolist()
        ]
        widest = self.margin_factor >= WIDEST_MARGIN_FACTOR
        self.margin_factor = min(2 * self.margin_factor, WIDEST_MARGIN_FACTOR)
        now = self.margin * self.margin_factor
        logger.warning(
            "KV cache scales were too small for the rollouts: share of saturated elements in "
            f"{listed(beyond)}. "
            + (
                f"The margin is at its limit of {now:g} already: the policy changes faster than it is calibrated. "
                "Lower learning_rate, or set kv_calibration='policy'."
                if widest
                else f"The margin is widened to {now:g} from the next sync on."
            )
        )

    def _warn_of_outliers(self, logit_error_L: torch.Tensor) -> None:
        skipped = self.tap.skip_layers
        errors = {layer: e for layer, e in outlier_layers(logit_error_L).items() if layer not in skipped}
        if errors:
            logger.warning(outlier_message(errors))


def _state_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"kv_calibration_{rank}.json"


def layers_with_outliers(
    model: nn.Module,
    tap: AttentionTap,
    prompts: Sequence[Sequence[int]],
    reduce_max: Callable[[torch.Tensor], None] | None = None,
    fused_lm_head: bool = False,
) -> dict[int, float]:
    """Layers of the policy whose k has outliers on `prompts` (token ids): number -> expected error of the logits."""
    error_L = observe_sequences(model, tap, prompts, fused_lm_head=fused_lm_head).logit_error_L
    if reduce_max is not None:
        reduce_max(error_L)
    return outlier_layers(error_L)


def outlier_message(errors: dict[int, float]) -> str:
    """What a user should know and do about layers with outliers in k; `errors` as from `outlier_layers`."""
    listed = ", ".join(f"{layer} ({error:.2g})" for layer, error in errors.items())
    return (
        f"k has outliers in layers (expected error of the attention logits in an FP8 KV cache): {listed}. Rollouts "
        f"will drift from the policy beyond {LOGIT_ERROR_LIMIT:g}; models with a bias on k and no normalization, such "
        f"as Qwen2, are known for it. Keep the KV cache of these layers in BF16: kv_cache_skip_layers={list(errors)}, "
        "or 'auto'."
    )


def observe_sequences(
    model: nn.Module,
    tap: AttentionTap,
    sequences: Sequence[Sequence[int]],
    *,
    pad_token_id: int = 0,
    max_tokens: int = 8192,
    fused_lm_head: bool = False,
) -> QKVObservation:
    """Run `sequences` through the policy and observe q, k, v of their tokens, with moments.

    Args:
        model: The policy as the trainer calls it (a transformers model, or a PEFT, DDP or FSDP2 wrapping of one).
        tap: Its tap.
        sequences: Token ids, one list a sequence, the most telling ones first. Repeated sequences are run once.
        pad_token_id: Any valid token id; padding is masked.
        max_tokens: The forward has at most so many tokens.
        fused_lm_head: The model has TRL's fused output head, which is then asked for no token at all.

    Raises:
        ValueError: There is no token to observe.
    """
    rows = _bounded(sequences, max_tokens)
    if not rows:
        raise ValueError("KV cache scales cannot be calibrated: there is no prompt with at least one token.")
    length = max(map(len, rows))
    ids = torch.tensor([row + [pad_token_id] * (length - len(row)) for row in rows], device=tap.device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=tap.device)
    observation = QKVObservation(tap.layers, tap.device, moments=True)
    # ZeRO-3 fetches modules ahead in the order of the last forward, and in TRL's own forwards the head is no module
    # call: a forward that made it one would have the next one gather it twice
    head = {"labels": torch.full_like(ids, -100), "fused_lm_head": True} if fused_lm_head else {"logits_to_keep": 1}
    with torch.no_grad(), tap.observing(observation):
        model(input_ids=ids, attention_mask=mask, use_cache=False, **head)
    return observation


def _bounded(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    rows, left = [], max_tokens
    for row in dict.fromkeys(tuple(sequence[:max_tokens]) for sequence in sequences):
        if row and len(row) <= left:
            rows.append(list(row))
            left -= len(row)
    return rows
