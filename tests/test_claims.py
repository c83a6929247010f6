"""The experiment on what FP8 does to learning: its statistics, verdicts, tasks, formats and arithmetic. No engine."""

import json
from dataclasses import replace
from math import comb, exp
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.claims import evidence, pictures, run_table, verdicts
from benchmarks.claims.automaton import REMARKS, TABLE, Problem, right_trace
from benchmarks.claims.formats import SIMULATED
from benchmarks.claims.grid import Cell, cells
from benchmarks.claims.precision import LOSS_SCALE, ComputesIn
from benchmarks.claims.runs import Run, Runs
from benchmarks.claims.statements import CLAIMS, arm
from benchmarks.claims.verdicts import NOT_DECIDED, NOT_SUPPORTED, SUPPORTED
from docs import generate_claims


# -- statistics


def covered(draws=400):
    rows = np.random.default_rng(1).normal(3.0, 2.0, size=(draws, 8))
    found = [evidence.mean(row) for row in rows]
    return np.mean([each.low < 3.0 < each.high for each in found])


def test_an_interval_of_eight_normal_numbers_holds_their_mean_as_often_as_it_says(monkeypatch):
    """400 trials: a standard error of 0.011."""
    assert 0.925 < covered() < 0.975
    monkeypatch.setattr(evidence, "_percentiles", lambda n, level: (0.025, 0.975))  # percentiles that are not expanded
    assert covered() < 0.92


def test_holm_by_hand():
    assert evidence.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert evidence.holm([0.5, 0.9]) == [1.0, 1.0]
    assert max(evidence.holm([2 / 256] * 6)) < 0.05 < max(evidence.holm([2 / 128] * 6))


