"""The benchmarks' bookkeeping: provenance, rows that survive a failure, and a table that invents nothing; and how they
run on a host without a network (gpu/).
"""

import hashlib
import io
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trl_fp8
from gpu.ten_minutes import EXPERIMENTS
from testing.processes import alone


ROOT = Path(__file__).parents[1]
GPU = ROOT / "gpu"


def run(script, *words, **environment):
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", *map(str, words)],
        cwd=ROOT,
        env=alone() | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )


def test_a_goal_is_reached_or_missed_by_the_number_in_the_file(tmp_path):
    from benchmarks.table import render

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
    table = "\n".join(render(tmp_path))
    assert "| 1.31 (1.2 - 1.4) | **missed** |" in table
    assert "| 2.4 | reached |" in table and table.count("| not measured |") == 3


def test_results_that_a_run_has_written_leave_its_commit_clean(tmp_path, monkeypatch):
    """So that `make models` goes on after an interruption, with the families that have no row of this commit."""
    from testing import record

    monkeypatch.delenv("TRL_FP8_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    results, source = tmp_path / "benchmarks" / "results" / "models_cpu.json", tmp_path / "row.py"
    results.parent.mkdir(parents=True)
    for file in (results, source):
        file.write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    clean = record.commit()
    results.write_text("2")
    assert record.commit() == clean and re.fullmatch("[0-9a-f]{7,}", clean)
    source.write_text("2")
    assert record.commit() == f"{clean}-dirty"


def test_a_benchmark_writes_what_it_measured_with_its_provenance(tmp_path):
    options = ("--size", "tiny", "--repeats", "1", "--tokens", "128", "--results", str(tmp_path))
    done = run("bench_fp8_linear", *options, TRL_FP8_COMMIT="abc123")
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "fp8_linear_cpu.json").read_text())
    assert record["commit"] == "abc123" and record["n"] == 1 and "torch" in record["versions"]
    found = record["results"]
    assert found["kernels"] == {"ReferenceFp8BlockKernel": 4}  # fused calls of a decoder layer
    for backward in ("bf16", "fp8"):
        for which in ("forward", "forward_backward"):
            assert found["backward"][backward]["decoder_layer"][which]["speedup"]["median"] > 0


def test_lora_on_a_shared_base_reaches_what_it_is_for():
    """The file that the docs quote."""
    found = json.loads((ROOT / "benchmarks" / "results" / "lora_cpu.json").read_text())["results"]
    assert found["memory_ratio_float32"] < found["memory_ratio"] <= 0.6
    assert found["sync_ratio"] <= 0.1 and found["mismatch_full"] <= 1e-5
    assert all(found["mismatch_shared"][weights] <= merged for weights, merged in found["mismatch_merged"].items())


