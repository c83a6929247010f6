"""The matrix of families: three of its rows, and that what is said to have been trained is what has a row."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testing.matrix.families import FAMILIES
from testing.matrix.row import row
from trl_fp8.recipe.families import families_with, types_with
from trl_fp8.upstream.versions import VERSIONS


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "models_cpu.json"


@pytest.mark.engine
@pytest.mark.parametrize("name", ["phi3", "qwen3_next", "deepseek_v3"])
def test_a_family_goes_through_a_whole_run(name, tmp_path):
    """Fused projections, a hybrid, and latent attention; both of the latter with experts."""
    made = row(FAMILIES[name], tmp_path)
    assert made["kv"] == {"qwen3_next": "FP8 in 1 of 2 layers"}.get(name, "FP8")
    assert 0 < made["mismatch"] < made["spread"] / 3
    assert made["full"].get("exact", False) == (name == "phi3")


def test_every_tested_family_has_a_row_and_none_failed():
    rows = json.loads(RESULTS.read_text())["results"]
    oldest = families_with(next(iter(VERSIONS.values())))  # whose results these are
    assert set(types_with("tested")) == set(FAMILIES)
    assert {kind for kind, family in oldest.items() if family.tested} == set(rows)
    assert len(rows) >= 20 and not any("failed" in made for made in rows.values())


def test_the_page_of_models_is_what_was_measured():
    """In a process of its own: the generator is no module of the package."""
    done = subprocess.run([sys.executable, "-m", "docs.generate_models", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
