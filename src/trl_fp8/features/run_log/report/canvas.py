"""Figures without a global state: PNGs for slides, and SVGs that take the colours of the page they stand in."""

import re
from html import escape
from io import StringIO
from pathlib import Path


try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("pictures need matplotlib: pip install 'trl-fp8[report]'", name=error.name) from error

RAW, TREND, MARK = "#9ecae1", "#08519c", "#d94801"
SERIES = ("#08519c", "#d94801", "#31844a", "#7b3f98", "#a07800", "#555555")
DOTS = "#3d85c8"  # of what is drawn in pixels: seen on white and on black
TITLE = 12  # points above the axes and their highest tick
STYLES = ("-", "--", ":")  # of lines beyond the first six


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty figure of `width` x `height` inches."""
    figure = Figure(figsize=(width, height), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: no global backend, no open figure of the caller's is touched
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold")
    return figure


def new_axes(height: float = 2.9) -> Axes:
    """The only axes of a figure as wide as a phone, whose letters are still read there."""
    return new_figure(4.4, height).subplots()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """`figure` as an element of a page, `name` being unique there and `label` what a screen reader says.

    Letters stay letters, in the font of the page. Black is the page's colour of text, any other colour `#rrggbb` is
    its custom property `--c-rrggbb` if it has that. Titles are left to the page. Places
    are those that `save` has found, as finding them takes most of the time.
    """
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_title("", loc="left")
    written = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # the salt: no two pictures share an id
        figure.savefig(written, format="svg", transparent=True, dpi=160)
    drawn = written.getvalue()
    _, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', drawn)[1].split())
    box = f"0 {TITLE} {width:g} {height - TITLE:g}"
    body = drawn[drawn.index("</metadata>") + len("</metadata>") :]
    body = re.sub(r'<g id="[^"]+"', "<g", body)
    body = re.sub(r"(?<=: )#000000\b", "currentColor", body)
    body = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c-\1, #\1)", body)
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{box}">{body}'


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
