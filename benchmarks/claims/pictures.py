"""Draw accuracy over time for each claim (docs/evidence.md), and mismatch against accuracy (README.md here).

python -m benchmarks.claims.pictures        # writes docs/images/claims_map.png and claims_curves.png
"""

from collections.abc import Sequence
from math import ceil, isfinite, log10
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from PIL import Image

from testing.record import interval
from trl_fp8.features.run_log.report.canvas import new_figure, save, tidy

from . import names
from .evidence import FEWEST
from .runs import Run, Runs
from .statements import CLAIMS, Claim, arm


IMAGES = Path(__file__).parents[2] / "docs" / "images"
# Okabe and Ito's colours, which are told apart without seeing red and green
BLUE, ORANGE, GREEN, PINK, SKY, BLACK = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000"
FULL_FLOW = "full_flow"  # which has nothing to correct
YELLOW = "#f0c000"
BF16 = "bf16"
OF_CORRECTION = {BF16: YELLOW, "none": ORANGE, "tis": BLUE, "mis": SKY, "icepop": PINK, "geometric": GREEN}
OF_CORRECTION |= {FULL_FLOW: BLACK}
OF_ROLLOUTS = {"bf16": BLACK, "e4m3": BLUE, "e4m3_kv": ORANGE, FULL_FLOW: GREEN}
# By correction and precision
STYLES = {
    ("none", "bf16"): "-",
    ("tis", "bf16"): "--",
    ("tis", "bf16_emulated"): "-.",
    ("tis", "fp16_emulated"): ":",
}
MARKERS = {"1x1": "o", "3x1": "^", "1x4": "s", "3x4": "D"}
READ_AS = {"e4m3": "FP8 linears", "e4m3_kv": "FP8 linears and KV cache"}  # names of arms, in words
LEAST = 1e-7  # k3 that is less is drawn here
PANELS = 3  # beside each other
COLOURS = 128


def plot_map(runs: Runs, path: str | Path) -> Path:
    """Write one PNG: a panel for each task, a dot for each run, and a cross on it where it collapsed."""
    drawn = [run for run in runs if isfinite(run.k3)]
    tasks = [task for task in names.TASKS if any(run.cell.task == task for run in drawn)]
    figure = new_figure(3.2 * len(tasks) + 0.6, 4.2)
    panels = figure.subplots(1, len(tasks), sharex=True, sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for run in drawn:
            if run.cell.task == task:
                _dot(axes, run)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{'≤ ' if x <= LEAST else ''}1e{round(log10(x))}")
        tidy(axes, names.TASKS[task], "k3, mean of the run", "final held-out accuracy" if axes is panels[0] else "")
    colours = {_colour_key(run): run.cell.arm for run in drawn}
    shapes = {run.cell.pressure: run.cell.arm for run in drawn}
    handles = [
        *(_mark("o", OF_CORRECTION[key], _title(key, colours[key])) for key in OF_CORRECTION if key in colours),
        *(_mark(MARKERS[key], "#777777", names.pressure(shapes[key])) for key in MARKERS if key in shapes),
        _mark("x", BLACK, "collapsed"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * len(tasks), frameon=False, fontsize=8)
    return small(save(figure, path))


def _dot(axes: Axes, run: Run) -> None:
    place, colour = (max(run.k3, LEAST), run.final), OF_CORRECTION[_colour_key(run)]
    size = 8 if run.collapsed else 5  # so that the cross hides neither shape nor colour
    axes.plot(*place, MARKERS[run.cell.pressure], color=colour, markersize=size, alpha=0.7, markeredgewidth=0)
    if run.collapsed:
        axes.plot(*place, "x", color=BLACK, markersize=3)


def _colour_key(run: Run) -> str:
    if run.cell.rollouts == FULL_FLOW:
        return FULL_FLOW
    return BF16 if (run.cell.rollouts, run.cell.correction) == (BF16, "none") else run.cell.correction


def _title(key: str, arm: str) -> str:
    if key == FULL_FLOW:
        return names.rollouts(arm)
    if key == BF16:
        return "BF16 rollouts, no correction"
    return "FP8 rollouts, no correction" if key == "none" else names.correction(arm)


def _mark(marker: str, colour: str, label: str) -> Line2D:
    return Line2D([], [], marker=marker, color=colour, linestyle="", label=label)


def plot_curves(runs: Runs, path: str | Path) -> Path:
    """Write one PNG: a panel for each claim, held-out accuracy of its arms; means, with 95 % bands of enough seeds."""
    rows = ceil(len(CLAIMS) / PANELS)
    figure = new_figure(3 * PANELS, 2.7 * rows)
    panels = figure.subplots(rows, PANELS, sharey=True)
    for axes, (number, claim) in zip(panels.flat, CLAIMS.items(), strict=False):
        for name in _arms(claim):
            if of := runs.of(name):
                _curve(axes, of)
        title = f"{number}: {claim.title} ({names.task(claim.test.arm)})"
        tidy(axes, title, "generations", "held-out accuracy" if axes in panels[:, 0] else "")
        axes.set_ylim(0, 0.8)
        if axes.lines:
            axes.legend(frameon=False, fontsize=7, loc="lower right")
        else:
            axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="#777777")
            axes.set_xticks([])
    return small(save(figure, path))


def _arms(claim: Claim) -> list[str]:
    """BF16 rollouts without correction, and the claim's arms of its test's task, what they are compared with first."""
    task, *_, pressure = claim.test.arm.split("-")
    comparisons = (claim.test, *claim.parts)
    named = [each.reference for each in comparisons] + [each.arm for each in comparisons]
    of_task = [name for name in named if name.startswith(f"{task}-")]
    return list(dict.fromkeys([arm(task, "bf16", pressure=pressure), *of_task]))


def _curve(axes: Axes, of: Sequence[Run]) -> None:
    cell, generations = of[0].cell, sorted(of[0].accuracies)
    values = [[run.accuracies[generation] for run in of] for generation in generations]
    colour, style = OF_ROLLOUTS[cell.rollouts], STYLES[cell.correction, cell.precision]
    rollouts, *rest = names.short(cell.arm).split(" ")
    label = " ".join([READ_AS.get(rollouts, rollouts), *rest, f"({len(of)})"])
    means = list(map(fmean, values))
    axes.plot(generations, means, style, color=colour, linewidth=1.6, label=label)
    if len(of) >= FEWEST:
        low, high = ([interval(each)[end] for each in values] for end in ("low", "high"))
        axes.fill_between(generations, low, high, color=colour, alpha=0.12, linewidth=0)


def small(path: Path) -> Path:
    """A PNG with no more colours than it needs, a third of the bytes."""
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    return path


def main() -> None:
    runs = Runs.read()
    print(plot_map(runs, IMAGES / "claims_map.png"))
    print(plot_curves(runs, IMAGES / "claims_curves.png"))


if __name__ == "__main__":
    main()
