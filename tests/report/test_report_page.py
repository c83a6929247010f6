"""The report of a run: what it answers, what it shows, and how it looks in a browser."""

import random
import re

import pytest

from testing.browser import LAPTOP, PHONE, chromium, look_at
from trl_fp8.cli import main
from trl_fp8.report.checks import checks
from trl_fp8.report.page import write_report
from trl_fp8.run.file import append, begin, read_run


FACTS = {
    "model": "Qwen/Qwen3-8B",
    "plan": "FP8 plan for Qwen/Qwen3-8B\n\nmodules  count\nmodel.layers.*.mlp.up_proj  36",
    "fp8_linears": 252,
    "fp8_experts": 0,
    "fp8_share": 0.848,
    "kv_cache_dtype": "fp8",
    "kernels": {"CutlassFp8BlockScaledMMKernel": 144},
    "correction": {"level": "token", "bound": "truncate", "bound_min": 0.5, "bound_max": 2.0, "monitor_only": False},
    "flags": {"learning_rate": 1e-6, "output_dir": "<b>out</b>"},
    "processes": 8,
    "hardware": "NVIDIA H200",
    "versions": {"trl-fp8": "0.1.0", "trl": "1.16.0"},
}


def made_up_run(folder, steps=40, mismatch=0.01, layers=36, **changed):
    """A run's file with plausible numbers; `changed` replaces logged values."""
    draw = random.Random(0)
    begin(folder, 0, FACTS)
    for step in range(1, steps + 1):
        counts = [0] * 122
        for _ in range(500):
            counts[1 + min(119, max(0, int((draw.gauss(0, 0.2) + 3) / 0.05)))] += 1
        pairs = [[logp, logp + draw.gauss(0, mismatch)] for logp in (-draw.expovariate(2) for _ in range(64))]
        rollouts = {
            "step": step - 1,
            "log_ratio_limit": 3.0,
            "log_ratio_counts": counts,
            "log_probs": pairs,
            "kv_scales": [[2.0 ** draw.randint(-8, -2) for _ in "qkv"] for _ in range(layers)],
            "kv_saturation": [[0.0, 1e-6 * (layer == 3)] for layer in range(layers)],
        }
        append(folder, "rollouts", rollouts)
        logged = {
            "step": step,
            "reward": step / steps,
            "completions/mean_length": 100 + step,
            "step_time": 10.0,
            "fp8/sync_seconds": 0.9,
            "fp8/quantize_seconds": 0.2,
            "fp8/calibration_seconds": 0.05,
            "fp8/audited_tensors": 543,
            "fp8/dead_blocks": 0.0,
            "fp8/kv_saturation_fraction": 1e-6,
            "sampling/sampling_logp_difference/mean": mismatch,
            "mismatch/logp_difference_mean": mismatch * (0.9 + 0.2 * draw.random()),
            "mismatch/logp_difference_max": 0.4,
            "mismatch/k3_kl": 0.001,
            "mismatch/token_mult_prob_error": 1.01,
            "mismatch/k3_kl/position_0-15": 0.001,
            "mismatch/k3_kl/position_16384+": 0.002,
            "correction/effective_sample_size": 0.97,
            "correction/fraction_masked_tokens": 0.0,
        }
        append(folder, "log", logged | changed)
    return str(folder)


def questions(folder, fine):
    return {check.question for check in checks(read_run(folder)) if check.fine is fine}


def test_a_healthy_run_is_answered_with_yes(tmp_path):
    folder = made_up_run(tmp_path)
    assert questions(folder, fine=False) == set() and len(questions(folder, fine=True)) == 6


@pytest.mark.parametrize(
    "changed, question",
    [
        ({"fp8/audited_tensors": 0}, "Did the engine get the weights?"),
        ({"mismatch/token_mult_prob_error": 1.2}, "Can the correction handle it?"),
        ({"fp8/kv_saturation_fraction": 0.01}, "Did the KV cache hold its values?"),
        ({"fp8/dead_blocks": 3.0}, "Are all weights alive?"),
        ({"fp8/sync_seconds": 8.0}, "What does it cost?"),
    ],
)
def test_what_is_wrong_is_marked(changed, question, tmp_path):
    assert questions(made_up_run(tmp_path, **changed), fine=False) == {question}


def test_a_growing_mismatch_is_marked(tmp_path):
    made_up_run(tmp_path, steps=20)
    for step in range(21, 41):
        append(tmp_path, "log", {"step": step, "mismatch/logp_difference_mean": 0.05})
    assert questions(tmp_path, fine=False) == {"How far are engine and trainer apart?"}


def test_a_page_has_a_picture_for_everything_that_was_recorded(tmp_path, capsys):
    folder = made_up_run(tmp_path / "run")
    assert main(["report", folder]) == 0 and "8 pictures" in capsys.readouterr().out
    pictures = {path.stem for path in (tmp_path / "run" / "report").glob("*.png")}
    shown = {"training", "mismatch", "importance_ratios", "log-probs", "mismatch_by_position", "times"}
    assert pictures == shown | {"KV_cache_scales", "KV_cache_saturation"}
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures) and not re.search(r'(src|href)="http', page)
    assert "&lt;b&gt;out&lt;/b&gt;" in page and "<b>out</b>" not in page
    assert "543 tensors" in page and "model.layers.*.mlp.up_proj" in page


def test_what_was_not_recorded_has_no_picture(tmp_path):
    begin(tmp_path, 0, FACTS | {"plan": None, "correction": None, "kernels": {}})
    append(tmp_path, "log", {"step": 1, "reward": 0.5})
    append(tmp_path, "rollouts", {"step": 0})
    page = write_report([read_run(tmp_path)], tmp_path / "report")
    assert [path.stem for path in page.parent.glob("*.png")] == ["training"]
    assert "nothing is FP8" in page.read_text()


def test_runs_that_cannot_be_reported_are_named(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "has no fp8_run.jsonl" in capsys.readouterr().err
    begin(tmp_path / "empty", 0, FACTS)
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "'empty' has logged nothing yet" in capsys.readouterr().err
    first, second = made_up_run(tmp_path / "a" / "run", 2), made_up_run(tmp_path / "b" / "run", 2)
    assert main(["report", first, second]) == 2
    assert "called alike" in capsys.readouterr().err


def test_the_page_is_right_in_a_browser(tmp_path):
    runs = [
        read_run(made_up_run(tmp_path / name, steps=12, mismatch=level))
        for name, level in (("fp8", 0.02), ("bf16", 0.002))
    ]
    page = write_report(runs, tmp_path / "report")
    for size in (LAPTOP, PHONE):
        with chromium(size) as browser:
            look_at(browser, page.resolve().as_uri())
            assert len(browser.find_elements("css selector", "img")) == 2 + 2 * 8
            assert browser.find_element("css selector", "tr.fine td").text == "ok"
