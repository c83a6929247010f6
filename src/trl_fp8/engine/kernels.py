"""The engine's kernels, one method per kind of module, for a policy that computes its forward with these kernels.

Most methods return or call one of the engine's own kernels, which works on the engine's own tensors, in BF16 and
without gradients; four methods only describe the model (see `EngineKernels`). The argument of a method is the
checkpoint name of the policy's module, or the number of its decoder layer. A row's bits do not depend on the rest of
the batch. A trainer's batch therefore gives the same bits that the engine computed when it decoded the same tokens.

Shape letters: T tokens, K in-features, N out-features, H heads, G key heads, D head size, R sequences, V vocabulary,
E experts, k experts chosen for each token, P positions, F rotary angles.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torchao.quantization import Float8Tensor


# (positions `[T]`, query `[T, H * D]`, key `[T, G * D]`) -> (rotated query, rotated key). Changes no argument in place
Rotary = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Linear(Protocol):
    """One linear layer of the engine: one of the policy's layers, or several of them that the engine fuses."""

    layers: tuple[str, ...]  # checkpoint names of the policy's layers, in the order of the output's columns

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of `layers` for x `[T, K]`, with their biases, side by side: `[T, sum of N]`.

        The engine may pad the last dimension.
        """

    def codes(self, layer: str) -> Float8Tensor | None:
        """Return codes and scales of one layer's FP8 weight `[N, K]`, as views of the engine's tensors.

        None if the weight is not FP8.
        """


class Attention(Protocol):
    """Attention of a decoder layer, as a prefill computes it. The sequences of a batch are concatenated."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the output `[T, H, D]`, the log-sum-exp of each query's scores `[H, T]`, and (q, k, v), rounded.

        The kernel rounds q, k and v as the engine does, before it computes with them.

        Args:
            query: `[T, H, D]`.
            key, value: `[T, G, D]`.
            starts: `[R + 1]`, int32. The index of each sequence's first token, and T at the end.
            longest: The number of tokens of the longest sequence.
            scales: `[3]`, the scales of q, k and v for an FP8 cache; None for a BF16 cache.
        """

    scaling: float  # a score is scaling * (q . k)
    window: int | None  # number of tokens that a query sees, the query's own token included; None: no limit
    softcap: float | None  # scores s become softcap * tanh(s / softcap)


class EngineKernels(Protocol):
    """The kernels of one engine.

    Methods raise `ValueError` if the engine lacks the module, or if this package does not know the module's kernel.
    `angles`, `reference_activation`, `eps` and `scores` only read the engine's model and call none of its kernels, so
    they also work where a trainer cannot call kernels.
    """

    def linear(self, layer: str) -> Linear:
        """Return the engine's linear layer that computes `layer` of the policy."""

    def norm(self, module: str) -> Callable[[Tensor], Tensor]:
        """Return the norm, a function of x `[T, ..., N]`."""

    def activation(self, mlp: str) -> Callable[[Tensor], Tensor]:
        """Return a function: gate and up, concatenated, `[T, 2 N]` -> act(gate) * up `[T, N]`."""

    def rotary(self, layer: int) -> Rotary:
        """Return the function that rotates the queries and keys of a decoder layer."""

    def angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of a decoder layer's rotary angles at `positions` `[P]`, each `[P, F]`.

        None if the layer has no table of cos and sin.
        """

    def attention(self, layer: int) -> Attention:
        """Return the attention of a decoder layer."""

    def reference_activation(self, mlp: str, gate_up: Tensor) -> Tensor | None:
        """Compute act(gate) * up `[T, N]` from gate and up, concatenated, `[T, 2 N]`, with torch's operations in FP32.

        Returns None if this package has no such formula for the activation.
        """

    def eps(self, module: str) -> float | None:
        """Return the eps of a norm; None for any other module."""

    def scores(self, layer: int) -> tuple[float, int | None, float | None]:
        """Return `scaling`, `window` and `softcap` of the `Attention` of a decoder layer."""

    def router(self, module: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return a function: x `[T, K]` -> logits `[T, E]`, gate weights `[T, k]` in FP32, chosen experts `[T, k]`."""

    def experts(self, module: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function: x `[T, K]`, chosen experts `[T, k]`, gate weights `[T, k]` -> `[T, K]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the sampler's logits `[T, V]` for hidden states `[T, K]`, with the model's scaling and soft cap."""

    def watching(self, note: Callable[[tuple[str, ...], Tensor, Tensor], None]) -> AbstractContextManager[None]:
        """Call `note(layers, x, y)` inside the block after each linear layer in the engine's own forward.

        Only layers that `linear` has returned are watched. `layers` are the policy's layers (see `Linear`), `x` is
        the input, `y` the output. A compiled engine runs no hooks, so `note` is never called.
        """
