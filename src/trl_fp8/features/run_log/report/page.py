"""A run, or several, as one HTML file that needs nothing else, with its pictures beside it as PNGs."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from trl_fp8.features.run_log.log_file import Run

from .canvas import SERIES, inline_svg, save
from .checks import checks
from .pictures import Picture, run_pictures, training_pictures
from .results import correction_name, model_name, results, summary
from .runs_compared import compared, differences


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
    title = f"{', '.join(names)}: FP8 rollouts"
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    body = _alone(runs[0], folder) if len(runs) == 1 else _side_by_side(runs, folder)
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _alone(run: Run, folder: Path) -> str:
    cards = "".join(
        f"<div><dt>{escape(result.label)}</dt><dd><b>{escape(result.value)}</b> "
        f"<small>{escape(result.meaning)}</small> <small>{escape(result.note)}</small></dd></div>\n"
        for result in results(run)
    )
    return (
        f'<header>\n<p class="kind">FP8 rollouts</p>\n<h1>{escape(run.name)}</h1>\n<p>{escape(summary(run))}</p>\n'
        f'<dl class="headline">\n{cards}</dl>\n</header>\n'
        f"{_checks(run, 2)}{_section('Training', 2, training_pictures([run]), folder)}{_details(run, folder, 2)}"
    )


def _side_by_side(runs: Sequence[Run], folder: Path) -> str:
    each = "".join(
        f'<details class="run"><summary>{_swatch(index)}{escape(run.name)} {_state(run)}</summary>\n'
        f"<p>{escape(summary(run))}</p>\n"
        f"{_checks(run, 3)}{_details(run, folder / run.name, 3)}</details>\n"
        for index, run in enumerate(runs)
    )
    return (
        f'<header>\n<p class="kind">FP8 rollouts</p>\n<h1>{escape(", ".join(run.name for run in runs))}</h1>\n'
        "<p>Results side by side. Rewards of single runs differ by chance, too: compare several seeds.</p>\n"
        f"{_table(runs)}</header>\n"
        f"{_section('Training', 2, training_pictures(runs), folder)}<h2>Each run</h2>\n{each}"
    )


def _state(run: Run) -> str:
    """How its checks ended, to be seen while the run is folded."""
    found = checks(run)
    look = sum(not check.fine for check in found)
    count = f"{len(found)} check{'s' * (len(found) > 1)}"
    text = f"look at {look} of {count}" if look else f"{count} ok"
    return f'<span class="{"look" if look else "fine"}"><b>{text}</b></span>' if found else ""


def _table(runs: Sequence[Run]) -> str:
    """Roles, as a phone shows its rows as blocks, which without them would be no table to a screen reader."""
    heads = "".join(
        f'<th scope="col" role="columnheader">{_swatch(index)}{escape(run.name)}</th>'
        for index, run in enumerate(runs)
    )
    rows = []
    for row in compared(runs):
        first = next(filter(None, row))
        cells = [f"<b>{escape(r.value)}</b> <small>{escape(r.note)}</small>" if r else "not measured" for r in row]
        rows.append(_row(f"{escape(first.label)} <small>{escape(first.meaning)}</small>", cells, runs))
    if flags := differences(runs):
        heading = f'<th colspan="{len(runs) + 1}" scope="rowgroup" role="rowheader">Settings that differ</th>'
        rows.append(f'<tr role="row" class="group">{heading}</tr>\n')
        names = [escape(name).replace("_", "_<wbr>") for name in flags]
        rows += [_row(name, map(escape, values), runs) for name, values in zip(names, flags.values(), strict=True)]
    return (
        '<div class="scrolls" tabindex="0" role="region" aria-label="Runs side by side">\n<table role="table">\n'
        f'<thead role="rowgroup"><tr role="row"><td role="cell"></td>{heads}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{"".join(rows)}</tbody>\n</table>\n</div>\n'
    )


def _row(head: str, cells: Iterator[str], runs: Sequence[Run]) -> str:
    told = "".join(
        f'<td role="cell"><span class="of">{_swatch(index)}{escape(run.name)}</span><span>{cell}</span></td>'
        for index, (run, cell) in enumerate(zip(runs, cells, strict=True))
    )
    return f'<tr role="row"><th scope="row" role="rowheader">{head}</th>{told}</tr>\n'


def _swatch(index: int) -> str:
    color = SERIES[index % len(SERIES)]
    return f'<i aria-hidden="true" style="background: var(--c-{color[1:]}, {color})"></i>'


def _checks(run: Run, level: int) -> str:
    answers = "".join(
        f'<li class="{"fine" if check.fine else "look"}"><b>{"ok" if check.fine else "look"}</b> '
        f"<div><strong>{escape(check.question)}</strong> {escape(check.answer)}</div></li>\n"
        for check in checks(run)
    )
    return f'<h{level}>Checks</h{level}>\n<ul class="checks">\n{answers}</ul>\n' if answers else ""


def _details(run: Run, folder: Path, level: int) -> str:
    """Pictures that only one run can have, and what it was made of; headings are of `level`."""
    sections = [_section(heading, level, pictures, folder) for heading, pictures in run_pictures(run).items()]
    facts = run.facts
    plan = (facts["plan"] or "Nothing is FP8: this run is TRL's own.").replace(facts["model"], model_name(facts))
    folded = {
        "Model, machine, versions": _list(_facts(facts)),
        "What was FP8, tensor by tensor": f'<pre tabindex="0">{escape(plan)}</pre>\n',
        "Flags that differ from their defaults": _list(facts["flags"]),
    }
    sections += [f"<details><summary>{name}</summary>\n{content}</details>\n" for name, content in folded.items()]
    return "".join(sections)


def _section(heading: str, level: int, pictures: Sequence[Picture], folder: Path) -> str:
    """Those of `pictures` that can be drawn, each also written as a PNG; empty if none can."""
    drawn = []
    for picture in pictures:
        if (figure := picture.draw()) is not None:
            path = save(figure, folder / f"{picture.title.lower().replace(' ', '_')}.png")
            caption = f"<figcaption><strong>{escape(picture.title)}</strong> {escape(picture.meaning)}</figcaption>"
            label = f"{picture.title}. {picture.meaning}"
            drawn.append(f"<figure>{caption}\n{inline_svg(figure, str(path), label)}</figure>\n")
    shown = f'<h{level}>{heading}</h{level}>\n<div class="pictures">\n{"".join(drawn)}</div>\n'
    return shown if drawn else ""


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


def _list(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>\n" for k, v in values.items())
    return f'<dl class="facts">\n{rows}</dl>\n'
