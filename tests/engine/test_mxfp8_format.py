"""fp8_weight_format='mxfp8' against real engines: what arrives, what an audit finds, what an export is."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mxfp8.flashinfer import FlashInferCutlassMxfp8LinearKernel
from vllm.platforms import PlatformEnum

from testing import engines
from trl_fp8.engine.vllm import numerics
from trl_fp8.engine.vllm.cpu.reference_linear import ReferenceMxfp8Kernel, register_cpu_kernel
from trl_fp8.export.export import INDEX, export_fp8
from trl_fp8.quantization.formats import E8M0_AMAX_FLOOR
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

MODELS = {
    "qwen3": ("qwen3", {"tied": True}),
    "qwen2": ("qwen2", {}),  # biases
    "llama": ("llama", {"tied": True, "intermediate_size": 224}),  # scales of down_proj: rows of 7 bytes
    "moe": ("qwen3_moe", {}),  # experts stay in high precision
}


def start(checkpoint, architecture="qwen3", scales=None, **options):
    return engines.start(
        checkpoint(architecture, **options), scales or engines.some_scales(2, 1), weight_format="mxfp8"
    )


@pytest.mark.parametrize("name", MODELS)
def test_two_syncs_equal_a_fresh_engine_bit_for_bit(name, checkpoint, tmp_path):
    architecture, options = MODELS[name]
    generation = start(checkpoint, architecture, **options)
    assert generation.numerics.kernels.keys() == {"ReferenceMxfp8Kernel"}
    assert generation.numerics.linears == ("pow2", E8M0_AMAX_FLOOR, "group", False)
    synced_twice = engines.after_two_syncs(generation)
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced_twice


class TiledKernel(FlashInferCutlassMxfp8LinearKernel):
    """vLLM's kernel for Blackwell up to its GEMM, for which the reference stands in. It reads scales in tiles only."""

    is_supported = ReferenceMxfp8Kernel.is_supported

    def apply_weights(self, layer, x, bias=None):
        rows, columns = layer.weight.shape
        tiles = layer.weight_scale.view(-(-rows // 128), -1, 32, 4, 4).transpose(1, 3)
        scale = tiles.reshape(-(-rows // 128) * 128, -1)[:rows, : columns // 32]
        return ReferenceMxfp8Kernel.apply_weights(
            self, SimpleNamespace(weight=layer.weight, weight_scale=scale), x, bias
        )


@pytest.fixture
def tiled(monkeypatch):
    register_cpu_kernel()
    monkeypatch.setitem(kernels._POSSIBLE_MXFP8_KERNELS, PlatformEnum.CPU, [TiledKernel])
    monkeypatch.setattr(numerics, "TILED", ("TiledKernel",))
    monkeypatch.setattr(numerics, "AUDITABLE_KERNELS", ("TiledKernel",))


def test_scales_that_a_kernel_reads_in_tiles_are_rearranged_and_audited(checkpoint, tiled, tmp_path):
    """Two-sided: an engine that loads the same checkpoint lets vLLM rearrange them."""
    generation = start(checkpoint, "llama", intermediate_size=224, hidden_size=160)  # whole tiles nowhere
    assert generation.numerics.kernels.keys() == {"TiledKernel"}
    synced_twice = engines.after_two_syncs(generation)
    tiles = len(generation.engine.layout.derived)
    sent = len(list(generation.model.parameters())) + len(generation.recipe.fp8_tensors)
    assert tiles == 8 and generation.last_sync.audited_tensors == sent + tiles
    layer = engine_model(generation.llm).get_submodule("model.layers.1.mlp.down_proj")
    layer.weight_scale.data[7] ^= 1
    with pytest.raises(
        RuntimeError, match=r"^1 tensors .*: model\.layers\.1\.mlp\.down_proj\.weight_scale in tiles\. "
    ):
        generation.delivery.verify()
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced_twice


def test_a_flipped_byte_and_a_changed_exponent_are_named(checkpoint):
    generation = start(checkpoint)
    generation.sync_weights()
    layer = engine_model(generation.llm).get_submodule("model.layers.1.self_attn.qkv_proj")
    layer.weight.data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(RuntimeError, match=r"^1 tensors .*: model\.layers\.1\.self_attn\.q_proj\.weight\. "):
        generation.delivery.verify()
    generation.sync_weights()
    layer.weight_scale.data[-1, -1] += 1
    with pytest.raises(RuntimeError, match=r"^1 tensors .*: model\.layers\.1\.self_attn\.v_proj\.weight_scale\. "):
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
    assert config["quant_method"] == "mxfp8" and config["ignored_layers"] == ["lm_head"]
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    with safe_open(folder / names["lm_head.weight"], "pt") as file:
        scale = file.get_tensor("model.layers.0.mlp.up_proj.weight_scale")
        weight = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert scale.dtype == torch.uint8 and scale.shape == (weight.shape[0], weight.shape[1] // 32)
    assert "(MXFP8) with `weight_scale`" in (folder / "README.md").read_text()
    assert engines.loaded_log_probs(folder, recipe, generation.pinned) == sent
