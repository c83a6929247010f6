"""A run's file survives what happens to runs: a kill in the middle of a line, a resume, a second run in the folder."""

import pytest

from trl_fp8.features.run_log import log_file
from trl_fp8.features.run_log.log_file import FILE, Run, append, begin, earlier_logs, read_run, read_runs, settle


def step(folder, number, reward):
    append(folder, "rollouts", {"step": number - 1, "log_probs": []})
    append(folder, "log", {"step": number, "reward": reward})


def test_a_file_is_read_back(tmp_path):
    folder = tmp_path / "run"
    begin(folder, 0, {"model": "m"})
    for number in (1, 2):
        step(folder, number, number / 10)
    run = read_run(folder)
    assert read_run(folder / FILE) == run and [run] == read_runs([folder / FILE])
    assert run.name == "run" and run.facts == {"model": "m"}
    assert run.logs == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]
    assert [row["step"] for row in run.rollouts] == [0, 1]


def test_steps_beyond_the_resumed_checkpoint_do_not_count(tmp_path):
    begin(tmp_path, 0, {"attempt": 1})
    for number in (1, 2, 3):
        step(tmp_path, number, 0.0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "log", "st')  # killed
    begin(tmp_path, 2, {"attempt": 2})
    step(tmp_path, 3, 1.0)
    run = read_run(tmp_path)
    assert run.facts == {"attempt": 2}
    assert [(row["step"], row["reward"]) for row in run.logs] == [(1, 0.0), (2, 0.0), (3, 1.0)]
    assert [row["step"] for row in run.rollouts] == [0, 1, 2]


def test_a_new_run_in_an_old_folder_takes_its_place_with_its_first_step(tmp_path):
    begin(tmp_path, 0, {"run": 1})
    step(tmp_path, 1, 0.0)
    for run in (2, 3):  # the second dies before its first step
        begin(tmp_path, 0, {"run": run})
        append(tmp_path, "rollouts", {"step": 0, "log_probs": []})
        found = read_run(tmp_path)
        assert found.facts == {"run": 1} and len(found.logs) == 1
    append(tmp_path, "log", {"step": 1, "reward": 0.3})
    found = read_run(tmp_path)
    assert found.facts == {"run": 3} and [row["reward"] for row in found.logs] == [0.3] and len(found.rollouts) == 1
    begin(tmp_path, 0, {"run": 4})
    step(tmp_path, 1, 0.4)
    logs = earlier_logs(tmp_path)
    assert [read_run(log).facts["run"] for log in logs] == [1, 3] and read_run(tmp_path).facts == {"run": 4}
    assert [run.name for run in read_runs([tmp_path, *logs])] == [tmp_path.name, "fp8_run.1", "fp8_run.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("fp8_run.1.jsonl", "fp8_run.2.jsonl", "fp8_run.jsonl"),
    ]


def test_a_resumed_run_goes_on_in_the_file_of_its_checkpoint(tmp_path):
    begin(tmp_path, 0, {"run": 1})
    step(tmp_path, 1, 0.0)
    begin(tmp_path, 0, {"run": 2})  # by mistake, and stopped
    begin(tmp_path, 1, {"run": 1})
    step(tmp_path, 2, 0.1)
    assert [row["step"] for row in read_run(tmp_path).logs] == [1, 2] and earlier_logs(tmp_path) == []


def test_a_run_that_saved_before_its_first_log_goes_on_in_its_own_file(tmp_path):
    begin(tmp_path, 0, {"run": 1})
    step(tmp_path, 1, 0.0)
    begin(tmp_path, 0, {"run": 2})
    append(tmp_path, "rollouts", {"step": 0})
    settle(tmp_path)  # with its first checkpoint
    begin(tmp_path, 2, {"run": 2})
    step(tmp_path, 3, 0.1)
    resumed, (earlier,) = read_run(tmp_path), earlier_logs(tmp_path)
    assert resumed.facts == {"run": 2} and [row["step"] for row in resumed.logs] == [3] and len(resumed.rollouts) == 2
    assert [row["step"] for row in read_run(earlier).logs] == [1]


def test_a_run_logs_on_though_the_file_of_the_earlier_run_was_moved_away(tmp_path):
    begin(tmp_path, 0, {"run": 1})
    step(tmp_path, 1, 0.0)
    begin(tmp_path, 0, {"run": 2})
    (tmp_path / FILE).rename(tmp_path / "saved.jsonl")
    step(tmp_path, 1, 0.5)
    assert read_run(tmp_path).facts == {"run": 2} and [row["reward"] for row in read_run(tmp_path).logs] == [0.5]
    assert earlier_logs(tmp_path) == []


def test_names_of_runs_are_relative_paths_also_directly_under_the_root(monkeypatch):
    monkeypatch.setattr(log_file, "read_run", lambda folder: Run("", {}, [], []))
    assert [run.name for run in read_runs(["/run", "/data/run"])] == ["run", "data/run"]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"has no {FILE}: pass the output_dir"):
        read_run(tmp_path)
    append(tmp_path, "log", {"step": 1})
    with pytest.raises(ValueError, match="does not begin with a run's facts"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "line", [b'{"kind": "run"}', b'{"kind": "log", "reward": 1}', b'{"kind": "run", "facts": 1}', b"\xff"]
)
def test_a_line_that_says_nothing_is_left_out(line, tmp_path):
    begin(tmp_path, 0, {"model": "m"})
    append(tmp_path, "log", {"step": 1, "reward": 0.5})
    with (tmp_path / FILE).open("ab") as file:
        file.write(line + b"\n")
    run = read_run(tmp_path)
    assert run.facts == {"model": "m"} and run.logs == [{"step": 1, "reward": 0.5}]
