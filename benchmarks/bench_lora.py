"""LoRA on an FP8 base that trainer and engine share, against adapters that each sync merges: memory, syncs, mismatch.

    python -m benchmarks.bench_lora [--turns 11] [--seeds 3] [--results DIR]

    merged      fp8_base=False: a whole base in the trainer, too; a sync merges adapters into it and sends all of it
    shared      fp8_base=True: FP8 weights in the engine alone, what else a policy has in BF16; a sync sends adapters
    full        the latter, and fp8_forward="one_forward"

Memory and syncs are those of 24 layers with 0.1 B parameters and adapters of rank 16 on all linears. Memory is that of
all tensors of policy and engine, each storage once, with adapters and scales, without the KV cache and what training
adds; "elsewhere_bytes" are those of all other tensors in the process. A merged base is in FP32, as TRL loads it, or in
BF16: `memory_ratio` is over the smaller one, BF16. A sync's time is its report's, with a KV cache
in BF16, whose scales need no calibration; ratios are of one turn, in which all adapters change and each path syncs.

The mismatch is the mean |trainer - rollout| log-prob of 24 layers with an FP8 KV cache, in groups of uneven lengths as
in measure_depth, under BF16 autocast, as TRL trains. Weights are random, or pretrained on the addition task; a seed
draws random weights, adapters (not zero; the same ones on each path) and samples. Both paths are compared on what both
engines sample, which each gives its log-probs as a prompt: those are the ones that it decodes with, "prefill_decode"
of one forward says. `mismatch_full` is of tokens as they were decoded, and the larger one of the two weights.

Each cell runs in a process of its own, the file is written after it; a second run of the same command, commit,
versions and host goes on where the first one ended.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torchao.quantization import Float8Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing import engines, record, tiny_models
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.shared_base.engine_base import BasePart
from trl_fp8.features.shared_base.held_base import SharedBase
from trl_fp8.features.shared_base.stored_base import load_without_base
from trl_fp8.recipe.recipe import recipe_for_model

from . import harness, shapes
from .bench_sync import Operations
from .deep_policies import DeepPolicy, RandomPolicy, TrainedPolicy
from .measure_depth import PROMPTS, decoded, in_a_process, in_step, of_seed, prefilled
from .rollouts import Rollouts, score


NAME, LAYERS, RANK = "lora", 24, 16
SHAPE = dict(  # a quarter of the parameters are the embedding's, as in Qwen3-0.6B
    vocab_size=49152,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    initializer_range=0.02,
    tied=True,
)
SCALING = 0.25  # so that sBA has 8 % of the root mean square of the random policy's W
MERGED, SHARED = {"dtype": torch.float32}, {}
HELD = {"merged_float32": MERGED, "merged_bfloat16": {"dtype": torch.bfloat16}, "shared": SHARED}
PATHS = {"merged": MERGED, "shared": SHARED}
GROUPS = 2  # that each engine samples, times those of the policy
POLICIES: dict[str, type[DeepPolicy]] = {"random": RandomPolicy, "trained": TrainedPolicy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=11, help="in each of which both paths sync")
    parser.add_argument("--seeds", type=int, default=3, help="of the mismatch")
    parser.add_argument("--layers", type=int, choices=(2, LAYERS), default=LAYERS, help="2 shows that it runs")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the file")
    parser.add_argument("--cell", help="measure this one only and print it; used by the benchmark itself")
    options = parser.parse_args()
    if options.cell:
        what, *of = options.cell.split()
        return harness.emit(MEASURES[what](options, *of))
    options.results.mkdir(parents=True, exist_ok=True)
    found = (record.held(NAME, options.turns, options.results) or {"cells": {}})["cells"]
    for cell in (one for one in cells() if one not in found):
        if (row := in_a_process(cell)) is None:
            raise SystemExit(f"failed, see the log: {cell}. What was measured is in the file.")
        found[cell] = row
        record.write(NAME, options.turns, summary(found) | {"cells": found}, options.results)
    print(record.path(NAME, options.results).read_text())


def cells() -> Iterator[str]:
    yield "sync"
    yield from (f"memory {path}" for path in HELD)
    yield from (f"{what} {weights}" for what in ("full", "mismatch") for weights in POLICIES)


def summary(found: dict[str, dict]) -> dict:
    """The numbers that matter, as soon as the cells for them are there."""
    told = {"memory_ratio": None, "memory_ratio_float32": None, "sync_ratio": None, "mismatch_full": None}
    if all(f"memory {path}" in found for path in HELD):
        sizes = {path: found[f"memory {path}"]["bytes"] for path in HELD}
        told["memory_ratio"] = sizes["shared"] / sizes["merged_bfloat16"]
        told["memory_ratio_float32"] = sizes["shared"] / sizes["merged_float32"]
    if "sync" in found:
        told["sync_ratio"] = found["sync"]["ratio"]["median"]
    if all(f"full {weights}" in found for weights in POLICIES):
        told["mismatch_full"] = max(found[f"full {weights}"]["mean"] for weights in POLICIES)
    for path in PATHS:
        of = {weights: found.get(f"mismatch {weights}") for weights in POLICIES}
        told[f"mismatch_{path}"] = {weights: row[path]["mean"] for weights, row in of.items() if row}
    return told


def engine_of(folder: str, seed: int, dtype: torch.dtype | None = None, parts: Sequence[EnginePart] = (), **flags):
    """An engine that holds no policy yet, and one with adapters that do not depend on its dtype. Without a `dtype` the
    base is the engine's, and the policy's is what fp8_base=True gives it.
    """
    load, recipe_for = AutoModelForCausalLM.from_pretrained, partial(recipe_for_model, **flags)
    if dtype is None:
        policy, stored = load_without_base(load, folder, recipe_for)
        recipe = stored.recipe
    else:
        policy = load(folder, dtype=dtype)
        recipe = recipe_for(policy)
    config = LoraConfig(r=RANK, lora_alpha=SCALING * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(policy.to(shapes.DEVICE), config)
    draw_adapters(policy, seed)
    if dtype is None:
        parts = [*parts, BasePart(SharedBase(policy, stored, policy.device))]
    return engines.start(folder, model=policy, recipe=recipe, parts=parts)


@torch.no_grad()
def draw_adapters(policy: nn.Module, seed: int) -> None:
    """Other adapters, of the size that PEFT gives ones that do not start at zero."""
    generator = torch.Generator().manual_seed(seed)
    for _, adapter in adapters(policy):
        adapter.copy_((3 * adapter.shape[1]) ** -0.5 * torch.randn(adapter.shape, generator=generator))


def adapters(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name]


def sync(options: argparse.Namespace) -> dict:
    """Seconds, bytes and operations of syncs of both paths, turn by turn."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_models.save_checkpoint(Path(folder), **(SHAPE | {"num_hidden_layers": options.layers}))
        paths = {path: engine_of(checkpoint, 0, kv_cache_dtype="auto", **how) for path, how in PATHS.items()}
    reports, seconds, operations = {}, {path: [] for path in paths}, {}
    for turn in range(options.turns + 1):
        for path, generation in paths.items():
            draw_adapters(generation.model, turn)
            generation.sync_weights()
            reports[path] = generation.last_sync
            if turn:  # the first one of an engine makes what is kept
                seconds[path].append(generation.last_sync.seconds)
    for path, generation in paths.items():
        with Operations() as counted:
            generation.sync_weights()
        operations[path] = counted.count
    return {
        "ratio": harness.ratios(seconds["shared"], seconds["merged"]),
        "seconds": {path: record.spread(found) for path, found in seconds.items()},
        "bytes_sent": {path: report.bytes_sent for path, report in reports.items()},
        "tensors_audited": {path: report.audited_tensors for path, report in reports.items()},
        "dispatched_operations": operations,
    }


