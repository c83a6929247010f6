"""The attention of a policy that follows an engine: the engine's kernel, over the sequences of a padded batch.

It is what `AttentionHook.replace` takes: which tokens a query sees, the kernel knows by itself, so that no mask of
transformers' is read.
"""

import torch
from torch import Tensor

from trl_fp8.engine.kernels import EngineKernels

from .packed_attention import packed_attention
from .sequences import Sequences


SINKS = "s_aux"  # transformers' keyword for attention sinks


class FollowedAttention:
    """Mixed into `OneForward`; see `policy.hook.Replacement`."""

    kernels: EngineKernels

    def before_forward(self, real_BT: Tensor | None, shape: tuple[int, int], device: torch.device) -> Sequences:
        return Sequences.of(real_BT, *shape, device)

    def attend(
        self, layer: int, states: tuple[Tensor, ...], batch: Sequences, scales: Tensor | None, options: dict
    ) -> Tensor:
        engine = self.kernels.attention(layer)

        def kernel(*packed: Tensor) -> tuple:
            return engine(*packed, batch.starts, batch.longest, scales)

        packed = (batch.packed(tensor.to(torch.bfloat16)) for tensor in states)
        mask = engine.scaling, engine.window, engine.softcap
        return batch.padded(packed_attention(kernel, *packed, batch.starts, batch.longest, *mask, options.get(SINKS)))
