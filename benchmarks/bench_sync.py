"""A sync of a 28-layer model (0.5 B parameters, random weights) into a real engine, in FP8 and in BF16.

    python -m benchmarks.bench_sync [--rounds 3] [--syncs 4]
    python -m benchmarks.bench_sync --size qwen3_8b [--dtype float32]       the parts of a sync, and TRL's own (GPU)

Both go through the same reload. Rounds alternate between the two engines, and the first sync of each is not counted.
Memory is the process's peak during a sync over what it had before, in BF16 decoder layers of the model. vLLM reloads
module by module, so embeddings, which are larger than a layer, set the peak; "fp8_small_vocabulary" is without them.
It is measured in a process of its own, whose allocator returns freed memory at once, which costs time.

With `--size` the model is made on the device and each engine has a process of its own, in alternating rounds.
"seconds" are of a whole sync, between two waits for the device; "parts" of one more, with a wait around each part,
"quantize" of the stream alone, without an engine. "trl_bf16" is TRL's own sync of the same policy into a BF16 engine.
Rates are bytes that the engine holds per second, beside those of a copy on the device (bytes read, once).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from . import harness, record, shapes


SHAPE = dict(  # the decoder of Qwen3-0.6B, with a vocabulary that brings it to 0.5 B
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32768,
)
BF16 = {"fp8_weights": False, "kv_cache_dtype": "auto"}
# name -> size of the vocabulary, what is FP8
ENGINES = {"fp8": (SHAPE["vocab_size"], {}), "bf16": (SHAPE["vocab_size"], BF16), "fp8_small_vocabulary": (1024, {})}


def measure(folder: str, rounds: int, syncs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds and peak memory of `syncs` syncs after a first one, in alternating rounds;
    engine -> figure -> values.
    """
    from testing import engines, tiny_models

    measured = {name: {"seconds": [], "quantize_seconds": [], "peak_bytes": [], "bytes_sent": []} for name in ENGINES}
    for size in {size for size, _ in ENGINES.values()}:
        shape = SHAPE | {"vocab_size": size}
        tiny_models.save_checkpoint(Path(folder, str(size)), initializer_range=0.02, **shape)
    for name, (size, flags) in rounds * list(ENGINES.items()):
        scales = None if flags else engines.some_scales(SHAPE["num_hidden_layers"], 1)
        generation = engines.start(f"{folder}/{size}", scales, **flags)
        generation.sync_weights()
        for _ in range(syncs):
            with torch.no_grad():
                generation.model.model.layers[0].mlp.down_proj.weight.add_(0.001)
            reset_peak()
            before = memory("VmRSS")
            generation.sync_weights()
            measured[name]["peak_bytes"].append(memory("VmHWM") - before)
            for figure in ("seconds", "quantize_seconds", "bytes_sent"):
                measured[name][figure].append(getattr(generation.last_sync, figure))
        engines.shutdown(generation.llm)
    return measured


def reset_peak() -> None:
    """Make the kernel forget the process's peak resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(which: str) -> int:
    """`VmRSS` or `VmHWM` (peak) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


def peaks_in_a_process_of_its_own() -> dict[str, list[float]]:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-m", "benchmarks.bench_sync", "--peaks"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def start(name: str, folder: str, options: argparse.Namespace):
    """A policy of `options.size` and a colocated engine of precision `name`, "trl_bf16" being TRL's own class."""
    import trl.generation.vllm_generation as trl_generation
    from transformers import AutoTokenizer
    from vllm import LLM

    from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
    from trl_fp8.quantization.kv_scales import KVScales
    from trl_fp8.recipe.recipe import recipe_for_model
    from trl_fp8.upstream.patches import substituted

    model = shapes.policy(folder, getattr(torch, options.dtype))
    scales = KVScales(torch.full((model.config.num_hidden_layers, 3), 2.0**-5))
    arguments = dict(
        model=model,
        accelerator=shapes.accelerator(),
        processing_class=AutoTokenizer.from_pretrained(folder),
        max_model_length=256,
        max_num_seqs=8,
        gpu_memory_utilization=options.utilization,
    )
    user = {"enforce_eager": True} | options.engine_kwargs  # graphs change nothing in a sync
    if name == "trl_bf16":
        user |= {"load_format": "dummy", "dtype": "bfloat16"}
        with substituted(trl_generation, "LLM", lambda **kwargs: LLM(**(kwargs | user))):
            return trl_generation.VLLMGeneration(**arguments)
    recipe = recipe_for_model(model, **shapes.PRECISIONS[name])
    return FP8VLLMGeneration(recipe=recipe, calibrate=lambda: scales, engine_kwargs=user, **arguments)


