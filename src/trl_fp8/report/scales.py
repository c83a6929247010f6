"""Scales of the FP8 KV cache, per layer over the generations."""

from math import log2

from trl_fp8.run.file import Run

from .canvas import Figure, new_figure


def scales_figure(run: Run) -> Figure | None:
    """log2 of the scales of q, k and v, layers upwards, steps to the right; None if the KV cache was not FP8."""
    rows = [row for row in run.rollouts if "kv_scales" in row]
    if not rows:
        return None
    columns = {name: [[log2(layer[i]) for layer in row["kv_scales"]] for row in rows] for i, name in enumerate("qkv")}
    title = "Scales of the KV cache: one for q, k and v of each layer"
    return _heatmaps(columns, [row["step"] for row in rows], "viridis", "log2 of the scale", title)


def saturation_figure(run: Run) -> Figure | None:
    """Share of k and v that their scale did not hold; None if that was not measured or never happened."""
    rows = [row for row in run.rollouts if "kv_saturation" in row]
    if not any(share for row in rows for layer in row["kv_saturation"] for share in layer):
        return None
    columns = {name: [[layer[i] for layer in row["kv_saturation"]] for row in rows] for i, name in enumerate("kv")}
    title = "Elements of k and v beyond the scale in force"
    return _heatmaps(columns, [row["step"] for row in rows], "Reds", "share of elements", title)


def _heatmaps(columns: dict[str, list[list[float]]], steps: list[int], colors: str, label: str, title: str) -> Figure:
    """A map for each of `columns`: name -> generation -> layer -> value; all share one colour bar."""
    layers = len(next(iter(columns.values()))[0])
    figure = new_figure(3.6 * len(columns) + 0.9, min(6.0, 2.4 + 0.1 * layers))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    every = [value for generations in columns.values() for row in generations for value in row]
    drawn = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    edge = (steps[-1] - steps[0]) / max(1, 2 * (len(steps) - 1)) or 0.5
    extent = (steps[0] - edge, steps[-1] + edge, -0.5, layers - 0.5)
    look = {"aspect": "auto", "origin": "lower", "interpolation": "nearest", "cmap": colors}
    for axes, (name, generations) in zip(drawn, columns.items(), strict=True):
        by_layer = list(zip(*generations, strict=True))
        image = axes.imshow(by_layer, extent=extent, vmin=min(every), vmax=max(every), **look)
        axes.set_title(name, fontsize=11, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    drawn[0].set_ylabel("layer", fontsize=9)
    drawn[0].yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=drawn, shrink=0.9).set_label(label, fontsize=9)
    return figure
