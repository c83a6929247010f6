"""The report of a run: what it answers, what it shows, and how it looks in a browser."""

import random
import re
import sys
from pathlib import Path

import pytest

import trl_fp8.features.run_log.report
from testing.browser import FAINT, SCHEMES, SIZES, chromium, look_at, show, unfold
from trl_fp8.commands.cli import main
from trl_fp8.features.run_log.log_file import append, begin, read_run, read_runs
from trl_fp8.features.run_log.report.checks import checks
from trl_fp8.features.run_log.report.curves import Panel, panel_figure
from trl_fp8.features.run_log.report.page import write_report
from trl_fp8.features.run_log.report.results import compared, differences, results, summary
from trl_fp8.features.run_log.report.rollout_pictures import log_prob_figure, position_figure, scales_figure


FACTS = {
    "method": "GRPO",
    "model": "Qwen/Qwen3-8B",
    "plan": "FP8 plan for Qwen/Qwen3-8B\n\nmodules  count\nmodel.layers.*.mlp.up_proj  36",
    "fp8_linears": 252,
    "fp8_experts": 0,
    "fp8_share": 0.848,
    "weight_format": "e4m3 in 128x128 blocks",
    "weight_bytes": [16 << 30, 9 << 30],
    "kv_cache_dtype": "fp8",
    "kv_bytes_per_token": [147456, 73728],
    "kernels": {"CutlassFp8BlockScaledMMKernel": 144},
    "correction": {"level": "token", "bound": "truncate", "bound_min": 0.5, "bound_max": 2.0, "monitor_only": False},
    "flags": {"learning_rate": 1e-6, "output_dir": "<b>out</b>"},
    "processes": 8,
    "hardware": "NVIDIA H200",
    "versions": {"trl-fp8": "0.1.0", "trl": "1.16.0"},
}


def made_up_run(folder, steps=40, mismatch=0.01, layers=36, facts=FACTS, **changed):
    """A run's file with plausible numbers; `changed` replaces logged values."""
    draw = random.Random(0)
    begin(folder, 0, facts)
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
            # layer 5 caches no k and v
            "kv_scales": [[2.0 ** draw.randint(-8, -2) * (layer != 5) for _ in "qkv"] for layer in range(layers)],
            "kv_saturation": [[0.0, 1e-6 * (layer == 3)] for layer in range(layers)],
        }
        append(folder, "rollouts", rollouts)
        logged = {
            "step": step,
            "reward": step / steps,
            "num_tokens": 5000.0 * step,
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
            "correction/fraction_masked_tokens": 0.01,
        }
        append(folder, "log", logged | changed)
    return str(folder)


def questions(folder, fine):
    return {check.question for check in checks(read_run(folder)) if check.fine is fine}


def test_a_healthy_run_is_answered_with_yes(tmp_path):
    folder = made_up_run(tmp_path)
    assert questions(folder, fine=False) == set() and len(questions(folder, fine=True)) == 6


@pytest.mark.parametrize("steps, words", [(1, "In the one"), (2, "Over the last 2"), (40, "Over the last 10")])
def test_a_check_says_of_how_many_steps_it_is(steps, words, tmp_path):
    answers = [check.answer for check in checks(read_run(made_up_run(tmp_path, steps)))]
    assert any(answer.startswith(f"{words} logged step") for answer in answers)


@pytest.mark.parametrize(
    "changed, question",
    [
        ({"fp8/audited_tensors": 0}, "Did the engine get the weights?"),
        ({"mismatch/unexplained_k3": 0.02}, "Is the mismatch small enough to correct?"),
        ({"fp8/kv_saturation_fraction": 0.01}, "Did the KV cache hold its values?"),
        ({"fp8/dead_blocks": 3.0}, "Are all weights alive?"),
        ({"fp8/sync_seconds": 8.0}, "Is the sync cheap?"),
    ],
)
def test_the_page_marks_problems(changed, question, tmp_path):
    assert questions(made_up_run(tmp_path, **changed), fine=False) == {question}


def test_the_mismatch_is_split_where_the_run_explained_it(tmp_path):
    folder = made_up_run(tmp_path, **{"mismatch/explained_k3": 0.043, "mismatch/unexplained_k3": 0.0})
    answers = [check.answer for check in checks(read_run(folder))]
    assert sum("explain a k3 of 0.043; 0 is unexplained." in answer for answer in answers) == 1


def test_the_pause_of_a_server_is_part_of_the_answer_on_syncs(tmp_path):
    folder = made_up_run(tmp_path, **{"fp8/pause_seconds": 0.25})
    assert ", and pauses the server for 250 ms (medians)." in " ".join(
        check.answer for check in checks(read_run(folder))
    )


