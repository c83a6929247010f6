"""Scales of the FP8 KV cache, per layer over the generations."""

from collections.abc import Callable
from math import isnan, log2, nan

from trl_fp8.features.run_log.log_file import Run
from trl_fp8.features.run_log.report.canvas import Figure, new_figure


def scales_figure(run: Run) -> Figure | None:
    """log2 of the scales of q, k and v, blank in layers that have none; None if the KV cache was not FP8."""
    return _heatmaps(run, "kv_scales", "qkv", "Scales of the KV cache", "log2 of the scale", _log2)


def _log2(scale: float) -> float:
    return log2(scale) if scale else nan


def saturation_figure(run: Run) -> Figure | None:
    """Share of k and v that their scale did not hold; None if that was not measured or never happened."""
    if not any(share for row in run.rollouts for layer in row.get("kv_saturation", ()) for share in layer):
        return None
    return _heatmaps(run, "kv_saturation", "kv", "Clipped keys and values", "share of elements", float)


def _heatmaps(
    run: Run, key: str, names: str, title: str, label: str, shown: Callable[[float], float]
) -> Figure | None:
    """A map for each of `names`, one above the other: layers upwards, steps to the right; all share one colour bar."""
    rows = [row for row in run.rollouts if key in row]
    if not rows:
        return None
    steps, layers = [row["step"] for row in rows], len(rows[0][key])
    maps = [[[shown(row[key][layer][i]) for row in rows] for layer in range(layers)] for i in range(len(names))]
    every = [value for one in maps for layer in one for value in layer if not isnan(value)]
    figure = new_figure(4.4, 0.8 + len(names) * min(1.6, 0.7 + 0.03 * layers))
    drawn = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    edge = (steps[-1] - steps[0]) / max(1, 2 * (len(steps) - 1)) or 0.5
    extent = (steps[0] - edge, steps[-1] + edge, -0.5, layers - 0.5)
    look = {"aspect": "auto", "origin": "lower", "interpolation": "none", "cmap": "viridis"}
    for axes, name, values in zip(drawn, names, maps, strict=True):
        image = axes.imshow(values, extent=extent, vmin=min(every), vmax=max(every), **look)
        axes.set_ylabel(f"{name}, layer", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.yaxis.get_major_locator().set_params(integer=True)
    drawn[0].set_title(title, fontsize=11, loc="left")
    drawn[-1].set_xlabel("step", fontsize=9)
    drawn[-1].xaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=drawn, shrink=0.9)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=9)
    bar.solids.set_rasterized(True)
    return figure
