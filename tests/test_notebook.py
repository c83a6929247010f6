"""examples/quickstart.ipynb: every cell runs, as Jupyter would run it, and git holds no outputs."""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from testing import engines


EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())


@pytest.fixture
def display(monkeypatch):
    """A stand-in for `IPython.display`, which Jupyter brings: pictures are read, and pages kept as they are."""
    module = ModuleType("IPython.display")
    module.Image = lambda filename: Path(filename).read_bytes()
    module.HTML = str
    monkeypatch.setitem(sys.modules, module.__name__, module)


def shown_by(cell: dict, names: dict) -> object:
    """Run a cell in the namespace `names`; returns the value of its last line if that is an expression."""
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "quickstart.ipynb", "exec"), names)
    return last and eval(compile(ast.Expression(last.value), "quickstart.ipynb", "eval"), names)


@pytest.mark.engine
def test_every_cell_runs_and_shows_what_the_text_says(display, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    names = {"__name__": "__main__"}
    try:
        shown = [shown_by(cell, names) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    finally:
        if trainer := names.get("trainer"):
            engines.shutdown(trainer.vllm_generation.llm)
    *_, (problem, rewards), _, _, _, picture, page = shown
    assert problem.keys() == {"prompt", "answer"} and rewards == [1.0, 1.0, 0.0]
    assert picture.startswith(b"\x89PNG") and "<iframe srcdoc=" in page and "&lt;/html&gt;" in page
    out = capfd.readouterr().out
    assert "95.8% of them FP8" in out
    told = {line.split()[0]: [float(word) for word in line.split()[1:]] for line in out.splitlines()[-5:-1]}
    mismatch, audited = (told[name] for name in names["SHOWN"][1:3])
    assert len(mismatch) == 3 and all(0 < value < 0.1 for value in mismatch)
    assert min(audited) == max(audited) > 0


def test_git_holds_no_outputs():
    assert NOTEBOOK["nbformat"] == 4
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
