"""A report shows the numbers it was given, all of them, and nothing that was not measured."""

import json
import math
import sys
from importlib import reload

import numpy as np
import pytest
from matplotlib.image import imread

from examples.demo_report import demo_table, plot_training, training_figure
from trl_fp8.features.run_log.report import canvas
from trl_fp8.features.run_log.report.curves import moving


SUMMARY = {
    "reward_start": 0.247,
    "reward_end": 0.879,
    "mismatch_mean": 0.00491,
    "fp8_linears": 14,
    "kv_cache_dtype": "fp8",
    "sync_seconds_median": 0.0172,
    "audit_failures": 0,
    "fp8_share": 0.9312,
    "weight_bytes_bf16": 821_248,
    "weight_bytes_engine": 439_936,
    "kv_bytes_per_token_bf16": 1024,
    "kv_bytes_per_token_engine": 512,
    "kernels": {"ReferenceKernel": 14},
    "steps": 100,
    "training_seconds": 83.25,
    "hardware": "CPU",
    "versions": {"trl": "1.16.0"},
}
TREND, HELD_OUT = (8, 81, 156), (217, 72, 1)


def history(steps=40, *leave_out):
    rows = [
        {
            "step": step,
            "reward": 0.2 + 0.6 * step / steps + 0.05 * math.sin(7 * step),
            "sampling/sampling_logp_difference/mean": 0.005 + 0.001 * math.sin(3 * step),
            "fp8/sync_seconds": 0.017 + 0.4 * (step == 1),
            "completions/mean_length": 8 + 14 * step / steps,
        }
        for step in range(1, steps + 1)
    ]
    return [{k: v for k, v in row.items() if k not in leave_out} for row in rows] + [
        {"step": steps, "train_loss": 0.1}
    ]


def pixels(path):
    return (imread(path)[:, :, :3] * 255).round().astype(int)


def has_color(image, color):
    return bool((np.abs(image - np.array(color)).max(axis=-1) <= 2).any())


# Table


def test_table_holds_the_numbers_it_was_given():
    table = demo_table(json.loads(json.dumps(SUMMARY)))
    for text in (
        "0.247 -> 0.879 (+0.632)",
        "0.00491",
        "93.1%",
        "17.2 ms",
        "83.2 s",
        "1.0 KiB -> 512 B (50%)",
        "trl 1.16.0",
    ):
        assert text in table
    lines = {line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1] for line in table.splitlines()[1:-1]}
    assert lines["FP8 linear layers"] == "14" and lines["audit failures"] == "0" and lines["steps"] == "100"
    assert lines["KV cache"] == "fp8" and lines["hardware"] == "CPU" and lines["kernels"] == "ReferenceKernel 14"
    assert max(map(len, table.splitlines())) <= 100
    assert not any(
        key in table for key in ("reward_start", "weight_bytes_engine", "fp8_share")
    )  # nothing is told twice


def test_table_shows_a_fall_as_a_fall():
    assert "0.500 -> 0.400 (-0.100)" in demo_table({"reward_start": 0.5, "reward_end": 0.4})


def test_table_leaves_out_what_was_not_measured_and_nothing_else():
    table = demo_table(
        SUMMARY | {"mismatch_mean": None, "sync_seconds_median": None, "kernels": {}, "note": "short run"}
    )
    assert "mismatch" not in table and "sync" not in table and "kernels" not in table
    assert "short run" in table and "audit failures" in table
    lonely = demo_table({"reward_start": 0.247, "reward_end": None})
    assert "0.247" in lonely and "->" not in lonely


def test_table_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="summary.*nothing in it was measured"):
        demo_table({"reward_start": None, "kernels": {}})


# Picture


def test_moving_mean_against_the_definition():
    values = [3.0, -1.0, 4.0, 1.0, 5.0, 9.0]
    assert moving(values, 3) == pytest.approx([3, 1, 2, 4 / 3, 10 / 3, 5], abs=1e-12)
    assert moving(values, 1) == values and moving([], 4) == []


