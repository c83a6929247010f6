"""Deleting a feature's folder and its line of registration leaves a package that imports, plans and trains."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from trl_fp8 import features


ROOT = Path(__file__).parents[2]
# Feature -> classes with hooks that a run with default flags lacks without it
GONE = {
    "kv_cache": {"KVCache"},
    "run_log": {"RunLog"},
    "correction": {"Correction"},
    "one_forward": {"SameModel"},
}

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def without(checkpoint, tmp_path_factory):
    """Feature -> what became of a copy without it; "nothing": of a whole copy."""
    words = ["nothing", *features.FOLDERS]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "testing.without_feature",
            checkpoint("qwen3"),
            str(tmp_path_factory.mktemp("c")),
            *words,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    assert len(found) == len(words), done.stdout + done.stderr
    return {each.pop("feature"): each for each in found}


@pytest.mark.parametrize("feature", features.FOLDERS)
def test_the_rest_works(without, feature):
    found, whole = without[feature], without["nothing"]
    assert "error" not in found, found.get("error")
    assert found["failed"] == [] and found["plan"] == 0
    assert len(found["losses"]) == 3 and all(map(math.isfinite, found["losses"]))
    assert found["fp8_modules"] == whole["fp8_modules"] > 0 and found["audit_failures"] == 0
    assert set(whole["features"]) - set(found["features"]) == GONE.get(feature, set())


def test_what_is_not_used_changes_nothing(without):
    """Bit for bit: a feature whose flags are off has no part in a run."""
    for feature in ("shared_base", "router_replay", "truncated_sampling", "run_log"):
        assert without[feature]["losses"] == without["nothing"]["losses"]
    assert without["correction"]["losses"] != without["nothing"]["losses"]
