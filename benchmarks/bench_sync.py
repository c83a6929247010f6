"""A sync of a 28-layer model (0.5 B parameters, random weights) into a real engine, in FP8 and in BF16.

    python benchmarks/bench_sync.py [--rounds 3] [--syncs 4]

Both go through the same reload. Rounds alternate between the two engines, and the first sync of each is not counted.
Memory is the process's peak during a sync over what it had before, in BF16 decoder layers of the model. vLLM reloads
module by module, so embeddings, which are larger than a layer, set the peak; "fp8_small_vocabulary" is without them. It is
measured in a process of its own, whose allocator returns freed memory at once, which costs time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

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
    """Seconds and peak memory of `syncs` syncs after a first one, in alternating rounds; engine -> figure -> values."""
    import tiny_models
    import torch
    from engine import engines

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
    command = [sys.executable, __file__, "--peaks"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--peaks", action="store_true", help="print peak memory as JSON; used by the benchmark itself")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.peaks:
            measured = measure(folder, rounds=1, syncs=3)
            print(json.dumps({name: figures["peak_bytes"] for name, figures in measured.items()}))
            return
        measured = measure(folder, options.rounds, options.syncs)
    peaks = peaks_in_a_process_of_its_own()

    import tiny_models

    model = tiny_models.ARCHITECTURES["qwen3"][1](tiny_models.config(**SHAPE))
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
