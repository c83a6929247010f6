"""Largest magnitudes of q, k and v in each layer, over all tokens except padding. They decide a KV cache's scales.

`QKVObservation` collects the magnitudes. It is plugged into the policy's hook (policy/hook.py), either while TRL runs
the policy anyway (`watching`), or while `observe_sequences` runs the policy for this purpose.

Shape letters: L layers, B sequences, H heads, T tokens, D head size. The 3 columns are q, k and v.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.kv_scales import add_magnitudes, logit_error
from trl_fp8.quantization.formats import E4M3_MAX


class QKVObservation:
    """Magnitudes of real tokens (not padding), accumulated over forwards on the model's device.

    With `scales_L3`, fp32 `[L, 3]`, the observation counts the elements of k and v beyond `448 * scale`, which a cache
    clips. With `moments` it measures `logit_error_L`, from the mean squares of q and k per channel. On a GPU each of
    q, k and v takes one kernel. `moments` takes several operations of torch, but a run needs this only before its
    first rollouts.
    """

    def __init__(self, layers: int, device: torch.device, *, scales_L3: Tensor | None = None, moments: bool = False):
        self.limits_L3 = None if scales_L3 is None else E4M3_MAX * scales_L3
        self.amax_L3 = torch.zeros(layers, 3, device=device)  # 0 in a layer that no forward ran
        # Number of elements of real tokens, and number of those that a cache clips
        self.elements_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        self.saturated_L3 = torch.zeros(layers, 3, dtype=torch.float64, device=device)
        # The largest `kv_scales.logit_error` over forwards; 0 without `moments`
        self.logit_error_L = torch.zeros(layers, device=device)
        self.passes = 0  # finished blocks of `watching`
        self.under_way = False  # whether a block of `watching` is open
        self._moments = moments
        self._real = torch.ones((), dtype=torch.bool, device=device)

    @property
    def saturated_fraction_L3(self) -> Tensor:
        """Return the share `[L, 3]` of clipped elements; 0 in a layer that no forward ran."""
        return (self.saturated_L3 / self.elements_L3.clamp_min(1)).float()

    @contextmanager
    def watching(self, hook: AttentionHook) -> Iterator[None]:
        """Observe the forwards inside the block. Count the block in `passes` unless it raises."""
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
        """Add q, k and v of one attention call.

        Args:
            layer: Number of the decoder layer.
            states: q, k and v `[B, H, T, D]`; k and v are those that the cache stores.
            real_BT: False at padding, which is left out; None: there is no padding.
            scaling: Factor on the attention scores.
            key: The k that q is multiplied with, for `logit_error_L`; None: the cached k.
        """
        states = tuple(tensor.detach() for tensor in states)
        if real_BT is None:
            real_BT = self._real.expand(states[1].shape[0], states[1].shape[2])
        for column, tensor in enumerate(states):
            cells = {"amax": self.amax_L3[layer, column], "elements": self.elements_L3[layer, column]}
            if self.limits_L3 is not None and column > 0:  # q is not cached
                cells |= {"limit": self.limits_L3[layer, column], "beyond": self.saturated_L3[layer, column]}
            add_magnitudes(tensor, real_BT, **cells)
        if self._moments:
            query = states[0]
            key = states[1] if key is None else key.detach()
            q_squares_HD = _mean_squares(query, real_BT)
            k_squares_GD = _mean_squares(key, real_BT)
            error = self.logit_error_L[layer]
            torch.maximum(error, logit_error(q_squares_HD, k_squares_GD, scaling), out=error)


def _mean_squares(states: Tensor, real_BT: Tensor) -> Tensor:
    """Return the mean squares `[H, D]` of `states` `[B, H, T, D]` over real tokens."""
    squares = states.float().square().mul_(real_BT[:, None, :, None])  # 0 at padding
    return squares.sum((0, 2)) / real_BT.sum()


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
    forward: Callable[[nn.Module, list[list[int]]], None] | None = None,
) -> QKVObservation:
    """Run `sequences` through the policy. Return the observation: maxima over the tokens of all ranks.

    Args:
        model: The policy as the trainer calls it, with its wrappers (PEFT, DDP, FSDP2).
        hook: The policy's hook.
        sequences: Token ids, a list for each sequence, the most important first. A repeated sequence is run once.
        pad_token_id: Any valid token id; padding is masked.
        max_tokens: Limit on the tokens of all forwards together, and on the padded positions of each forward.
        fused_lm_head: Whether the model has TRL's fused output head, which then scores no token.
        moments: Whether to measure `logit_error_L`.
        reduce_max: See `reduce_together`. With it all ranks run the same number of forwards, because each forward of a
            sharded policy is a collective.
        forward: Runs rows of token ids through `model`; None: the rows are run as one padded batch.

    Raises:
        ValueError: All sequences of a rank are empty. Raised on all ranks.
    """
    batches = _batches(bounded(sequences, max_tokens), max_tokens)
    # The number of forwards, and 1 if this rank has nothing to run. After the maximum over ranks, all ranks raise if
    # one rank has nothing to run, and no rank waits for another
    counts = torch.tensor([len(batches), not batches], device=hook.device)
    if reduce_max is not None:
        reduce_max(counts)
    forwards, lacks_tokens = counts.tolist()
    if lacks_tokens:
        raise ValueError("KV cache scales cannot be calibrated: there is no prompt with at least one token.")
    observation = QKVObservation(hook.layers, hook.device, moments=moments)
    with torch.no_grad(), hook.observing(observation):
        for number in range(forwards):
            # A rank with fewer batches repeats its last and smallest batch, which changes no maximum
            rows = batches[min(number, len(batches) - 1)]
            if forward is not None:
                forward(model, rows)
            else:
                _padded_forward(model, rows, hook.device, pad_token_id, fused_lm_head)
    reduce_together(reduce_max, observation.amax_L3, observation.logit_error_L[:, None])
    return observation


def _padded_forward(
    model: nn.Module, rows: list[list[int]], device: torch.device, pad_token_id: int, fused_lm_head: bool
) -> None:
    """Run rows as one padded batch. The first row is the longest."""
    length = len(rows[0])
    padded = [row + [pad_token_id] * (length - len(row)) for row in rows]
    real = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
    ids = torch.tensor(padded, device=device)
    mask = torch.tensor(real, device=device)
    head = {"logits_to_keep": 1}
    if fused_lm_head:
        # Call TRL's fused head, as TRL does, with labels that leave out every token. ZeRO-3 gathers parameters
        # ahead in the order of the previous forward. After a call of the head's module (`logits_to_keep`) ZeRO-3 would
        # gather the head twice in TRL's next forward
        head = {"labels": torch.full_like(ids, -100), "fused_lm_head": True}
    model(input_ids=ids, attention_mask=mask, use_cache=False, **head)


def reduce_together(reduce_max: Callable[[Tensor], None] | None, *tensors: Tensor) -> None:
    """Replace each of `tensors` (`[L, n]`, any n) by its maximum over ranks, in one collective.

    `reduce_max` replaces one tensor by its maximum over ranks; None: there is one process, and nothing is done.
    """
    if reduce_max is None:
        return
    packed = torch.cat(tensors, dim=1)
    reduce_max(packed)
    widths = [tensor.shape[1] for tensor in tensors]
    for tensor, reduced in zip(tensors, packed.split(widths, dim=1), strict=True):
        tensor.copy_(reduced)


def bounded(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the distinct `sequences` in order, each cut to `max_tokens`. Leave out a sequence that would exceed
    `max_tokens` together with the sequences before it.
    """
    rows = []
    left = max_tokens
    cut = (tuple(sequence[:max_tokens]) for sequence in sequences)
    for row in dict.fromkeys(cut):  # without repetitions
        if row and len(row) <= left:
            rows.append(list(row))
            left -= len(row)
    return rows


def _batches(rows: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Split `rows` into batches, the longest rows first. A batch padded to its first row has at most `max_tokens`."""
    batches = []
    for row in sorted(rows, key=len, reverse=True):
        if batches:
            last = batches[-1]
            positions = (len(last) + 1) * len(last[0])  # of the last batch with this row, padded
        if not batches or positions > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
