"""Bytes of an engine's KV cache, by what each decoder layer keeps of a sequence.

attention of all tokens    k and v of each, their heads divided over the tensor parallel ranks
sliding windows            the same, of the last tokens alone
MLA                        one latent vector per token, which every rank holds whole
linear attention, ...      a state of the sequence, however long it is, divided over the ranks
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from trl_fp8.recipe.outline import LayerCache


BF16_BYTES, FP8_BYTES = 2, 1


@dataclass(frozen=True)
class KVCache:
    """What one rank of an engine keeps; a token's share is that of the whole engine."""

    layers: tuple[LayerCache, ...]
    kv_heads: int  # 0 where layers differ in them
    ranks: int = 1  # the tensor parallel size
    fp8_layers: frozenset[int] = frozenset()  # of an engine with an FP8 KV cache

    def sequence_bytes(self, tokens: int, fp8: bool) -> float:
        """Bytes on each rank of a sequence of that many tokens."""
        shares = min(self.ranks, self.kv_heads or self.ranks)  # further ranks hold copies of the KV heads
        total = 0.0
        for (layer, is_fp8), count in self._alike.items():
            kept = min(tokens, layer.window or tokens) * layer.elements * _element_bytes(is_fp8 and fp8)
            total += count * ((kept if layer.is_latent else kept / shares) + layer.state_bytes / self.ranks)
        return total

    def token_bytes(self, fp8: bool) -> int:
        """Bytes in all layers of a token that every layer still keeps."""
        return sum(
            count * layer.elements * _element_bytes(is_fp8 and fp8) for (layer, is_fp8), count in self._alike.items()
        )

    @property
    def windows(self) -> dict[int, int]:
        """Window -> number of layers that keep no more tokens than that."""
        return Counter(layer.window for layer in self.layers if layer.window and layer.elements)

    @cached_property
    def _alike(self) -> Counter[tuple[LayerCache, bool]]:
        """(layer, whether an FP8 cache has it in FP8) -> how many there are."""
        return Counter((layer, index in self.fp8_layers) for index, layer in enumerate(self.layers))


def _element_bytes(is_fp8: bool) -> int:
    return FP8_BYTES if is_fp8 else BF16_BYTES
