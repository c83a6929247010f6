"""fp8_weight_format='tensor' against real engines: what arrives, what an audit finds, what an export is."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from trl.trainer.utils import ensure_master_addr_port

from testing import engines
from trl_fp8.export.export import INDEX, export_fp8
from trl_fp8.quantization.formats import FLOORED_SCALE_AMAX
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

MODELS = {
    "qwen3": ("qwen3", {"tied": True}),
    "qwen2": ("qwen2", {}),  # biases
    "odd": ("qwen3", {"intermediate_size": 208}),  # multiples of 16 only
    "moe": ("qwen3_moe", {}),  # experts stay in high precision
}


def start(checkpoint, architecture="qwen3", scales=None, scale_format="pow2", **options):
    flags = {"weight_format": "tensor", "scale_format": scale_format}
    return engines.start(checkpoint(architecture, **options), scales or engines.some_scales(2, 1), **flags)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_two_syncs_equal_a_fresh_engine_bit_for_bit(name, scale_format, checkpoint, tmp_path):
    architecture, options = MODELS[name]
    generation = start(checkpoint, architecture, scale_format=scale_format, **options)
    assert generation.numerics.kernels.keys() == {"ReferenceFp8TensorKernel"}
    assert generation.numerics.linears == ("fp32", FLOORED_SCALE_AMAX, "token", True)
    synced_twice = engines.after_two_syncs(generation)
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced_twice


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_weights_that_vllm_requantizes_keep_their_bytes(scale, scale_format, checkpoint):
    """Weights far smaller and larger than any: vLLM's way through FP16 changes no byte, or the audit would say so."""
    generation = start(checkpoint, scale_format=scale_format)
    with torch.no_grad():
        for name, parameter in generation.model.named_parameters():
            if name in generation.recipe.fp8_tensors:
                parameter.mul_(scale * (3 if "k_proj" in name else 1))  # fused with smaller ones
    generation.sync_weights()
    engines.shutdown(generation.llm)
    engines.require_whole_audit(generation)


def test_a_flipped_byte_and_a_changed_scale_are_named(checkpoint):
    generation = start(checkpoint)
    generation.sync_weights()
    layer = engine_model(generation.llm).get_submodule("model.layers.1.self_attn.qkv_proj")
    layer.weight.data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(RuntimeError, match=r"^1 tensors .*: model\.layers\.1\.self_attn\.q_proj\.weight\. "):
        generation.delivery.verify()
    generation.sync_weights()
    layer.weight_scale.data.mul_(2)
    with pytest.raises(RuntimeError, match=r"3 tensors .*q_proj\.weight_scale, .*k_proj\.weight_scale"):
        generation.delivery.verify()
    generation.sync_weights()
    generation.delivery.verify()
    engines.shutdown(generation.llm)


def test_vllm_loads_an_export_and_computes_the_same(checkpoint, tmp_path):
    scales = engines.some_scales(2, 1)
    generation = start(checkpoint, scales=scales)
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    sent = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    recipe = generation.recipe
    folder = export_fp8(generation.model, generation.processing_class, tmp_path / "fp8", scales, recipe=recipe)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and "weight_block_size" not in config
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    with safe_open(folder / names["lm_head.weight"], "pt") as file:
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight_scale").shape == (1,)
    assert "e4m3 per tensor with `weight_scale`" in (folder / "README.md").read_text()
    ensure_master_addr_port()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    llm = engines.load(folder, recipe, generation.pinned)
    loaded = engines.log_probs(llm)
    engines.shutdown(llm)
    assert loaded == sent