@pytest.fixture
def benchmarks():
    """A run of one answers to SIGTERM, which is undone."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_a_part_that_had_to_be_ended_has_failed(benchmarks, tmp_path, monkeypatch):
    from benchmarks import harness

    script = tmp_path / "bench_slow.py"
    script.write_text("import time\nprint('ROW {\"rate\": 1}', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(script)])
    run = harness.Run("slow", Namespace(size="tiny", budget=2, results=tmp_path, engine_kwargs={}, part=None))
    assert list(run.rows("engine")) == [{"rate": 1}]
    with pytest.raises(SystemExit, match="ended after 2 seconds; rows from before are kept"):
        run.finish()
    assert "engine" in json.loads((tmp_path / "slow_tiny_cpu.json").read_text())["results"]["not_measured"]


def test_a_step_that_cannot_fit_is_refused(benchmarks):
    from benchmarks.bench_step import require_memory

    def options(size, lora=0):
        return Namespace(size=size, lora=lora, utilization=0.3)

    with pytest.raises(ValueError, match="--size qwen3_8b with --lora 0.*61 GiB.*Set --lora 32 or --size qwen3_1_7b"):
        require_memory(options("qwen3_8b"), 80 * 10**9)
    require_memory(options("qwen3_8b", lora=32), 80 * 10**9)
    require_memory(options("qwen3_8b"), 141 * 10**9)
    require_memory(options("qwen3_1_7b"), 80 * 10**9)


def stage(*words, **environment):
    words = ["bash", GPU / "run.sh", *map(str, words)]
    quiet = {"VLLM_LOGGING_LEVEL": ""}  # as if it were not set
    return subprocess.run(words, cwd=ROOT, env=os.environ | quiet | environment, capture_output=True, text=True)


def test_stages_for_a_host_without_network_name_scripts_that_exist(tmp_path):
    places = {"SITE": str(tmp_path), "OUT": str(tmp_path / "out")}
    done = [stage(number, DRY_RUN="1", **places) for number in range(11)]
    assert all(one.returncode == 0 for one in done), [one.stderr for one in done]
    printed = "".join(one.stdout + one.stderr for one in done)
    printed += "".join(f" {word} " for each in EXPERIMENTS for command in each.commands for word in command)
    scripts = set(re.findall(r"examples/\w+\.py", printed))
    scripts |= {f"benchmarks/{name}.py" for name in re.findall(r"-m benchmarks\.(\w+)", printed)}
    assert len(scripts) >= 6 and all((ROOT / name).exists() for name in scripts), scripts
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    asked_for = {word.partition("::")[0] for word in printed.split() if word.startswith("tests/")}
    left_out = [path for path in marked if not any(path.is_relative_to(ROOT / place) for place in asked_for)]
    assert left_out == [Path(__file__)]  # the marker is named in this line's neighbours only
    # the first ten minutes, settings and long rollouts fit into 30, with a sixth of them for everything else
    limits = [max(map(int, re.findall(r"\(at most (\d+) s\)", done[number].stdout))) for number in (0, 3)]
    assert 300 + sum(limits) <= 0.85 * 1800
    assert re.search(
        r"--lengths 16384.* fp8_linears_kv fp8_linears_kv_deep_gemm fp8_linears_kv_triton", done[3].stdout
    )
    assert "--size qwen3_1_7b" in done[7].stdout and "--size qwen3_8b" in done[4].stdout
    # nothing is installed there, and results name the version
    (metadata,) = tmp_path.glob("trl_fp8-*.dist-info/METADATA")
    assert f"Version: {trl_fp8.__version__}\n" in metadata.read_text()


def test_a_padded_policy_computes_the_same(benchmarks):
    from benchmarks.deep_policies import padded_to_blocks

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


@pytest.fixture
def sent(tmp_path):
    """A bundle of two parts in a folder, as `make_bundle.sh` leaves it; the site that it is for."""
    packed, folder = io.BytesIO(), tmp_path / "sent"
    content = random.Random(0).randbytes(100_000)
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("./vllm/__init__.py", "./vllm/_C.so"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    folder.mkdir()
    write_parts(folder, lzma.compress(packed.getvalue()))
    return folder, tmp_path / "site"


def write_parts(folder, data):
    halves = {"part-00": data[: len(data) // 2], "part-01": data[len(data) // 2 :]}
    for name, half in halves.items():
        (folder / name).write_bytes(half)
    lines = [f"{hashlib.sha256(half).hexdigest()}  {name}" for name, half in halves.items()]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")


def take(folder, site):
    """What `run.sh bundle` does, and the folders that it leaves beside the site."""
    done = stage("bundle", folder, SITE=str(site), OUT=str(site.parent / "out"), PYTHON=sys.executable)
    return done, sorted(path.name for path in site.parent.iterdir() if path.name.startswith("site"))


def test_parts_may_come_one_at_a_time(sent):
    folder, site = sent
    late = (folder / "part-01").read_bytes()
    (folder / "part-01").unlink()
    done, left = take(folder, site)
    assert done.returncode == 0 and "waiting: part-01 is not here" in done.stdout and left == ["site.parts"]
    (folder / "part-01").write_bytes(late[:-1])
    done, left = take(folder, site)
    assert "part-01 is not what was sent: transfer it again" in done.stdout and left == ["site.parts"]
    (folder / "part-01").write_bytes(late)
    done, left = take(folder, site)
    assert done.returncode == 0 and f"unpacked to {site}" in done.stdout and left == ["site"]
    assert len((site / "vllm" / "_C.so").read_bytes()) == 100_000
    (site / "of_an_older_bundle").touch()
    done, left = take(folder, site)
    assert done.returncode == 0 and left == ["site"] and not (site / "of_an_older_bundle").exists()


@pytest.mark.parametrize("train, sync, pause", [(500, 60, 40), (2000, 60, 40), (500, 0, 0)])
def test_simulated_overlap_takes_what_the_formula_says_for_completions_of_one_length(train, sync, pause):
    from benchmarks.bench_overlap import Case, asynchronous, rollout_time
    from trl_fp8.planning.overlap import StepTimes

    case = Case(train, sync, pause, staleness=2, prefill=float("inf"))
    lengths = np.full((4000, 8), 1000.0)
    times = StepTimes(rollout_time(case, lengths[:8].flatten()), train, sync, pause)
    assert times.rollout == 1000
    assert asynchronous(case, lengths)["step"] == pytest.approx(times.asynchronous, rel=0.01)


def test_simulated_rollouts_are_no_older_than_the_bound_and_long_ones_are_dropped_more_often():
    from benchmarks.bench_overlap import simulated

    found = {bound: simulated(2.0, bound, tail=1.0, load=1.0, seed=0) for bound in (1, 4)}
    assert all(0 < each["age"] <= bound for bound, each in found.items())
    assert found[1]["speedup"] < found[4]["speedup"] and found[1]["dropped"] > found[4]["dropped"] > 0
    assert found[1]["trained_length"] < 0.95
    assert simulated(2.0, 1, tail=0.0, load=1.0, seed=0)["trained_length"] == 1