def test_picture_is_a_png_of_laptop_size(tmp_path):
    path = plot_training(
        history(), tmp_path / "made" / "report.png", title="GRPO on addition", held_out={0: 0.25, 40: 0.88}
    )
    assert path == tmp_path / "made" / "report.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and 20_000 < path.stat().st_size < 1_000_000
    image = pixels(path)
    assert 1200 <= image.shape[1] <= 1600 and 700 <= image.shape[0] <= 1000
    assert has_color(image, TREND)


@pytest.mark.parametrize("scale", [1, 1e-6, 1e6])
def test_nothing_is_cut_off_or_overlaps_whatever_the_size_of_the_numbers(scale):
    rows = [{k: v * scale if k not in ("step", "reward") else v for k, v in row.items()} for row in history()]
    figure = training_figure(rows, "GRPO on addition", held_out={0: 0.25, 40: 0.88})
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    width, height = figure.canvas.get_width_height()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes += [text.get_window_extent(renderer) for text in figure.texts]  # the title
    assert len(boxes) == 5
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    reward = figure.axes[0]
    labels = [text.get_window_extent(renderer) for text in reward.texts]
    assert [text.get_text() for text in reward.texts] == ["0.25", "0.88"]
    assert all(reward.bbox.x0 <= box.x0 and box.x1 <= reward.bbox.x1 for box in labels)


def test_curves_are_the_logged_values_in_the_unit_of_their_axis():
    rows = history(40, "completions/mean_length", "sampling/sampling_logp_difference/mean")
    reward, sync = training_figure(rows, "").axes
    assert list(reward.lines[0].get_ydata()) == [row["reward"] for row in rows if "reward" in row]
    assert list(reward.lines[0].get_xdata()) == list(range(1, 41))
    assert list(reward.lines[1].get_ydata()) == moving(reward.lines[0].get_ydata(), 5)
    assert list(sync.lines[0].get_ydata()) == [1000 * row["fp8/sync_seconds"] for row in rows if "reward" in row]
    assert set(sync.lines[1].get_ydata()) == {17.0}  # the median, in milliseconds; the first sync took 417
    assert sync.get_yscale() == "log" and "log scale" in sync.get_ylabel() and reward.get_yscale() == "linear"
    low, high = sync.get_ylim()
    assert low < 17.0 and high > 417.0  # the slow one is shown, too


def test_held_out_rewards_are_drawn_only_if_given(tmp_path):
    with_marks = pixels(plot_training(history(), tmp_path / "a.png", held_out={0: 0.25, 40: 0.88}))
    without = pixels(plot_training(history(), tmp_path / "b.png"))
    assert has_color(with_marks, HELD_OUT) and not has_color(without, HELD_OUT)


def test_missing_series_get_no_panel(tmp_path):
    four = pixels(plot_training(history(), tmp_path / "4.png")).shape
    two = pixels(plot_training(history(40, "fp8/sync_seconds", "completions/mean_length"), tmp_path / "2.png")).shape
    reward = history(40, "fp8/sync_seconds", "completions/mean_length", "sampling/sampling_logp_difference/mean")
    one = pixels(plot_training(reward, tmp_path / "1.png")).shape
    assert two[0] < 0.6 * four[0] and two[1] == four[1]  # one row of two panels instead of two rows
    assert one[0] == two[0] and one[1] < 0.6 * two[1]


def test_values_that_are_not_numbers_and_steps_logged_twice_do_not_count(tmp_path):
    rows = history(40, "fp8/sync_seconds", "completions/mean_length", "sampling/sampling_logp_difference/mean")
    clean = plot_training(rows, tmp_path / "clean.png").read_bytes()
    broken = [{"step": 7, "reward": 100.0}, *rows, {"step": 41, "reward": math.nan}, {"step": 42, "reward": math.inf}]
    assert plot_training(broken, tmp_path / "broken.png").read_bytes() == clean
    assert plot_training([*rows, {"step": 41, "reward": 0.0}], tmp_path / "other.png").read_bytes() != clean


def test_a_single_step_is_drawn(tmp_path):
    image = pixels(plot_training(history(1), tmp_path / "one.png", held_out={0: 0.2}))
    assert has_color(image, HELD_OUT)


def test_history_without_any_series_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="log_history with 1 entries.*reward.*logging_steps"):
        plot_training([{"step": 3, "train_loss": 0.1}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"trl-fp8\[report\]"):
        reload(canvas)
