"""The first ten minutes on a GPU (gpu/ten_minutes.py): their order, and that a failure is a result."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from gpu import ten_minutes
from gpu.ten_minutes import EXPERIMENTS, Experiment


ROOT = Path(__file__).parents[1]
ROW = 'print("ROW " + json.dumps({"mismatch_mean": %s}), flush=True)'


def python(*statements):
    return ("-c", "; ".join(("import json, sys, time", *statements)))


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Runs experiments and returns exit code and the results of each, by name."""

    def run(*experiments, words=()):
        monkeypatch.setattr(sys, "argv", ["ten_minutes", "--results", str(tmp_path), *words])
        code = ten_minutes.main(experiments)
        kind = "gpu" if torch.cuda.is_available() else "cpu"
        files = {each.name: tmp_path / f"first_{each.name}_{kind}.json" for each in experiments}
        return code, {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}

    return run


def test_experiments_fit_into_ten_minutes_and_name_files_that_exist():
    assert [each.name for each in EXPERIMENTS] == ["decode", "sync", "kernels", "depth", "parts", "syncs"]
    for half in (EXPERIMENTS[:3], EXPERIMENTS[3:]):  # two commands of a lease
        assert sum(each.seconds for each in half) <= ten_minutes.LIMIT
    assert [each.name for each in EXPERIMENTS[:3]] == list(ten_minutes.FIRST)
    words = " ".join(word for each in EXPERIMENTS for command in each.commands for word in command)
    files = set(re.findall(r"tests/[^:\s]+\.py", words)) | {
        f"benchmarks/{m}.py" for m in re.findall(r"benchmarks\.(\w+)", words)
    }
    assert len(files) == 6 and all((ROOT / file).exists() for file in files)
    tests = (ROOT / "tests/engine/test_gpu.py").read_text()
    for name in ten_minutes.SYNCS:
        assert f"def {name.partition('::')[2].partition('[')[0]}(" in tests, name


def test_a_failure_is_a_result_and_the_next_one_begins(results):
    fails = Experiment("fails", 20, (python(ROW % 1, 'print("a reason")', "sys.exit(3)"),))
    hangs = Experiment("hangs", 1.5, (python(ROW % 2, "time.sleep(60)"),))
    tests = Experiment(
        "tests", 20, (python('print("tests/a.py::b[c d] PASSED [ 50%]")', 'print("tests/a.py::e FAILED")'),)
    )
    code, found = results(fails, hangs, tests)
    assert code == 1 and set(found) == {"fails", "hangs", "tests"}
    for file in found.values():
        assert {"command", "commit", "versions", "hardware", "n", "results"} <= file.keys()
    [failed], [late], [tested] = (file["results"]["runs"] for file in found.values())
    assert failed["exit_code"] == 3 and failed["error"] == "a reason" and failed["rows"] == [{"mismatch_mean": 1}]
    assert late["exit_code"] == "time" and late["rows"] == [{"mismatch_mean": 2}] and late["seconds"] < 10
    outcomes = [{"test": "tests/a.py::b[c d]", "outcome": "PASSED"}, {"test": "tests/a.py::e", "outcome": "FAILED"}]
    assert tested["rows"] == outcomes and tested["exit_code"] == 0 and "error" not in tested


def test_benchmarks_accept_the_experiments_commands(monkeypatch):
    from benchmarks import bench_kernels, bench_rollout, bench_sync, measure_depth

    taken = []
    monkeypatch.setattr(bench_kernels, "rows", lambda options: taken.append(options) or [])
    monkeypatch.setattr(bench_rollout, "measure", taken.append)
    monkeypatch.setattr(bench_sync, "of_size", taken.append)
    monkeypatch.setattr(measure_depth, "measured", lambda options: taken.append(options) or {})
    modules = {"kernels": bench_kernels, "depth": measure_depth, "decode": bench_rollout, "sync": bench_sync}
    for name, module in modules.items():
        [experiment] = [each for each in EXPERIMENTS if each.name == name]
        for command in experiment.commands:
            more = ["--part", "bf16"] if name == "decode" else []
            monkeypatch.setattr(sys, "argv", [*command[1:], *more])
            module.main()
    assert len(taken) == 5
    decode = taken[3]
    assert decode.lengths == [1024, 16384] and decode.sequences == [64, 2] and decode.layers == 8
    variants = [bench_rollout.precision_and_variant(part)[1] for part in decode.precisions]
    assert variants == [None, "deep_gemm", "cutlass"]
