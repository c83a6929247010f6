"""The report of one or several runs: one HTML file that needs no other file, and its pictures beside it as PNGs.

This module gathers the values, `report.html.j2` lays them out, and `report.css` sets their style.
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
    """Write `folder/report.html` and the page's pictures as PNGs. Return the path of the page.

    Names of `runs` have to be unique: with several runs, each run's pictures are in a folder of its name.

    Raises:
        ValueError: A run has logged nothing yet.
    """
    names = [run.name for run in runs]
    assert len(set(names)) == len(names), names
    for run in runs:
        if not run.logs:
            raise ValueError(
                f"RUN={run.name!r} has logged nothing yet. Wait for its first step, or set logging_steps=1."
            )
    folder = Path(folder)
    run_values = []
    for number, run in enumerate(runs):
        run_folder = folder / run.name if len(runs) > 1 else folder
        run_values.append(_run_values(run, number, run_folder))
    values = {
        "title": ", ".join(names),
        "training": _drawn(training_pictures(runs), folder, "training"),
        "runs": run_values,
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


def _run_values(run: Run, number: int, folder: Path) -> dict[str, Any]:
    """Return the template's values of one run, the `number`-th on the page. Write its pictures to `folder`."""
    facts = run.facts
    plan = facts["plan"] or "Nothing is FP8: this run is TRL's own."
    pictures = {}
    for heading, heading_pictures in run_pictures(run).items():
        pictures[heading] = _drawn(heading_pictures, folder, section=f"run{number}")
    return {
        "name": run.name,
        "color": SERIES[number % len(SERIES)],
        "summary": summary(run),
        "results": results(run),
        "checks": checks(run),
        "pictures": pictures,
        "facts": _fact_rows(facts),
        "plan": plan.replace(facts["model"], model_name(facts)),  # hides local folders
        "flags": facts["flags"],
    }


def _drawn(pictures: Sequence[Picture], folder: Path, section: str) -> list[dict[str, str]]:
    """Write each picture that has a figure as a PNG. Return title, meaning and SVG of each for the template.

    Ids in the SVGs are unique: each `section` of the page has its own name, and each picture in it its own title.
    """
    drawn = []
    for picture in pictures:
        if picture.figure is not None:
            name = picture.title.lower().replace(" ", "_")
            save(picture.figure, folder / f"{name}.png")
            svg = inline_svg(picture.figure, f"{section}-{name}")
            drawn.append({"title": picture.title, "meaning": picture.meaning, "svg": svg})
    return drawn


def _fact_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of facts: label -> text."""
    in_fp8 = f"{facts['fp8_linears']} linear layers"
    if facts["fp8_experts"]:
        in_fp8 += f", {facts['fp8_experts']} layers of experts"
    kernels = ", ".join(f"{name} ({count})" for name, count in facts["kernels"].items())
    return {
        "Model": model_name(facts),
        "In FP8": in_fp8,
        "Kernels of the engine": kernels or "high precision",
        "Correction": correction_name(facts),
        "Machine": f"{facts['processes']} x {facts['hardware']}",
        "Versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
    }
