"""The attention of a policy that follows an engine: the engine's kernel, over the sequences of a padded batch.

Shape letters: B rows, T tokens of a padded row, N tokens of all sequences, R sequences, H heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_fp8.engine.kernels import EngineKernels

from .packed_attention import packed_attention


SINKS = "s_aux"  # transformers' keyword for attention sinks


class FollowedAttention:
    """Mixed into `OneForward`; see `policy.hook.Replacement`. No mask of transformers' is read, because the kernel
    knows which tokens a query sees.
    """

    kernels: EngineKernels

    def before_forward(self, real_BT: Tensor | None, shape: tuple[int, int], device: torch.device) -> "Sequences":
        return Sequences.of(real_BT, *shape, device)

    def attend(
        self, layer: int, states: tuple[Tensor, ...], batch: "Sequences", scales: Tensor | None, options: dict
    ) -> Tensor:
        engine = self.kernels.attention(layer)

        def kernel(*packed: Tensor) -> tuple:
            return engine(*packed, batch.starts, batch.longest, scales)

        packed = (batch.packed(tensor.to(torch.bfloat16)) for tensor in states)
        mask = engine.scaling, engine.window, engine.softcap
        return batch.padded(packed_attention(kernel, *packed, batch.starts, batch.longest, *mask, options.get(SINKS)))


@dataclass(frozen=True)
class Sequences:
    """The sequences of a padded batch, one after another, as kernels for packed sequences want them."""

    shape: tuple[int, int]  # B, T
    starts: Tensor  # first token of each sequence, and the end; int32 `[R + 1]`
    longest: int  # a bound of their lengths
    rows_N: Tensor | None  # the real tokens among B * T; None: all of them, padding is a sequence, too

    @classmethod
    def of(cls, real_BT: Tensor | None, rows: int, length: int, device: torch.device) -> "Sequences":
        """`real_BT` says which tokens are no padding, on either side of a row; None: all.

        To pack tokens the host has to know their number. On a GPU it does not wait for that: there nothing is packed,
        and the padding on either side of a row, maybe of no token at all, is a sequence by itself.
        """
        first_B = torch.arange(0, rows * length, length, device=device)
        if real_BT is None:
            starts, rows_N = first_B, None
        elif device.type == "cpu":
            lengths_B = real_BT.sum(-1)
            starts, rows_N = lengths_B.cumsum(0) - lengths_B, real_BT.flatten().nonzero()[:, 0]
        else:
            before_B = first_B + real_BT.int().argmax(-1)
            starts, rows_N = torch.stack([first_B, before_B, before_B + real_BT.sum(-1)], -1).flatten(), None
        end = rows * length if rows_N is None else len(rows_N)
        return cls((rows, length), torch.cat([starts, starts.new_full((1,), end)]).int(), length, rows_N)

    def packed(self, states_BHTD: Tensor) -> Tensor:
        """`[N, H, D]` of `[B, H, T, D]`."""
        flat = states_BHTD.transpose(1, 2).flatten(0, 1)
        return flat if self.rows_N is None else flat[self.rows_N]

    def padded(self, states_NHD: Tensor) -> Tensor:
        """`[B, T, H, D]` of `[N, H, D]`, padding zero."""
        if self.rows_N is not None:
            rows, length = self.shape
            states_NHD = states_NHD.new_zeros(rows * length, *states_NHD.shape[1:]).index_copy(
                0, self.rows_N, states_NHD
            )
        return states_NHD.unflatten(0, self.shape)
