"""Pictures of the rollouts: how far engine and trainer disagreed, and the scales of the FP8 KV cache."""

from collections.abc import Callable
from itertools import pairwise
from math import exp, isfinite, isnan, log2, nan
from statistics import fmean

from trl_fp8.features.run_log.log_file import Run
from trl_fp8.features.run_log.report.canvas import DOTS, MARK, RAW, TREND, Figure, new_axes, new_figure, tidy


POINTS = 4000  # maximum number of points in the picture of log-probs


def ratio_figure(run: Run) -> Figure | None:
    """Draw the histogram of pi_trainer / pi_rollout, over all generations and over their last quarter. None without
    data.
    """
    rows = [row for row in run.rollouts if "log_ratio_counts" in row]
    if not rows:
        return None
    recorded = [row["log_ratio_counts"] for row in rows]
    limit = rows[0]["log_ratio_limit"]
    last_quarter = recorded[-max(1, len(recorded) // 4) :]
    counts = [sum(column) for column in zip(*recorded, strict=True)]
    late = [sum(column) for column in zip(*last_quarter, strict=True)]
    # The first and the last bin count all log-ratios beyond the limit. The bins between them divide [-limit, limit]
    # evenly, so bin 1 begins at -limit. Each bin is drawn at its centre
    width = 2 * limit / (len(counts) - 2)
    ratios = [exp(-limit + (index - 0.5) * width) for index in range(len(counts))]
    axes = new_axes()
    axes.step(ratios, counts, where="mid", color=TREND, linewidth=1, label=f"all {sum(counts):,}")
    axes.fill_between(ratios, counts, step="mid", color=RAW, alpha=0.6)
    axes.step(ratios, late, where="mid", color=MARK, linewidth=1.2, label="last quarter")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    correction = run.facts.get("correction") or {}
    for name in ("bound_min", "bound_max"):
        bound = correction.get(name)
        if bound:  # 0 and None are no bounds
            axes.axvline(bound, color=MARK, linestyle="--", linewidth=1.2, label=f"bound {bound:g}")
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    title = "Importance ratio"
    return tidy(axes, title, "p(trainer) / p(engine), log scale", "tokens, log scale", legend="upper left")


def log_prob_figure(run: Run) -> Figure | None:
    """Draw the log-probs of the latest rollouts' tokens, trainer against engine. None without data."""
    pairs: list[list[float]] = []
    for row in reversed(run.rollouts):
        # A log-prob of -inf has no place on the axes
        pairs += [pair for pair in row.get("log_probs", []) if all(map(isfinite, pair))]
        if len(pairs) >= POINTS:
            break
    if not pairs:
        return None
    axes = new_axes()
    trainer, rollout = zip(*pairs[:POINTS], strict=True)
    lowest = min(*trainer, *rollout)
    axes.plot([lowest, 0], [lowest, 0], color=MARK, linewidth=1, label="no mismatch")
    label = f"{len(trainer):,} tokens"
    axes.scatter(rollout, trainer, s=6, alpha=0.4, color=DOTS, linewidths=0, label=label, rasterized=True)
    return tidy(axes, "Log-probs", "engine, nats", "trainer, nats", legend="upper left")


def position_figure(run: Run) -> Figure | None:
    """Draw the k3 estimate of KL(rollout || trainer) by position in the completion. The two halves of the run have
    bars side by side. None without data.
    """
    prefix = "mismatch/k3_kl/position_"
    rows = [row for row in run.logs if any(key.startswith(prefix) for key in row)]
    if not rows:
        return None
    bins = {key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)}
    bins = sorted(bins, key=lambda name: int(name.rstrip("+").partition("-")[0]))  # names such as 0-15 or 16384+
    axes = new_axes()
    width = 0.4
    middle = len(rows) // 2
    parts = [
        ("first half of the run", rows[:middle], RAW, -width / 2),
        ("second half", rows[middle:], TREND, width / 2),
    ]
    if not middle:
        parts = [("the only logged step", rows, TREND, 0)]
    for label, part, color, offset in parts:
        by_bin = [[row[prefix + name] for row in part if prefix + name in row] for name in bins]
        means = {index: fmean(values) for index, values in enumerate(by_bin) if values}
        axes.bar([index + offset for index in means], list(means.values()), width=width, color=color, label=label)
    axes.set_xticks(range(len(bins)), bins)
    axes.margins(y=0.45)  # room above the bars for the legend
    return tidy(
        axes, "Mismatch by position", "position in the completion, tokens", "KL, nats a token", legend="upper right"
    )


def scales_figure(run: Run) -> Figure | None:
    """Draw log2 of the scales of q, k and v, blank in layers that have none. None if the KV cache was not FP8."""

    def exponent(scale: float) -> float:
        return log2(scale) if scale else nan  # 0: a layer without k and v

    return _heatmaps(run, "kv_scales", "qkv", "Scales of the KV cache", "log2 of the scale", exponent)


def saturation_figure(run: Run) -> Figure | None:
    """Draw the share of k and v that was clipped. None if it was not measured or is zero throughout."""
    key = "kv_saturation"
    if not any(share for row in run.rollouts for layer_shares in row.get(key, ()) for share in layer_shares):
        return None
    return _heatmaps(run, key, "kv", "Clipped keys and values", "share of elements", float)


def _heatmaps(
    run: Run, key: str, letters: str, title: str, label: str, transform: Callable[[float], float]
) -> Figure | None:
    """Draw a map for each letter of `letters`: layers upwards, steps to the right, with one colour bar for all.

    Rows of `run.rollouts` have values `[layer][letter]` under `key`. The maps show `transform(value)`. Return None if
    no row has `key`.
    """
    by_step = {row["step"]: row for row in run.rollouts if key in row}  # the last generation of a step counts
    if not by_step:
        return None
    rows = list(by_step.values())
    layers = len(rows[0][key])
    maps = []  # for each letter the values [layer][step]
    for column in range(len(letters)):
        maps.append([[transform(row[key][layer][column]) for row in rows] for layer in range(layers)])
    drawn = [value for one_map in maps for layer_values in one_map for value in layer_values if not isnan(value)]
    figure = new_figure(4.4, 0.8 + len(letters) * min(1.6, 0.7 + 0.03 * layers))
    all_axes = figure.subplots(len(letters), 1, sharex=True, squeeze=False)[:, 0]
    layer_edges = [layer - 0.5 for layer in range(layers + 1)]
    look = {"vmin": min(drawn), "vmax": max(drawn), "cmap": "viridis", "rasterized": True}
    for axes, letter, values in zip(all_axes, letters, maps, strict=True):
        mesh = axes.pcolormesh(_edges(list(by_step)), layer_edges, values, **look)
        axes.set_ylabel(f"{letter}, layer", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.yaxis.get_major_locator().set_params(integer=True)
    all_axes[0].set_title(title, fontsize=11, loc="left")
    all_axes[-1].set_xlabel("step", fontsize=9)
    all_axes[-1].xaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(mesh, ax=all_axes, shrink=0.9)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=9)
    bar.solids.set_rasterized(True)
    return figure


def _edges(steps: list[int]) -> list[float]:
    """Return the borders of columns at `steps`, which need not be evenly spaced: halfway between neighbours."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(left + right) / 2 for left, right in pairwise(steps)]
    return [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]