def memory(options: argparse.Namespace, path: str) -> dict:
    """Bytes of a policy and its engine after a sync."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_models.save_checkpoint(Path(folder), **(SHAPE | {"num_hidden_layers": options.layers}))
        generation = engine_of(checkpoint, 0, kv_cache_dtype="auto", **HELD[path])
    generation.sync_weights()
    policy, engine = (list(tensors_of(model)) for model in (generation.model, generation.engine.model))
    cache = [layer.kv_cache for layer in attention_layers(generation.engine.model).values()]
    gc.unfreeze()  # vLLM hides what is there after its start
    gc.collect()
    everything = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    known = storages([*policy, *engine])
    of_adapters = {"policy": adapters(generation.model), "engine": adapters(generation.engine.model)}
    counted = known | storages(cache)
    return {
        "bytes": sum(known.values()),
        "policy_bytes": sum(storages(policy).values()),
        "engine_bytes": sum(storages(engine).values()),
        "adapter_bytes": {of: sum(storages(held for _, held in each).values()) for of, each in of_adapters.items()},
        "elsewhere_bytes": sum((storages(everything) | counted).values()) - sum(counted.values()),
        "parameters": shapes.numel(AutoModelForCausalLM.from_config(generation.model.config)),
    }


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and the codes that a policy's modules compute with."""
    yield from model.parameters()
    yield from model.buffers()
    for codes in (getattr(module, "codes", None) for module in model.modules()):
        if isinstance(codes, Float8Tensor):
            yield from (codes.qdata, codes.scale)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of what is behind tensors."""
    return {held.data_ptr(): held.nbytes() for held in (tensor.untyped_storage() for tensor in tensors)}


def mismatch(options: argparse.Namespace, weights: str) -> dict:
    """Of both paths, on what both engines sample."""
    source, found = POLICIES[weights](), {path: [] for path in PATHS}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            checkpoint = seeded(source, Path(folder), options.layers, seed)
            engines_of = {path: engine_of(checkpoint, seed, **how) for path, how in PATHS.items()}
            for generation in engines_of.values():
                stack.enter_context(in_step(generation, source.prompts()[:PROMPTS], full=False))
            groups = range(seed * GROUPS * source.groups, (seed + 1) * GROUPS * source.groups)
            sampled = [
                Rollouts(decoded(generation, source, group), generation.accelerator.device)
                for group in groups
                for generation in engines_of.values()
            ]
            for path, generation in engines_of.items():
                each = [one.distances(scored(generation.model, one), prefilled(generation, one)) for one in sampled]
                found[path].append(torch.cat(each).double().cpu())
        for generation in engines_of.values():
            engines.shutdown(generation.llm)
    means = {path: [of.mean().item() for of in each] for path, each in found.items()}
    return {
        path: {"mean": torch.cat(each).mean().item(), "seeds": means[path], "largest": torch.cat(each).max().item()}
        for path, each in found.items()
    } | {
        "shared_over_merged": [ours / theirs for ours, theirs in zip(means["shared"], means["merged"], strict=True)],
        "tokens": [len(of) for of in found["shared"]],
    }


def full(options: argparse.Namespace, weights: str) -> dict:
    """The mismatch where the trainer follows the engine, as it decodes."""
    source, found = POLICIES[weights](), []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = seeded(source, Path(folder), options.layers, seed)
            generation = engine_of(checkpoint, seed, parts=[SharedKernelsPart()], **SHARED)
        found.append(of_seed(generation, source, seed, True, scored))
        engines.shutdown(generation.llm)
    distances = torch.cat([of["mismatch"] for of in found])
    return {
        "mean": distances.mean().item(),
        "seeds": [of["mismatch"].mean().item() for of in found],
        "largest": distances.max().item(),
        "prefill_decode": {"largest": max(of["prefill_decode"].max().item() for of in found)},
        "tokens": len(distances),
        "decoded_alone": sum(of["decoded_alone"] for of in found),
    }


def seeded(source: DeepPolicy, folder: Path, layers: int, seed: int) -> str:
    """A checkpoint in BF16 with the weights of `seed`, from which all paths start."""
    given = source.checkpoint(folder / "given", layers)
    model = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32)
    source.seed(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder / "seeded")
    AutoTokenizer.from_pretrained(given).save_pretrained(folder / "seeded")
    return str(folder / "seeded")


def scored(policy: nn.Module, rollouts: Rollouts) -> Tensor:
    with torch.autocast(shapes.DEVICE, dtype=torch.bfloat16):
        return score(policy, rollouts)


MEASURES = {"sync": sync, "memory": memory, "mismatch": mismatch, "full": full}


if __name__ == "__main__":
    main()