def test_a_growing_mismatch_is_marked(tmp_path):
    made_up_run(tmp_path, steps=20)
    for step in range(21, 41):
        append(tmp_path, "log", {"step": step, "mismatch/logp_difference_mean": 0.05})
    assert questions(tmp_path, fine=False) == {"How far apart are engine and trainer?"}


def test_results_are_the_ends_of_the_run_each_with_its_steps(tmp_path):
    """Against the logged values: reward is step / 40, 10 s and 5,000 tokens a step, 0.9 s of sync."""
    found = {result.label: (result.value, result.note) for result in results(read_run(made_up_run(tmp_path)))}
    assert found.pop("Mismatch")[0].endswith(" nats")
    assert found == {
        "Final reward": ("0.887", "steps 31 to 40; 0.138 in steps 1 to 10"),  # 35.5 / 40, 5.5 / 40
        "Step time": ("10 s", "median, steps 1 to 40; 500 tokens/s, prompts included"),
        "Sync": ("9.0%", "900 ms, median, steps 1 to 40"),
        "Weights in FP8": ("84.8%", "9.0 GiB; 16.0 GiB in BF16"),
        "KV cache": ("FP8", "72.0 KiB a token; 144.0 KiB in BF16"),
    }
    assert "Qwen/Qwen3-8B, 40 steps, not finished when this was written" in summary(read_run(tmp_path))
    append(tmp_path, "log", {"step": 40, "train_runtime": 400.0})
    assert "40 steps, finished. vLLM sampled the completions with FP8 weights" in summary(read_run(tmp_path))
    begin(tmp_path, 40, FACTS | {"flags": {"max_steps": 60}})  # goes on with more steps
    append(tmp_path, "log", {"step": 41, "reward": 1.0})
    assert "41 of 60 steps, not finished when this was written" in summary(read_run(tmp_path))


def test_unmeasured_values_are_no_results(tmp_path):
    begin(tmp_path, 0, FACTS | {"plan": None, "fp8_share": 0.0, "weight_bytes": None, "kv_cache_dtype": "auto"})
    append(tmp_path, "log", {"step": 3, "reward": 0.5, "fp8/sync_seconds": None})
    found = {result.label: (result.value, result.note) for result in results(read_run(tmp_path))}
    assert found.pop("KV cache")[0] == "high precision"
    assert found == {"Final reward": ("0.5", "step 3"), "Weights in FP8": ("none", "")}
    assert "Nothing was FP8" in summary(read_run(tmp_path))


def test_several_runs_stand_side_by_side(pages):
    *_, page, runs = pages
    rewards, mismatches, *_ = compared(runs)
    # Steps 7-12 of 12; steps 8-12 and the one of 5
    assert [result.value for result in rewards] == [f"{57 / 12 / 6:.3g}", f"{(50 / 12 + 5) / 6:.3g}"]
    assert mismatches[0].note.startswith("steps 7 to 12") and mismatches[1] is None
    assert differences(runs) == {
        "correction of the loss": ["token-level importance weights, at least 0.5 and at most 2", "none"],
        "learning_rate": ["1e-06", "2e-06"],
        "bf16": ["default", "True"],
    }
    text = page.read_text()
    titles = re.findall(r"<figcaption><strong>(.*?)</strong>", text)
    assert titles[:4] == ["Reward", "Mismatch", "Completion length", "Step time"]
    assert all(titles.count(title) == 1 for title in titles[:4])  # what all share is not drawn for each again
    assert text.count('<details class="run">') == 2 and text.count("6 checks ok") == 1 and "not measured" in text


def test_adapters_and_their_fp8_base_are_settings_that_differ(tmp_path):
    lora = {"trained": "LoRA of rank 4, alpha 16, on q_proj, v_proj", "fp8_flags": {"fp8_base": True}}
    full = {"trained": "all weights", "fp8_flags": {"fp8_base": False}}
    runs = read_runs(
        [made_up_run(tmp_path / name, 1, facts=FACTS | of) for name, of in zip("ab", (lora, full), strict=True)]
    )
    assert differences(runs) == {"trained": [lora["trained"], "all weights"], "fp8_base": ["True", "False"]}


