"""Deleting a feature's folder and its line of registration leaves a package that imports, plans, helps and trains."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from testing.without_feature import STEPS
from trl_fp8 import features


ROOT = Path(__file__).parents[2]
# Feature -> classes with hooks that a run with default flags lacks without it
GONE = {
    "kv_cache": {"KVCache"},
    "run_log": {"RunLog"},
    "correction": {"Correction"},
    "one_forward": {"SameModel", "Explanation"},
}
# Likewise of a run with all features switched on
GONE_OF_ALL = GONE | {
    "shared_base": {"BaseInEngine"},
    "router_replay": {"Routes"},
    "one_forward": {"Following", "SameModel", "Explanation"},
    "truncated_sampling": {"Truncation"},
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
            checkpoint("qwen3_moe"),
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
    assert found["failed"] == [] and found["plan"] == found["help"] == 0
    for run, gone in (("default", GONE), ("switched_on", GONE_OF_ALL)):
        ran, all_ran = found[run], whole[run]
        assert len(ran["losses"]) == STEPS and all(map(math.isfinite, ran["losses"])), run
        assert ran["fp8_modules"] == all_ran["fp8_modules"] > 0 and ran["audit_failures"] == 0
        assert set(all_ran["features"]) - set(ran["features"]) == gone.get(feature, set())


def test_every_feature_takes_part_once_it_is_switched_on(without):
    assert set().union(*GONE_OF_ALL.values()) | {"Syncs"} == set(without["nothing"]["switched_on"]["features"])


def test_features_that_are_off_change_nothing(without):
    """Bit for bit: a feature whose flags are off has no part in a run."""
    losses = {feature: found["default"]["losses"] for feature, found in without.items()}
    for feature in ("shared_base", "router_replay", "truncated_sampling", "run_log"):
        assert losses[feature] == losses["nothing"]
    assert losses["correction"] != losses["nothing"]
