"""The first ten minutes on a GPU (gpu/ten_minutes.py): their order, and that a failure is a result."""

import json
import re
import sys
import tarfile
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


def test_they_stand_in_their_order_fit_into_ten_minutes_and_name_what_exists():
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


@pytest.mark.parametrize(("first", "runs"), [(1e-6, 1), (1e-2, 2)])
def test_what_is_not_exact_is_measured_without_the_compiler(first, runs, results):
    depth = Experiment("depth", 20, (python(ROW % first), python(ROW % 0)), ten_minutes.is_exact)
    code, found = results(depth)
    assert code == 0 and len(found["depth"]["results"]["runs"]) == runs


def test_results_are_packed_after_each_experiment_and_caches_are_not_among_them(results, tmp_path):
    archive = tmp_path.parent / f"{tmp_path.name}.tgz"

    def names():
        with tarfile.open(archive) as packed:
            return sorted(Path(name).name for name in packed.getnames())

    look = f"print(open({str(archive)!r}).close() or 'there')"  # the second experiment finds the first one's archive
    fill = "import os; open(os.environ['VLLM_CACHE_ROOT'] + '/compiled', 'w').write('x')"
    one = Experiment("one", 20, (python(fill),), caches=True)
    code, _ = results(one, Experiment("two", 20, (python(look),)), words=("--archive", str(archive)))
    seen = names()
    assert code == 0 and [name for name in seen if name.endswith(".json")] == [
        f"first_{name}_{'gpu' if torch.cuda.is_available() else 'cpu'}.json" for name in ("one", "two")
    ]
    assert "compiled" not in seen and not list(tmp_path.rglob("compiled"))


def test_it_says_first_what_comes_and_how_long_it_takes(results, capsys):
    results(Experiment("one", 20, (python(),)), Experiment("two", 7, (python(),)))
    assert capsys.readouterr().out.startswith("==== one 20 s, two 7 s; at most 510 s together\n")


def test_what_there_is_no_time_for_is_said(results):
    one, two = (Experiment(name, 20, (python(),)) for name in ("one", "two"))
    code, found = results(one, two, words=("--limit", "5", "--only", "two"))
    assert code == 1 and set(found) == {"two"} and "no time left" in found["two"]["results"]["error"]


def test_its_commands_are_taken_by_what_they_call(monkeypatch):
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


def test_kernels_that_fail_are_rows_and_the_rest_is_measured(monkeypatch, capsys):
    """On CPU: the reference kernel's check, and torch's product."""
    from benchmarks import bench_kernels
    from trl_fp8.engine.vllm.gemms import Gemm

    monkeypatch.setattr(sys, "argv", ["bench_kernels", "--size", "tiny", "--rows", "1", "3"])
    bench_kernels.main()
    found = [json.loads(line.removeprefix("ROW ")) for line in capsys.readouterr().out.splitlines() if "ROW" in line]
    assert found[0] == {"check": "auto"} and [row["rows"] for row in found[1:]] == [1, 3]
    monkeypatch.setattr(Gemm, "check", lambda self: 1 / 0)
    with pytest.raises(SystemExit, match="1 rows have errors"):
        bench_kernels.main()
    assert '{"error": "ZeroDivisionError: division by zero"}' in capsys.readouterr().out
