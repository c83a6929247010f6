"""The FP8 KV cache in numbers: simulated in the trainer, calibrated in two ways, and under a biased k.

    python benchmarks/bench_kv_cache.py [--seeds 3]

simulation   mismatch of the addition demo with and without simulate_kv_cache, same seeds, with FP8 and BF16 weights
calibration  cost and saturation of kv_calibration=rollout and =policy on the demo; what observation adds to a forward
k_bias       mismatch of a tiny Qwen2 over the size of a bias on one channel of k per head, with and without the remedy
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import bench_demo
import record
import torch


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

BF16_WEIGHTS = ["--fp8_weights", "false"]
SIMULATED = ["--simulate_kv_cache", "true"]
RUNS = {
    "fp8_linears_kv": [],
    "fp8_linears_kv_simulated": SIMULATED,
    "kv_only": BF16_WEIGHTS,
    "kv_only_simulated": [*BF16_WEIGHTS, *SIMULATED],
    "policy_calibration": ["--kv_calibration", "policy"],
}
KEYS = ("mismatch_mean", "reward_end", "kv_saturation_max", "calibration_seconds_median", "step_seconds_median")


def demo_runs(seeds: int) -> dict:
    bench_demo.PRECISIONS.update(RUNS)
    summaries = {name: [bench_demo.run(name, seed) for seed in range(seeds)] for name in RUNS}
    results = {
        name: {key: record.spread([row[key] for row in rows]) for key in KEYS} for name, rows in summaries.items()
    }
    for name in ("fp8_linears_kv", "kv_only"):
        pairs = zip(summaries[f"{name}_simulated"], summaries[name], strict=True)
        ratios = [on["mismatch_mean"] / off["mismatch_mean"] for on, off in pairs]
        results[f"{name}_simulated"]["mismatch_over_not_simulated"] = record.spread(ratios)
    for name in ("fp8_linears_kv", "policy_calibration"):
        shares = [row["calibration_seconds_median"] / row["step_seconds_median"] for row in summaries[name]]
        results[name]["calibration_share_of_step"] = record.spread(shares)
    return results


def observation_cost(repeats: int = 30) -> dict:
    """CPU seconds of a forward of the demo's policy over a demo batch with and without observation, alternating."""
    import tiny_models

    from trl_fp8.policy.attention_tap import AttentionTap, QKVObservation

    torch.manual_seed(0)
    model = tiny_models.ARCHITECTURES["qwen3"][1](tiny_models.config()).eval()
    tap = AttentionTap(model)
    ids = torch.randint(4, 60, (128, 40))
    mask = torch.ones_like(ids)
    scales = torch.full((tap.layers, 3), 2.0**-6)
    seconds = {"plain": [], "observed": []}
    with torch.no_grad():
        for step in range(2 * repeats + 4):
            name = ("plain", "observed")[step % 2]
            start = time.process_time()
            if name == "observed":
                with tap.observing(QKVObservation(tap.layers, tap.device, scales_L3=scales)):
                    model(input_ids=ids, attention_mask=mask)
            else:
                model(input_ids=ids, attention_mask=mask)
            if step >= 4:
                seconds[name].append(time.process_time() - start)
    extra = [b - a for a, b in zip(seconds["plain"], seconds["observed"], strict=True)]
    return {"forward_seconds": record.spread(seconds["plain"]), "extra_seconds": record.spread(extra)}


def k_bias(biases=(0, 10, 30, 100, 300)) -> list[dict]:
    import tiny_models
    from engine import engines
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from trl_fp8.numerics.kv_scales import kv_scales_from_amax
    from trl_fp8.policy.attention_tap import AttentionTap
    from trl_fp8.policy.kv_calibration import observe_sequences

    prompts = torch.randint(4, 60, (16, 48), generator=torch.Generator().manual_seed(1))
    rows = []
    for bias in biases:
        row = {"bias": bias}
        for name, skip in (("mismatch_per_tensor", ()), ("mismatch_layer_0_in_bf16", (0,))):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = tiny_models.save_checkpoint(Path(folder) / "qwen2", "qwen2")
                model = AutoModelForCausalLM.from_pretrained(checkpoint)
                with torch.no_grad():
                    model.model.layers[0].self_attn.k_proj.bias[[5, 64 + 33]] += torch.tensor([bias, -bias])
                model.save_pretrained(checkpoint)
                generation = engines.start(checkpoint, fp8_weights=False, kv_cache_skip_layers=skip)
            tap = AttentionTap(generation.model)
            observation = observe_sequences(generation.model, tap, prompts.tolist())
            scales = kv_scales_from_amax(observation.amax_L3)
            generation.calibrate = lambda scales=scales: scales
            generation.sync_weights()
            score = SamplingParams(max_tokens=1, prompt_logprobs=0)
            inputs = [{"prompt_token_ids": ids} for ids in prompts.tolist()]
            outputs = generation.llm.generate(inputs, score, use_tqdm=False)
            rollout = [
                [row[t].logprob for row, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)] for o in outputs
            ]
            with torch.no_grad():
                log_probs = generation.model(input_ids=prompts).logits[:, :-1].log_softmax(-1)
            ours = log_probs.gather(-1, prompts[:, 1:, None])[..., 0]
            row[name] = (ours - torch.tensor(rollout)).abs().mean().item()
            row["logit_error_layer_0"] = observation.logit_error_L[0].item()
            engines.shutdown(generation.llm)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    results = {"demo": demo_runs(seeds), "observation": observation_cost(), "k_bias": k_bias()}
    step = median([results["demo"]["fp8_linears_kv"]["step_seconds_median"]["median"]])
    results["observation"]["extra_share_of_step"] = results["observation"]["extra_seconds"]["median"] / step
    print(record.write("kv_cache", seeds, results).read_text())


if __name__ == "__main__":
    main()