def test_a_legend_lies_over_no_bar(tmp_path):
    """Of bars that are all as high as the highest."""
    key = "mismatch/k3_kl/position_"
    flat = {f"{key}{name}": 0.002 for name in ("0-15", "16-63", "64-255", "256-1023", "1024-4095", "16384+")}
    figure = position_figure(read_run(made_up_run(tmp_path, **flat)))
    figure.canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent()
    assert len(axes.patches) == 12
    assert not any(legend.overlaps(bar.get_window_extent()) for bar in axes.patches)


def test_one_logged_step_has_one_bar_for_each_bin_and_no_legend_of_an_empty_half(tmp_path):
    (axes,) = position_figure(read_run(made_up_run(tmp_path, 1))).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["the only logged step"]
    assert len(axes.patches) == 2


def test_log_probs_of_minus_infinity_leave_the_diagonal(tmp_path):
    begin(tmp_path, 0, FACTS)
    append(tmp_path, "rollouts", {"step": 0, "log_probs": [[-3.0, -2.0], [float("-inf"), -1.0]]})
    (axes,) = log_prob_figure(read_run(tmp_path)).axes
    assert axes.lines[0].get_xydata().tolist() == [[-3, -3], [0, 0]]


def test_maps_of_scales_put_each_generation_at_its_step(tmp_path):
    """Steps that are unevenly spaced, one of them with two generations, of which the last counts."""
    begin(tmp_path, 0, FACTS)
    for step, scale in ((0, 1.0), (1, 8.0), (1, 2.0), (11, 4.0)):
        append(tmp_path, "rollouts", {"step": step, "kv_scales": [[scale] * 3] * 2})
    axes = scales_figure(read_run(tmp_path)).axes[0]
    (mesh,) = axes.collections
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-0.5, 0.5, 6.0, 16.0]
    assert mesh.get_array().tolist() == [[0, 1, 2]] * 2


def test_a_page_has_a_picture_for_everything_that_was_recorded(tmp_path, capsys):
    facts = FACTS | {
        "model": "/secret/place/qwen",
        "plan": FACTS["plan"].replace("Qwen/Qwen3-8B", "/secret/place/qwen"),
    }
    folder = made_up_run(tmp_path / "run", facts=facts)
    assert main(["report", folder]) == 0 and "report.html" in capsys.readouterr().out
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    titles = re.findall(r"<figcaption><strong>(.*?)</strong>", page)
    assert (
        len(titles) == len(set(titles)) == 14
        and page.count('<div role="img" aria-label="') == page.count("<svg ") == 14
    )
    pictures = {path.stem for path in (tmp_path / "run" / "report").glob("*.png")}
    assert pictures == {title.lower().replace(" ", "_") for title in titles}
    assert not re.search(r'(src|href)="http', page) and str(tmp_path) not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert ids and len(ids) == len(set(ids))
    assert "&lt;b&gt;out&lt;/b&gt;" in page and "<b>out</b>" not in page
    assert "FP8 plan for qwen\n" in page and "GRPO on qwen, 40 steps" in page and "/secret" not in page
    assert "543 tensors" in page and "model.layers.*.mlp.up_proj" in page
    assert page.count("</h1>") == 1 and re.findall(r"<h(\d)>", page) == ["1"] + ["2"] * 5


def test_unrecorded_values_have_no_picture(tmp_path):
    begin(tmp_path, 0, FACTS | {"plan": None, "correction": None, "kernels": {}})
    append(tmp_path, "log", {"step": 1, "reward": 0.5})
    append(tmp_path, "rollouts", {"step": 0})
    page = write_report([read_run(tmp_path)], tmp_path / "report")
    assert [path.stem for path in page.parent.glob("*.png")] == ["reward"]
    assert "Nothing is FP8" in page.read_text()


def test_more_runs_than_colours_are_all_drawn_and_told_apart(tmp_path):
    runs = read_runs([made_up_run(tmp_path / str(index), 2, layers=1) for index in range(8)])
    axes = panel_figure(runs, Panel("reward", "Reward", "reward")).axes[0]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines[1::2]}
    assert len(axes.lines) == 16 and len(looks) == 8


def test_runs_that_cannot_be_reported_are_named(tmp_path, capsys):
    empty, first = tmp_path / "empty", made_up_run(tmp_path / "a" / "run", 2)
    begin(empty, 0, FACTS)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "fp8_run.jsonl").write_text("\n[1]\n")
    for words, reason in (
        ([tmp_path], "has no fp8_run.jsonl"),
        ([tmp_path / "gone"], "has no fp8_run.jsonl"),
        ([tmp_path / "nothing"], "does not begin with a run's facts"),
        ([empty], "'empty' has logged nothing yet"),
        ([first, first], "is named twice"),
        ([first, "--output", tmp_path / "nothing" / "fp8_run.jsonl"], "exists"),
    ):
        assert main(["report", *map(str, words)]) == 2
        told = capsys.readouterr().err
        assert reason in told and told.count("\n") == 1


