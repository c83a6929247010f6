"""The plan: what a recipe means for one model in modules, parameters and bytes, printed before training starts.

Tensors that differ only in their layer's number share a row, with `*` for the number. So 400 linear layers take ten
rows, and a linear layer that is kept in high precision stands out.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from torch import nn

from trl_fp8.recipe.messages import format_bytes
from trl_fp8.recipe.outline import LayerCache, Outline
from trl_fp8.recipe.recipe import FP8Recipe


BLOCK_TOKENS = 16  # tokens of a block of vLLM's KV cache, unless states need larger ones
# vLLM forms groups of layers. A group has as many layers as the most common kind, if these are fewer than this many
# times the layers of the least common kind; otherwise as many as the least common kind
MOST_PADDING = 1.5


@dataclass(frozen=True)
class PlanRow:
    """Tensors that share name pattern, shape, precision and reason."""

    pattern: str
    count: int  # number of tensors
    shape: tuple[int, ...]  # shape of each
    precision: str  # "fp8" or "bf16"
    # Why the tensors are not FP8. Empty for FP8, and for embeddings, norms and biases, which are never FP8
    reason: str
    parameters: int  # number of parameters of all `count` tensors together
    bytes_after: int  # bytes of all `count` tensors together in the engine


class _LayerKind(NamedTuple):
    """Layers that keep the same of a sequence, on each rank."""

    window: int | None  # the most tokens that are kept; None: all
    token_bytes: float  # 0 if the layers cache no tokens
    state_bytes: float  # 0 if the layers have no state

    def cached_bytes(self, tokens: int) -> float:
        """Return the bytes of a sequence's tokens in one layer."""
        return min(tokens, self.window or tokens) * self.token_bytes


def _hybrid_bytes(kinds: Mapping[_LayerKind, int], tokens: int) -> float:
    """Return the bytes of a sequence on each rank, for a model whose layers keep different tokens, or states.

    vLLM gives all layers pages of one size, and each state takes a whole page. vLLM also forms groups of layers of one
    kind. All groups have the same number of layers, and vLLM allocates the pages of whole groups
    (`get_kv_cache_groups`).

    Args:
        kinds: The number of layers of each kind.
    """
    # 1. The size of a page: some tokens of the layer with the most bytes per token, or the largest state
    token_sizes = [kind.token_bytes for kind in kinds if kind.token_bytes]
    largest_state = max(kind.state_bytes for kind in kinds)
    block_tokens = BLOCK_TOKENS
    if largest_state and token_sizes:
        block_tokens *= ceil(largest_state / (BLOCK_TOKENS * min(token_sizes)))
    largest_block = block_tokens * max(token_sizes, default=0.0)
    page_bytes = max(largest_block, largest_state)

    # 2. The number of layers in a group
    least = min(kinds.values())
    most = max(kinds.values())
    group = most if most < MOST_PADDING * least else least

    # 3. The pages of all groups
    total = 0.0
    for kind, layers in kinds.items():
        pages = 2  # for a state: prefix caching also keeps the state at the end of the last full block
        if kind.token_bytes:
            # `round` removes FP64's rounding error, which could make one page more of a whole number
            pages = ceil(round(kind.cached_bytes(tokens) / page_bytes, 6))
        padded_layers = ceil(layers / group) * group
        total += padded_layers * pages * page_bytes
    return total


@dataclass(frozen=True)
class KVCache:
    """Bytes of an engine's KV cache, by what each decoder layer keeps of a sequence.

    full attention             k and v of each token, with the heads divided over the tensor parallel ranks
    sliding windows            the same for the last tokens of the sequence
    MLA                        one latent vector per token, which every rank holds whole
    linear attention, ...      a state whose size does not depend on the sequence, divided over the ranks

    A model whose layers are of several kinds takes more: see `_hybrid_bytes`.
    """

    layers: tuple[LayerCache, ...]
    kv_heads: int  # 0 if layers differ in their number of KV heads
    ranks: int = 1  # the tensor parallel size
    fp8_layers: frozenset[int] = frozenset()  # numbers of the layers that an FP8 KV cache stores in FP8

    def sequence_bytes(self, tokens: int, fp8: bool) -> float:
        """Return the bytes of a sequence on each rank. `fp8`: whether the engine has an FP8 KV cache."""
        shares = min(self.ranks, self.kv_heads or self.ranks)  # further ranks hold copies of the KV heads
        kinds: Counter[_LayerKind] = Counter()  # number of layers of each kind
        for index, layer in enumerate(self.layers):
            token_bytes = float(self._token_bytes(index, fp8))
            if not layer.is_latent:
                token_bytes /= shares
            state_bytes = layer.state_bytes / self.ranks
            if token_bytes or state_bytes:
                kinds[_LayerKind(layer.window, token_bytes, state_bytes)] += 1
        has_states = any(kind.state_bytes for kind in kinds)
        windows = {kind.window for kind in kinds}
        if has_states or len(windows) > 1:
            return _hybrid_bytes(kinds, tokens)
        # All layers share their blocks of tokens. Only the last block of a sequence has unused places
        return sum(kind.cached_bytes(tokens) * layers for kind, layers in kinds.items())

    def token_bytes(self, fp8: bool) -> int:
        """Return the bytes that a token takes in all layers together, before it leaves a sliding window."""
        return sum(self._token_bytes(index, fp8) for index in range(len(self.layers)))

    def _token_bytes(self, index: int, fp8: bool) -> int:
        """Return the bytes that a token takes in the layer `index`."""
        return self.layers[index].elements * (1 if fp8 and index in self.fp8_layers else 2)

    @property
    def windows(self) -> dict[int, int]:
        """Return the number of layers with a sliding window, by the window's length in tokens."""
        return Counter(layer.window for layer in self.layers if layer.window and layer.elements)


