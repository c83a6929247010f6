"""The FP8 KV cache beside the demo: what observing q, k, v costs, and what a biased k does to the mismatch.

    python -m benchmarks.bench_kv_cache

observation  CPU seconds that observation adds to a forward of the demo's policy
k_bias       mismatch of a tiny Qwen2 over the size of a bias on one channel of k per head, with and without the remedy
"""

import tempfile
import time
from pathlib import Path

import torch

from testing import record


def observation_cost(repeats: int) -> dict:
    """CPU seconds of a forward of the demo's policy over a demo batch with and without observation, alternating."""
    from testing import tiny_models
    from trl_fp8.features.kv_cache.observation import QKVObservation
    from trl_fp8.policy.hook import AttentionHook

    model = tiny_models.build()
    hook = AttentionHook(model)
    ids = torch.randint(4, 60, (128, 40))
    mask = torch.ones_like(ids)
    scales = torch.full((hook.layers, 3), 2.0**-6)
    seconds = {"plain": [], "observed": []}
    with torch.no_grad():
        for step in range(2 * repeats + 4):
            name = ("plain", "observed")[step % 2]
            start = time.process_time()
            if name == "observed":
                with hook.observing(QKVObservation(hook.layers, hook.device, scales_L3=scales)):
                    model(input_ids=ids, attention_mask=mask)
            else:
                model(input_ids=ids, attention_mask=mask)
            if step >= 4:
                seconds[name].append(time.process_time() - start)
    extra = [b - a for a, b in zip(seconds["plain"], seconds["observed"], strict=True)]
    return {"forward_seconds": record.spread(seconds["plain"]), "extra_seconds": record.spread(extra)}


def k_bias(biases=(0, 10, 30, 100, 300)) -> list[dict]:
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from testing import engines, tiny_models
    from trl_fp8.features.kv_cache.observation import observe_sequences
    from trl_fp8.policy.hook import AttentionHook
    from trl_fp8.quantization.codec.kv_scales import kv_scales_from_amax

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
            hook = AttentionHook(generation.model)
            observation = observe_sequences(generation.model, hook, prompts.tolist())
            scales = kv_scales_from_amax(observation.amax_L3)
            engines.scales_of(generation).calibrate = lambda scales=scales: scales
            generation.sync_weights()
            score = SamplingParams(max_tokens=1, prompt_logprobs=0)
            inputs = [{"prompt_token_ids": ids} for ids in prompts.tolist()]
            outputs = generation.llm.generate(inputs, score, use_tqdm=False)
            rollout = [
                [row[t].logprob for row, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
                for o in outputs
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
    repeats = 30
    results = {"observation": observation_cost(repeats), "k_bias": k_bias()}
    print(record.write("kv_cache", repeats, results).read_text())


if __name__ == "__main__":
    main()
