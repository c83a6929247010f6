"""Pictures of the rollouts: how far engine and trainer disagreed, and the scales of the FP8 KV cache."""

from collections.abc import Callable
from math import exp, isnan, log2, nan
from statistics import fmean

from trl_fp8.features.run_log.log_file import Run
from trl_fp8.features.run_log.report.canvas import DOTS, MARK, RAW, TREND, Figure, new_axes, new_figure, tidy


POINTS = 4000  # of the scatter


def ratio_figure(run: Run) -> Figure | None:
    """Draw the histogram of pi_trainer / pi_rollout, of all tokens and the last quarter's. None without data."""
    rows = [row for row in run.rollouts if "log_ratio_counts" in row]
    if not rows:
        return None
    recorded = [row["log_ratio_counts"] for row in rows]
    limit = rows[0]["log_ratio_limit"]
    counts = [sum(column) for column in zip(*recorded, strict=True)]
    late = [sum(column) for column in zip(*recorded[-max(1, len(recorded) // 4) :], strict=True)]
    width = 2 * limit / (len(counts) - 2)
    ratios = [exp(-limit + (index - 0.5) * width) for index in range(len(counts))]  # the outer two: beyond the limit
    axes = new_axes()
    axes.step(ratios, counts, where="mid", color=TREND, linewidth=1, label=f"all {sum(counts):,}")
    axes.fill_between(ratios, counts, step="mid", color=RAW, alpha=0.6)
    axes.step(ratios, late, where="mid", color=MARK, linewidth=1.2, label="last quarter")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    correction = run.facts.get("correction") or {}
    for bound in filter(None, (correction.get(name) for name in ("bound_min", "bound_max"))):
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
        pairs += row.get("log_probs", [])
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
    """Draw the k3 estimate of KL(rollout, trainer) by position, first and second half of the run."""
    prefix = "mismatch/k3_kl/position_"
    rows = [row for row in run.logs if any(key.startswith(prefix) for key in row)]
    if not rows:
        return None
    bins = {key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)}
    bins = sorted(bins, key=lambda name: int(name.rstrip("+").partition("-")[0]))
    axes = new_axes()
    halves = {"first half of the run": rows[: len(rows) // 2], "second half": rows[len(rows) // 2 :]}
    for shift, color, (label, part) in zip((-0.2, 0.2), (RAW, TREND), halves.items(), strict=True):
        found = [[row[prefix + name] for row in part if prefix + name in row] for name in bins]
        means = {index: fmean(values) for index, values in enumerate(found) if values}
        axes.bar([index + shift for index in means], list(means.values()), width=0.4, color=color, label=label)
    axes.set_xticks(range(len(bins)), bins)
    axes.margins(y=0.45)  # room above the bars for the legend
    return tidy(
        axes, "Mismatch by position", "position in the completion, tokens", "KL, nats a token", legend="upper right"
    )


def scales_figure(run: Run) -> Figure | None:
    """Draw log2 of the scales of q, k and v, blank in layers without any. None if the KV cache was not FP8."""
    return _heatmaps(
        run, "kv_scales", "qkv", "Scales of the KV cache", "log2 of the scale", lambda scale: log2(scale or nan)
    )


def saturation_figure(run: Run) -> Figure | None:
    """Draw the share of k and v that their scale did not hold. None if it was not measured or is zero."""
    if not any(share for row in run.rollouts for layer in row.get("kv_saturation", ()) for share in layer):
        return None
    return _heatmaps(run, "kv_saturation", "kv", "Clipped keys and values", "share of elements", float)


def _heatmaps(
    run: Run, key: str, names: str, title: str, label: str, shown: Callable[[float], float]
) -> Figure | None:
    """Draw a map for each of `names`: layers upwards, steps to the right, with one colour bar for all."""
    rows = [row for row in run.rollouts if key in row]
    if not rows:
        return None
    steps = [row["step"] for row in rows]
    layers = len(rows[0][key])
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
