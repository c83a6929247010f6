"""A sync into a real engine, against other ways to bring a policy there.

    python -m benchmarks.bench_sync [--pairs 21]
    python -m benchmarks.bench_sync --size qwen3_8b [--dtype float32]       the parts of a sync, and TRL's own (GPU)

Without a size, on CPU: one process holds an FP8 and a BF16 engine of 36 small layers, which are brought to a policy in
turns of each way; ratios are of one turn. Proof and KV scales are part of a sync, calibration is not.

    inplace          this project's: weights are quantized to where the engine reads them
    reload           the same bytes and checks through vLLM's `reload_weights`, which copies and processes each layer
    bf16_load        TRL's own sync, into the BF16 engine: `load_weights` for each parameter, and no check
    bf16_load_once   the same in a single call of `load_weights`

Memory is the process's peak during a sync over what it had before, on 28 larger layers, in bytes and in units of the
codes of a decoder layer and of the engine's largest linear layer. It is measured in a process of its own, whose
allocator returns freed memory at once, which costs time.

With `--size` the model is made on the device and each engine has a process of its own, in alternating rounds.
"seconds" are of a whole sync, between two waits for the device; "parts" of one more, with a wait around each part, and
"verify" is the check before each generation. "trl_bf16" is TRL's own sync of the same policy into a BF16 engine.
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
from torch.utils._python_dispatch import TorchDispatchMode

from testing import record

from . import harness, shapes


DEEP = dict(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=36,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.02,
)
LARGE = dict(  # the decoder of Qwen3-0.6B
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    initializer_range=0.02,
)
VOCABULARIES = (1024, 32768, 131072)  # the second one brings it to 0.5 B parameters
BF16 = {"fp8_weights": False, "kv_cache_dtype": "auto"}


class Operations(TorchDispatchMode):
    """Counts what torch dispatches, views included."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def engine_of(folder: str, shape: dict, **flags):
    """A colocated engine that holds no policy yet; with KV scales, unless there are `flags`."""
    from testing import engines, tiny_models

    scales = None if flags else engines.some_scales(shape["num_hidden_layers"], 1)
    return engines.start(tiny_models.save_checkpoint(Path(folder), **shape), scales, **flags)


def change(policy: torch.nn.Module) -> None:
    with torch.no_grad():
        policy.model.layers[0].mlp.down_proj.weight.add_(0.001)


