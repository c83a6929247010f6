"""Scales of the FP8 KV cache, per layer over the generations."""

from collections.abc import Callable
from math import log2

from trl_fp8.run.file import Run

from .canvas import Figure, new_figure


def scales_figure(run: Run) -> Figure | None:
    """log2 of the scales of q, k and v; None if the KV cache was not FP8."""
    title = "Scales of the KV cache: one for q, k and v of each layer"
    return _heatmaps(run, "kv_scales", "qkv", title, "log2 of the scale", "viridis", log2)


def saturation_figure(run: Run) -> Figure | None:
    """Share of k and v that their scale did not hold; None if that was not measured or never happened."""
    if not any(share for row in run.rollouts for layer in row.get("kv_saturation", ()) for share in layer):
        return None
    title = "Elements of k and v beyond the scale in force"
    return _heatmaps(run, "kv_saturation", "kv", title, "share of elements", "Reds", float)


def _heatmaps(
    run: Run, key: str, names: str, title: str, label: str, colors: str, shown: Callable[[float], float]
) -> Figure | None:
    """A map for each of `names`: layers upwards, steps to the right; all share one colour bar."""
    rows = [row for row in run.rollouts if key in row]
    if not rows:
        return None
    steps, layers = [row["step"] for row in rows], len(rows[0][key])
    maps = [[[shown(row[key][layer][i]) for row in rows] for layer in range(layers)] for i in range(len(names))]
    every = [value for one in maps for layer in one for value in layer]
    figure = new_figure(3.6 * len(names) + 0.9, min(6.0, 2.4 + 0.1 * layers))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    drawn = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    edge = (steps[-1] - steps[0]) / max(1, 2 * (len(steps) - 1)) or 0.5
    extent = (steps[0] - edge, steps[-1] + edge, -0.5, layers - 0.5)
    look = {"aspect": "auto", "origin": "lower", "interpolation": "nearest", "cmap": colors}
    for axes, name, values in zip(drawn, names, maps, strict=True):
        image = axes.imshow(values, extent=extent, vmin=min(every), vmax=max(every), **look)
        axes.set_title(name, fontsize=11, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    drawn[0].set_ylabel("layer", fontsize=9)
    drawn[0].yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=drawn, shrink=0.9).set_label(label, fontsize=9)
    return figure
