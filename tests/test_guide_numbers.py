"""Numbers of README and of the guide pages are those of the result files."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from benchmarks.pictures import plot_mismatch
from testing.record import interval
from trl_fp8.recipe.families import families_with
from trl_fp8.upstream.versions import VERSIONS


ROOT = Path(__file__).parents[1]


def text_of(page: str) -> str:
    """Return a page as one line."""
    return " ".join((ROOT / page).read_text().split())


def results_of(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}_cpu.json").read_text())["results"]


def median_and_range(spread: dict, digits: str, dash: str = "-") -> str:
    median, low, high = (f"{spread[key]:{digits}}" for key in ("median", "min", "max"))
    return f"{median} ({low} {dash} {high})"


@pytest.mark.parametrize(
    "label, name, arm",
    [
        ("BF16", "demo_avx512", "bf16"),
        ("FP8 linears + FP8 KV cache", "demo_avx512", "fp8_linears_kv"),
        ("BF16", "demo", "bf16"),
        ("FP8 linears + FP8 KV cache", "demo", "fp8_linears_kv"),
        ("merged at each sync (417.8 KiB)", "demo_lora", "merged"),
        ("on an FP8 base (124.0 KiB)", "demo_lora", "shared"),
    ],
)
def test_accuracies_of_the_demo(label, name, arm):
    found = results_of(name)[arm]
    accuracy = f"{found['reward_start']['median']:.2f} -> {median_and_range(found['reward_end'], '.2f')}"
    row = f"| {label} | {accuracy} | {median_and_range(found['mismatch_mean'], '.4f')} |"
    assert row in text_of("docs/quickstart.md")
    if name == "demo_lora":
        assert f"({found['sync_bytes_median']['median'] / 1024:.1f} KiB)" in label


@pytest.mark.parametrize(
    "label, weights", [("SmolLM2-135M, 30 layers", "SmolLM2"), ("Qwen3, 24 random layers", "random")]
)
def test_mismatch_of_the_weight_formats(label, weights):
    rows = {row["policy"]: row for row in results_of("depth_formats")["rows"] if row["weights"].startswith(weights)}
    cells = []
    for weight_format in ("blocks", "tensor", "mxfp8"):
        row = rows[f"fp8 {weight_format}"]
        assert (row["seeds"], row["tokens"]) == (3, 468)
        cells.append(median_and_range(row["mismatch"] | {"median": row["mismatch_mean"]}, ".2f"))
    assert f"| mismatch, {label} | {' | '.join(cells)} |" in text_of("docs/how_it_works.md")


@pytest.mark.parametrize(
    "name, arms",
    [
        ("demo", ("fp8_linears_kv", "bf16")),
        ("demo_avx512", ("fp8_linears_kv", "bf16")),
        ("demo_lora", ("shared", "merged")),
    ],
)
def test_differences_of_accuracy_seed_by_seed(name, arms):
    ends = [results_of(name)[arm]["reward_end_per_seed"] for arm in arms]
    found = interval([one - other for one, other in zip(*ends, strict=True)])
    stated = "{mean:.3f}{}95 % CI {low:.3f} to {high:.3f}"
    assert any(stated.format(joint, **found) in text_of("docs/quickstart.md") for joint in (" (", ", "))


def test_readmes_picture_is_of_the_stored_runs(tmp_path):
    curves = results_of("demo_mismatch")["by_step"]
    assert all(len(mismatch) == 40 for mismatch in curves.values()) and max(curves["fp8_flow"]) == 0
    shown = imread(ROOT / "docs" / "images" / "mismatch.png")
    drawn, of_others = (
        imread(plot_mismatch({name: [scale * value for value in curve] for name, curve in curves.items()}, path))
        for scale, path in ((1, tmp_path / "again.png"), (1.5, tmp_path / "others.png"))
    )
    # Not equal bytes: letters differ between versions of matplotlib
    assert abs(drawn - shown).mean() < 0.2 * abs(of_others - shown).mean()


def test_counts_and_names_of_models():
    assert f"Tiny policies of [{len(results_of('models'))} families]" in text_of("README.md")
    (listed,) = re.findall(r"\*\*Models\.\*\* (.*?)\. On CPU", text_of("docs/how_it_works.md"))
    oldest = families_with(next(iter(VERSIONS.values())))
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(kind for kind in oldest if oldest[kind].followed)


def test_claims_that_pages_repeat():
    claims = results_of("claims")["claims"]
    stated = "{value:.3f} (97.5 % CI {low:.3f} to {high:.3f})"
    linears, (one_forward,) = claims["1"]["test"], [part for part in claims["5"]["parts"] if part["metric"] == "area"]
    assert f"FP8 linears change mean accuracy by {stated.format(**linears)}" in text_of("README.md")
    assert f"against BF16 rollouts by {stated.format(**one_forward)}" in text_of("docs/how_it_works.md")
    bf16, linears = (part["value"] for part in claims["3"]["parts"])
    of_experts = f"k3 is {bf16:.1f} times the dense policy's with BF16 rollouts, {linears:.1f} times with FP8 linears"
    assert of_experts in text_of("docs/evidence.md") and claims["3"]["test"]["high"] < 0.03


def test_the_mismatch_of_a_deep_model():
    cell = max(results_of("smollm2_depth")["cells"], key=lambda cell: cell["layers"])
    deepest, page = cell["fp8_linears_kv"]["k3"], text_of("docs/rollout_correction.md")
    stated = "{median:.3f} (range {min:.3f} to {max:.3f}, 3 seeds)".format(**deepest)
    toy = results_of("claims")["arms"]["addition-e4m3_kv-none-bf16-1x1"]["k3"]["value"]
    assert f"a toy has a k3 of {toy:.4f}, SmolLM2-135M of {stated}" in page
    assert f"and {toy:.4f} for that policy" in text_of("README.md")
    assert f"{deepest['median']:.3f} for SmolLM2-135M" in text_of("README.md")
    normal = f"range from {toy:.4f} for a toy to {deepest['median']:.3f} for SmolLM2-135M"
    assert normal in text_of("docs/troubleshooting.md")
    for measure in ("mismatch", "k3"):
        medians = [cell[rollouts][measure]["median"] for rollouts in ("bf16", "fp8_linears_kv")]
        assert f"| {medians[0]:#.2g}, {medians[1]:.2g} |" in page


def test_what_a_k3_means():
    """The two verdicts with a loss are of the kinds of rollouts whose mean k3 lies in these bands."""
    page = text_of("docs/rollout_correction.md")
    bands = {(row["metric"], row["of"]): row for row in results_of("claims")["losses"]}
    by_mean, by_worst = bands["k3", "mean"], bands["k3", "worst"]
    stated = "{value:.3f} (95 % CI {low:.3f} to {high:.3f})"
    assert by_mean["edges"][2:] == [0.01, 0.1] and by_worst["edges"][2:4] == [0.01, 0.03]
    assert f"| 0.03 to 0.1 | accuracy fell by {stated.format(**by_mean['bands'][3])}" in page
    assert f"| above 0.1 | a warning. Accuracy fell by {stated.format(**by_mean['bands'][4])}" in page
    lost = by_worst["bands"][3]
    assert f"of 0.01 to 0.03, accuracy fell by {stated.format(**lost)}" in page


def test_healthy_runs_are_silent_and_planted_faults_are_not():
    rows = results_of("health")["rows"]
    healthy = [row for row in rows if row["fault"] is None]
    assert [row["warned"] or row["unexplained_k3"] for row in healthy] == [0] * 4
    real, page = rows[0], text_of("docs/rollout_correction.md")
    assert "SmolLM2-135M" in real["policy"] and real["explained_k3"] == real["k3"]
    explained = f"{real['k3']:.3f} in one generation of {real['mean_length']:.0f} tokens"
    assert f"FP8 explains all of SmolLM2-135M's k3, {explained}" in page
    faults = [(row["fault"], row["seed"]) for row in rows if row["fault"] is not None and row["warned"]]
    assert len(faults) == len(set(faults)) == 12 * 3 and "Twelve planted faults, 3 seeds each" in page
    scoring = [row["scoring_k3"] > 1e-6 for row in rows if row["fault"] is not None]
    assert sum(scoring) == 2 * 3 and not any(row["scoring_k3"] and row["unexplained_k3"] for row in rows)
    cost = results_of("health")["costs"][0]
    low, median, high = (f"{100 * cost['share'][key]:.1f}" for key in ("min", "median", "max"))
    assert f"{median} % of their CPU time (range {low} to {high} %, {cost['pairs']} pairs of steps" in page
    assert f"the first {cost['layers']} layers of SmolLM2-135M" in page


def test_the_size_of_a_patch_and_the_pause_with_it():
    cells, page = results_of("server")["cells"], text_of("docs/servers.md")
    slow, fast = (cells[f"smollm2 {rate}"]["results"] for rate in ("1e-06", "1e-05"))
    patch, whole = (slow["pause_seconds"][kind]["median"] for kind in ("patch", "whole"))
    first, second = (f"{found['patch_over_whole']['median']:.1%}".replace("%", " %") for found in (slow, fast))
    stated = f"{first} of the bytes after a step at a learning rate of 1e-6, and the pause is {patch:.2f} s"
    assert f"{stated} instead of {whole:.2f} s; at 1e-5 it has {second}" in page
    assert {cell["n"] for name, cell in cells.items() if name.startswith("smollm2")} == {2}
    equal = cells.pop("equal")["results"]
    assert equal["rows_rollouts_and_weights_equal"] and (equal["steps"], equal["servers"]) == (50, 2)
    assert all(cell["results"]["audit_failures"] == 0 for cell in cells.values())


def test_the_pause_beside_trls_own_weights():
    tiny, large = results_of("trl_weights")["rows"]
    stated = "{median:.2f} (range {min:.2f} to {max:.2f}) times"
    page = text_of("docs/servers.md")
    assert f"pause was {stated.format(**large['pause_over_trl'])} as long" in page
    assert f"and {stated.format(**tiny['pause_over_trl'])} for a tiny model" in page


def test_the_step_time_of_one_forward():
    ratio = results_of("flow")["step_seconds_ratio"]
    page = text_of("docs/how_it_works.md")
    assert "takes {median:.1f} (range {min:.1f} to {max:.1f}, 4 pairs of runs)".format(**ratio) in page
    assert results_of("flow")["full"]["mismatch_mean"]["max"] == 0
    assert f"{ratio['median']:.1f} times the step time" in text_of("docs/quickstart.md")


def test_the_table_of_outliers():
    page = text_of("docs/kv_cache.md")
    for row in results_of("kv_cache")["k_bias"]:
        cells = [row[key] for key in ("logit_error_layer_0", "mismatch_per_tensor", "mismatch_layer_0_in_bf16")]
        stated = next(line for line in page.split("| |") if line.strip().startswith(f"{row['bias']} |"))
        shown = [float(cell) for cell in stated.strip(" |").split("|")[1:4]]
        assert shown == [pytest.approx(cell, rel=0.06) for cell in cells], row["bias"]


def test_what_calibration_costs():
    page, extra = text_of("docs/kv_cache.md"), results_of("kv_cache")["observation"]["extra_seconds"]
    stated = "{median:.0f} ms more in the median of 30 (range {min:.0f} to {max:.0f} ms)"
    assert stated.format(**{key: 1000 * value for key, value in extra.items()}) in page
    policy, rollout = (results_of("demo")[arm] for arm in ("policy_calibration", "fp8_linears_kv"))
    seconds, share = (policy[f"calibration_{key}"]["median"] for key in ("seconds_median", "share_of_step"))
    assert f"{1000 * seconds:.0f} ms, {share:.1%} of a step".replace("%", " %") in page
    assert f"scales: {1000 * rollout['calibration_seconds_median']['median']:.1f} ms a sync" in page
    assert f"(5 seeds, at most {rollout['kv_saturation_max']['max']:.0e})" in page
    ratios = results_of("demo")["mismatch_ratios"]
    assert f"{median_and_range(ratios['simulation, FP8 weights'], '.2f')[:-1]}, 3 seeds)" in page


def test_the_table_of_router_replay():
    page = text_of("docs/models.md")
    labels = {
        "BF16": "bf16",
        "FP8 linears and KV cache": "fp8_linears_kv",
        "FP8 experts too (reference kernel)": "fp8_linears_kv_experts",
    }
    for label, engine in labels.items():
        found = results_of("router_replay")["same_rollouts"][engine]
        disagree = f"{found['own']['disagreement']['median']:.1%}".replace("%", " %")
        means = [f"{found[routes]['mismatch_mean']['median']:.4f}" for routes in ("own", "replay")]
        ratios = [median_and_range(found[f"{key}_ratio"], ".2f") for key in ("mismatch_mean", "k3_kl")]
        assert f"| {label} | {disagree} | {' -> '.join(means)} | {' | '.join(ratios)} |" in page
    largest = results_of("router_replay")["same_rollouts"]["fp8_linears_kv"]["mismatch_max_ratio"]
    assert f"falls to {median_and_range(largest, '.2f', 'to')}" in page
    training = results_of("router_replay")["training"]
    assert f"replay leaves {median_and_range(training['mismatch_ratio'], '.2f', 'to')} of the mismatch" in page
    for arm in ("monitor", "rollout"):
        assert f"to {median_and_range(training[arm]['reward_end'], '.2f', 'to')} with" in page
