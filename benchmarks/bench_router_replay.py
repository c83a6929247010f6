"""Router replay on the addition demo's mixture of experts: what it removes from the mismatch, and whether it learns.

    python -m benchmarks.bench_router_replay [--seeds 3] [--prompts 128] [--reuse]

`same_rollouts` samples once from each seed's pretrained policy and scores the very same tokens with the trainer's own
routes and with those of the engine: a paired difference, so that sampling noise cancels. Engines: BF16; FP8 linears
and KV cache with BF16 experts, which is what vLLM runs on CPU; and FP8 experts too, on the tests' reference kernel.
`flow`: the trainer's forward in the engine's FP8.

`training` runs examples/grpo_addition.py with router_replay=monitor, rollout and policy, once per seed.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from vllm import SamplingParams

from testing import record
from trl_fp8.features.kv_cache.calibration import PROMPTS_ONLY_MARGIN
from trl_fp8.features.router_replay.replay import RouterReplay, RouteTally
from trl_fp8.features.router_replay.routes import padded_routes

from . import harness
from .bench_demo import run_demo
from .rollouts import Rollouts, score


ROOT = Path(__file__).parents[1]

ENGINES = {
    "bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"},
    "fp8_linears_kv": {},
    "fp8_linears_kv_experts": {"expert_kernels": True},
}
COMPLETIONS = 4  # of each prompt
MODES = ("monitor", "rollout", "policy")


def same_rollouts(seed: int, prompt_count: int) -> dict:
    """Mismatch and disagreement of each engine's rollouts, scored with own and with replayed routes."""
    from examples.addition_task import PretrainRecipe, cached_checkpoint, reinforcement_dataset
    from testing import engines
    from testing.reference_experts import reference_fp8_experts
    from testing.rollouts import calibrated, follow
    from trl_fp8.features.router_replay.engine_routes import RouteLog

    checkpoint = str(cached_checkpoint(PretrainRecipe.of("qwen3_moe", seed=seed)))
    prompts = [
        row["prompt"] for row in reinforcement_dataset().select(range(prompt_count)) for _ in range(COMPLETIONS)
    ]
    found = {}
    for name, flags in ENGINES.items():
        with reference_fp8_experts(fused_activation=True) if flags.get("expert_kernels") else nullcontext():
            kwargs = {"max_num_seqs": 128, "kv_cache_memory_bytes": 2**28}
            log = RouteLog()
            generation = engines.start(checkpoint, parts=[log], engine_kwargs=kwargs, **flags)
        ids = [generation.processing_class(prompt)["input_ids"] for prompt in prompts]
        scales = hook = None
        if generation.recipe.fp8_kv_cache:
            margin = generation.recipe.kv_scale_margin * PROMPTS_ONLY_MARGIN
            hook, scales = calibrated(generation, ids[::COMPLETIONS], margin)
        else:
            generation.sync_weights()
        torch.manual_seed(seed)
        sampling = SamplingParams(temperature=1.0, max_tokens=32, logprobs=0)
        outputs = generation.llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        rollouts = Rollouts(outputs, generation.accelerator.device)
        sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        replay = RouterReplay(generation.model)
        routes, prompts = log.notes_on(sequences), [0] * len(sequences)
        field = padded_routes(replay, routes, prompts, prompt_columns=0, columns=rollouts.ids.shape[1])
        for flow in (False, True) if hook is not None else (False,):
            if flow:
                follow(generation, hook)
                hook.simulate(scales.values.to(hook.device))
            label = f"{name}, flow" if flow else name
            found[label] = {
                side: scored(generation, rollouts, replay, field, side == "replay") for side in ("own", "replay")
            }
        engines.shutdown(generation.llm)
    return found


def scored(generation, rollouts: Rollouts, replay: RouterReplay, field: torch.Tensor, replays: bool) -> dict:
    tally = RouteTally(rollouts.ids.device)
    with replay.during(field, replay=replays, tally=tally):
        logps = score(generation.model, rollouts)
    known, used, own = tally.counts.tolist()
    log_r = ((logps - rollouts.logps) * rollouts.completion).double()
    tokens = rollouts.completion.sum().item()
    return {
        "mismatch_mean": log_r.abs().sum().item() / tokens,
        "mismatch_max": log_r.abs().max().item(),
        "k3_kl": (torch.expm1(log_r) - log_r).sum().item() / tokens,
        "disagreement": 1 - used / known,
        "own_disagreement": 1 - own / known,
    }


def training(mode: str, seed: int, reuse: bool) -> dict:
    """`summary.json` of one run of the demo."""
    folder = ROOT / "outputs" / "bench_router_replay" / f"{mode}-{seed}"
    if reuse and (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text())
    return run_demo(folder, ["--seed", seed, "--router_replay", mode], "grpo_addition_moe")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--reuse", action="store_true", help="Take runs that outputs/bench_router_replay has already.")
    parser.add_argument("--one-seed", type=int, help="Measure the same rollouts of this seed and print them.")
    given = parser.parse_args()
    if given.one_seed is not None:
        print(json.dumps(same_rollouts(given.one_seed, given.prompts)))
        return
    per_seed = []
    for seed in range(given.seeds):  # in processes of their own: an engine leaves its mark on a process
        words = ["--one-seed", str(seed), "--prompts", str(given.prompts)]
        command = [sys.executable, "-m", "benchmarks.bench_router_replay", *words]
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29690 + seed)}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ports)
        if done.returncode:
            raise RuntimeError(f"seed {seed} failed:\n{done.stderr[-4000:]}")
        per_seed.append(json.loads(done.stdout.splitlines()[-1]))
    results = {"same_rollouts": {}, "training": {}}
    for label in per_seed[0]:
        sides = {
            side: {
                key: record.spread([seed[label][side][key] for seed in per_seed]) for key in per_seed[0][label][side]
            }
            for side in ("own", "replay")
        }
        ratios = {
            f"{key}_ratio": harness.ratios(*([s[label][side][key] for s in per_seed] for side in ("replay", "own")))
            for key in ("mismatch_mean", "mismatch_max", "k3_kl")
            if all(s[label]["own"][key] for s in per_seed)
        }
        results["same_rollouts"][label] = sides | ratios
    runs = {mode: [training(mode, seed, given.reuse) for seed in range(given.seeds)] for mode in MODES}
    keys = ("reward_start", "reward_end", "mismatch_mean", "router_disagreement", "router_own_disagreement")
    for mode, rows in runs.items():
        results["training"][mode] = {key: record.spread([row[key] for row in rows]) for key in keys}
        results["training"][mode]["step_seconds"] = record.spread([row["step_seconds_median"] for row in rows])
    for name, key in (("mismatch_ratio", "mismatch_mean"), ("step_seconds_ratio", "step_seconds_median")):
        replayed, own = ([row[key] for row in runs[mode]] for mode in ("rollout", "monitor"))
        results["training"][name] = harness.ratios(replayed, own)
    print(record.write("router_replay", given.seeds, results).read_text())


if __name__ == "__main__":
    main()