def test_earlier_runs_of_a_folder_are_named_and_can_be_compared(tmp_path, capsys):
    for reward in (0.1, 0.2):
        begin(tmp_path, 0, FACTS)
        append(tmp_path, "log", {"step": 1, "reward": reward})
    assert main(["report", str(tmp_path)]) == 0
    earlier = str(tmp_path / "fp8_run.1.jsonl")
    assert capsys.readouterr().out.endswith(
        f"not drawn: earlier runs in the same folder, also valid as RUN: {earlier}\n"
    )
    assert main(["report", str(tmp_path), earlier]) == 0
    assert "earlier runs" not in capsys.readouterr().out


def test_a_drawn_log_is_not_named_as_earlier_however_its_path_is_spelled(tmp_path, monkeypatch, capsys):
    for _ in range(3):
        begin(tmp_path, 0, FACTS)
        append(tmp_path, "log", {"step": 1, "reward": 0.1})
    monkeypatch.chdir(tmp_path)
    assert main(["report", ".", "./fp8_run.1.jsonl", str(tmp_path / "fp8_run.2.jsonl")]) == 0
    assert "not drawn" not in capsys.readouterr().out
    assert main(["report", ".", str(tmp_path / "fp8_run.2.jsonl")]) == 0
    not_drawn = capsys.readouterr().out.partition("also valid as RUN: ")[2]
    assert not_drawn.count("fp8_run.1.jsonl") == 1 and "fp8_run.2.jsonl" not in not_drawn


def test_the_report_of_an_earlier_run_leaves_that_of_the_current_one(tmp_path):
    for reward in (0.1, 0.2):
        begin(tmp_path, 0, FACTS)
        append(tmp_path, "log", {"step": 1, "reward": reward})
    assert main(["report", str(tmp_path / "fp8_run.1.jsonl")]) == 0
    assert not (tmp_path / "report").exists() and (tmp_path / "report.1" / "report.html").exists()
    assert main(["report", str(tmp_path / "fp8_run.jsonl")]) == 0
    assert (tmp_path / "report" / "report.html").exists()


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path):
    folders = [tmp_path / place / "run" for place in ("a", "b/x", "c/x")]
    for folder in folders:
        begin(folder, 0, FACTS)
        append(folder, "log", {"step": 1, "mismatch/k3_kl": 0.1})
    assert [run.name for run in read_runs(folders)] == [f"{tmp_path.name}/a/run", "b/x/run", "c/x/run"]
    page = write_report(read_runs(folders[:2]), tmp_path / "report")
    pictures = {path.parent.relative_to(page.parent) for path in page.parent.rglob("*.png")}
    assert pictures == {Path("a/run"), Path("x/run")}


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in ("canvas", "page"):
        monkeypatch.delitem(sys.modules, f"trl_fp8.features.run_log.report.{module}")
        monkeypatch.delattr(trl_fp8.features.run_log.report, module)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "trl-fp8: pictures need matplotlib: pip install 'trl-fp8[report]'\n"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of one run, that of two, and the two."""
    folder, flags = tmp_path_factory.mktemp("pages"), FACTS["flags"] | {"learning_rate": 2e-6, "bf16": True}
    made_up_run(folder / "fp8", 12, 0.02)
    other = folder / "in_bf16_with_quite_a_long_name_and_a_seed_of_17"
    begin(other, 0, FACTS | {"plan": None, "correction": None, "flags": flags})
    for step in range(1, 14):
        append(other, "log", {"step": step, "reward": step / 12 if step <= 12 else 5.0, "step_time": 11.0})
    runs = read_runs([folder / "fp8", other])
    return write_report(runs[:1], folder / "one"), write_report(runs, folder / "two"), runs


def test_pages_are_right_in_a_browser(pages):
    """At three widths, light and dark, folded and unfolded."""
    with chromium() as browser:
        for page, headline in zip(pages, (".headline", "tbody tr:nth-child(2)"), strict=False):
            for size in SIZES:
                for scheme in SCHEMES:
                    show(browser, size, scheme)
                    look_at(browser, page.resolve().as_uri())
                    box = browser.find_element("css selector", headline).rect
                    assert box["height"] and box["y"] + box["height"] <= size[1], (size, "headline")
                    unfold(browser)
                    look_at(browser)
                    assert browser.execute_script(FAINT) == []
