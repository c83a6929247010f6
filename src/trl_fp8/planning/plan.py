"""The plan: what a recipe means for one model in modules, parameters and bytes, printed before training starts.

Rows group the layers that are alike (the layer number becomes `*`), so that a model of 400 linear layers is ten lines
and the one layer that is kept in high precision stands out.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from trl_fp8.quantization.formats.spec import FormatSpec
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe


if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class PlanRow:
    """Modules that share name pattern, shape, precision and reason. Bytes are of all of them together."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    precision: str
    reason: str
    parameters: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Plan:
    """A model's plan: `rows`, and the totals over them. Bytes before are those of a BF16 engine."""

    model_name: str
    recipe: FP8Recipe
    rows: tuple[PlanRow, ...]
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

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
        """Fraction of all parameters that are FP8."""
        return self.fp8_parameters / self.parameters

    def table(self) -> str:
        """The plan as plain text, at most 119 columns for ordinary names."""
        recipe = self.recipe
        header = ("modules", "count", "shape", "parameters", "BF16", "engine", "precision")
        body = [
            (
                row.pattern,
                str(row.count),
                " x ".join(map(str, row.shape)),
                f"{row.parameters:,}",
                format_bytes(row.bytes_before),
                format_bytes(row.bytes_after),
                row.precision if not row.reason else f"{row.precision} ({row.reason})",
            )
            for row in self.rows
        ]
        total = ("total", "", "", f"{self.parameters:,}", format_bytes(self.bytes_before))
        body.append((*total, format_bytes(self.bytes_after), f"{self.fp8_share:.1%} of parameters fp8"))
        widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
        align = [str.ljust, str.rjust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust]
        lines = [
            "  ".join(pad(cell, width) for pad, cell, width in zip(align, line, widths, strict=True)).rstrip()
            for line in [header, tuple("-" * width for width in widths), *body]
        ]
        weights = f"{recipe.format.description}, {recipe.scale_format} scales" if recipe.fp8_weights else "off"
        title = (
            f"FP8 plan for {self.model_name} (tensor parallel size {recipe.tensor_parallel_size}, weights {weights})"
        )
        return "\n".join([title, "", *lines, "", self._kv_line()])

    def _kv_line(self) -> str:
        before, after = self.kv_bytes_per_token_before, self.kv_bytes_per_token_after
        if not self.recipe.fp8_kv_cache:
            return f"KV cache: the model's dtype, {format_bytes(before)} per token"
        return (
            f"KV cache: e4m3, q/k/v scales recalibrated at every sync, {format_bytes(before)} -> "
            f"{format_bytes(after)} per token ({before / after:.1f}x the tokens)"
            + (f"; layers {list(skipped)} stay in BF16" if (skipped := self.recipe.kv_cache_skip_layers) else "")
        )


def plan_for_model(model: "nn.Module", recipe: FP8Recipe) -> Plan:
    """`plan_for` a model; the meta device is fine."""
    from trl_fp8.recipe.from_model import outline_of  # torch comes with it, which a plan from a config does without

    return plan_for(outline_of(model), recipe)


def plan_for(outline: Outline, recipe: FP8Recipe) -> Plan:
    """Group the parameters of a model under `recipe`."""
    groups = defaultdict(int)
    for name, shape in outline.parameters.items():
        fp8 = name in recipe.fp8_tensors
        reason = recipe.kept_modules.get(name.rpartition(".")[0], "")
        label = name.removesuffix(".weight")
        groups[(re.sub(r"\.\d+(?=\.|$)", ".*", label), shape, "fp8" if fp8 else "bf16", reason)] += 1
    per_layer = 2 * outline.kv_heads * outline.head_dim  # elements of a token
    fp8_layers = outline.layers - len(recipe.kv_cache_skip_layers) if recipe.fp8_kv_cache else 0
    return Plan(
        model_name=outline.name,
        recipe=recipe,
        rows=tuple(_row(key, count, recipe.format) for key, count in groups.items()),
        kv_bytes_per_token_before=2 * per_layer * outline.layers,
        kv_bytes_per_token_after=per_layer * (2 * outline.layers - fp8_layers),
    )


def _row(key: tuple[str, tuple[int, ...], str, str], count: int, spec: FormatSpec) -> PlanRow:
    pattern, shape, precision, reason = key
    numel = prod(shape) * count
    after = count * spec.weight_bytes(shape) if precision == "fp8" else 2 * numel
    return PlanRow(pattern, count, shape, precision, reason, numel, 2 * numel, after)


def format_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
