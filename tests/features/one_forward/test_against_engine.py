"""The trainer's full FP8 forward against a real engine, for every family of models that can follow one.

A CPU engine rounds everything once, from FP64, so that neither rows nor their order show: nothing is left to differ.
"""

from contextlib import nullcontext

import pytest
import torch
from vllm import SamplingParams

from testing import engines, tiny_models
from testing.quantization_counter import QuantizationCounter
from testing.reference_experts import reference_fp8_experts
from testing.rollouts import PROMPTS, calibrated, calls_of, differences, follow, left_out, sampled, scored, witnessed
from trl_fp8.engine.vllm.numerics import activation_scaling
from trl_fp8.features.one_forward.between import FollowedEmbedding, FollowedNorm, FollowedParallelLayer
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.one_forward.followed_experts import FollowedExperts, FollowedRouter
from trl_fp8.features.one_forward.followed_linear import FollowedLinear
from trl_fp8.features.one_forward.one_forward import require_followable
from trl_fp8.quantization.codec.blockwise import quantize_activation
from trl_fp8.quantization.formats import ACTIVATION_AMAX_FLOOR, FLOORED_SCALE_AMAX, ActivationScaling
from trl_fp8.recipe.families import types_with
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.upstream.versions import installed_vllm
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

# log_softmax on both sides: FP32 logits of a few units, 64 exponentials, a logarithm; 2**-24 of about 10 each time
ROUNDING = 5e-6
VISIBLE = 1e-3
# What shows if it is left out. On CPU the engine's MLP, and the rotary embeddings of most families, are transformers'
PARTS = FollowedLinear, FollowedNorm, FollowedEmbedding, FollowedParallelLayer, FollowedExperts, FollowedRouter
BF16_CACHE, TENSOR, MXFP8 = {"kv_cache_dtype": "auto"}, {"weight_format": "tensor"}, {"weight_format": "mxfp8"}
FP8_EXPERTS = {"expert_kernels": True}
CASES = [
    ("qwen3", {}, {}),
    ("qwen3", {"tied": True, "intermediate_size": 192}, BF16_CACHE),  # the MLP stays in BF16
    ("llama", {"tied": True, "mlp_bias": True, "attention_bias": True}, {}),
    ("llama", {"intermediate_size": 208}, TENSOR | {"scale_format": "fp32"}),
    ("mistral", {"sliding_window": 16}, {}),
    ("qwen2", {}, TENSOR),  # biases
    ("llama", {"intermediate_size": 224}, MXFP8),
    ("gemma", {"tied": True}, {}),
    ("gemma2", {}, {}),
    ("gemma2", {}, BF16_CACHE),
    ("gemma3_text", {"tied": True}, {}),
    ("granite", {}, {}),
    ("granite", {"tied": True}, TENSOR | BF16_CACHE),
    ("glm", {"attention_bias": True}, {}),
    ("glm4", {"attention_bias": True}, TENSOR),
    ("phi3", {"sliding_window": 16}, {}),
    ("cohere", {}, {}),
    ("cohere", {"use_qk_norm": True}, BF16_CACHE),
    ("qwen3_moe", {"tied": True}, BF16_CACHE),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True}, FP8_EXPERTS),
    ("qwen2_moe", {}, {}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 192}, FP8_EXPERTS | BF16_CACHE),
    ("mixtral", {}, TENSOR),
    ("mixtral", {}, FP8_EXPERTS),
    ("gpt_oss", {}, {}),
    ("olmoe", {}, {}),
    ("olmoe", {}, FP8_EXPERTS),
]
# Only the operations of vLLM's own classes are followed
CASES = [case for case in CASES if case[0] not in installed_vllm().by_transformers]


