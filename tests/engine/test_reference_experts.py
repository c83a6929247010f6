"""The reference FP8 experts: against the formula in float64, and in a real engine against a transformers forward."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl.trainer.utils import ensure_master_addr_port
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from testing import engines
from testing.reference_experts import ReferenceExperts, reference_fp8_experts
from trl_fp8.engine.vllm.layout import engine_layout
from trl_fp8.quantization.codec.blockwise import quantize_weight
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

EXPERTS = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(2))
ENGINES_NAME = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}


def recipe():
    """Only experts are FP8: nothing else of the engine rounds to it."""
    projections = [f"self_attn.{which}_proj" for which in "qkvo"]
    kept = [name.replace("mlp.experts", other) for name in EXPERTS for other in ("mlp.gate", *projections)]
    return FP8Recipe(
        fp8_modules=(),
        fp8_experts=EXPERTS,
        kept_modules=dict.fromkeys(["lm_head", *kept], "kept"),
        kv_cache_dtype="auto",
    )


def expanded(scale):
    """`[..., N/128, K/128]` -> `[..., N, K]`."""
    return scale.repeat_interleave(128, -2).repeat_interleave(128, -1)


def fp8_expert(shape, generator):
    """Random codes and scales; the blocks differ in magnitude, so that a scale in the wrong place is noticed."""
    blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    magnitude = torch.exp2(torch.randint(-1, 2, blocks, generator=generator).float())
    return quantize_weight(0.08 * torch.randn(shape, generator=generator) * expanded(magnitude), "pow2")


# ------------------------------------------------------------------------------------------------------- the formula


def oracle(x, w13, w2, weights, ids, scale_format, fused):
    """One token and expert at a time, in float64 between the roundings."""
    out = []
    for row, row_weights, row_ids in zip(x, weights, ids, strict=True):
        parts = []
        for weight, expert in zip(row_weights, row_ids, strict=True):
            gate_up = (round_trip(row, scale_format) @ dequantized(w13, expert).T).to(torch.bfloat16)
            gate, up = gate_up.chunk(2)
            hidden = F.silu(gate.float()) * up.float() if fused else F.silu(gate) * up
            parts.append(
                (round_trip(hidden, scale_format) @ dequantized(w2, expert).T * weight.double()).to(torch.bfloat16)
            )
        out.append(torch.stack(parts).double().sum(0).to(torch.bfloat16))
    return torch.stack(out)


def dequantized(weight, expert):
    return weight.qdata[expert].double() * expanded(weight.scale[expert]).double()


def round_trip(x, scale_format):
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    if scale_format == "pow2":
        scale = scale.log2().ceil().exp2()
    return ((groups / scale).to(E4M3).double() * scale.double()).flatten(-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_the_kernel_equals_the_formula(scale_format, fused):
    generator = torch.Generator().manual_seed(0)
    w13, w2 = fp8_expert((4, 512, 256), generator), fp8_expert((4, 256, 256), generator)
    x = torch.randn(40, 256, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(40, 4, generator=generator).topk(2)
    kernel = object.__new__(ReferenceExperts)  # without vLLM's config of a whole layer
    kernel.scale_format, kernel.fused_activation = scale_format, fused
    kernel.quant_config = SimpleNamespace(w1_scale=w13.scale, w2_scale=w2.scale)
    output = torch.full_like(x, 7.0)
    options = dict(activation=MoEActivation.SILU, expert_map=None, apply_router_weight_on_input=False)
    kernel.apply(output, x, w13.qdata, w2.qdata, weights, ids, **options)

    def error(*variant):
        expected = oracle(x, w13, w2, weights, ids, *variant).double()
        return ((output - expected).norm() / expected.norm()).item()

    # FP32 and float64 seldom round to different BF16 numbers, then also to different codes: measured, 1e-4
    assert error(scale_format, fused) < 2e-3
    assert error(scale_format, not fused) > 5e-3  # measured: 1.3e-2
    assert error("pow2" if scale_format == "fp32" else "fp32", fused) > 5e-3  # measured: 6e-2


# -------------------------------------------------------------------------------------------------------- the engine


def checkpoint_tensors(model, seed):
    """The policy's tensors with other experts, in FP8, under the names that the weight stream gives them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name in [f"{experts}.{parameter}" for experts in EXPERTS for parameter in ENGINES_NAME]:
        weight = fp8_expert(tensors[name].shape, generator)
        tensors |= {name: weight.qdata, f"{name}_scale_inv": weight.scale}
    return tensors


