"""The sync against real engines: what arrives is bit for bit what a freshly loaded engine would hold."""

import pytest
import torch
from vllm import SamplingParams

from testing import engines
from trl_fp8.engine.protocol import Delivery, RolloutEngine
from trl_fp8.quantization.codec.kv_scales import KV_SCALES


pytestmark = pytest.mark.engine

MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tied": True}),
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "partly-aligned": ("qwen3", {"intermediate_size": 192}),
    "qwen3-moe": ("qwen3_moe", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_syncs_equal_fresh_engines_bit_for_bit(name, checkpoint, tmp_path):
    architecture, options = MODELS[name]
    scales = {}
    generation = engines.start(checkpoint(architecture, **options))
    engines.scales_of(generation).calibrate = lambda: scales["now"]
    layers = generation.model.config.num_hidden_layers
    results, folders = [], []
    for step in (1, 2):
        engines.perturb(generation.model, seed=step)
        scales["now"] = engines.some_scales(layers, step)
        generation.sync_weights()
        engines.require_whole_audit(generation)
        results.append(engines.log_probs(generation.llm))
        folders.append(tmp_path / f"step{step}")
        if step == 1:
            saved = {key: value.clone() for key, value in generation.model.state_dict().items()}
    assert results[0] != results[1]
    engines.shutdown(generation.llm)

    assert engines.fresh_log_probs(folders[1], generation, scales["now"]) == results[1]
    generation.model.load_state_dict(saved)
    assert engines.fresh_log_probs(folders[0], generation, engines.some_scales(layers, 1)) == results[0]


@pytest.mark.parametrize("flags", [{"fp8_weights": False}, {"kv_cache_dtype": "auto"}, {"scale_format": "fp32"}])
def test_partial_recipes_sync_too(flags, checkpoint, tmp_path):
    scales = engines.some_scales(2, 1) if flags.get("kv_cache_dtype") != "auto" else None
    generation = engines.start(checkpoint("qwen3"), scales, **flags)
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    synced = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, scales) == synced


def test_buffers_of_the_checkpoint_arrive(checkpoint):
    """A bias of GLM-4 MoE's routers, which load balancing moves, is a buffer and no parameter."""
    generation = engines.start(checkpoint("glm4_moe"), engines.some_scales(2, 1))
    generation.sync_weights()
    engines.require_whole_audit(generation)
    before = engines.log_probs(generation.llm)
    bias = generation.model.model.layers[1].mlp.gate.e_score_correction_bias
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in generation.engine.layout.pieces
    bias.copy_(torch.tensor([5.0, -5.0, 5.0, -5.0]))  # other experts for most tokens
    generation.sync_weights()
    assert engines.log_probs(generation.llm) != before
    bias[2] = torch.nan
    with pytest.raises(ValueError, match="1 of .* parameters: model.layers.1.mlp.gate.e_score_correction_bias"):
        generation.sync_weights()
    engines.shutdown(generation.llm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_table_that_vllm_casts_in_its_first_forward_is_known_as_cast(dtype, checkpoint):
    """vLLM makes GPT-OSS's rotary angles in FP32, and computes with them in the engine's dtype."""
    generation = engines.start(checkpoint("gpt_oss"), engines.some_scales(2, 1), engine_kwargs={"dtype": dtype})
    table = generation.engine.model.model.layers[0].attn.rotary_emb.cos_sin_cache
    assert table.dtype is getattr(torch, dtype)
    for step in range(2):
        engines.perturb(generation.model, seed=step)
        generation.sync_weights()
        assert all(generation.generate([[5, 6], [7, 8, 9]], None, 1)[1]) and generation.audit_failures == 0
    expected = engines.log_probs(generation.llm)
    with torch.inference_mode():  # as in which vLLM made it
        table[:64] *= -0.5
    assert engines.log_probs(generation.llm) != expected
    with pytest.raises(RuntimeError, match="^1 tensors of the engine have changed .*rotary_emb.cos_sin_cache"):
        generation.generate([[5, 6]], None, 1)
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == expected and generation.generate([[5, 6]], None, 1)
    engines.shutdown(generation.llm)


def test_sync_report_and_kernel_are_what_the_recipe_says(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    assert isinstance(generation, RolloutEngine) and isinstance(generation.delivery, Delivery)
    generation.sync_weights()
    report = generation.last_sync
    parameters = dict(generation.model.named_parameters())
    fp8 = {f"{name}.weight" for name in generation.recipe.fp8_modules}
    sent = sum(p.numel() * (1 if name in fp8 else 2) for name, p in parameters.items())
    sent += sum(4 * (parameters[name].numel() // 128**2) for name in fp8)
    assert report.bytes_sent == sent
    assert report.fp8_weights == len(fp8) == 14
    assert report.audited_tensors == len(parameters) + len(fp8)
    # e4m3 rounds to 4 significant bits: uniform relative error of at most 1/16 has an rms of a few percent
    assert 0.02 < report.weight_relative_error < 0.03
    assert generation.numerics.kernels == {"ReferenceFp8BlockKernel": 8}  # qkv, o, gate_up, down in 2 layers
    assert torch.equal(report.carried[KV_SCALES].values, engines.some_scales(2, 1).values)
    engines.shutdown(generation.llm)


def test_storage_of_the_engine_stays_where_it_was(checkpoint):
    """CUDA graphs and compiled code hold addresses: a sync must write into the same tensors."""
    from trl_fp8.upstream.vllm import engine_model

    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    model = engine_model(generation.llm)
    before = {name: t.data_ptr() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for _ in range(2):
        generation.sync_weights()
    assert {name: t.data_ptr() for name, t in [*model.named_parameters(), *model.named_buffers()]} == before
    engines.shutdown(generation.llm)


def test_prefix_cache_does_not_survive_a_sync(checkpoint):
    """Blocks of 32 tokens, a prompt of 50: its first block is reused, unless weights or scales changed."""
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1), engine_kwargs={"block_size": 32})
    prompt = {"prompt_token_ids": [4 + 5 * position % 40 for position in range(50)]}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)

    def sample():
        output = generation.llm.generate([prompt], greedy, use_tqdm=False)[0]
        rows = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
        return [row[token].logprob for row, token in rows], output.num_cached_tokens

    generation.sync_weights()
    assert sample()[1] == 0
    assert sample()[1] == 32  # the cache works, so that the next assertion means something
    engines.scales_of(generation).calibrate = lambda: engines.some_scales(2, 2)
    engines.perturb(generation.model, seed=3)
    generation.sync_weights()
    after, cached = sample()
    assert cached == 0
    assert generation.llm.reset_prefix_cache()
    assert sample()[0] == after
    engines.shutdown(generation.llm)
