"""Every interval and range on a page stands in a result file, or follows from the seeds that one has."""

import json
import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from testing.record import interval


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = r"(-?\d+\.?\d*)"
# -0.008 (97.5 % CI -0.033 to 0.018) and 1.3 (range 1.2 to 1.4)
QUOTED = re.compile(rf"{NUMBER} \((?:[\d.]+ % CI|range) {NUMBER} to {NUMBER}\)")


def intervals(node: dict | list) -> Iterator[tuple[float, float, float]]:
    """Yield (middle, low, high) of every interval and range in a result file; losses are gains with the other sign."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict | list):
            yield from intervals(child)
    if isinstance(node, list):
        return
    if node.get("low") is not None and "value" in node:
        yield node["value"], node["low"], node["high"]
        yield -node["value"], -node["high"], -node["low"]
    if node.keys() >= {"median", "min", "max"}:
        yield node["median"], node["min"], node["max"]
    if "mismatch_mean" in node and node.keys() >= {"mismatch", "policy"}:
        yield node["mismatch_mean"], node["mismatch"]["min"], node["mismatch"]["max"]


def differences(results: dict) -> Iterator[tuple[float, float, float]]:
    """Yield the paired difference of final accuracy, with its interval, for each pair of arms with the same seeds."""
    ends = [arm["reward_end_per_seed"] for arm in results.values() if isinstance(arm, dict) and "seeds" in arm]
    for one, other in permutations((each for each in ends if len(each) > 1), 2):
        if len(one) == len(other):
            found = interval([x - y for x, y in zip(one, other, strict=True)])
            yield found["mean"], found["low"], found["high"]


@pytest.fixture(scope="module")
def measured() -> list[tuple[float, float, float]]:
    found = []
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        results = json.loads(path.read_text())["results"]
        found += intervals(results)
        if path.stem.startswith("demo"):
            found += differences(results)
    return found


def is_measured(quoted: tuple[str, str, str], measured: list[tuple[float, float, float]]) -> bool:
    """Return whether some measurement has these three numbers, at the digits that are quoted."""
    return any(
        all(
            abs(float(text) - value) <= 0.500001 * 10 ** -len(text.partition(".")[2])
            for text, value in zip(quoted, each, strict=True)
        )
        for each in measured
    )


def test_every_interval_on_a_page_is_in_a_result_file(measured):
    quoted = {
        (path.name, *match.groups()) for path in PAGES for match in QUOTED.finditer(" ".join(path.read_text().split()))
    }
    assert len(quoted) > 15
    assert [each for each in quoted if not is_measured(each[1:], measured)] == []


def test_an_interval_that_was_not_measured_is_found(measured):
    [quoted] = QUOTED.findall("loses -0.008 (97.5 % CI -0.033 to 0.018) of")
    assert is_measured(quoted, measured)
    assert not is_measured((*quoted[:2], "0.019"), measured)
    assert not is_measured(("0.007", *quoted[1:]), measured)
