"""A sync of a 28-layer model (0.5 B parameters, random weights) into a real engine, in FP8 and in BF16.

    python benchmarks/bench_sync.py [--rounds 3] [--syncs 4]

Both go through the same reload. Rounds alternate between the two engines, and the first sync of each is not counted.
Memory is the process's peak during a sync over what it had before, in BF16 decoder layers of the model. vLLM reloads
module by module, so embeddings, which are larger than a layer, set the peak; "fp8_small_vocabulary" is without them.
"""

import argparse
import os
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


def measure(checkpoint: str, syncs: int, recipe_flags: dict) -> dict:
    """Seconds and peak memory of `syncs` syncs after a first one."""
    import torch
    from engine import engines

    scales = engines.some_scales(SHAPE["num_hidden_layers"], 1) if not recipe_flags else None
    generation = engines.start(checkpoint, scales, **recipe_flags)
    generation.sync_weights()
    seconds, quantize, peaks = [], [], []
    with torch.no_grad():
        for _ in range(syncs):
            generation.model.model.layers[0].mlp.down_proj.weight.add_(0.001)
            reset_peak()
            before = memory("VmRSS")
            generation.sync_weights()
            peaks.append(memory("VmHWM") - before)
            seconds.append(generation.last_sync.seconds)
            quantize.append(generation.last_sync.quantize_seconds)
    sent = generation.last_sync.bytes_sent
    engines.shutdown(generation.llm)
    return {"seconds": seconds, "quantize_seconds": quantize, "peak_bytes": peaks, "bytes_sent": sent}


def reset_peak() -> None:
    """Make the kernel forget the process's peak resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(which: str) -> int:
    """`VmRSS` or `VmHWM` (peak) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--syncs", type=int, default=4)
    options = parser.parse_args()
    import tiny_models

    per_engine = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        for size in {size for size, _ in ENGINES.values()}:
            shape = SHAPE | {"vocab_size": size}
            tiny_models.save_checkpoint(Path(folder, str(size)), initializer_range=0.02, **shape)
        for _ in range(options.rounds):
            for name, (size, flags) in ENGINES.items():
                per_engine[name].append(measure(f"{folder}/{size}", options.syncs, flags))
    model = tiny_models.ARCHITECTURES["qwen3"][1](tiny_models.config(**SHAPE))
    layer_bytes = 2 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())

    def every(name: str, key: str) -> list[float]:
        return [value for round_ in per_engine[name] for value in round_[key]]

    ratios = [f / b for f, b in zip(every("fp8", "seconds"), every("bf16", "seconds"), strict=True)]
    results = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layer_bytes_bf16": layer_bytes,
        "fp8_over_bf16": record.spread(ratios),
    }
    for name in ENGINES:
        results[name] = {
            "sync_seconds": record.spread(every(name, "seconds")),
            "quantize_seconds": record.spread(every(name, "quantize_seconds")),
            "peak_layers": record.spread([peak / layer_bytes for peak in every(name, "peak_bytes")]),
            "bytes_sent": per_engine[name][0]["bytes_sent"],
        }
    record.write("sync", options.rounds * options.syncs, results)


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # freed memory goes back at once, so that peaks are what is held
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"})
    main()