def reload(generation) -> None:
    """The baseline: finite? -> [quantize -> statistics -> checksum -> vLLM's loader] -> checksums -> KV scales."""
    from torchao.quantization import Float8Tensor

    from trl_fp8.quantization.codec.blockwise import dequantize_weight, first_rows
    from trl_fp8.quantization.codec.digest import digest
    from trl_fp8.quantization.codec.weights import dead_scale
    from trl_fp8.sync.policy_checks import require_finite
    from trl_fp8.sync.weight_stream import weight_stream
    from trl_fp8.sync.writer import SAMPLED_ROWS

    model, recipe, pieces = generation.model, generation.recipe, generation.engine.layout.pieces
    scales, weights, sent, statistics = generation.delivery.carried, dict(model.named_parameters()), {}, []
    scales.prepare()
    block, dead_scale = recipe.format.weight_block, dead_scale(recipe.format, recipe.scale_format)

    def statistics_of(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = weight.detach()[:SAMPLED_ROWS].bfloat16().float()
        quantized = Float8Tensor(codes, scale, block_size=list(block), dtype=torch.bfloat16)
        error = rows - dequantize_weight(first_rows(quantized, SAMPLED_ROWS), torch.float32)
        return torch.stack([error.square().sum(), rows.square().sum(), (scale <= dead_scale).sum().float()])

    def noted(stream):
        before = None
        for name, tensor in stream:
            if name in pieces:
                sent[name] = digest(pieces[name].of_sent(tensor), pieces[name].dtype)
            if (weight := name.removesuffix("_scale_inv")) != name:
                statistics.append(statistics_of(weights[weight], before, tensor))
            yield name, tensor
            before = tensor

    require_finite(model)
    with generation.policy_tensors() as parameters:
        stream = noted(weight_stream(parameters, recipe, scales.value))
        arguments = {"weights_iterator": stream, "is_checkpoint_format": True}
        generation.llm.collective_rpc("reload_weights", kwargs=arguments)
    held = torch.stack([digest(piece.of_engine()) for piece in pieces.values()])
    if held.tolist() != torch.stack([sent[name] for name in pieces]).tolist():
        raise RuntimeError("the engine holds other bytes than were sent")
    scales.verify()
    generation.engine.reset_prefix_cache()
    torch.stack(statistics).tolist()


def load_once(generation) -> None:
    generation.engine.model.load_weights(generation.model.named_parameters())
    generation.engine.reset_prefix_cache()


def require_equal_bytes(generation) -> None:
    """Both ways leave the same in an engine that held zeros."""
    layout, found = generation.engine.layout, []
    for way in (generation.sync_weights, lambda: reload(generation)):
        for tensor in layout.held.values():
            tensor.zero_()
        way()
        found.append(layout.sums().tolist())
    if found[0] != found[1] or not all(found[0]):
        raise RuntimeError("a sync in place and a reload leave different bytes")


def paired(turns: int) -> dict:
    """Seconds of each way, their ratios turn by turn, and operations of one sync."""
    from trl.generation.vllm_generation import VLLMGeneration

    with tempfile.TemporaryDirectory() as folder:
        fp8, bf16 = engine_of(f"{folder}/fp8", DEEP), engine_of(f"{folder}/bf16", DEEP, **BF16)
    require_equal_bytes(fp8)
    ways = {
        "inplace": fp8.sync_weights,
        "reload": lambda: reload(fp8),
        "bf16_load": lambda: VLLMGeneration.sync_weights(bf16),
        "bf16_load_once": lambda: load_once(bf16),
    }
    seconds = {name: [] for name in ways}
    for turn in range(turns + 1):
        change(fp8.model)
        change(bf16.model)
        for name, way in ways.items():
            took = shapes.seconds_of(way)
            if turn:  # the first of each makes what is kept
                seconds[name].append(took)
    dispatched = {}
    for name, way in ways.items():
        with Operations() as operations:
            way()
        dispatched[name] = operations.count
    over = {f"inplace_over_{name}": harness.ratios(seconds["inplace"], seconds[name]) for name in list(ways)[1:]}
    return over | {
        "dispatched_operations": dispatched.pop("inplace"),
        "dispatched_operations_of_others": dispatched,
        "seconds": {name: record.spread(found) for name, found in seconds.items()},
    }


def peaks(syncs: int) -> dict:
    """Size of the vocabulary -> bytes of its embedding and of an engine's layers, peak of each sync."""
    from testing import engines

    found = {}
    for vocabulary in VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            generation = engine_of(folder, LARGE | {"vocab_size": vocabulary})
        generation.sync_weights()
        layer = generation.engine.model.model.layers[0]
        codes = [parameter.nbytes for parameter in layer.parameters() if parameter.element_size() == 1]
        found[vocabulary] = {
            "embedding_bytes": generation.engine.model.model.embed_tokens.weight.nbytes,
            "decoder_layer_bytes": sum(codes),
            "largest_linear_bytes": max(codes),
            "peaks": [],
        }
        for _ in range(syncs):
            change(generation.model)
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak (Linux)
            before = memory("VmRSS")
            generation.sync_weights()
            found[vocabulary]["peaks"].append(memory("VmHWM") - before)
        engines.shutdown(generation.llm)
    return found


def memory(which: str) -> int:
    """`VmRSS` or `VmHWM` (peak) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


def peaks_in_a_process_of_its_own() -> dict:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-m", "benchmarks.bench_sync", "--peaks"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = {}
    for vocabulary, found in json.loads(done.stdout.splitlines()[-1]).items():
        peaks, units = found.pop("peaks"), {"bytes": 1}
        units |= {f"{of}s": found[f"{of}_bytes"] for of in ("decoder_layer", "largest_linear")}
        spreads = {f"peak_{unit}": record.spread([peak / size for peak in peaks]) for unit, size in units.items()}
        results[f"vocabulary_{vocabulary}"] = found | spreads
    return results


def start(name: str, folder: str, options: argparse.Namespace):
    """A policy of `options.size` and a colocated engine of precision `name`, "trl_bf16" being TRL's own class."""
    import trl.generation.vllm_generation as trl_generation
    from transformers import AutoTokenizer
    from vllm import LLM

    from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
    from trl_fp8.features.kv_cache.engine_scales import EngineScales
    from trl_fp8.quantization.codec.kv_scales import KVScales
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
    parts = [EngineScales(lambda: scales)] if recipe.fp8_kv_cache else []
    return FP8VLLMGeneration(recipe=recipe, parts=parts, engine_kwargs=user, **arguments)


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
    from trl_fp8.sync import delivery
    from trl_fp8.sync.writer import Writer

    watch = shapes.Stopwatch()
    watch.time(Writer, "write", "write")
    watch.time(Writer, "inspect", "inspect")
    watch.time(delivery, "audit", "audit")
    if generation.delivery.carried is not None:
        watch.time(generation.delivery.carried, "write", "scales")
        watch.time(generation.delivery.carried, "verify", "scales")
    generation.sync_weights()
    return dict(watch.seconds) | {"verify": shapes.seconds_of(generation.delivery.verify)}


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
    parser.add_argument("--pairs", type=int, default=21, help="turns; without --size")
    parser.add_argument("--rounds", type=int, default=2, help="with --size")
    parser.add_argument("--syncs", type=int, default=4, help="of each engine in a round; with --size")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the policy; with --size"
    )
    parser.add_argument("--utilization", type=float, default=0.3, help="the engine's share of the GPU; with --size")
    parser.add_argument("--peaks", action="store_true", help="print peak memory as JSON; used by the benchmark itself")
    options = parser.parse_args()
    if options.part:
        measure_part(options)
    elif options.size:
        of_size(options)
    elif options.peaks:
        print(json.dumps(peaks(syncs=3)))
    else:
        memory_of = peaks_in_a_process_of_its_own()  # before engines take this process's port
        print(record.write("sync", options.pairs, paired(options.pairs) | {"memory": memory_of}).read_text())


if __name__ == "__main__":
    main()
