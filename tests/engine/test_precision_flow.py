"""The trainer's full FP8 forward against a real engine: one linear layer, the whole model, and what both sides share.

On CPU both sides add in FP64, so that the number of rows in a batch does not show.
In FP32 about one BF16 output in 20,000 would round the other way, which e4m3 passes on, and every layer magnifies.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from testing import engines
from testing.played_attention import engine_with, played_attention
from testing.quantization_counter import QuantizationCounter
from testing.rollouts import DECODED, PROMPTS, calibrated, calls_of, flow_of, follow, sampled
from trl_fp8.engine.vllm.cpu.linear import ReferenceFp8BlockKernel
from trl_fp8.engine.vllm.numerics import activation_scaling
from trl_fp8.policy.flow import precision_flow
from trl_fp8.policy.flow.bf16_modules import BF16Modules
from trl_fp8.policy.flow.check import VERIFIED
from trl_fp8.policy.flow.gemm import fake_quant_gemm
from trl_fp8.policy.flow.linear import FP8Linears
from trl_fp8.quantization.blockwise import (
    ACTIVATION_AMAX_FLOOR,
    quantize_activation,
    quantize_weight,
)
from trl_fp8.quantization.formats.spec import FLOORED_SCALE_AMAX, ActivationScaling
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

# log_softmax on both sides: FP32 logits of a few units, 64 exponentials, a logarithm; 2**-24 of about 10 each time
ROUNDING = 5e-6


def synced(checkpoint, **flags):
    """A synced engine with scales of its own policy, that policy's tap, and the scales."""
    generation = engines.start(checkpoint, **flags)
    tap, scales = calibrated(generation, engines.PROMPTS + PROMPTS)
    return generation, tap, scales.values


def policy_log_probs(generation, tap, scales, sequences):
    """The trainer's, from one left-padded batch."""
    length = max(map(len, sequences))
    ids = torch.tensor([[0] * (length - len(tokens)) + tokens for tokens in sequences])
    mask = torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in sequences])
    tap.simulate(scales)
    with torch.no_grad():
        logits = generation.model(input_ids=ids, attention_mask=mask).logits
    tap.simulate(None)
    found = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [row[length - len(tokens) :] for row, tokens in zip(found, sequences, strict=True)]


def differences(ours, theirs):
    """|difference| of prompt tokens, and of decoded ones."""
    pairs = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    return torch.cat([row[:-DECODED] for row in pairs]), torch.cat([row[-DECODED:] for row in pairs])


MODELS = [
    ("qwen3", {}),
    ("qwen3", {"tied": True}),
    ("llama", {}),
    ("mistral", {}),
    ("gemma", {"tied": True}),  # scaled embeddings
    ("gemma3_text", {"tied": True}),
    ("qwen2", {}),
    ("qwen3", {"intermediate_size": 192}),  # the MLP stays in BF16
]
FORMATS = [(*model, {}) for model in MODELS]
FORMATS += [(*model, {"weight_format": "tensor"}) for model in [*MODELS[:2], MODELS[-2]]]  # qwen2 has biases
FORMATS += [("qwen3", {"intermediate_size": 208}, {"weight_format": "tensor", "scale_format": "fp32"})]


def test_what_is_called_verified_is_tested_here():
    assert sorted({architecture for architecture, _ in MODELS}) == sorted(VERIFIED)


@pytest.mark.parametrize("architecture, options, flags", FORMATS)
def test_the_policys_log_probs_are_the_engines(architecture, options, flags, checkpoint, monkeypatch):
    """Two-sided: with any one part of the flow left out, the two are apart."""
    generation, tap, scales = synced(checkpoint(architecture, **options), **flags)
    sequences, theirs = sampled(generation)

    def off(scales=scales):
        return differences(policy_log_probs(generation, tap, scales, sequences), theirs)

    with monkeypatch.context() as patch:
        patch.setattr(precision_flow.BF16Modules, "install", lambda model: None)
        installed = follow(generation, tap)
        without_bf16 = off()
    installed.installed.remove()
    weights_only = FP8Linears.install(
        generation.model, generation.recipe.fp8_modules, flow_of(generation, forward="weights")
    )
    between = BF16Modules.install(generation.model)
    only_weights = off()
    weights_only.remove()
    between.remove()
    follow(generation, tap)
    without_cache = off(None)
    prompt, decode = off()
    engines.shutdown(generation.llm)
    for broken in (without_bf16, only_weights, without_cache):
        assert all(part.mean() > 1e-3 for part in broken), [part.mean() for part in broken]
    assert prompt.max() < ROUNDING
    assert decode.max() < ROUNDING


