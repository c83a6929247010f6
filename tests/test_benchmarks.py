"""The benchmarks' bookkeeping: provenance, rows that survive a failure, and a table that invents nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import trl_fp8


ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(script, *words, **environment):
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )


def test_a_table_without_results_says_so_five_times(tmp_path):
    done = run("table.py", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| not measured |") == 5 and "reached" not in done.stdout
    assert "rollout_qwen3_8b_gpu.json (python benchmarks/bench_rollout.py --size qwen3_8b)" in done.stdout


def test_a_goal_is_reached_or_missed_by_the_number_in_the_file(tmp_path):
    spread = {"median": 1.31, "min": 1.2, "max": 1.4}
    held = {"tokens_per_second_over_bf16": {"16384": spread}, "kv_tokens_over_bf16": 2.4}
    held |= {"parameter_bytes": 9 * 2**30, "kv_tokens": 500_000, "lengths": {}}
    record = {
        "command": "python x",
        "commit": "abc",
        "versions": {"vllm": "0.31.0", "torch": "2.11"},
        "hardware": "NVIDIA H200",
        "n": 3,
        "results": {"engines": {"fp8_linears_kv": held}},
    }
    (tmp_path / "rollout_qwen3_8b_gpu.json").write_text(json.dumps(record))
    done = run("table.py", "--results", tmp_path)
    assert "| 1.31 (1.2 - 1.4) | **missed** |" in done.stdout, done.stderr
    assert "| 2.4 | reached |" in done.stdout and done.stdout.count("| not measured |") == 3


def test_a_benchmark_writes_what_it_measured_with_its_provenance(tmp_path):
    options = ("--size", "tiny", "--repeats", "1", "--tokens", "128", "--results", tmp_path)
    done = run("bench_fp8_linear.py", *options, TRL_FP8_COMMIT="abc123")
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "fp8_linear_tiny_cpu.json").read_text())
    assert record["commit"] == "abc123" and record["n"] == 1 and "torch" in record["versions"]
    assert record["results"]["backends"]["fake_quant"]["decoder_layer"]["fprop"]["speedup"]["median"] > 0
    refused = run("bench_fp8_linear.py", *options, "--backends", "scaled_mm")
    assert refused.returncode != 0 and "scaled_mm" in refused.stderr


def test_stages_for_a_host_without_network_name_scripts_that_exist(tmp_path):
    done = [
        subprocess.run(
            ["bash", ROOT / "gpu" / "run.sh", str(stage)],
            cwd=ROOT,
            env=os.environ | {"DRY_RUN": "1", "SITE": str(tmp_path), "OUT": str(tmp_path / "out")},
            capture_output=True,
            text=True,
        )
        for stage in range(1, 8)
    ]
    assert all(one.returncode == 0 for one in done), [one.stderr for one in done]
    printed = "".join(one.stdout + one.stderr for one in done)
    scripts = set(re.findall(r"(?:benchmarks|examples)/\w+\.py", printed))
    assert len(scripts) >= 6 and all((ROOT / name).exists() for name in scripts), scripts
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    asked_for = {word for word in printed.split() if word.startswith("tests/")}
    left_out = [path for path in marked if not any(path.is_relative_to(ROOT / place) for place in asked_for)]
    assert left_out == [Path(__file__)]  # the marker is named in this line's neighbours only
    # nothing is installed there, and results name the version
    (metadata,) = tmp_path.glob("trl_fp8-*.dist-info/METADATA")
    assert f"Version: {trl_fp8.__version__}\n" in metadata.read_text()
