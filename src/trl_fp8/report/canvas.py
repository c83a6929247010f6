"""Figures without a global state, and where they are written."""

from pathlib import Path


try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("pictures need matplotlib: pip install 'trl-fp8[report]'") from error

RAW, TREND, MARK = "#9ecae1", "#08519c", "#d94801"
SERIES = ("#08519c", "#d94801", "#31844a", "#7b3f98", "#a07800", "#555555")


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty figure of `width` x `height` inches."""
    figure = Figure(figsize=(width, height), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: no global backend, no open figure of the caller's is touched
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold")
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def tidy(axes: Axes, title: str, x: str, y: str = "", legend: str | None = None) -> Figure:
    """The figure of `axes`, with labels, a legend at that place, a light grid, no frame above and on the right."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=9, loc=legend)
    return axes.figure
