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
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

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


def test_a_table_without_results_says_so_five_times(tmp_path):
    done = run("table", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| not measured |") == 5 and "reached" not in done.stdout
    assert "rollout_qwen3_8b_gpu.json (python -m benchmarks.bench_rollout --size qwen3_8b)" in done.stdout


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


def test_what_a_flow_costs_is_a_ratio_of_runs_with_one_seed(tmp_path, monkeypatch, capsys):
    from benchmarks import bench_flow
    from testing import record

    def run_demo(folder, words):
        forward, seed = words[1], words[-1]
        return {"step_seconds_median": (seed + 1) * (1.5 if forward == "one_forward" else 1.0), "mismatch_mean": 0.0}

    monkeypatch.setattr(bench_flow, "run_demo", run_demo)
    monkeypatch.setattr(sys, "argv", ["bench_flow", "--pairs", "3"])
    write = record.write
    monkeypatch.setattr(record, "write", lambda *args: write(*args, tmp_path))
    bench_flow.main()
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == 3 and found["results"]["step_seconds_ratio"] == {"median": 1.5, "min": 1.5, "max": 1.5}
    assert found["results"]["one_forward"]["step_seconds"]["median"] == 3.0


def test_lora_on_two_bases_is_compared_seed_by_seed_and_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    from benchmarks import bench_demo
    from testing import record

    ran, ends = [], {"merged": (0.7, 0.8, 0.6), "shared": (0.71, 0.83, 0.62)}

    def run_demo(folder, words, settings):
        if len(ran) == 3:
            raise RuntimeError("ended from outside")
        base, seed = {"false": "merged", "true": "shared"}[words[-1]], words[1]
        ran.append((base, seed))
        summary = dict.fromkeys(bench_demo.OF_A_RUN, 2.0 if base == "merged" else 1.0)
        return summary | {"reward_end": ends[base][seed], "rewards": [0.5]}

    monkeypatch.setattr(bench_demo, "run_demo", run_demo)
    monkeypatch.setattr(sys, "argv", ["bench_demo", "--lora", "--seeds", "3"])
    monkeypatch.setattr(record, "path", lambda name, folder: tmp_path / f"{name}.json")
    with pytest.raises(RuntimeError, match="ended from outside"):
        bench_demo.main()
    held = json.loads((tmp_path / "demo_lora.json").read_text())["results"]
    assert [row["reward_end"] for row in held["rows"]] == [0.7, 0.71, 0.8] and held["merged"]["seeds"] == 2
    assert "reward_end_shared_minus_merged" not in held
    first = ran.copy()
    ran.clear()
    bench_demo.main()
    assert first + ran == [(base, seed) for seed in range(3) for base in ("merged", "shared")]
    found = json.loads((tmp_path / "demo_lora.json").read_text())["results"]
    difference = found["reward_end_shared_minus_merged"]
    assert difference["mean"] == pytest.approx(0.02)
    half = pytest.approx(4.3026527 * 0.01 / 3**0.5)  # Student's t, 97.5 %, two degrees of freedom
    assert difference["high"] - 0.02 == half and 0.02 - difference["low"] == half
    assert found["sync_bytes_median_shared_over_merged"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_depth_is_measured_once_and_drawn(tmp_path, monkeypatch, capsys):
    from benchmarks import measure_depth

    words = ["-m", "benchmarks.measure_depth", "--layers", "2", "--trained", "--seeds", "1"]
    words += ["--policies", "full", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *words])
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.setenv("TRL_FP8_COMMIT", "abc123")
    measure_depth.main()
    assert "| random | 2 " in capsys.readouterr().out
    [row] = json.loads((tmp_path / "depth_cpu.json").read_text())["results"]["rows"]
    assert (row["weights"], row["layers"], row["tokens"], row["decoded_alone"]) == ("random", 2, 156, 8)
    assert row["mismatch_mean"] <= 1e-6 and row["prefill_decode"]["largest"] == 0
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(measure_depth, "in_a_process", Mock(side_effect=AssertionError("measured again")))
    measure_depth.main()
    assert "| random | 2 " in capsys.readouterr().out


def test_a_mismatch_of_exactly_nothing_is_shown_as_0():
    from benchmarks.table import depth

    row = {"weights": "trained", "layers": 24, "prefill_decode": {"mean": 0.0, "largest": 0.0}}
    spread = {"median": 0.0123, "min": 0.011, "max": 0.0145}
    fp8 = row | {"policy": "fp8", "mismatch_mean": 0.0126, "mismatch": spread, "largest": 0.4}
    full = row | {"policy": "full", "mismatch_mean": 0.0, "mismatch": dict.fromkeys(spread, 0.0), "largest": 0.0}
    *_, first, second = depth({"results": {"rows": [fp8, full]}})
    assert first == "| trained | 24 | fp8 | 0.013 (0.011 - 0.015) | 0.40 | 0 |"
    assert second == "| trained | 24 | full | 0 | 0 | 0 |"


def test_lora_is_measured_cell_by_cell_and_summed_up(tmp_path, monkeypatch):
    from benchmarks import bench_lora
    from benchmarks.table import lora

    sizes = {"memory merged_float32": 400, "memory merged_bfloat16": 300, "memory shared": 150}
    cells = {cell: {"bytes": size} for cell, size in sizes.items()}
    cells["sync"] = {"ratio": {"median": 0.05, "min": 0.04, "max": 0.07}}
    for number, weights in enumerate(bench_lora.POLICIES):
        cells[f"full {weights}"] = {"mean": 1e-7 * number}
        cells[f"mismatch {weights}"] = {"merged": {"mean": 0.4}, "shared": {"mean": 0.3}}
    monkeypatch.setattr(bench_lora, "in_a_process", Mock(side_effect=[cells["sync"], None]))
    monkeypatch.setattr(sys, "argv", ["bench_lora", "--results", str(tmp_path)])
    monkeypatch.setenv("TRL_FP8_COMMIT", "abc123")
    with pytest.raises(SystemExit, match="failed, see the log: memory merged_float32"):
        bench_lora.main()
    monkeypatch.setattr(bench_lora, "in_a_process", lambda cell: cells[cell] if cell != "sync" else None)
    bench_lora.main()
    found = json.loads((tmp_path / "lora_cpu.json").read_text())
    assert found["results"]["cells"] == cells and found["n"] == 11
    assert (found["results"]["memory_ratio"], found["results"]["memory_ratio_float32"]) == (0.5, 0.375)
    assert (found["results"]["sync_ratio"], found["results"]["mismatch_full"]) == (0.05, 1e-7)
    table = list(lora(found))
    assert table[2:4] == ["| memory, merged base in BF16 (FP32) | 0.5 (0.375) |", "| a sync | 0.05 (0.04 - 0.07) |"]
    assert table[-2:] == [
        "| mismatch, trained weights | 0.75 |",
        '| mismatch itself with fp8_forward="one_forward" | 1e-07 |',
    ]


def test_bytes_behind_tensors_are_counted_once():
    from benchmarks.bench_lora import storages

    whole = torch.zeros(4, 8)
    assert sum(storages([whole, whole[1:], whole.t(), torch.zeros(2)]).values()) == 4 * 8 * 4 + 2 * 4


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


def test_kernels_that_no_trainer_takes_are_labelled(benchmarks, tmp_path, monkeypatch):
    from benchmarks.bench_rollout import kernels_of, precision_and_variant
    from benchmarks.table import rollout
    from trl_fp8.engine.vllm import auditable, numerics

    assert precision_and_variant("fp8_linears_kv_deep_gemm") == ("fp8_linears_kv", "deep_gemm")
    assert precision_and_variant("fp8_linears_kv_followed") == ("fp8_linears_kv", "followed")
    assert precision_and_variant("fp8_linears_kv") == ("fp8_linears_kv", None)
    monkeypatch.setattr(numerics, "fp8_kernels", lambda model: Counter(model))
    cutlass, deep_gemm = {"CutlassFp8BlockScaledMMKernel": 144}, {"DeepGemmFp8BlockScaledMMKernel": 144}
    monkeypatch.setattr(auditable, "require_auditable", lambda model: None)
    assert kernels_of(cutlass, "fp8_linears_kv")["auditable"]
    packed = Mock(side_effect=RuntimeError("keeps weight_scale_inv as int32"))  # DeepGEMM on Blackwell
    monkeypatch.setattr(auditable, "require_auditable", packed)
    found = kernels_of(deep_gemm, "fp8_linears_kv_deep_gemm")
    assert found == {"kernels": deep_gemm, "auditable": False}
    with pytest.raises(RuntimeError, match="deep_gemm: expected are linears on DeepGemm.*found are.*Cutlass"):
        kernels_of(cutlass, "fp8_linears_kv_deep_gemm")
    sizes = {"parameter_bytes": 2**30, "kv_tokens": 1000, "lengths": {}}
    table = list(rollout({"results": {"engines": {"x": sizes | found, "y": sizes}}}))
    assert table[-2].startswith("| x (speed only: not audited") and table[-1].startswith("| y |")


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


def test_a_stage_says_first_what_it_will_do_and_packs_its_results(tmp_path):
    """Of a stage whose first step fails at once: the interpreter is none."""
    out, archive = tmp_path / "out", tmp_path / "archive"
    places = {"SITE": str(tmp_path / "none"), "OUT": str(out), "ARCHIVE": str(archive), "PYTHON": "/bin/false"}
    done = stage(8, **places)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "stage 8 takes at most 570 s:"
    assert re.fullmatch(r"  pytest -k 'not experts and not routes' \(at most 560 s\)", lines[1])
    with tarfile.open(archive / "stage-8.tgz") as packed:
        assert "./stage-8.log" in packed.getnames()


def test_results_of_a_host_without_git_say_how_to_name_their_commit(tmp_path, monkeypatch):
    from testing import record

    monkeypatch.delenv("TRL_FP8_COMMIT", raising=False)
    assert record.commit() and record.commit() != record.UNKNOWN
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.commit() == record.UNKNOWN


def test_a_part_of_a_model_has_a_file_of_its_own(benchmarks, tmp_path):
    from benchmarks.harness import Run

    def name(**more):
        return Run("rollout", Namespace(size="qwen3_8b", budget=1, results=tmp_path, engine_kwargs={}, **more)).name

    assert name(layers=8) == "rollout_qwen3_8b_8_layers" and name(layers=None) == name() == "rollout_qwen3_8b"


def test_a_run_goes_on_from_its_own_results_only(benchmarks, tmp_path, monkeypatch):
    from testing import record

    monkeypatch.setenv("TRL_FP8_COMMIT", "abc123")
    assert record.held("depth", 8, tmp_path) is None
    record.write("depth", 8, {"cells": [1]}, tmp_path)
    assert record.held("depth", 8, tmp_path) == {"cells": [1]}
    assert record.held("depth", 16, tmp_path) is None
    monkeypatch.setenv("TRL_FP8_COMMIT", "another")
    assert record.held("depth", 8, tmp_path) is None


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


TRITON = """Traceback (most recent call last):
  File "/site/vllm/v1/worker/gpu/model_runner.py", line 9, in execute_model
    self.sample(x)
  File "/host/triton/compiler/compiler.py", line 80, in make_ir
    raise CompilationError(src)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^
triton.compiler.errors.CompilationError: at 3:4
"""
RUNNER = """  File "/site/vllm/v1/worker/gpu/sample/gumbel.py", line 9, in sample
    kernel[grid](x)
    ~~~~~~^^^^^^
AttributeError: 'NoneType' object has no attribute 'run'
"""
KERNEL = """  File "/site/vllm/v1/worker/gpu/model_runner.py", line 9, in execute_model
    self.model(x)
  File "/site/vllm/_custom_ops.py", line 5, in cutlass_scaled_mm
    torch.ops._C.cutlass_scaled_mm(out, a, b)
RuntimeError: Invalid status
"""
COMPILER = TRITON + "torch._inductor.exc.InductorError: CompilationError: at 3:4\n"
SAMPLER = "ModuleNotFoundError: No module named 'flashinfer'\n"
MEMORY = RUNNER.replace("AttributeError: ", "torch.OutOfMemoryError: CUDA out of memory. ")
NO_GRAPHS = '--engine-kwargs={"compilation_config":{"mode":0}}'


@pytest.mark.parametrize(
    "log, in_force, expected",
    [
        (TRITON, [], "VLLM_USE_V2_MODEL_RUNNER=0"),
        (RUNNER, ["VLLM_USE_FLASHINFER_SAMPLER=0"], "VLLM_USE_V2_MODEL_RUNNER=0"),
        (RUNNER, ["VLLM_USE_V2_MODEL_RUNNER=0"], ""),
        (COMPILER, [], NO_GRAPHS),
        (COMPILER, [NO_GRAPHS], ""),
        (SAMPLER, [], "VLLM_USE_FLASHINFER_SAMPLER=0"),
        ("INFO Using FlashInfer for top-p\n" + KERNEL, [], ""),
        (MEMORY, [], ""),
        ("AssertionError: an audit failed\n", [], ""),
    ],
    ids=["triton", "runner", "runner-again", "compiler", "compiler-again", "sampler", "kernel", "memory", "own"],
)
def test_a_setting_is_tried_for_failures_that_it_can_mend(log, in_force, expected, tmp_path):
    (tmp_path / "log").write_text(log)
    words = [sys.executable, GPU / "remedy.py", tmp_path / "log", *in_force]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (expected, 0 if expected else 1), done.stderr


@pytest.mark.parametrize(
    "number, log, mended",
    [(1, RUNNER, True), (1, KERNEL, False), (4, RUNNER, False)],
    ids=["mended", "not-mended", "another-stage"],
)
def test_only_the_first_stage_tries_again_and_only_with_a_remedy(number, log, mended, tmp_path):
    """The first model runner works here; `python` is a script that says how it was called."""
    (tmp_path / "failure").write_text(log)
    python = tmp_path / "python"
    python.write_text(
        f"""#!/usr/bin/env bash
case $1 in gpu/*) exec "{sys.executable}" "$@" ;; esac
echo "CALLED $VLLM_LOGGING_LEVEL ${{VLLM_USE_V2_MODEL_RUNNER:-unset}} $2"
[ "$2" = benchmarks.bench_sync ] && [ -z "${{VLLM_USE_V2_MODEL_RUNNER:-}}" ] || exit 0
cat "{tmp_path}/failure"
exit 1
"""
    )
    python.chmod(0o755)
    done = stage(number, PYTHON=str(python), SITE=str(tmp_path / "none"), OUT=str(tmp_path))
    synced = [line for line in done.stdout.splitlines() if line.startswith("CALLED") and "bench_sync" in line]
    first = f"CALLED {'INFO' if number == 1 else 'WARNING'} unset benchmarks.bench_sync"
    assert synced == ([first, first.replace("unset", "0")] if mended else [first])
    assert done.returncode == (0 if mended else 1), done.stdout
    assert ("SETTINGS='VLLM_USE_V2_MODEL_RUNNER=0'" if mended else "failed: sync") in done.stdout
    called = (tmp_path / f"stage-{number}.log").read_text().count("CALLED")
    assert called == {1: 4 + mended, 4: 1}[number]  # versions, syncs, rollout, tests


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


def test_a_truncated_archive_leaves_nothing_that_looks_like_a_bundle(sent):
    folder, site = sent
    whole = (folder / "part-00").read_bytes() + (folder / "part-01").read_bytes()
    write_parts(folder, whole[:-20_000])  # as it was sent, which was not whole
    done, left = take(folder, site)
    assert done.returncode == 1 and "unpacked" not in done.stdout and left == ["site.parts"]
