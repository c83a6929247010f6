"""Figures without global state: PNGs for slides, and SVGs for a page."""

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
DOTS = "#3d85c8"  # visible on white and on black; for dots drawn as pixels, which a dark page cannot recolour
TITLE_POINTS = 12  # height of the title's strip, above the highest tick label; `inline_svg` cuts it off
STYLES = ("-", "--", ":")  # the first six lines have the first style, the next six the second


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches."""
    figure = Figure(figsize=(width, height), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas for this figure alone: matplotlib's global backend and figures stay untouched
    return figure


def new_axes() -> Axes:
    """Return the only axes of a new figure, which is as wide as a phone and can be read there."""
    return new_figure(4.4, 2.9).subplots()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG, and make its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def inline_svg(figure: Figure, name: str) -> str:
    """Return an `<svg>` element for a page, without the title, which the page has. `name` is unique on the page.

    Text stays text, in the page's font. `save` has to come first: its layout is used again, because finding a layout
    takes most of the time.
    """
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_title("", loc="left")
    for number, artist in enumerate(figure.findobj()):  # matplotlib's own ids are the same in every picture
        artist.set_gid(f"{name}-{number}")
    width, height = figure.get_size_inches()
    written = StringIO()
    # Ids of clip paths and markers are hashes of shapes. The salt makes them differ between the pictures of a page
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            written,
            format="svg",
            dpi=160,
            bbox_inches=Bbox.from_bounds(0, 0, width, height - TITLE_POINTS / 72),
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    drawn = written.getvalue()
    return drawn[drawn.index("<svg") :]  # a page has no place for an XML declaration


def tidy(axes: Axes, title: str, x: str, y: str = "", legend: str | None = None) -> Figure:
    """Add title, labels, grid and, at the place `legend`, a legend. Remove half of the frame. Return the figure."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=9, loc=legend)
    return axes.figure
