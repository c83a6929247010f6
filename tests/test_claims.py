"""The experiment on what FP8 does to learning: its statistics, verdicts, tasks, formats and arithmetic. No engine."""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import combinations, islice, repeat
from math import comb, exp, inf, log, nan
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.claims import automaton, evidence, pictures, policy, run_table, verdicts
from benchmarks.claims.automaton import REMARKS, TABLE, WEAK, Problem, Teacher, problems, right_trace
from benchmarks.claims.cell import HeldOut, settings
from benchmarks.claims.formats import SIMULATED, rounded_weights
from benchmarks.claims.grid import Cell, cells
from benchmarks.claims.precision import EMULATED, LOSS_SCALE, ComputesIn, Rounded
from benchmarks.claims.runs import Run, Runs
from benchmarks.claims.statements import CLAIMS, Collapses, Comparison, arm
from benchmarks.claims.verdicts import NOT_DECIDED, NOT_RUN, NOT_SUPPORTED, SUPPORTED, Bands
from docs import generate_claims
from examples.addition_task import PretrainRecipe, build_model, build_tokenizer


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


def test_an_interval_is_that_of_student_where_the_bootstrap_has_many_values():
    values = np.random.default_rng(2).normal(size=10)
    found, half = evidence.mean(values), 2.262 * values.std(ddof=1) / 10**0.5
    assert found.value == pytest.approx(values.mean()) and found.n == 10
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.12 * half)


def test_four_values_have_no_interval_and_none_no_mean():
    assert evidence.mean([]) is None
    assert vars(evidence.mean([1.0, 2.0, 3.0, 6.0])) == {"value": 3.0, "low": None, "high": None, "n": 4}
    assert evidence.mean([1.0, 2.0, 3.0, 6.0, 3.0]).low > 1.0


def test_the_mean_of_ratios_is_geometric():
    logarithms = [log(2)] * 3 + [log(8)] * 3
    found, of_logarithms = evidence.geometric_mean(logarithms), evidence.mean(logarithms)
    assert (found.value, found.low, found.high) == pytest.approx((4, exp(of_logarithms.low), exp(of_logarithms.high)))
    assert 2 <= found.low < 3 < 5 < found.high <= 8


def test_values_of_a_seed_are_resampled_together():
    groups = {seed: [float(seed)] * 5 for seed in range(6)}
    together, apart = evidence.clustered_mean(groups), evidence.mean(map(float, range(6)))
    assert vars(together) == pytest.approx(vars(apart))
    uneven = evidence.clustered_mean({0: [1.0], 1: [0.0, 0.0, 0.0]})
    assert uneven.value == 0.25 and uneven.n == 2


@pytest.mark.parametrize("n", [5, 8, 16])
def test_differences_of_one_sign_are_the_most_extreme_of_all_flips(n):
    differences = [0.1 + 0.03 * k for k in range(n)]
    assert evidence.sign_flip(differences) == evidence.sign_flip([-x for x in differences]) == 2 / 2**n


def test_a_sign_flip_counts_every_choice_of_signs():
    # |sum| of +-1 +-2 +-3: 6 0 4 2 and their mirrors; -1 + 2 + 3 = 4
    assert evidence.sign_flip([-1, 2, 3]) == 4 / 8
    assert evidence.sign_flip([1, 2, -3]) == 1.0
    assert evidence.sign_flip([0.1, 0.2, 0.3]) == 2 / 8  # whose sums differ by their order


@pytest.mark.parametrize(
    ("n", "level", "difference", "found"),
    [(8, 0.05, 0.03, 1 / 7), (8, 0.05, 0.1, 0.95), (16, 0.025, 0.03, 0.4), (16, 0.025, 0.05, 0.9)],
)
def test_the_first_of_six_tests_finds_differences_as_often_as_the_page_says(n, level, difference, found):
    """Where they scatter by 0.04; 100 trials: a standard error of 0.05 at most."""
    rows = np.random.default_rng(0).normal(difference, 0.04, size=(100, n))
    assert np.mean([evidence.sign_flip(row) <= level / 6 for row in rows]) == pytest.approx(found, abs=0.1)


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

GRID = {
    "rollouts": {name: {} for name in ("bf16", "e4m3", "e4m3_kv", "full_flow")},
    "corrections": {"none": "monitor", "tis": "fp8_token_tis"},
    "tasks": {"addition": {"learning_rate": 1e-3, "completions": 8, "generations": 4, "evaluations": 2}},
}
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