@pytest.fixture
def started(checkpoint):
    """`started("qwen3", {...}, prompts, **flags)` -> a synced engine of a policy without a zero or a one, the policy's
    hook, and the scales of an FP8 KV cache.
    """
    running = []

    def start(architecture, options, prompts=PROMPTS, **flags):
        with reference_fp8_experts(fused_activation=True) if "expert_kernels" in flags else nullcontext():
            generation = engines.start(checkpoint(architecture, **options), parts=[SharedKernelsPart()], **flags)
        running.append(generation)
        engines.perturb(generation.model, seed=0)
        if generation.recipe.fp8_kv_cache:
            hook, scales = calibrated(generation, engines.PROMPTS + prompts, margin=4.0)
            return generation, hook, scales.values
        generation.sync_weights()
        return generation, None, None

    yield start
    for generation in running:
        engines.shutdown(generation.llm)


@pytest.mark.parametrize("architecture, options, flags", CASES)
def test_the_policys_log_probs_are_the_engines(architecture, options, flags, started):
    """Two-sided: with any one part left out, the two are apart. By itself each module agrees within rounding."""
    generation, hook, scales = started(architecture, options, **flags)
    sequences, theirs = sampled(generation)
    forward = follow(generation, hook)

    def off(scales=scales):
        if scales is not None:
            hook.simulate(scales)
        with torch.autocast("cpu", torch.bfloat16):  # what is left out computes as in TRL
            return torch.cat(differences(scored(forward, generation.model, sequences), theirs))

    assert off().max() < ROUNDING
    found = witnessed(forward, generation.model)
    assert not found.differences and found.compared > 30, found.differences
    assert {kind for kind, excess in found.excesses.items() if excess == 0} <= {"embedding"}
    assert max(part.max() for part in differences(scored(forward, generation.model, sequences), theirs)) < ROUNDING
    apart = {}
    for part in PARTS:
        with left_out(forward, part) as modules:
            # Mixtral's router computes in FP32 from BF16 logits in transformers, too
            if modules and (architecture, part) != ("mixtral", FollowedRouter):
                apart[part.__name__] = off().mean()
    with forward.switched(on=False):
        apart["all"] = off().mean()
    if scales is not None:
        apart["KV cache"] = off(0.75 * scales).mean()
    assert len(apart) >= 4 and min(apart.values()) > VISIBLE, apart
    forward.remove()
    assert all(
        type(module).__module__.startswith(("torch.", "transformers.")) for module in generation.model.modules()
    )


def test_each_family_that_can_follow_is_tested_here_and_others_are_refused():
    models = [tiny_models.on_meta(architecture) for architecture, *_ in CASES]
    for model in models:
        require_followable(model, recipe_for_model(model), "bf16")
    assert {model.config.model_type for model in models} == set(types_with("followed"))
    with pytest.raises(
        ValueError, match=r"fp8_forward='one_forward' with a policy of type 'glm4_moe'.*cohere, gemma, .*off"
    ):
        require_followable(tiny_models.on_meta("glm4_moe"), FP8Recipe(()), "bf16")