@dataclass(frozen=True)
class Plan:
    """A model's plan: `rows`, and the totals over them. `bytes_before` are the weights of a BF16 engine."""

    outline: Outline
    recipe: FP8Recipe
    rows: tuple[PlanRow, ...]
    cache: KVCache

    @property
    def bytes_before(self) -> int:
        return 2 * self.parameters

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    @property
    def fp8_parameters(self) -> int:
        return sum(row.parameters for row in self.rows if row.precision == "fp8")

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def fp8_share(self) -> float:
        return self.fp8_parameters / self.parameters

    def summary(self) -> str:
        """Return three lines for the start of a run: what is FP8, the KV cache, and what stays in BF16 and why."""
        in_fp8 = f"{len(self.recipe.fp8_modules)} linear layers"
        if self.recipe.fp8_experts:
            in_fp8 += f", {len(self.recipe.fp8_experts)} layers of experts"
        memory = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        lines = [f"FP8 plan: {in_fp8}, {self.fp8_share:.1%} of parameters, {memory}", f"KV cache: {self._kv_cache()}"]
        modules_by_reason = defaultdict(list)
        for row in self.rows:
            if row.reason:
                modules_by_reason[row.reason].append(row.pattern.removeprefix("model.layers.*."))
        if modules_by_reason:
            in_bf16 = (f"{', '.join(names)} ({reason})" for reason, names in modules_by_reason.items())
            lines.append(f"In BF16:  {'; '.join(in_bf16)}")
        return "\n".join(lines)

    def table(self) -> str:
        """Return the plan as plain text, at most 119 columns for ordinary names."""
        lines = [("modules", "count", "shape", "parameters", "BF16", "engine", "precision")]
        for row in self.rows:
            sizes = f"{row.parameters:,}", format_bytes(2 * row.parameters), format_bytes(row.bytes_after)
            precision = f"{row.precision} ({row.reason})" if row.reason else row.precision
            lines.append((row.pattern, str(row.count), " x ".join(map(str, row.shape)), *sizes, precision))
        sizes = f"{self.parameters:,}", format_bytes(self.bytes_before), format_bytes(self.bytes_after)
        lines.append(("total", "", "", *sizes, f"{self.fp8_share:.1%} of parameters fp8"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("-" * width for width in widths))
        sides = "<><>>><"  # for each column: "<" aligns its cells left, ">" right
        line_format = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        text = "\n".join(line_format.format(*line).rstrip() for line in lines)
        recipe = self.recipe
        weights = f"{recipe.format.description}, {recipe.scale_format} scales" if recipe.fp8_weights else "off"
        setup = f"tensor parallel size {recipe.tensor_parallel_size}, weights {weights}"
        cache = self._kv_cache(", q/k/v scales recalibrated at every sync")
        return f"FP8 plan for {self.outline.name} ({setup})\n\n{text}\n\nKV cache: {cache}"

    def _kv_cache(self, scales: str = "") -> str:
        """Return a phrase on the KV cache. `scales` is a phrase on its scales that begins with a comma, or empty."""
        before, after = self.cache.token_bytes(fp8=False), self.cache.token_bytes(fp8=True)
        if not self.recipe.fp8_kv_cache:
            return f"the model's dtype, {format_bytes(before)} per token"
        memory = f"{format_bytes(before)} -> {format_bytes(after)} per token ({before / after:.1f}x the tokens)"
        text = f"e4m3{scales}, {memory}"
        skipped = list(self.recipe.kv_cache_skip_layers)
        if skipped:
            text += f"; layers {skipped} stay in BF16"
        uncached = len(self.cache.layers) - len(self.cache.fp8_layers) - len(skipped)
        if uncached:
            text += f"; {uncached} layers cache none"
        return text


def plan_for_model(model: nn.Module, recipe: FP8Recipe) -> Plan:
    """Return the plan of a transformers or PEFT causal LM, also of one on the meta device."""
    # Imported here, because transformers takes seconds, and a report needs none of it
    from trl_fp8.recipe.from_model import outline_of

    return plan_for(outline_of(model), recipe)


def plan_for(outline: Outline, recipe: FP8Recipe) -> Plan:
    """Return the plan of an outlined model."""
    counts = defaultdict(int)  # number of tensors that share a row
    for name, shape in outline.parameters.items():
        precision = "fp8" if name in recipe.fp8_tensors else "bf16"
        reason = recipe.kept_modules.get(name.rpartition(".")[0], "")
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name.removesuffix(".weight"))  # layers.7.mlp -> layers.*.mlp
        counts[pattern, shape, precision, reason] += 1
    rows = []
    for (pattern, shape, precision, reason), count in counts.items():
        parameters = prod(shape) * count
        bytes_after = 2 * parameters
        if precision == "fp8":
            bytes_after = count * recipe.format.weight_bytes(shape)
        row = PlanRow(
            pattern, count, shape, precision=precision, reason=reason, parameters=parameters, bytes_after=bytes_after
        )
        rows.append(row)
    fp8_layers: frozenset[int] = frozenset()
    if recipe.fp8_kv_cache:
        fp8_layers = frozenset(outline.kv_layers).difference(recipe.kv_cache_skip_layers)
    cache = KVCache(outline.caches, outline.kv_heads, recipe.tensor_parallel_size, fp8_layers)
    return Plan(outline, recipe, tuple(rows), cache)