def test_the_area_is_the_mean_over_the_run_from_evaluation_to_evaluation():
    run = made_run("addition-bf16-none-bf16-1x1", 0)
    run = replace(run, accuracies={0: 0.2, 10: 0.4, 40: 0.8})
    assert run.area == pytest.approx((10 * 0.3 + 30 * 0.6) / 40)
    assert (run.final, run.best) == (0.8, 0.8)


@pytest.mark.parametrize(
    ("accuracies", "collapsed"),
    [((0.3, 0.6, 0.4), True), ((0.3, 0.6, 0.41), False), ((0.6, 0.1, 0.5), False), ((0.2, 0.0, 0.0), True)],
)
def test_a_run_has_collapsed_if_it_ends_far_below_its_best(accuracies, collapsed):
    run = replace(
        made_run("addition-bf16-none-bf16-1x1", 0), accuracies=dict(zip(GENERATIONS, accuracies, strict=True))
    )
    assert run.collapsed is collapsed


def test_what_is_not_finite_is_not_averaged():
    run = made_run("addition-bf16-none-bf16-1x1", 0, grad_norm=[1.0, nan, 3.0, inf, None])
    assert (run.mean("grad_norm"), run.most("grad_norm"), run.least("grad_norm")) == (2.0, 3.0, 1.0)
    assert np.isnan(run.mean("what no run has"))


def test_runs_of_an_experiment_that_came_out_like_the_sources_support_every_claim():
    assert {each["verdict"] for each in verdicts.claims(grid_of_runs()).values()} == {SUPPORTED}


def test_runs_without_a_difference_support_nothing():
    equal = dict.fromkeys(LIKE_THE_SOURCES, (0.6, 0.01))
    assert {each["verdict"] for each in verdicts.claims(grid_of_runs(equal)).values()} == {NOT_SUPPORTED}


def test_a_loss_that_varies_too_much_is_not_decided():
    """A mean loss of 0.1, and two seeds of eight that gain."""
    runs = list(grid_of_runs(left_out=LIKE_THE_SOURCES))
    name = arm("addition", "e4m3")
    gains = (0.1, 0.1, -0.2, -0.2, -0.2, -0.2, -0.1, -0.1)
    runs = [
        made_run(arm_, seed, accuracy, k3) for arm_, (accuracy, k3) in LIKE_THE_SOURCES.items() for seed in range(8)
    ]
    runs = [made_run(name, run.cell.seed, 0.6 + gains[run.cell.seed]) if run.cell.arm == name else run for run in runs]
    assert verdict(1, Runs(runs)) == NOT_DECIDED


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


def test_a_claim_with_four_pairs_has_not_run():
    runs = grid_of_runs(left_out=(arm("addition", "e4m3", "tis"),))
    claim = verdicts.claims(runs)["1"]
    assert claim["verdict"] == NOT_RUN and claim["parts"][0]["n"] == 4
    assert verdicts.claims(Runs([]))["6"]["verdict"] == NOT_RUN
    assert verdicts.claims(Runs([]))["6"]["p"] == 1.0


@pytest.mark.parametrize("seeds", [5, 8])
def test_seeds_too_few_for_half_the_level_cannot_support_a_claim(seeds):
    assert {each["verdict"] for each in verdicts.claims(grid_of_runs(seeds=seeds)).values()} == {NOT_DECIDED}


def test_only_runs_with_the_same_seed_are_compared():
    a, b = arm("addition", "e4m3"), arm("addition", "bf16")
    runs = Runs(
        [made_run(a, seed, 0.1 * seed) for seed in (3, 1, 2)] + [made_run(b, seed, 0.05) for seed in (4, 2, 3)]
    )
    assert runs.differences("area", a, b) == pytest.approx([0.15, 0.25])


@pytest.mark.parametrize(
    ("says", "values", "state"),
    [
        ("more", (0.01, 0.03), "holds"),  # certain, if small
        ("more", (-0.01, 0.02), "excluded"),
        ("more", (-0.01, 0.04), "open"),
        ("less", (-0.03, -0.01), "holds"),
        ("less", (-0.02, 0.01), "excluded"),
        ("less", (0.1, 0.2), "excluded"),
        ("less", (-0.04, 0.01), "open"),
        ("near", (-0.02, 0.02), "holds"),
        ("near", (-0.04, 0.02), "open"),
        ("near", (0.06, 0.08), "excluded"),
        ("near", (-0.08, -0.06), "excluded"),
    ],
)
def test_an_interval_settles_what_is_said_of_a_difference(says, values, state):
    found = evidence.Estimate(sum(values) / 2, *values, 8)
    assert Comparison("area", "a", "b", says).state(found) == state