@pytest.mark.parametrize(("count", "n"), [(0, 8), (1, 8), (4, 8), (8, 8), (2, 5)])
def test_a_share_has_the_interval_that_no_binomial_outside_of_it_would_reach(count, n):
    found = evidence.share(count, n)
    mass = [lambda p, k=k: comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    assert (found.low == 0.0) if count == 0 else sum(m(found.low) for m in mass[count:]) == pytest.approx(0.025)
    assert (found.high == 1.0) if count == n else sum(m(found.high) for m in mass[: count + 1]) == pytest.approx(0.025)


# -- runs and verdicts

GENERATIONS = (0, 2, 4)


def made_run(name, seed, accuracy=0.5, k3=0.01, final=None, **curves):
    """Of an arm by its name, whose accuracy is the same all along, or another one at the end."""
    task, rollouts, correction, precision, pressure = name.split("-")
    rate, updates = map(int, pressure.split("x"))
    cell = Cell(task, rollouts, correction, precision, rate, updates, seed, {}, "", 1e-3, 8, 4, 2)
    accuracies = dict.fromkeys(GENERATIONS, accuracy) | ({4: final} if final is not None else {})
    return Run(cell, accuracies, {"k3": [k3] * 4, "token_mult_prob_error": [1.01] * 4} | curves)


def noise(seed, name):
    return Random(f"{seed} {name}").uniform(-0.01, 0.01)


# Accuracies and k3 as all claims would have them
LIKE_THE_SOURCES = {name: (0.6, 0.01) for claim in CLAIMS.values() for name in claim.arms} | {
    arm("addition", "e4m3"): (0.5, 0.01),
    arm("addition", "e4m3_kv"): (0.45, 0.02),
    arm("addition", "e4m3_kv", "tis"): (0.6, 0.02),
    arm("addition", "e4m3", "tis", "fp16_emulated"): (0.7, 0.01),
    arm("addition_moe", "bf16"): (0.4, 0.02),
    arm("addition_moe", "e4m3"): (0.4, 0.03),
    arm("addition", "full_flow"): (0.6, 0.0),
}
COLLAPSING = arm("automaton", "e4m3_kv", pressure="3x4")


def grid_of_runs(changed=None, seeds=16, left_out=()):
    made = []
    for name, (accuracy, k3) in (LIKE_THE_SOURCES | (changed or {})).items():
        for seed in range(seeds if name not in left_out else 4):
            end = 0.2 if name == COLLAPSING and not changed else None
            made.append(made_run(name, seed, accuracy + noise(seed, name), k3 * exp(noise(seed, name)), end))
    return Runs(made)


def verdict(number, runs):
    return verdicts.claims(runs)[str(number)]["verdict"]


@pytest.mark.parametrize(
    ("accuracies", "collapsed"),
    [((0.3, 0.6, 0.4), True), ((0.3, 0.6, 0.41), False), ((0.6, 0.1, 0.5), False), ((0.2, 0.0, 0.0), True)],
)
def test_a_run_has_collapsed_if_it_ends_far_below_its_best(accuracies, collapsed):
    run = replace(
        made_run("addition-bf16-none-bf16-1x1", 0), accuracies=dict(zip(GENERATIONS, accuracies, strict=True))
    )
    assert run.collapsed is collapsed


def test_runs_of_an_experiment_that_came_out_like_the_sources_support_every_claim():
    assert {each["verdict"] for each in verdicts.claims(grid_of_runs()).values()} == {SUPPORTED}


def test_runs_without_a_difference_support_nothing():
    equal = dict.fromkeys(LIKE_THE_SOURCES, (0.6, 0.01))
    assert {each["verdict"] for each in verdicts.claims(grid_of_runs(equal)).values()} == {NOT_SUPPORTED}


def test_a_part_that_its_interval_excludes_costs_the_claim():
    for number, name, values in (
        (1, arm("addition", "e4m3", "tis"), (0.5, 0.01)),  # TIS restores nothing
        (2, arm("addition", "e4m3_kv", "tis"), (0.5, 0.02)),
        (3, arm("addition_moe", "e4m3"), (0.4, 0.01)),  # no more mismatch than dense
        (4, arm("addition", "e4m3", "tis", "fp16_emulated"), (0.7, 0.001)),  # less mismatch
        (5, arm("addition", "full_flow"), (0.5, 0.0)),
        (6, COLLAPSING, (0.5, 0.01)),  # worse, but no collapse
    ):
        runs = grid_of_runs({name: values})
        assert verdict(number, runs) == NOT_SUPPORTED
        assert verdicts.claims(runs)[str(number)]["test"]["state"] == "holds"


@pytest.mark.parametrize("seeds", [5, 8])
def test_seeds_too_few_for_half_the_level_cannot_support_a_claim(seeds):
    assert {each["verdict"] for each in verdicts.claims(grid_of_runs(seeds=seeds)).values()} == {NOT_DECIDED}


def test_only_runs_with_the_same_seed_are_compared():
    a, b = arm("addition", "e4m3"), arm("addition", "bf16")
    runs = Runs(
        [made_run(a, seed, 0.1 * seed) for seed in (3, 1, 2)] + [made_run(b, seed, 0.05) for seed in (4, 2, 3)]
    )
    assert runs.differences("area", a, b) == pytest.approx([0.15, 0.25])


# -- the grid, and what is committed of it

COMMITTED = Path(evidence.__file__).with_name("runs_cpu.jsonl.gz")


def test_the_grid_has_at_least_eight_seeds_of_every_arm_that_a_claim_names():
    seeds = {}
    for cell in cells():
        seeds.setdefault(cell.arm, set()).add(cell.seed)
    named = {name for claim in CLAIMS.values() for name in claim.arms}
    assert {name for name in named if not seeds.get(name, set()) >= set(range(8))} == set()


def test_committed_runs_are_those_of_the_grid_with_its_settings():
    grid = {cell.name: cell for cell in cells()}
    runs = [Run.of(row) for row in run_table.read(COMMITTED)]
    assert len({run.cell.name for run in runs}) == len(runs) > 0
    for run in runs:
        assert grid[run.cell.name] == run.cell
        assert max(run.accuracies) == run.cell.generations and len(run.accuracies) == run.cell.evaluations + 1


def test_a_run_is_added_to_the_table_whole_or_not_at_all(tmp_path, monkeypatch):
    table, rows = tmp_path / "runs.jsonl.gz", run_table.read(COMMITTED)[:3]
    assert run_table.read(table) == []
    for row in reversed(rows):
        run_table.add(row, table)
    assert run_table.read(table) == rows
    before = table.read_bytes()
    run_table.add(rows[1], table)  # again, in its own place: the same bytes
    assert table.read_bytes() == before and list(tmp_path.iterdir()) == [table]
    run_table.add(rows[1] | {"commit": "another"}, table)
    assert run_table.read(table) == [rows[0], rows[1] | {"commit": "another"}, rows[2]]
    before = table.read_bytes()

    def killed(path, data):
        path.open("wb").write(data[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        run_table.add(rows[2] | {"commit": "lost"}, table)
    assert table.read_bytes() == before


def test_committed_verdicts_are_those_of_the_committed_runs():
    if generate_claims.RESULTS.exists():
        committed = json.loads(generate_claims.RESULTS.read_text())["results"]
        assert list(differing(committed, json.loads(json.dumps(verdicts.results(Runs.read(COMMITTED)))))) == []


def differing(one, other, where=""):
    """Places where two trees of dicts and lists are not the same; numbers may differ by their rounding."""
    if isinstance(one, dict | list) and type(one) is type(other) and len(one) == len(other):
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            found = other.get(key, "nothing") if isinstance(one, dict) else other[key]
            yield from differing(value, found, f"{where}.{key}")
    elif not (one == pytest.approx(other, rel=1e-3, abs=1e-9) if isinstance(one, float) else one == other):
        yield f"{where}: {one} and {other}"


@pytest.mark.parametrize("path", generate_claims.PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_results_make_of_it(path):
    assert path.read_text() == generate_claims.page(path)


def test_other_results_make_other_pages(monkeypatch, tmp_path, capsys):
    for path in generate_claims.RESULTS.parent.glob("*_cpu.json"):
        (tmp_path / path.name).write_text(path.read_text())
    record = {"hardware": "two cores", "commit": "abc", "results": verdicts.results(grid_of_runs())}
    (tmp_path / "claims_cpu.json").write_text(json.dumps(record))
    monkeypatch.setattr(generate_claims, "RESULTS", tmp_path / "claims_cpu.json")
    monkeypatch.setattr("sys.argv", ["generate_claims", "--check"])
    text = generate_claims.generated("details")
    assert text.count("**supported**") == 6 and "area, e4m3 - BF16: -0." in text and "| **above 0.01** |" in text
    assert generate_claims.generated("verdicts").count("**supported**") == 6
    assert "| k3, 8 layers, FP8 linears and KV cache | 0.02" in generate_claims.generated("measured")
    assert generate_claims.main() == 1
    assert "docs/evidence.md differs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["claims_map", "claims_curves"])
def test_pictures_are_small(name):
    path = pictures.IMAGES / f"{name}.png"
    assert path.exists() == generate_claims.RESULTS.exists()
    if path.exists():
        assert path.stat().st_size < 150_000


# -- formats

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# 0x7F is NaN; below 2**-6 steps are those above it
E4M3 = [(8 + code % 8 if code > 7 else code) * 2.0 ** (max(code // 8, 1) - 10) for code in range(0x7F)]


def nearest(value, grid):
    """To a grid of magnitudes; of two as near the even code."""
    code = min(range(len(grid)), key=lambda code: (abs(grid[code] - abs(value)), code % 2))
    return grid[code] if value >= 0 else -grid[code]


def mx(row, grid):
    """A power of two for each 32, by which the largest comes into the grid's highest octave."""
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        scale = 2.0 ** (np.floor(np.log2(np.abs(block).max())) - np.floor(np.log2(grid[-1])))
        yield from (nearest(value / scale, grid) * scale for value in block)


def nvfp4(row, largest):
    """An e4m3 scale for each 16, by which their largest is 6; in units that make the tensor's largest scale 448."""
    unit = np.float32(largest) / np.float32(6 * 448)
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        scale = nearest(np.float32(np.abs(block).max()) / 6 / unit, E4M3) * unit
        yield from (nearest(value / scale, E2M1) * scale for value in block)


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_formats_are_those_of_an_independent_computation(name):
    weight = (torch.randn(6, 64, generator=torch.manual_seed(0)) * torch.logspace(-3, 1, 6)[:, None]).bfloat16()
    rows = weight.double().numpy()
    quantizers = {
        "mxfp8": lambda row: mx(row, E4M3),
        "mxfp4": lambda row: mx(row, E2M1),
        "nvfp4": lambda row: nvfp4(row, np.abs(rows).max()),
    }
    right = [list(quantizers[name](row)) for row in rows]
    found = SIMULATED[name].rounded(weight.float())
    np.testing.assert_allclose(found.double().numpy(), right, rtol=2e-7, atol=0)  # FP32's products of the scales
    assert not torch.equal(found, weight.float())


def test_the_grids_are_those_of_the_formats():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.double().tolist() == E4M3 and E4M3[-1] == 448


# -- arithmetic


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return torch.randn(7, 96, requires_grad=True), torch.randn(33, 96, requires_grad=True)


def is_held(x, dtype):
    return torch.equal(x, x.to(dtype).to(x.dtype))


def test_a_linear_in_bf16_is_that_of_autocast(linear):
    with ComputesIn(torch.bfloat16):
        found = F.linear(*linear)
    with torch.autocast("cpu", torch.bfloat16):
        right = F.linear(*linear)
    step = 2.0 ** (right.float().abs().log2().floor() - 7)  # sums in another order may round to the next number
    assert found.dtype == torch.float32 and is_held(found, torch.bfloat16)
    assert ((found - right.float()).abs() <= step).all()
    assert (found == right.float()).double().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_and_the_operands_in_them(linear, dtype):
    x, weight = linear
    upstream = torch.randn(7, 33)
    with ComputesIn(dtype):
        F.linear(x, weight).backward(upstream)

    def held(value):
        return (value * LOSS_SCALE).to(dtype).float() / LOSS_SCALE

    right = held(held(upstream) @ weight.detach().to(dtype).float())
    assert is_held(x.grad * LOSS_SCALE, dtype) and is_held(weight.grad * LOSS_SCALE, dtype)
    assert (x.grad == right).double().mean() > 0.98  # the rest: sums in another order
    assert not torch.equal(x.grad, upstream @ weight.detach())


# -- the automaton and its policy


def lines_of(trace):
    """Letter, digits and what ends it of each line, but for the last."""
    lines = [trace[at : at + 7] for at in range(0, len(trace), 7)]
    return [(line[0], [int(digit) for digit in line[1:6]], line[6:]) for line in lines]


def test_a_trace_is_the_automatons():
    problem = Problem((3, 1, 4, 0, 5), 15)
    state, lines = [3, 1, 4, 0, 5], lines_of(problem.trace())
    assert problem.prompt == "p31405;" and len(problem.trace()) == 15 * 7 - 1 and len(lines) == 15
    for left, (letter, digits, end) in zip("onmlkjihgfedcba", lines, strict=True):
        state = [TABLE[state[cell]][state[(cell + 1) % 5]] for cell in range(5)]
        assert (letter, digits, end) == (left, state, "" if left == "a" else ";")


def test_one_wrong_character_makes_an_answer_wrong_unless_it_is_a_remark():
    right = Problem((3, 1, 4, 0, 5), 15).trace()
    for at, character in enumerate(right):
        if character == ";":
            tried = [(right[:at] + remark + right[at + 1 :], 1.0) for remark in REMARKS]
            tried += [(right[:at] + "0" + right[at + 1 :], 0.0)]
        elif character.isdigit():
            tried = [(right[:at] + str((int(character) + 1) % 8) + right[at + 1 :], 0.0)]
        else:
            tried = [(right[:at] + ("b" if character == "a" else "a") + right[at + 1 :], 0.0)]
        completions, rewards = zip(*tried, strict=True)
        assert right_trace(completions, [right] * len(tried)) == list(rewards)
    assert right_trace([right, right[:-1], right + "0", ""], [right] * 4) == [1.0, 0.0, 0.0, 0.0]
