"""The mismatch ladder: how far trainer and rollout log-probs are apart,
and what each part of one precision flow removes.

    python -m benchmarks.measure_mismatch [--prompts 256] [--results DIR]

Three engines (BF16; FP8 linears; + FP8 KV cache) sample the same prompts of the addition demo with the same seed. The
trainer scores each engine's own tokens: as it is, and those of the FP8 engine also in eight other ways. These engines
are eager. The other rows are of the whole flow: with two compiled engines, one of which keeps its roundings; and, on
CPU, with engines that round the weights of their attention as GPU kernels do (testing/played_attention.py),
which the trainer does not, or does in other tiles. A row's mismatch is the mean |trainer - rollout| log-prob over
completion tokens, its interval a bootstrap over sequences. On CPU the trainer computes in FP32 where a row says
nothing else, on GPU under BF16 autocast.

`layers` compares the hidden states behind each decoder layer on one sequence: norm of the difference over norm. The
file is written again after each engine.
"""

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from vllm import SamplingParams

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.policy.attention.calibration import PROMPTS_ONLY_MARGIN, observe_sequences
from trl_fp8.policy.attention.hook import AttentionHook
from trl_fp8.policy.flow import gemm as fp8_gemm
from trl_fp8.policy.flow.bf16_modules import BF16Modules
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.precision_flow import PrecisionFlow
from trl_fp8.quantization.blockwise import dequantize_weight
from trl_fp8.quantization.kv_scales import KVScales, kv_scales_from_amax
from trl_fp8.upstream.vllm import engine_model

from . import record
from .pictures import plot_ladder


ROOT = Path(__file__).parents[1]

ENGINES = {
    "bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"},
    "fp8_linears": {"kv_cache_dtype": "auto"},
    "fp8_linears_kv": {},
}
WHOLE_FLOW = {"forward": "full", "simulate": True}
# What the trainer does with the rollouts of the engine with FP8 linears and FP8 KV cache
TRAINERS = {
    "weights_fake_quant": {"forward": "weights"},
    "full_forward": {"forward": "full"},
    "kv_simulated": {"simulate": True},
    "full_forward_kv_simulated": WHOLE_FLOW,
    "fp16_trainer": {"autocast": torch.float16},
    "bf16_trainer": {"autocast": torch.bfloat16},
    "full_forward_kv_simulated_fp32_between": WHOLE_FLOW | {"bf16_between": False},
    "full_forward_kv_simulated_reordered": WHOLE_FLOW | {"reorder": True},
}
# What vLLM's compiler does by itself. A CPU engine is told otherwise in any case
UNPINNED = {
    "compilation_config": {"custom_ops": ["none"], "inductor_compile_config": {"emulate_precision_casts": False}},
    "kernel_config": {"ir_op_priority": {"fused_add_rms_norm": ["native"]}},
}
# Engines whose tokens the trainer scores with the whole flow
COMPILED = {
    "compiled_engine": {"match_rounding": True, "engine_kwargs": {"enforce_eager": False}},
    "compiled_engine_roundings_not_kept": {
        "engine_kwargs": {"enforce_eager": False} | ({} if torch.cuda.is_available() else UNPINNED)
    },
}
TILE = 8  # keys; sequences have about 40
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Engines that round their attention weights -> dtype in the engine, what the trainer does
ATTENTION = {
    "attention_weights_bf16": (BF16, {}),
    "attention_weights_bf16_in_trainer_too": (BF16, {"attention": BF16}),
    "attention_weights_e4m3": (E4M3, {}),
    "attention_weights_e4m3_simulated": (E4M3, {"weight_offset": 256.0}),
}
BOOTSTRAPS = 2000
COMPLETIONS = 4  # of each prompt


