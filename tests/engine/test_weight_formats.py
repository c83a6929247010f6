"""The formats of weights beside blocks against real engines: what arrives, what an audit finds, what an export is."""

import json

import pytest
import torch
from safetensors import safe_open

from testing import engines
from testing.tiled_kernel import tiled_kernel
from trl_fp8.engine.vllm import numerics
from trl_fp8.export.export import INDEX, export_fp8
from trl_fp8.quantization.formats import E8M0_AMAX_FLOOR, FLOORED_SCALE_AMAX, FORMATS
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

NUMERICS = {  # kernel, and how it quantizes activations
    "tensor": ("ReferenceFp8TensorKernel", ("fp32", FLOORED_SCALE_AMAX, "token", True)),
    "mxfp8": ("ReferenceMxfp8Kernel", ("pow2", E8M0_AMAX_FLOOR, "group", False)),
}
MODELS = {
    "qwen3": ("qwen3", {"tied": True}),
    "qwen2": ("qwen2", {}),  # biases
    "moe": ("qwen3_moe", {}),  # experts stay in high precision
}
UNEVEN = {
    "tensor": ("qwen3", {"intermediate_size": 208}),  # multiples of 16 only
    "mxfp8": ("llama", {"tied": True, "intermediate_size": 224}),  # scales of down_proj: rows of 7 bytes
}
CASES = [
    (weight_format, scale_format, model)
    for weight_format in NUMERICS
    for scale_format in FORMATS[weight_format].scale_formats
    for model in (*MODELS, "uneven")
]


def start(checkpoint, weight_format, architecture="qwen3", scales=None, scale_format="pow2", **options):
    flags = {"weight_format": weight_format, "scale_format": scale_format}
    return engines.start(checkpoint(architecture, **options), scales or engines.some_scales(2, 1), **flags)


@pytest.mark.parametrize("weight_format, scale_format, name", CASES)
def test_two_syncs_equal_a_fresh_engine_bit_for_bit(weight_format, scale_format, name, checkpoint, tmp_path):
    architecture, options = (MODELS | {"uneven": UNEVEN[weight_format]})[name]
    generation = start(checkpoint, weight_format, architecture, scale_format=scale_format, **options)
    kernel, scaling = NUMERICS[weight_format]
    assert generation.numerics.kernels.keys() == {kernel} and generation.numerics.linears == scaling
    synced_twice = engines.after_two_syncs(generation)
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced_twice


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_weights_that_vllm_requantizes_keep_their_bytes(scale, scale_format, checkpoint):
    """Weights far smaller and larger than any: vLLM's way through FP16 changes no byte, or the audit would say so."""
    generation = start(checkpoint, "tensor", scale_format=scale_format)
    with torch.no_grad():
        for name, parameter in generation.model.named_parameters():
            if name in generation.recipe.fp8_tensors:
                parameter.mul_(scale * (3 if "k_proj" in name else 1))  # fused with smaller ones
    generation.sync_weights()
    engines.shutdown(generation.llm)
    engines.require_whole_audit(generation)


@tiled_kernel()
def test_scales_that_a_kernel_reads_in_tiles_are_rearranged_and_audited(checkpoint, tmp_path):
    """Two-sided: an engine that loads the same checkpoint lets vLLM rearrange them."""
    # whole tiles nowhere
    generation = start(checkpoint, "mxfp8", "llama", intermediate_size=224, hidden_size=160)
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


@pytest.mark.parametrize(
    "weight_format, backend, change, named",
    [
        (
            "tensor",
            "cutlass",
            lambda scale: scale.mul_(2),
            r"3 tensors .*q_proj\.weight_scale, .*k_proj\.weight_scale",
        ),
        (
            "mxfp8",
            "flashinfer_cutlass",
            lambda scale: scale[-1, -1].add_(1),
            r"1 tensors .*: model\.layers\.1\.self_attn\.v_proj\.weight_scale\. ",
        ),
    ],
    ids=NUMERICS,
)
def test_an_unknown_kernel_a_flipped_byte_and_a_changed_scale_are_named(
    weight_format, backend, change, named, checkpoint, monkeypatch
):
    generation = start(checkpoint, weight_format)
    model = engine_model(generation.llm)
    with monkeypatch.context() as patched:
        patched.setattr(numerics, "AUDITABLE_KERNELS", ())
        with pytest.raises(RuntimeError, match=f"(?s)Kernel is not known to read.*{{'linear_backend': '{backend}'}}"):
            numerics.require_auditable(model)
    generation.sync_weights()
    layer = model.get_submodule("model.layers.1.self_attn.qkv_proj")
    layer.weight.data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(RuntimeError, match=r"^1 tensors .*: model\.layers\.1\.self_attn\.q_proj\.weight\. "):
        generation.delivery.verify()
    generation.sync_weights()
    change(layer.weight_scale.data)
    with pytest.raises(RuntimeError, match=f"^{named}"):
        generation.delivery.verify()
    generation.sync_weights()
    generation.delivery.verify()
    engines.shutdown(generation.llm)


@pytest.mark.parametrize(
    "weight_format, quant_method, dtype, blocks",
    [
        ("tensor", "fp8", torch.float32, lambda rows, columns: (1,)),
        ("mxfp8", "mxfp8", torch.uint8, lambda rows, columns: (rows, columns // 32)),
    ],
    ids=NUMERICS,
)
def test_vllm_loads_an_export_and_computes_the_same(weight_format, quant_method, dtype, blocks, checkpoint, tmp_path):
    scales = engines.some_scales(2, 1)
    generation = start(checkpoint, weight_format, scales=scales)
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    sent = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    recipe = generation.recipe
    folder = export_fp8(generation.model, generation.processing_class, tmp_path / "fp8", scales, recipe=recipe)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == quant_method and config[recipe.format.kept_key] == ["lm_head"]
    assert ("weight_block_size" in config) == (recipe.format.weight_block is not None)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    with safe_open(folder / names["lm_head.weight"], "pt") as file:
        scale = file.get_tensor("model.layers.0.mlp.up_proj.weight_scale")
        weight = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert scale.dtype == dtype and scale.shape == blocks(*weight.shape)
    assert f"{recipe.format.description} with `weight_scale`" in (folder / "README.md").read_text()
    assert engines.loaded_log_probs(folder, recipe, generation.pinned) == sent
