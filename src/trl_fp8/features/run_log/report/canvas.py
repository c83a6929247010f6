"""Figures without a global state: PNGs for slides, and SVGs for a page."""

from io import StringIO
from pathlib import Path


try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("pictures need matplotlib: pip install 'trl-fp8[report]'", name=error.name) from error

RAW, TREND, MARK = "#9ecae1", "#08519c", "#d94801"
SERIES = ("#08519c", "#d94801", "#31844a", "#7b3f98", "#a07800", "#555555")
DOTS = "#3d85c8"  # of what is drawn in pixels: seen on white and on black
TITLE = 12  # points above the axes and their highest tick
STYLES = ("-", "--", ":")  # of lines beyond the first six


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches."""
    figure = Figure(figsize=(width, height), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: no global backend, no open figure of the caller's is touched
    return figure


def new_axes() -> Axes:
    """Return the only axes of a figure as wide as a phone, on which its letters can be read."""
    return new_figure(4.4, 2.9).subplots()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def inline_svg(figure: Figure, name: str) -> str:
    """Return an `<svg>` element for a page, with a `name` unique there. Letters stay letters, in the page's font.

    The title is left to the page. The layout is the one that `save` has found, which takes most of the time.
    """
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_title("", loc="left")
    for number, artist in enumerate(figure.findobj()):  # matplotlib's own names are the same in every picture
        artist.set_gid(f"{name}-{number}")
    width, height = figure.get_size_inches()
    written = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # the salt is for ids of parts that many share
        figure.savefig(
            written,
            format="svg",
            dpi=160,
            bbox_inches=Bbox.from_bounds(0, 0, width, height - TITLE / 72),
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    drawn = written.getvalue()
    return drawn[drawn.index("<svg") :]  # a page has no place for an XML declaration


def tidy(axes: Axes, title: str, x: str, y: str = "", legend: str | None = None) -> Figure:
    """Add labels, a legend at that place and a light grid; remove the frame above and right. Return the figure."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=9, loc=legend)
    return axes.figure
