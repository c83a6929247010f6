"""Router replay: the trainer's routers use the experts that the rollout chose, with gate weights of their own.

If two experts nearly tie, a rounding error makes engine and trainer send a token to different experts, and its
log-prob jumps. These jumps are the largest part of a mixture of experts' mismatch (R3, arXiv 2510.11370: about one
router in ten differs). A *route* is the experts of one token in one layer. Replay takes only routes from the rollout.
Logits, softmax and normalization are the model's own, so gradients reach routers and experts as without replay. The
only change is that `topk` returns the route as indices, and the values at these indices.

    forward  ->  routes [N, K] of a layer for this forward's tokens  ->  router: softmax, topk -> route, normalize

`RouterReplay` gives each router a class (`_Replayed`) whose forward calls `RouterReplay.route`. `route` calls the
router's own forward inside `_TopK`, which replaces the result of `topk`. Before each forward a hook on the decoder,
`_before_forward`, takes the routes of the forward's sequences.

Shape letters: B sequences, S tokens of a padded sequence, N = B * S, L layers with routers, K experts per token.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trl_fp8.policy.model import decoder_input, transformers_model
from trl_fp8.policy.swapped import swap
from trl_fp8.recipe.names import NOWHERE, full_shape, is_router, routers


class RouteTally:
    """Three counts of routes, fp64 `[3]` on the device.

    The first number counts the routes that are known from the rollout. The second counts the known routes that the
    forward used, and the third the known routes that the router itself chose.
    """

    def __init__(self, device: torch.device):
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, rollout_NK: Tensor, used_NK: Tensor, own_NK: Tensor, real_N: Tensor | None = None) -> None:
        """Count the routes of one router. Tokens outside `real_N` do not count."""
        known_N = (rollout_NK != NOWHERE).all(-1)
        if real_N is not None:
            known_N = known_N & real_N
        used_as_rollout_N = known_N & _same_set(used_NK, rollout_NK)
        chosen_as_rollout_N = known_N & _same_set(own_NK, rollout_NK)
        self.counts += torch.stack([known_N.sum(), used_as_rollout_N.sum(), chosen_as_rollout_N.sum()])


class RouterReplay:
    """Replays routes in a policy, PEFT-wrapped or not, from `begin` to `end`. Errors name `flag`."""

    def __init__(self, model: nn.Module, flag: str = "router_replay"):
        base = transformers_model(model)
        by_layer = _by_layer(base, flag)
        self.layers = tuple(by_layer)  # numbers of the decoder layers that have a router
        first = by_layer[self.layers[0]]
        self.experts_per_token: int = first.top_k
        # The smallest type that holds every expert's number, from 0, and `NOWHERE`
        self.dtype = torch.int8 if full_shape(first.weight)[0] <= 128 else torch.int16
        self._recorded: list[Tensor] = []
        self.end()
        for column, router in enumerate(by_layer.values()):
            if isinstance(router, _Replayed):  # an earlier trainer swapped this router: remove that trainer's hook
                earlier_replay, _ = router.replay
                earlier_replay._hook.remove()
            else:
                swap(router, _Replayed, replay=None)
            router.replay = self, column
        self._hook = base.get_decoder().register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def begin(
        self, routes_BSLK: Tensor | None, *, replay: bool, tally: RouteTally | None = None, record: bool = False
    ) -> None:
        """Use `routes_BSLK` in the next forwards. Each forward takes the next rows, a row for each of its sequences.

        Call `end` only after the backward pass, because gradient checkpointing runs the forward again.

        Args:
            routes_BSLK: Experts of each token and layer, on any device, or None.
            replay: Whether routers use these experts, except at `NOWHERE`. False: routers choose by themselves, and
                their choices are only compared with these experts.
            tally: Counts how often routers agree with the routes.
            record: Whether the routers' own choices are stored for `recorded`.
        """
        self._routes_BSLK = routes_BSLK
        self._replay = replay
        self._tally = tally
        self._recording = record
        self._row = 0  # first row of `routes_BSLK` that no forward has used
        self._chunk_NLK: Tensor | None = None  # routes of the forward that is running
        self._real_N: Tensor | None = None  # False at padding in that forward; None: no padding
        if record or routes_BSLK is not None:  # not in `end`, because `recorded` is read after `end`
            self._recorded = []

    def end(self) -> None:
        self.begin(None, replay=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let routers choose by themselves inside the block. Continue the current replay after it."""
        state = dict(vars(self))  # all attributes, because `end` resets those of the current replay
        self.end()
        try:
            yield
        finally:
            vars(self).update(state)

    @contextmanager
    def during(self, routes_BSLK: Tensor | None, **options) -> Iterator[None]:
        """Replay routes inside the block, for a forward without backward."""
        self.begin(routes_BSLK, **options)
        try:
            yield
        finally:
            self.end()

    def recorded(self) -> Tensor:
        """Return the routers' own choices `[B, S, L, K]` since the last `begin(record=True)`, on the device."""
        return torch.cat(self._recorded)

    def _before_forward(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._routes_BSLK is None and not self._recording:
            return
        tokens = decoder_input(args, kwargs)
        rows, length = tokens.shape[:2]
        if self._recording:
            shape = rows, length, len(self.layers), self.experts_per_token
            self._recorded.append(torch.empty(shape, dtype=self.dtype, device=tokens.device))
        if self._routes_BSLK is not None:
            chunk = self._routes_BSLK[self._row : self._row + rows]
            if chunk.shape[:2] != (rows, length):
                raise RuntimeError(
                    f"router replay has routes for {len(self._routes_BSLK)} sequences of {self._routes_BSLK.shape[1]} "
                    f"tokens, but after {self._row} of them the policy was run on {rows} sequences of {length} tokens."
                )
            self._row += rows
            self._chunk_NLK = chunk.to(tokens.device).flatten(0, 1)
            mask = kwargs.get("attention_mask")
            self._real_N = None
            if isinstance(mask, Tensor) and mask.dim() == 2:
                self._real_N = mask.flatten().bool()

    def route(self, column: int, forward: Callable[..., tuple], *args, **kwargs) -> tuple:
        """Call a router's `forward` under this replay. Return its outputs, the last of which are routes `[N, K]`."""
        if self._chunk_NLK is None and not self._recording:
            return forward(*args, **kwargs)
        rollout_NK = None if self._chunk_NLK is None else self._chunk_NLK[:, column].long()
        replayed_NK = rollout_NK if self._replay else None
        with _TopK(replayed_NK) as topk:
            output = forward(*args, **kwargs)
        if len(topk.own) != 1:
            raise RuntimeError(
                f"the router of layer {self.layers[column]} calls topk {len(topk.own)} times, but replay needs one "
                "call, which chooses the experts. Set router_replay='off'."
            )
        [own_NK] = topk.own
        used_NK = output[-1]
        if self._recording:
            recorded_NLK = self._recorded[-1].flatten(0, 1)  # a view
            recorded_NLK[:, column] = own_NK.to(self.dtype)
        if self._tally is not None and rollout_NK is not None:
            self._tally.add(rollout_NK, used_NK, own_NK, self._real_N)
        return output


class _TopK(TorchFunctionMode):
    """Makes `torch.topk` return `indices_NK` (unless None) and the values there. The indices of torch go to `own`.

    Routers in transformers do different things before and after their top-k, but all routers call `torch.topk`.
    """

    def __init__(self, indices_NK: Tensor | None):
        super().__init__()
        self.indices_NK = indices_NK
        self.own: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return output
        self.own.append(output.indices)
        if self.indices_NK is None:
            return output
        indices = torch.where(self.indices_NK == NOWHERE, output.indices, self.indices_NK)
        values = args[0] if args else kwargs["input"]
        return torch.return_types.topk((values.gather(-1, indices), indices))


class _Replayed:
    """Mixed into the class of a router, so that `RouterReplay.route` calls its forward."""

    replay: tuple[RouterReplay, int]  # the replay, and this router's column in its routes

    def forward(self, *args, **kwargs):
        replay, column = self.replay
        return replay.route(column, super().forward, *args, **kwargs)


def _by_layer(base: nn.Module, flag: str) -> dict[int, nn.Module]:
    """Return the router of each decoder layer that has one. `ValueError` if none has, or for an unknown router."""
    routers_by_name = routers(base)
    if not routers_by_name:
        raise ValueError(f"{flag}: {type(base).__name__} is not a mixture of experts. Set router_replay='off'.")
    for name, router in routers_by_name.items():
        if not is_router(router):
            raise ValueError(
                f"{flag}: {name} is a {type(router).__name__}, but replay needs routers that choose by one top-k (as "
                "in Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE and GPT-OSS). Set router_replay='off'."
            )
    by_layer = {}
    for name, router in routers_by_name.items():
        layer = int(re.search(r"layers\.(\d+)\.", name)[1])
        by_layer[layer] = router
    return by_layer


def _same_set(a_NK: Tensor, b_NK: Tensor) -> Tensor:
    """Return for each row whether `a` and `b` name the same experts, in any order. A row has no repetitions."""
    is_equal_NKK = a_NK[:, :, None] == b_NK[:, None, :]
    return is_equal_NKK.any(-1).all(-1)
