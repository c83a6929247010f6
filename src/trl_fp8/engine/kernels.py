"""`EngineKernels`: what an engine computes, part by part, as a policy that shares its forward calls it.

Each part is the engine's own kernel on the engine's own tensors, in BF16 and without gradients, and is looked up by
the checkpoint name of the policy's module. A row's bits do not depend on the rest of the batch, so a trainer gets from
its own batches what the engine computed when it decoded.

Shape letters: T tokens, K in-features, N out-features, H heads, G key heads, D head size, R sequences, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torchao.quantization import Float8Tensor


# positions `[T]`, query `[T, H * D]`, key `[T, G * D]` -> both, rotated; the arguments stay as they are
Rotary = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Linear(Protocol):
    """One call of the engine, which computes one linear layer of the policy or those that it fused."""

    layers: tuple[str, ...]  # the policy's, in the order of the output's columns

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of `layers` for x `[T, K]`, biases included, one after another, maybe with padding."""

    def codes(self, layer: str) -> Float8Tensor | None:
        """Return views of the engine's codes and scales of one layer's weight `[N, K]`; None if it is not FP8."""


class Attention(Protocol):
    """Attention of a decoder layer over sequences that are packed one after another, as a prefill computes it."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the output `[T, H, D]`, the log-sum-exp of each query's scores `[H, T]`, and q, k, v as the kernel
        rounded them.

        query `[T, H, D]`, key and value `[T, G, D]`; starts: first token of each sequence and the end, int32
        `[R + 1]`; scales: those of q, k and v in an FP8 cache, `[3]`, or None.
        """

    scaling: float  # of scores
    window: int | None  # tokens that a query sees, itself included; None: all before it
    softcap: float | None  # scores s become softcap * tanh(s / softcap)


class EngineKernels(Protocol):
    """Parts of an engine. `ValueError` for one that the engine does not have, or whose kernel is not known.

    `angles`, `definition`, `eps` and `scores` are those of any engine, whether or not a trainer can share its kernels.
    """

    def linear(self, layer: str) -> Linear: ...

    def norm(self, module: str) -> Callable[[Tensor], Tensor]:
        """Return the norm as a function of x `[T, ..., N]`."""

    def activation(self, mlp: str) -> Callable[[Tensor], Tensor]:
        """Return the function that makes act(gate) * up `[T, N]` of gate and up `[T, 2 N]`."""

    def rotary(self, layer: int) -> Rotary: ...

    def angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin at positions `[P]`, one column for each angle; None if the layer has no table of them."""

    def attention(self, layer: int) -> Attention: ...

    def definition(self, mlp: str, gate_up: Tensor) -> Tensor | None:
        """Return the activation `[T, 1]` of gate and up `[T, 2]` by torch's operations in FP32; None if not known."""

    def eps(self, module: str) -> float | None:
        """Return the eps of a norm; None for any other module."""

    def scores(self, layer: int) -> tuple[float, int | None, float | None]:
        """Return `scaling`, `window` and `softcap` of a layer's `Attention`."""

    def router(self, module: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return a function: x `[T, K]` -> logits `[T, E]`, gate weights FP32 `[T, k]`, chosen experts `[T, k]`."""

    def experts(self, module: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function: x `[T, K]`, chosen experts `[T, k]`, gate weights `[T, k]` -> `[T, K]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return what the sampler gets for `[T, K]`: logits `[T, V]`, scaled and capped as the model wants them."""

    def watching(self, note: Callable[[tuple[str, ...], Tensor, Tensor], None]) -> AbstractContextManager[None]:
        """Call `note(layers, x, y)` after each call of a linear layer in the engine's own forward, inside the block.
        A compiled engine makes no calls.
        """