class Rollouts:
    """Sampled completions, right-padded: ids, mask, completion mask `[B, T]` and the engine's log-probs of them."""

    def __init__(self, outputs: list, device: torch.device):
        rows = [(list(output.prompt_token_ids), sampled) for output in outputs for sampled in output.outputs]
        shape = len(rows), max(len(prompt) + len(completion.token_ids) for prompt, completion in rows)
        self.ids, self.mask, self.completion = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        self.logps = torch.zeros(shape)
        for row, (prompt, completion) in enumerate(rows):
            tokens = prompt + list(completion.token_ids)
            span = slice(len(prompt), len(tokens))
            self.ids[row, : len(tokens)] = torch.tensor(tokens)
            self.mask[row, : len(tokens)] = 1
            self.completion[row, span] = 1
            sampled = zip(completion.logprobs, completion.token_ids, strict=True)
            self.logps[row, span] = torch.tensor([logprobs[token].logprob for logprobs, token in sampled])
        for name in ("ids", "mask", "completion", "logps"):
            setattr(self, name, getattr(self, name).to(device))

    def row(self, name: str, logps: torch.Tensor) -> dict:
        """Mismatch of the trainer's `logps` `[B, T]`, with a 95 % interval over sequences."""
        distance = (logps - self.logps).abs() * self.completion
        sums, counts = distance.sum(1).cpu(), self.completion.sum(1).cpu()
        draws = torch.randint(len(sums), (BOOTSTRAPS, len(sums)), generator=torch.Generator().manual_seed(0))
        means = sums[draws].sum(1) / counts[draws].sum(1)
        interval = torch.quantile(means, torch.tensor([0.025, 0.975])).tolist()
        return {
            "name": name,
            "mismatch_mean": (sums.sum() / counts.sum()).item(),
            "ci95": interval,
            "n": int(counts.sum()),
            "mismatch_max": distance.max().item(),
        }


def trainer_model(generation: FP8VLLMGeneration, scales: KVScales | None, variant: dict) -> torch.nn.Module:
    """A copy of the policy that computes as `variant` says; its hook, if any, as attribute `hook`."""
    model = copy.deepcopy(generation.model)
    hook = AttentionHook(model) if scales is not None else None
    if forward := variant.get("forward"):
        recipe = generation.recipe
        flow = FP8Flow(forward, "bf16", recipe.format, recipe.scale_format, generation.numerics.linears)
        install = BF16Modules.install
        if not variant.get("bf16_between", True):
            BF16Modules.install = lambda model: None
        PrecisionFlow(model, generation.recipe, flow, hook)
        BF16Modules.install = install
    if variant.get("simulate"):
        hook.simulate(scales.values.to(hook.device))
        hook.follow(generation.numerics.query_rounded, variant.get("weight_offset"))
    return model


def autocast(variant: dict, device: torch.device):
    dtype = variant.get("autocast", torch.bfloat16 if device.type == "cuda" else None)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def reordered():
    """GEMMs that add up their terms in another order, which is what another kernel on the same codes would do."""
    gemm = fp8_gemm.fake_quant_gemm

    def shuffled(a, b, dtype):
        order = torch.randperm(a.qdata.shape[1], generator=torch.Generator().manual_seed(0))
        a, b = dequantize_weight(a, torch.float32), dequantize_weight(b, torch.float32)
        return a[:, order] @ b[:, order].T

    fp8_gemm.fake_quant_gemm = shuffled
    try:
        yield
    finally:
        fp8_gemm.fake_quant_gemm = gemm


@torch.no_grad()
def score(model: torch.nn.Module, rollouts: Rollouts, variant: dict) -> torch.Tensor:
    with autocast(variant, rollouts.ids.device), reordered() if variant.get("reorder") else nullcontext():
        logits = model(input_ids=rollouts.ids, attention_mask=rollouts.mask).logits
    logps = torch.zeros_like(rollouts.logps)
    logps[:, 1:] = logits[:, :-1].float().log_softmax(-1).gather(-1, rollouts.ids[:, 1:, None])[..., 0]
    return logps


@torch.no_grad()
def layer_errors(generation: FP8VLLMGeneration, models: dict, tokens: list[int]) -> dict[str, list[float]]:
    """Relative error of the hidden states behind each decoder layer, engine against trainer, on one sequence."""
    engines_own, handles = [], []
    for layer in engine_model(generation.llm).model.layers:
        handles.append(
            layer.register_forward_hook(lambda module, inputs, output: engines_own.append(sum(output).float()))
        )
    generation.llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1), use_tqdm=False)
    for handle in handles:
        handle.remove()
    ids, errors = torch.tensor([tokens], device=engines_own[0].device), {}
    for name, (model, variant) in models.items():
        ours, handles = [], []
        for layer in model.get_decoder().layers:
            handles.append(layer.register_forward_hook(lambda module, inputs, output, to=ours: to.append(output)))
        with autocast(variant, ids.device):
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        for handle in handles:
            handle.remove()
        pairs = zip(ours, engines_own, strict=False)  # the engine went on to decode
        errors[name] = [((o[0].float() - e).norm() / e.norm()).item() for o, e in pairs]
    return errors