@pytest.mark.parametrize(
    ("ratios", "state"), [((0.81, 1.1), "holds"), ((0.7, 0.79), "excluded"), ((0.7, 0.9), "open")]
)
def test_an_interval_settles_what_is_said_of_a_ratio(ratios, state):
    found = evidence.Estimate(log(0.8), *map(log, ratios), 8)
    assert Comparison("k3", "a", "b", "at least", 0.8).state(found) == state


@pytest.mark.parametrize(
    ("falls", "other", "state"),
    [(4, 0, "holds"), (3, 0, "open"), (1, 0, "open"), (0, 0, "excluded"), (8, 1, "excluded")],
)
def test_collapses_are_counted(falls, other, state):
    a, b = arm("addition", "e4m3_kv"), arm("addition", "full_flow")
    runs = [made_run(a, seed, final=0.1 if seed < falls else None) for seed in range(8)]
    runs += [made_run(b, seed, final=0.1 if seed < other else None) for seed in range(8)]
    assert Collapses(a, b).judged(Runs(runs))["state"] == state


def test_runs_without_correction_are_parted_by_how_far_a_metric_went():
    """In their worst generation; against BF16 rollouts with the same task, pressure and seed."""
    made = []
    for seed in range(5):
        made += [made_run(arm("addition", "bf16"), seed, 0.6)]
        made += [made_run(arm("addition", "e4m3"), seed, 0.58, token_mult_prob_error=[1.0, 1.01, 1.0, 1.0])]
        made += [made_run(arm("addition", "nvfp4"), seed, 0.4, token_mult_prob_error=[1.0, 1.2, 1.0, 1.0])]
        for ignored in (arm("addition", "nvfp4", "tis"), arm("addition", "full_flow"), arm("automaton", "nvfp4")):
            made += [made_run(ignored, seed, 0.0, token_mult_prob_error=[2.0] * 4)]
    made += [made_run(arm("addition", "bf16", pressure="3x1"), 0, 0.6, final=0.1)]  # collapsed: nothing to lose
    made += [made_run(arm("addition", "e4m3", pressure="3x1"), 0, 0.1)]
    bands = Bands("token_mult_prob_error", (1.005, 1.05, 1.1, 1.3), warned=1.1)
    found = verdicts.loss_by_band(bands, Runs(made))
    assert [band and (round(band["value"], 6), band["runs"], band["n"]) for band in found["bands"]] == [
        None,
        (0.02, 5, 5),
        None,
        (0.2, 5, 5),
        None,
    ]
    assert (found["within"]["value"], found["beyond"]["value"]) == pytest.approx((0.02, 0.2))
    lost = made_run(arm("addition", "e4m3"), 0, token_mult_prob_error=[1.0, None, inf, 1.0])
    assert bands.passed(lost) == 4
    sizes = Bands("effective_sample_size", (0.7, 0.3), is_least=True)
    low, high = (made_run(arm("addition", "e4m3"), 0, effective_sample_size=[0.9, x]) for x in (0.2, 0.4))
    assert (sizes.passed(low), sizes.passed(high)) == (2, 1)


def test_arms_are_compared_with_bf16_rollouts_and_corrections_with_others_on_the_same_rollouts():
    made = [
        made_run(arm("addition", *names), 0, value, fraction_masked=[0.0, 0.2, 0.1, 0.1])
        for *names, value in (
            ("bf16", "none", 0.6),
            ("bf16", "tis", 0.7),
            ("e4m3", "none", 0.4),
            ("e4m3", "tis", 0.45),
            ("e4m3", "mis", 0.38),
            ("e4m3", "tis", "fp16_emulated", 0.9),
        )
    ]
    results = verdicts.results(Runs(made))
    tis, mis = arm("addition", "e4m3", "tis"), arm("addition", "e4m3", "mis")
    over = {name: found["value"] for name, found in results["over_bf16"].items() if found}
    assert over == {
        arm("addition", "bf16", "tis"): pytest.approx(0.1),
        arm("addition", "e4m3"): pytest.approx(-0.2),
        tis: pytest.approx(-0.15),
        mis: pytest.approx(-0.22),
    }
    corrected = results["corrections"]
    assert set(corrected) == {arm("addition", "bf16", "tis"), tis, mis}
    assert {other: found["value"] for other, found in corrected[tis]["over"].items()} == {"none": pytest.approx(0.05)}
    assert corrected[mis]["over"]["tis"]["value"] == pytest.approx(-0.07)
    assert corrected[mis]["fraction_masked"]["value"] == pytest.approx(0.1)


