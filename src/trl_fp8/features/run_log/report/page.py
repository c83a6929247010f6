"""A run, or several, as one HTML file that needs nothing else, with its pictures beside it as PNGs.

Values are gathered here, `report.html.j2` lays them out, and `report.css` says how that looks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trl_fp8.features.run_log.log_file import Run

from .canvas import SERIES, inline_svg, save
from .checks import checks
from .pictures import Picture, run_pictures, training_pictures
from .results import compared, correction_name, differences, model_name, results, summary


def write_report(runs: Sequence[Run], folder: str | Path) -> Path:
    """Write `folder/report.html` and the pictures in it as PNGs. Names of `runs` differ.

    Raises:
        ValueError: A run has logged nothing yet.
    """
    names = [run.name for run in runs]
    assert len(set(names)) == len(names), names
    if empty := [run.name for run in runs if not run.logs]:
        raise ValueError(f"RUN={empty[0]!r} has logged nothing yet. Wait for its first step, or set logging_steps=1.")
    folder = Path(folder)
    values = {
        "title": ", ".join(names),
        "training": _drawn(training_pictures(runs), folder, "training"),
        "runs": [
            _values(run, index, folder / run.name if len(runs) > 1 else folder) for index, run in enumerate(runs)
        ],
        "compared": list(compared(runs)),
        "differences": differences(runs),
    }
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(templates.get_template("report.html.j2").render(values).lstrip(), encoding="utf-8")
    return path


def _values(run: Run, index: int, folder: Path) -> dict[str, Any]:
    """Return what the template shows of the `index`-th run of the page."""
    facts = run.facts
    plan = facts["plan"] or "Nothing is FP8: this run is TRL's own."
    return {
        "name": run.name,
        "color": SERIES[index % len(SERIES)],
        "summary": summary(run),
        "results": results(run),
        "checks": checks(run),
        "pictures": {
            heading: _drawn(pictures, folder, f"run{index}") for heading, pictures in run_pictures(run).items()
        },
        "facts": _facts(facts),
        "plan": plan.replace(facts["model"], model_name(facts)),
        "flags": facts["flags"],
    }


def _drawn(pictures: Sequence[Picture], folder: Path, place: str) -> list[dict[str, str]]:
    """Write each picture that has a figure as a PNG. Return them for the page; titles are unique in a `place`."""
    drawn = []
    for picture in pictures:
        if picture.figure is not None:
            name = picture.title.lower().replace(" ", "_")
            save(picture.figure, folder / f"{name}.png")
            svg = inline_svg(picture.figure, f"{place}-{name}")
            drawn.append({"title": picture.title, "meaning": picture.meaning, "svg": svg})
    return drawn


def _facts(facts: Mapping[str, Any]) -> dict[str, str]:
    experts = f", {facts['fp8_experts']} layers of experts" if facts["fp8_experts"] else ""
    return {
        "Model": model_name(facts),
        "In FP8": f"{facts['fp8_linears']} linear layers{experts}",
        "Kernels of the engine": ", ".join(f"{name} ({count})" for name, count in facts["kernels"].items())
        or "high precision",
        "Correction": correction_name(facts),
        "Machine": f"{facts['processes']} x {facts['hardware']}",
        "Versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
    }