class Sampler:
    """Samples the same prompts from one engine after another."""

    def __init__(self, prompt_count: int):
        from examples.addition_task import PretrainRecipe, cached_checkpoint, reinforcement_dataset

        self.checkpoint = str(cached_checkpoint(PretrainRecipe()))
        self.prompts = [row["prompt"] for row in reinforcement_dataset().select(range(prompt_count))]

    @contextmanager
    def sampled(self, **options):
        """(engine, its KV scales, what it returned, that as `Rollouts`); the engine is shut down afterwards."""
        from testing import engines

        generation = engines.start(self.checkpoint, **options)
        ids = [generation.processing_class(prompt)["input_ids"] for prompt in self.prompts]
        scales = None
        if generation.recipe.fp8_kv_cache:
            hook = AttentionHook(generation.model)
            amax_L3 = observe_sequences(generation.model, hook, ids).amax_L3
            scales = kv_scales_from_amax(amax_L3, generation.recipe.kv_scale_margin * PROMPTS_ONLY_MARGIN)
            hook.remove()
            generation.calibrate = lambda: scales
        generation.sync_weights()
        sampling = SamplingParams(n=COMPLETIONS, temperature=1.0, max_tokens=32, logprobs=0, seed=1)
        outputs = generation.llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        yield generation, scales, outputs, Rollouts(outputs, generation.accelerator.device)
        engines.shutdown(generation.llm)


def measure(prompt_count: int) -> Iterator[dict]:
    """The results so far, after each engine."""
    from testing.played_attention import engine_with, played_attention, trainer_with

    sampler, rows, layers = Sampler(prompt_count), [], {}
    for name, flags in ENGINES.items():
        with sampler.sampled(**flags) as (generation, scales, outputs, rollouts):
            plain = trainer_model(generation, None, {})
            rows.append(rollouts.row(name, score(plain, rollouts, {})))
            if name == "fp8_linears_kv":
                models = {"plain": (plain, {})}
                for label, variant in TRAINERS.items():
                    model = trainer_model(generation, scales, variant)
                    rows.append(rollouts.row(label, score(model, rollouts, variant)))
                    models[label] = model, variant
                longest = max(outputs, key=lambda output: len(output.outputs[0].token_ids))
                tokens = list(longest.prompt_token_ids) + list(longest.outputs[0].token_ids)
                layers = layer_errors(generation, models, tokens)
        yield {"rows": rows, "layers": layers}
    played = {} if torch.cuda.is_available() else dict.fromkeys(ATTENTION, {})
    for name, options in (COMPILED | played).items():
        dtype, variant = ATTENTION.get(name, (None, {}))
        engines_own = played_attention(dtype, TILE) if dtype else None
        trainers = played_attention(variant["attention"]) if "attention" in variant else None
        with engine_with(engines_own), sampler.sampled(**options) as (generation, scales, _, rollouts):
            variant |= WHOLE_FLOW
            model = trainer_model(generation, scales, variant)
            with trainer_with(trainers):
                rows.append(rollouts.row(name, score(model, rollouts, variant)))
        yield {"rows": rows, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--results", type=Path, help="folder of the file and its plot; else those of the repository")
    options = parser.parse_args()
    folder, images = options.results or record.RESULTS, options.results or ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for results in measure(options.prompts):
        path = record.write("mismatch_ladder", options.prompts * COMPLETIONS, results, folder)
    print(path.read_text())
    name = "mismatch_ladder_gpu.png" if torch.cuda.is_available() else "mismatch_ladder.png"  # the docs show the CPU's
    plot_ladder(results["rows"], images / name)
    print("| trainer and rollout | mismatch (95 % CI) | tokens |\n|---|---|---|")
    for row in results["rows"]:
        low, high = row["ci95"]
        print(f"| {row['name']} | {row['mismatch_mean']:.2g} ({low:.2g} - {high:.2g}) | {row['n']} |")


if __name__ == "__main__":
    main()
