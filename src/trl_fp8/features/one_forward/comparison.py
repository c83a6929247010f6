"""The first linear layer whose input or output differs between an engine and a policy that calls its kernels.

Both compute the same sequence. Each linear layer's input and output leave one checksum per token, 8 bytes instead of a
row, compared in the order in which the policy computed them. A difference in an input arose after the linear layer
before: in a norm, an activation function, attention, a router.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from trl_fp8.features.one_forward.modules.followed_linear import FollowedLinear

from .one_forward import OneForward


Place = tuple[str, str]  # checkpoint name of a layer, and which of its ends


class Comparison:
    """Used as `with engine(): ...` and `with policy(): ...`, each around one forward of the same sequence."""

    def __init__(self, forward: OneForward):
        followed = [module for module in forward.modules.values() if isinstance(module, FollowedLinear)]
        self._kernels = forward.kernels
        self._linears: dict[str, FollowedLinear] = {linear.name: linear for linear in followed}
        self._engine: dict[Place, list[Tensor]] = defaultdict(list)  # checksums `[T]` of each of its calls
        self._policy: dict[Place, Tensor] = {}

    def engine(self) -> AbstractContextManager[None]:
        """Watch what the engine computes in the block."""
        return self._kernels.watching(self._note_engine)

    @contextmanager
    def policy(self) -> Iterator[None]:
        """Watch what the policy computes in the block."""
        with ExitStack() as handles:
            for name, linear in self._linears.items():
                handles.enter_context(linear.register_forward_hook(partial(self._note_policy, name)))
            yield

    @property
    def layers(self) -> int:
        """Number of layers that ran on both sides. 0: the engine is compiled, and calls none of them."""
        return len({name for name, _ in self._engine} & {name for name, _ in self._policy})

    def first_difference(self) -> str | None:
        """Return a noun phrase for the first difference; None if nothing differs."""
        for place, mine in self._policy.items():
            if place in self._engine:
                theirs = torch.cat(self._engine[place])[: len(mine)]
                if differing := (mine != theirs).nonzero().flatten().tolist():
                    name, end = place
                    return f"the {end} of {name}, from token {differing[0] + 1} of {len(mine)} on"
        return None

    def _note_engine(self, layers: tuple[str, ...], x: Tensor, y: Tensor) -> None:
        for linear in (self._linears[layer] for layer in layers):
            self._engine[linear.name, "input"].append(checksums(x))
            self._engine[linear.name, "output"].append(checksums(y[..., linear.columns]))

    def _note_policy(self, name: str, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        self._policy[name, "input"], self._policy[name, "output"] = checksums(args[0]), checksums(y)


def checksums(rows: Tensor) -> Tensor:
    """int64 `[T]` of `[..., N]` in BF16. Columns are multiplied by odd keys, so that any one other element shows."""
    bits = rows.detach().to(torch.bfloat16).flatten(0, -2).contiguous().view(torch.int16)
    keys = 2 * torch.arange(bits.shape[-1], device=bits.device) + 1
    return (bits.long() * keys).sum(-1)
