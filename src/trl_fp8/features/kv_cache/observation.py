"""Magnitudes of q, k and v of real tokens in each layer, from which the scales of a KV cache are made.

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
    """Magnitudes of real tokens, accumulated over forwards, on the model's device.

    With `scales_L3`, fp32 `[L, 3]`, elements beyond `448 * scale` are counted; with `moments` mean squares of q and k
    per channel are taken, which `logit_error_L` needs. On a GPU each of q, k and v is one kernel; mean squares, which
    are taken once before the first rollouts, are torch's operations.
    """

    def __init__(self, layers: int, device: torch.device, *, scales_L3: Tensor | None = None, moments: bool = False):
        self.limits_L3 = None if scales_L3 is None else E4M3_MAX * scales_L3
        self.amax_L3 = torch.zeros(layers, 3, device=device)  # 0 where a layer was not run
        # Elements beyond 448 * scale, and all elements, of real tokens
        self.saturated_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.elements_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.logit_error_L = torch.zeros(layers, device=device)  # the largest over forwards; 0 without `moments`
        self.passes = 0  # blocks of `watching` that are through
        self.under_way = False  # inside such a block
        self._moments = moments
        self._real = torch.ones((), dtype=torch.bool, device=device)

    @property
    def saturated_fraction_L3(self) -> Tensor:
        """Return the share `[L, 3]` of elements that the scales do not hold; 0 where a layer was not run."""
        return (self.saturated_L3 / self.elements_L3.clamp_min(1)).float()

    @contextmanager
    def watching(self, hook: AttentionHook) -> Iterator[None]:
        """Observe the forwards inside the block. A block that fails is no pass."""
        if self.under_way:
            raise RuntimeError("this observation watches a forward already, and such blocks do not nest.")
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
        """Account for one attention call: q, k, v `[B, H, T, D]`, of which tokens with `real_BT` count; None: all.

        k and v are as they are cached. `key` is k as q meets it, which `logit_error_L` takes to be what is rounded.
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
            q_HD, k_HD = (_mean_squares(tensor, real_BT) for tensor in (states[0], key))
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
        sequences: Token ids, one list a sequence, the most telling ones first. Repeated sequences are run once.
        pad_token_id: Any valid token id; padding is masked.
        max_tokens: Bound on the tokens of all forwards without padding, and on those of each forward with it.
        fused_lm_head: The model has TRL's fused output head, which then scores no token.
        moments: Measure `logit_error_L`, too.
        reduce_max: As for `reduce_together`. Ranks then run the same number of forwards: each is a collective for a
            sharded policy.
    """
    batches = _batches(bounded(sequences, max_tokens), max_tokens)
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
    reduce_together(reduce_max, observation.amax_L3, observation.logit_error_L[:, None])
    return observation


def reduce_together(reduce_max: Callable[[Tensor], None] | None, *tensors: Tensor) -> None:
    """Make `[L, n]` tensors their maximum over ranks, in place, in one collective: `reduce_max` does so with one
    tensor, and is None on one process.
    """
    if reduce_max is not None:
        packed = torch.cat(tensors, dim=1)
        reduce_max(packed)
        for tensor, reduced in zip(tensors, packed.split([t.shape[1] for t in tensors], dim=1), strict=True):
            tensor.copy_(reduced)


def bounded(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the first different `sequences` that together have at most `max_tokens`, each cut to as many."""
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


def _mean_squares(values: Tensor, real_BT: Tensor) -> Tensor:
    return values.float().square().mul_(real_BT[:, None, :, None]).sum((0, 2)) / real_BT.sum()