def start(source, folder, tensors):
    """An engine that has read `tensors` from a checkpoint on disk."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = recipe().quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    ensure_master_addr_port()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with reference_fp8_experts():
        return engines.load(folder, recipe())


def held(llm):
    """The parameters of the engine's experts by the name of what was sent."""
    modules = [engine_model(llm).get_submodule(name).routed_experts for name in EXPERTS]
    return {
        f"{name}.{sent}{suffix}": getattr(module, kept + suffix)
        for name, module in zip(EXPERTS, modules, strict=True)
        for sent, kept in ENGINES_NAME.items()
        for suffix in ("", "_scale_inv")
    }


@torch.no_grad()
def distance(found, model, tensors, change=lambda scale: scale):
    """Mean |engine - transformers| log-prob over the prompts' tokens, with dequantized experts in `model`."""
    state = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name in state:
        if f"{name}_scale_inv" in tensors:
            state[name] = tensors[name].float() * expanded(change(tensors[f"{name}_scale_inv"]))
    model.load_state_dict(state)
    differences = []
    for ids, (_, _, engines_own) in zip(engines.PROMPTS, found, strict=True):
        tokens = torch.tensor([ids])
        logps = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        differences.append(logps.gather(-1, tokens[0, 1:, None])[:, 0] - torch.tensor(engines_own))
    return torch.cat(differences).abs().mean().item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA engines have kernels of their own")
def test_an_engine_holds_and_computes_with_what_was_loaded_and_what_is_written_over_it(checkpoint, tmp_path):
    source = checkpoint("qwen3_moe", hidden_size=256, moe_intermediate_size=256)  # experts of several blocks
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    loaded, written = checkpoint_tensors(model, seed=1), checkpoint_tensors(model, seed=2)
    llm = start(source, tmp_path / "fp8", loaded)
    addresses = {name: parameter.data_ptr() for name, parameter in held(llm).items()}
    for tensors, others in (loaded, written), (written, loaded):
        if tensors is written:
            layout = engine_layout(engine_model(llm), ())
            for name, held_there in layout.held.items():
                held_there.copy_(layout.pieces[name].of_sent(tensors[name]))
            llm.reset_prefix_cache()
        for name, parameter in held(llm).items():
            assert parameter.dtype == tensors[name].dtype and parameter.shape == tensors[name].shape, name
            assert torch.equal(parameter.data.view(torch.uint8), tensors[name].view(torch.uint8)), name
        found = engines.log_probs(llm)
        # transformers computes with BF16 activations, the engine's experts with e4m3: measured, that changes an expert
        # layer's output by 4.5%. Without experts the log-probs are off by 1.2 to 1.4, so 0.09 is to be expected of two
        # layers and 0.05 to 0.07 was measured; with scales in a wrong place it was 0.97 and more.
        assert distance(found, model, tensors) < 0.12
        assert distance(found, model, tensors, torch.ones_like) > 0.5
        assert distance(found, model, tensors, lambda scale: scale.flip(1)) > 0.5
        assert distance(found, model, tensors, lambda scale: scale.flip(2)) > 0.5
        assert distance(found, model, others) > 0.5
    assert {name: parameter.data_ptr() for name, parameter in held(llm).items()} == addresses
    engines.shutdown(llm)