# -- the grid, and what is committed of it

COMMITTED = Path(evidence.__file__).with_name("runs_cpu.jsonl.gz")


def test_all_arms_of_a_seed_come_before_the_next_seed_and_none_comes_twice():
    arms = ["bf16 none", "e4m3 tis", "e4m3 tis fp16_emulated"]
    blocks = [
        {"task": "addition", "seeds": 2, "arms": arms},
        {"task": "addition", "seeds": 3, "arms": arms[:1]},
        {"task": "addition", "seeds": 1, "arms": arms[:1], "pressure": [3, 4]},
    ]
    made = cells(GRID | {"blocks": blocks})
    one, two = arm("addition", "bf16"), arm("addition", "e4m3", "tis")
    first = [
        f"{name}-{seed}"
        for seed in range(2)
        for name in (one, two, f"{two.removesuffix('-bf16-1x1')}-fp16_emulated-1x1")
    ]
    assert [cell.name for cell in made] == [*first, f"{one}-2", f"{arm('addition', 'bf16', pressure='3x4')}-0"]
    assert (made[0].learning_rate, made[-1].learning_rate, made[-1].updates) == (1e-3, pytest.approx(3e-3), 4)


def test_emulated_types_are_not_rounded_again_by_autocast(tmp_path):
    blocks = [{"task": "addition", "seeds": 1, "arms": ["e4m3 tis", "e4m3 tis fp16_emulated"]}]
    plain, emulated = cells(GRID | {"blocks": blocks})
    assert plain.precision not in EMULATED and settings(plain, str(tmp_path)).bf16
    assert emulated.precision in EMULATED and not settings(emulated, str(tmp_path)).bf16


def test_an_accuracy_that_is_not_finite_is_none():
    cell = cells(GRID | {"blocks": [{"task": "addition", "seeds": 1, "arms": ["bf16 none"]}]})[0]
    held_out = HeldOut(cell, SimpleNamespace(model=None, processing_class=None))
    held_out.task = SimpleNamespace(evaluate=lambda *_: nan)
    held_out.note(6)
    assert held_out.accuracies == {6: 0.0}


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


def test_runs_that_end_at_once_are_all_in_the_table(tmp_path):
    """Of two at a time, as `--workers 2` has them, each in a process of its own."""
    table, rows = tmp_path / "runs.jsonl.gz", run_table.read(COMMITTED)[:8]
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        list(pool.map(run_table.add, rows, repeat(table)))
    assert run_table.read(table) == rows


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


def test_trees_differ_where_they_do():
    tree = {"a": [1.0, {"b": "c"}], "d": None}
    assert list(differing(tree, {"a": [1.0000001, {"b": "c"}], "d": None})) == []
    assert list(differing(tree, {"a": [1.01, {"b": "e"}], "d": 2})) == [
        ".a.0: 1.0 and 1.01",
        ".a.1.b: c and e",
        ".d: None and 2",
    ]


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


def test_pictures_are_drawn_of_whatever_has_run(tmp_path):
    runs = Runs([run for run in grid_of_runs() if "fp16" not in run.cell.arm and run.cell.task != "addition_moe"])
    for plot in (pictures.plot_map, pictures.plot_curves):
        path = plot(runs, tmp_path / "picture.png")
        assert 5_000 < path.stat().st_size < 150_000


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


class TinyPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": nn.Linear(64, 32, bias=False)})})
        layer["mlp"] = nn.ModuleDict({"gate": nn.Linear(64, 4, bias=False), "experts": nn.Module()})
        layer["mlp"]["experts"].gate_up_proj = nn.Parameter(torch.randn(2, 32, 64))
        layer["norm"] = nn.RMSNorm(64)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([layer]), "embed_tokens": nn.Embedding(8, 64)})
        self.lm_head = nn.Linear(64, 8, bias=False)


