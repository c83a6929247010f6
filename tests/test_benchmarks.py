"""The benchmarks' bookkeeping: provenance, rows that survive a failure, and a table that invents nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


@pytest.fixture
def benchmarks(monkeypatch):
    """Benchmarks can be imported."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_run_goes_on_from_its_own_results_only(benchmarks, tmp_path, monkeypatch):
    import record

    monkeypatch.setenv("TRL_FP8_COMMIT", "abc123")
    assert record.held("depth", 8, tmp_path) is None
    record.write("depth", 8, {"cells": [1]}, tmp_path)
    assert record.held("depth", 8, tmp_path) == {"cells": [1]}
    assert record.held("depth", 16, tmp_path) is None
    monkeypatch.setenv("TRL_FP8_COMMIT", "another")
    assert record.held("depth", 8, tmp_path) is None


def test_a_padded_policy_computes_the_same(benchmarks):
    from deep_policies import padded_to_blocks

    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, head_dim=32, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.5)
    ids = torch.arange(40).view(2, 20)
    whole, half = padded_to_blocks(model, 2).eval(), padded_to_blocks(model, 1).eval()
    assert all(size % 128 == 0 for p in whole.model.layers.parameters() for size in p.shape)
    with torch.no_grad():
        expected, found, other = (one(ids).logits for one in (model, whole, half))
    largest = expected.abs().max()
    assert (found - expected).abs().max() < 1e-5 * largest  # 96 terms of an FP32 sum in another order: some 2^-24 each
    assert (other - expected).abs().max() > 1e-2 * largest