def measure_part(options: argparse.Namespace) -> None:
    """Start one engine, sync `options.syncs` times after a first one, and emit a row for each;
    then one of the parts.
    """
    run = harness.Run("sync", options)
    with tempfile.TemporaryDirectory() as folder:
        generation = start(options.part, shapes.write_folder(options.size, folder), options)
        trls, policy = options.part == "trl_bf16", generation.model
        for step in range(options.syncs + 1):
            with torch.no_grad():
                policy.model.layers[0].mlp.down_proj.weight.add_(0.001)
            peak = shapes.PeakMemory()
            seconds = shapes.seconds_of(generation.sync_weights)
            sent = 2 * shapes.numel(policy) if trls else generation.last_sync.bytes_sent
            if step:
                harness.emit({"seconds": seconds, "peak_bytes": peak.bytes, "bytes_sent": sent})
            if run.left < 2 * seconds:
                return harness.skip(f"syncs after {step}")
        if not trls:
            harness.emit({"parts": parts(generation)})


def parts(generation) -> dict[str, float]:
    """Seconds of the parts of one sync."""
    from trl_fp8.sync import delivery as module
    from trl_fp8.sync.audit import Ledger
    from trl_fp8.sync.weight_stream import WeightStream

    def quantize() -> None:
        scales = generation.last_sync.kv_scales
        parameters = generation.model.named_parameters()
        for _ in WeightStream(parameters, generation.recipe, scales, round_here=False):
            pass

    found = {"quantize": shapes.seconds_of(quantize)}
    watch = shapes.Stopwatch()
    watch.time(module, "require_finite", "finite")
    watch.time(generation.delivery, "_load", "reload")
    watch.time(Ledger, "audit", "audit")
    watch.time(generation.engine, "verify_kv_scales", "scales")
    generation.sync_weights()
    return found | watch.seconds


def of_size(options: argparse.Namespace) -> None:
    """Rounds over the engines, and what they say together."""
    on_gpu = shapes.DEVICE == "cuda"
    names = ["fp8_linears_kv", "trl_bf16" if on_gpu else "bf16"]
    run = harness.Run("sync", options, options.rounds * options.syncs, policy_dtype=options.dtype)
    if not on_gpu:
        run.results["not_measured"]["trl_bf16"] = "GPU only: TRL's sync fails where vLLM's CPU engine packs weights"
    run.results["copy_gigabytes_per_second"] = shapes.copy_rate()
    if on_gpu:
        torch.cuda.empty_cache()
    rows = {name: [] for name in names}
    for index in range(options.rounds * len(names)):
        name = names[index % len(names)]
        for row in run.rows(name, options.rounds * len(names) - index):
            rows[name].append(row)
            run.results |= summarize({name: found for name, found in rows.items() if found}, names[1])
    run.finish()


def summarize(rows: dict[str, list[dict]], baseline: str) -> dict:
    """Spreads per engine, and the ratio of FP8 syncs to those of `baseline` in the order in which they were made."""
    found = {}
    for name, of_engine in rows.items():
        syncs = [row for row in of_engine if "seconds" in row]
        parts = [row["parts"] for row in of_engine if "parts" in row]
        measured = [key for key in ("seconds", "peak_bytes") if syncs[0][key] is not None]
        found[name] = {key: record.spread([row[key] for row in syncs]) for key in measured}
        rates = [row["bytes_sent"] / row["seconds"] / 1e9 for row in syncs]
        found[name] |= {"bytes_sent": syncs[0]["bytes_sent"], "gigabytes_per_second": record.spread(rates)}
        if parts:
            found[name]["parts"] = {part: record.spread([row[part] for row in parts]) for part in parts[0]}
    if len(rows) == 2:
        pairs = zip(*([row["seconds"] for row in rows[name] if "seconds" in row] for name in rows), strict=False)
        found[f"seconds_over_{baseline}"] = record.spread([ours / theirs for ours, theirs in pairs])
    return found


def main() -> None:
    parser = harness.parser(__doc__, budget=460)
    parser.set_defaults(size=None)
    parser.add_argument("--rounds", type=int, help="3; with --size 2")
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the policy; with --size"
    )
    parser.add_argument("--utilization", type=float, default=0.3, help="the engine's share of the GPU; with --size")
    parser.add_argument("--peaks", action="store_true", help="print peak memory as JSON; used by the benchmark itself")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.size else 3)
    if options.part:
        return measure_part(options)
    if options.size:
        return of_size(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.peaks:
            measured = measure(folder, rounds=1, syncs=3)
            print(json.dumps({name: figures["peak_bytes"] for name, figures in measured.items()}))
            return
        measured = measure(folder, options.rounds, options.syncs)
    peaks = peaks_in_a_process_of_its_own()

    from testing import tiny_models

    model = tiny_models.build(**SHAPE)
    layer_bytes = 2 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    pairs = zip(measured["fp8"]["seconds"], measured["bf16"]["seconds"], strict=True)
    results = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layer_bytes_bf16": layer_bytes,
        "fp8_over_bf16": record.spread([fp8 / bf16 for fp8, bf16 in pairs]),
    }
    for name, figures in measured.items():
        results[name] = {
            "sync_seconds": record.spread(figures["seconds"]),
            "quantize_seconds": record.spread(figures["quantize_seconds"]),
            "peak_layers": record.spread([peak / layer_bytes for peak in peaks[name]]),
            "bytes_sent": figures["bytes_sent"][0],
        }
    record.write("sync", options.rounds * options.syncs, results)


if __name__ == "__main__":
    main()