def test_depth_leaves_nothing_while_the_batch_shrinks_to_one_row(checkpoint):
    """24 layers, norms that are not 1, completions of 2 to 24 tokens. With sums in FP32 the engine's decode parts from
    its own prefill in a few layers: benchmarks/results/mismatch_depth_fp32_sums_cpu.json.
    """
    generation = engines.start(checkpoint("qwen3", num_hidden_layers=24))
    engines.perturb(generation.model, seed=0)
    lengths = 2, 5, 9, 14, 24
    prompts = [[4 + (11 * row + 7 * p) % 50 for p in range(6 + 3 * row)] for row in range(len(lengths))]
    tap, scales = calibrated(generation, prompts, margin=4.0)
    sampling = [SamplingParams(seed=row, max_tokens=n, logprobs=0, ignore_eos=True) for row, n in enumerate(lengths)]
    outputs = generation.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    prefilled = generation.llm.generate(
        [{"prompt_token_ids": tokens} for tokens in sequences],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    follow(generation, tap)
    ours = policy_log_probs(generation, tap, scales.values, sequences)
    engines.shutdown(generation.llm)
    for tokens, n, output, prompt, row in zip(sequences, lengths, outputs, prefilled, ours, strict=True):
        rows = zip(output.outputs[0].logprobs, tokens[-n:], strict=True)
        decoded = torch.tensor([found[token].logprob for found, token in rows])
        again = [found[token].logprob for found, token in zip(prompt.prompt_logprobs[-n:], tokens[-n:], strict=True)]
        assert (decoded - torch.tensor(again)).abs().max() < ROUNDING
        assert (decoded - row[-n:]).abs().max() < ROUNDING


def test_neither_rows_nor_shards_change_a_bit_of_an_fp8_product():
    """The engine's kernel in batches of 1 to 200 rows and in parts of N, and the trainer's GEMM, in BF16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1024, generator=generator).bfloat16()
    w = quantize_weight(0.1 * torch.randn(1024, 1024, generator=generator).bfloat16())
    codes = quantize_activation(x, "fp32")
    kernel = object.__new__(ReferenceFp8BlockKernel)
    kernel.weight_group_shape, kernel.config = GroupShape(128, 128), SimpleNamespace(out_dtype=torch.bfloat16)
    whole = fake_quant_gemm(codes, w, torch.float32).bfloat16()
    for rows in (1, 2, 3, 5, 8, 31, 64, 200):
        for columns in (1024, 128):
            parts = [
                kernel.apply_block_scaled_mm(a, b, a_scale, b_scale)
                for b, b_scale in zip(w.qdata.split(columns), w.scale.split(columns // 128), strict=True)
                for a, a_scale in [(codes.qdata[:rows], codes.scale[:rows])]
            ]
            assert torch.equal(torch.cat(parts, 1), whole[:rows])


@pytest.mark.parametrize("tile, left", [(None, 0.001), (8, 0.75)])
def test_an_engine_that_rounds_attention_weights_is_followed(tile, left, checkpoint):
    """Where both round relative to the same largest score; in tiles, the more the earlier the largest score comes."""
    with engine_with(played_attention(torch.float8_e4m3fn, tile)):
        generation, tap, scales = synced(checkpoint("qwen3"))
        sequences, theirs = sampled(generation)
        follow(generation, tap)
        off = {}
        for offset in (None, 256.0):
            tap.follow(weight_offset=offset)
            parts = differences(policy_log_probs(generation, tap, scales, sequences), theirs)
            off[offset] = torch.cat(parts).mean().item()
        engines.shutdown(generation.llm)
    assert off[None] > 1e-3 and off[256.0] < left * off[None], off


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_an_fp8_linear_gives_the_engines_bf16_outputs(scale_format, checkpoint):
    """Layers with a bias (QKV of Qwen2) and without, prefill and decode."""
    generation, tap, _ = synced(checkpoint("qwen2"), scale_format=scale_format)
    calls = {
        name: calls_of(generation, name)
        for layer in range(2)
        for name in (f"model.layers.{layer}.self_attn.qkv_proj", f"model.layers.{layer}.mlp.down_proj")
    }
    follow(generation, tap)
    for name, seen in calls.items():
        parent, _, last = name.rpartition(".")
        layers = [generation.model.get_submodule(f"{parent}.{part}") for part in FUSED.get(last, (last,))]
        assert (layers[0].bias is not None) == (last == "qkv_proj")
        assert len({len(x) for x, _ in seen}) > 1 and {y.dtype for _, y in seen} == {torch.bfloat16}

        def ours(x, layers=layers):
            with torch.no_grad():
                return torch.cat([layer(x) for layer in layers], -1)

        assert all(torch.equal(ours(x), y) for x, y in seen)
        if last == "qkv_proj":  # a bias that is added before the product is rounded to BF16 rounds differently
            x, y = seen[0]
            once = torch.cat([layer.quantized_weight().dequantize(torch.float32) for layer in layers])
            codes = quantize_activation(x, "fp32", amax_floor=generation.numerics.linears.amax_floor)
            product = codes.dequantize(torch.float32) @ once.T + torch.cat([layer.bias for layer in layers])
            assert (product.to(torch.bfloat16) != y).float().mean() > 0.05
        x, y = (torch.cat(parts) for parts in zip(*seen, strict=True))
        assert torch.equal(ours(x), y)  # all batches as one
    engines.shutdown(generation.llm)


def test_the_forward_computes_with_what_the_sync_quantized(checkpoint, monkeypatch):
    """Also after a change that nobody could see, wherever in a weight: one step without it,
    and only if a forward came first.
    """
    generation, tap, scales = synced(checkpoint("qwen3"))
    held = engine_model(generation.llm).model.layers[1].mlp
    flow = follow(generation, tap)
    generation.share = flow.keep_weight
    calls, linears = QuantizationCounter(monkeypatch), flow.installed.modules

    def forward():
        return policy_log_probs(generation, tap, scales, PROMPTS)

    generation.sync_weights()
    assert calls.during(forward) == 0  # the sync's codes
    flow.weights_changed()
    assert calls.during(forward) == len(linears) == 14
    weight = linears["model.layers.1.mlp.up_proj"].weight
    weight.data[200] += 1  # moves no version counter, and is not in the first block of rows
    before = forward()
    generation.sync_weights()
    assert calls.calls == 14 and not torch.equal(torch.cat(forward()), torch.cat(before))
    fresh = quantize_weight(weight.detach().bfloat16())
    assert torch.equal(held.gate_up_proj.weight[256:].view(torch.uint8), fresh.qdata.view(torch.uint8))
    for name, codes, scale in (
        ("down_proj", held.down_proj.weight, held.down_proj.weight_scale_inv),
        ("gate_proj", held.gate_up_proj.weight[:256], held.gate_up_proj.weight_scale_inv[:2]),
        ("up_proj", held.gate_up_proj.weight[256:], held.gate_up_proj.weight_scale_inv[2:]),
    ):
        kept = linears[f"model.layers.1.mlp.{name}"].cached_weight()
        assert torch.equal(codes.view(torch.uint8), kept.qdata.view(torch.uint8)) and torch.equal(scale, kept.scale)
    engines.shutdown(generation.llm)


def test_the_kernels_activation_scaling_is_read_from_the_engine(checkpoint, monkeypatch):
    generation = engines.start(checkpoint("qwen3"))
    model = engine_model(generation.llm)
    engines.shutdown(generation.llm)
    kernel = model.model.layers[1].mlp.down_proj.quant_method.fp8_linear.quant_fp8
    generator = torch.Generator().manual_seed(0)
    x = (1e-4 * torch.rand(5, 256, generator=generator)).to(torch.bfloat16)  # below the floor, which is what differs
    x[0] *= 1e5
    codes, scale = kernel(x)

    def same(amax_floor):
        ours = quantize_activation(x, "fp32", amax_floor=amax_floor)
        return torch.equal(ours.scale, scale) and torch.equal(ours.qdata.view(torch.uint8), codes.view(torch.uint8))

    assert same(FLOORED_SCALE_AMAX) and not same(ACTIVATION_AMAX_FLOOR)
    assert activation_scaling(model) == generation.numerics.linears
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"(?s)in 2 ways.*'fp32'.*'pow2'.*Pin one"):
        patch.setattr(kernel, "use_ue8m0", True)
        activation_scaling(model)
    assert generation.numerics.linears == ActivationScaling("fp32", 1 / 512)