@pytest.mark.parametrize("architecture, options", [("qwen3", {}), ("qwen3_moe", {"num_experts": 8})])
def test_depth_leaves_nothing_while_the_batch_shrinks_to_one_row(architecture, options, started):
    """24 layers, completions of 2 to 24 tokens. With sums in FP32 the engine's decode parts from its own prefill in a
    few layers (docs/how_it_works.md).
    """
    lengths = 2, 5, 9, 14, 24
    prompts = [[4 + (11 * row + 7 * p) % 50 for p in range(6 + 3 * row)] for row in range(len(lengths))]
    generation, hook, scales = started(architecture, {"num_hidden_layers": 24} | options, prompts)
    sampling = [SamplingParams(seed=row, max_tokens=n, logprobs=0, ignore_eos=True) for row, n in enumerate(lengths)]
    outputs = generation.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    prefilled = generation.llm.generate(
        [{"prompt_token_ids": tokens} for tokens in sequences],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    forward = follow(generation, hook)
    hook.simulate(scales)
    trainer_logps = scored(forward, generation.model, sequences)
    for tokens, n, output, prompt, row in zip(sequences, lengths, outputs, prefilled, trainer_logps, strict=True):
        rows = zip(output.outputs[0].logprobs, tokens[-n:], strict=True)
        decoded = torch.tensor([found[token].logprob for found, token in rows])
        again = [found[token].logprob for found, token in zip(prompt.prompt_logprobs[-n:], tokens[-n:], strict=True)]
        assert decoded.tolist() == again
        assert (decoded - row[-n:]).abs().max() < ROUNDING


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def test_layers_that_the_engine_fuses_are_columns_of_one_call(started):
    """Prefill and decode, and all their batches as one; with a bias (QKV of Qwen2) and without."""
    generation, hook, _ = started("qwen2", {})
    names = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.qkv_proj", "mlp.down_proj")]
    calls = {name: calls_of(generation, name) for name in names}
    forward = follow(generation, hook)
    fused = []
    for name, seen in calls.items():
        parent, _, last = name.rpartition(".")
        layers = [forward.modules[f"{parent}.{part}"] for part in FUSED.get(last, (last,))]
        assert (layers[0].bias is not None) == (last == "qkv_proj")
        assert len({len(x) for x, _ in seen}) > 1 and {y.dtype for _, y in seen} == {torch.bfloat16}
        x, y = (torch.cat(parts) for parts in zip(*seen, strict=True))
        with torch.no_grad():
            together = [layer(x) for layer in layers]
            assert torch.equal(torch.cat(together, -1), y)
            assert all(torch.equal(torch.cat([layer(x) for layer in layers], -1), y) for x, y in seen)
        fused.append({part.untyped_storage().data_ptr() for part in together})
    assert all(len(storages) == 1 for storages in fused)


def test_the_forward_computes_with_the_engines_tensors(started, monkeypatch):
    """The policy quantizes nothing; what a weight becomes shows after the next sync, and not before."""
    generation, hook, scales = started("qwen3", {})
    followed = follow(generation, hook)
    hook.simulate(scales)
    calls = QuantizationCounter(monkeypatch)

    def forward():
        return torch.cat(scored(followed, generation.model, PROMPTS))

    before = forward()
    up = followed.modules["model.layers.1.mlp.up_proj"]
    up.weight.data[200] += 1
    assert torch.equal(forward(), before) and calls.calls == 0
    engine_linear = engine_model(generation.llm).model.layers[1].mlp.gate_up_proj
    assert up.lasting_codes().qdata.data_ptr() == engine_linear.weight[256:].data_ptr()
    generation.sync_weights()
    assert not torch.equal(forward(), before)


def test_the_kernels_activation_scaling_is_read_from_the_engine(started, monkeypatch):
    generation, *_ = started("qwen3", {})
    model = engine_model(generation.llm)
    kernel = model.model.layers[1].mlp.down_proj.quant_method.fp8_linear.quant_fp8
    generator = torch.Generator().manual_seed(0)
    x = (1e-4 * torch.rand(5, 256, generator=generator)).to(torch.bfloat16)  # below the floor, which is what differs
    x[0] *= 1e5
    codes, scale = kernel(x)

    def same(amax_floor):
        expected = quantize_activation(x, "fp32", amax_floor=amax_floor)
        return torch.equal(expected.scale, scale) and torch.equal(
            expected.qdata.view(torch.uint8), codes.view(torch.uint8)
        )

    assert same(FLOORED_SCALE_AMAX) and not same(ACTIVATION_AMAX_FLOOR)
    assert activation_scaling(model) == generation.numerics.linears
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"(?s)in 2 ways.*'fp32'.*'pow2'.*Pin one"):
        patch.setattr(kernel, "use_ue8m0", True)
        activation_scaling(model)
    assert generation.numerics.linears == ActivationScaling("fp32", 1 / 512)
