"""Magnitudes of q, k and v in each layer, over all tokens but padding. The scales of a KV cache are made from them.

Shape letters: L layers, B sequences, H heads, T tokens, D head size; columns as in `kv_scales.QKV`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import add_magnitudes, logit_error
from trl_fp8.quantization.formats import E4M3_MAX


class QKVObservation:
    """Magnitudes of real tokens, those that are not padding, accumulated over forwards on the model's device.

    With `scales_L3`, fp32 `[L, 3]`, it counts the elements beyond `448 * scale`. With `moments` it measures
    `logit_error_L` from the mean squares of q and k per channel. On a GPU each of q, k and v takes one kernel; mean
    squares take several operations of torch's, but only once, before the first rollouts.
    """

    def __init__(self, layers: int, device: torch.device, *, scales_L3: Tensor | None = None, moments: bool = False):
        self.limits_L3 = None if scales_L3 is None else E4M3_MAX * scales_L3
        self.amax_L3 = torch.zeros(layers, 3, device=device)  # 0 in a layer that no forward ran
        # Elements beyond 448 * scale, and all elements, of real tokens
        self.saturated_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.elements_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.logit_error_L = torch.zeros(layers, device=device)  # the largest over forwards; 0 without `moments`
        self.passes = 0  # finished blocks of `watching`
        self.under_way = False  # inside such a block
        self._moments = moments
        self._real = torch.ones((), dtype=torch.bool, device=device)

    @property
    def saturated_fraction_L3(self) -> Tensor:
        """Return the share `[L, 3]` of elements beyond 448 * scale; 0 in a layer that no forward ran."""
        return (self.saturated_L3 / self.elements_L3.clamp_min(1)).float()

    @contextmanager
    def watching(self, hook: AttentionHook) -> Iterator[None]:
        """Observe the forwards inside the block, and count it in `passes` unless it raises."""
        if self.under_way:
            raise RuntimeError("this observation already watches a forward: blocks of `watching` do not nest.")
        self.under_way = True
        try:
            with hook.observing(self):
                yield
            self.passes += 1
        finally:
            self.under_way = False

    def add(
        self, layer: int, states: tuple[Tensor, ...], real_BT: Tensor | None, scaling: float, key: Tensor | None = None
    ) -> None:
        """Add one attention call.

        Args:
            layer: Number of the decoder layer.
            states: q, k and v `[B, H, T, D]`, k and v as they are cached.
            real_BT: False at padding, which does not count; None: no padding.
            scaling: Factor on the attention scores.
            key: k as the scores are computed from it, for `logit_error_L`; None: the cached k.
        """
        states = tuple(tensor.detach() for tensor in states)
        if real_BT is None:
            real_BT = self._real.expand(states[1].shape[0], states[1].shape[2])
        for column, tensor in enumerate(states):
            cells = [self.amax_L3[layer, column], self.elements_L3[layer, column]]
            if self.limits_L3 is not None and column > 0:  # q is not cached
                cells += [self.limits_L3[layer, column], self.saturated_L3[layer, column]]
            add_magnitudes(tensor, real_BT, *cells)
        if self._moments:
            key = states[1] if key is None else key.detach()
            squares = [tensor.float().square().mul_(real_BT[:, None, :, None]) for tensor in (states[0], key)]
            q_HD, k_HD = (square.sum((0, 2)) / real_BT.sum() for square in squares)  # their means
            error = self.logit_error_L[layer]
            torch.maximum(error, logit_error(q_HD, k_HD, scaling), out=error)


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
    """Run `sequences` through the policy and observe `amax_L3` and `logit_error_L` of their tokens, over all ranks.

    Args:
        model, hook: The policy as the trainer calls it (in PEFT, DDP or FSDP2 wrappings), and its hook.
        sequences: Token ids, a list for each sequence, the most important first. A repeated sequence is run once.
        pad_token_id: Any valid token id; padding is masked.
        max_tokens: Limit on the tokens of all forwards without padding, and on those of each forward with it.
        fused_lm_head: The model has TRL's fused output head, which then scores no token.
        moments: Also measure `logit_error_L`.
        reduce_max: As for `reduce_together`. Ranks then run the same number of forwards: with a sharded policy each
            forward is a collective.
    """
    batches = _batches(bounded(sequences, max_tokens), max_tokens)
    if not batches:
        raise ValueError("KV cache scales cannot be calibrated: there is no prompt with at least one token.")
    forwards = torch.tensor(len(batches), device=hook.device)
    if reduce_max is not None:
        reduce_max(forwards)
    observation = QKVObservation(hook.layers, hook.device, moments=moments)
    with torch.no_grad(), hook.observing(observation):
        for number in range(int(forwards)):
            rows = batches[min(number, len(batches) - 1)]  # the last one, the smallest, again: it changes no maximum
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
    reduce_together(reduce_max, observation.amax_L3, observation.logit_error_L[:, None])
    return observation


def reduce_together(reduce_max: Callable[[Tensor], None] | None, *tensors: Tensor) -> None:
    """Replace `[L, n]` tensors by their maximum over ranks, in one collective. `reduce_max` replaces one tensor; None
    on one process.
    """
    if reduce_max is not None:
        packed = torch.cat(tensors, dim=1)
        reduce_max(packed)
        for tensor, reduced in zip(tensors, packed.split([t.shape[1] for t in tensors], dim=1), strict=True):
            tensor.copy_(reduced)


def bounded(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the first distinct `sequences`, each cut to `max_tokens`, that together have at most `max_tokens`."""
    rows = []
    left = max_tokens
    for row in dict.fromkeys(tuple(sequence[:max_tokens]) for sequence in sequences):
        if row and len(row) <= left:
            rows.append(list(row))
            left -= len(row)
    return rows


def _batches(rows: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Split `rows`, the longest first, into batches of at most `max_tokens` when padded to their first row."""
    batches = []
    for row in sorted(rows, key=len, reverse=True):
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0]) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