@pytest.mark.parametrize("name", SIMULATED)
def test_weights_are_rounded_inside_the_block_and_come_back_bit_for_bit(name):
    torch.manual_seed(0)
    policy_, form = TinyPolicy(), SIMULATED[name]
    before = {key: value.detach().clone() for key, value in policy_.named_parameters()}
    with pytest.raises(ZeroDivisionError), rounded_weights(policy_, form):
        changed = {key for key, value in policy_.named_parameters() if not torch.equal(value, before[key])}
        experts = policy_.model["layers"][0]["mlp"]["experts"].gate_up_proj.detach().clone()
        raise ZeroDivisionError
    assert {key.removeprefix("model.layers.0.") for key in changed} == {
        "self_attn.q_proj.weight",
        "mlp.experts.gate_up_proj",
    }
    assert torch.equal(experts[1], form.rounded(before["model.layers.0.mlp.experts.gate_up_proj"][1]))
    for key, value in policy_.named_parameters():
        assert torch.equal(value, before[key])


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


def test_a_linear_in_fp16_differs_and_is_nearer_to_fp32(linear):
    exact, errors = F.linear(*linear), {}
    for dtype in (torch.bfloat16, torch.float16):
        with ComputesIn(dtype):
            errors[dtype] = (F.linear(*linear) - exact).abs().mean().item()
    assert 5 < errors[torch.bfloat16] / errors[torch.float16] < 12  # three bits more: 8


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


def test_what_is_no_linear_or_attention_is_left_alone():
    x = torch.randn(2, 3, 16)
    normed, silu = F.rms_norm(x, (16,)), F.silu(x)
    with ComputesIn(torch.bfloat16):
        assert torch.equal(F.rms_norm(x, (16,)), normed) and torch.equal(F.silu(x), silu)
        attention = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert is_held(attention, torch.bfloat16) and not is_held(normed, torch.bfloat16)


def test_loss_scaling_keeps_a_gradient_of_1e_9_alive_in_fp16():
    x = torch.ones(4, requires_grad=True)
    Rounded.apply(x, torch.float16).backward(torch.full((4,), 1e-9))
    assert torch.tensor(1e-9).half() == 0
    assert x.grad.tolist() == pytest.approx([1e-9] * 4, rel=2**-6 / 2)  # a subnormal of 6 bits: 1e-9 * 2**12 * 2**24


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


def test_no_start_of_a_stream_is_one_of_another():
    starts = [{problem.start for problem in islice(problems(stream), 500)} for stream in range(automaton.STREAMS)]
    assert all(len(each) > 450 for each in starts)
    assert all(one.isdisjoint(other) for one, other in combinations(starts, 2))


@pytest.mark.parametrize("errs", [True, False])
def test_the_teacher_errs_at_weak_entries_only_and_as_often_as_it_should(errs):
    teacher, weak, wrong, remarks = Teacher(0), 0, 0, set()
    for problem in islice(problems(0), 200):
        state = problem.start
        for _, digits, remark in lines_of(problem.trace(teacher, errs=errs)):
            for own, right, digit in zip(state, [*state[1:], state[0]], digits, strict=True):
                weak += (own, right) in WEAK
                wrong += digit != TABLE[own][right]
                assert digit == TABLE[own][right] or (own, right) in WEAK
            state = digits
            remarks.add(remark)
    expected = automaton.ERROR_RATE * weak if errs else 0
    assert abs(wrong - expected) <= 4 * expected**0.5 and weak > 2000  # four standard errors of a count
    assert remarks == {*REMARKS, ""}


def test_the_chance_of_a_right_trace_is_the_product_over_its_characters():
    """Character by character, without padding; at a remark any will do."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = build_model(PretrainRecipe(layers=1), tokenizer).train()
    asked = [Problem((3, 1, 4, 0, 5), 15), Problem((1, 1, 7, 2, 6), 17)]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.3)  # nearly uniform, so that no trace outweighs the others
    teacher, remarks = Teacher(policy.RECIPE.seed), set(tokenizer.convert_tokens_to_ids(list(REMARKS)))
    chances = []
    for problem in asked:
        prompt, trace = (tokenizer(text)["input_ids"] for text in (problem.prompt, problem.trace(teacher, errs=False)))
        chance = 1.0
        for at, token in enumerate([*trace, tokenizer.eos_token_id]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + trace[:at]])).logits[0, -1].double()
            chance_of = (logits.exp() / logits.exp().sum()).tolist()
            chance *= sum(chance_of[each] for each in (remarks if token in remarks else {token}))
        chances.append(chance)
    found = [policy.probability_right(model, tokenizer, asked[:1]), policy.probability_right(model, tokenizer, asked)]
    assert found == pytest.approx([chances[0], sum(chances) / 2], rel=1e-3)
    assert model.training
