"""What the engine is told, on CPU and on each generation of GPU; no engine is started."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.attention.backends import fa_utils

from testing import tiny_models
from testing.hub_cache import COMMITS, KEEPS_COMMITS, NAME, write_repository
from trl_fp8.engine.vllm import platform
from trl_fp8.engine.vllm.layout import engine_layout
from trl_fp8.engine.vllm.platform import Cpu, Cuda, platform_of
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.shared_base.engine_base import BasePart
from trl_fp8.quantization.formats import MXFP8, TENSOR
from trl_fp8.recipe.recipe import FP8Recipe


RECIPE = FP8Recipe(fp8_modules=("a",), kept_modules={"lm_head": "output head"})
HOPPER, ADA = Cuda((9, 0), flash_attention=3), Cuda((8, 9), flash_attention=2)


def arguments(recipe=RECIPE, platform=HOPPER, **options):
    sizes = {"max_num_seqs": 8, "max_model_len": 64} | options
    return platform.arguments(recipe, tiny_models.config(), **sizes)


def test_dummy_weights_and_the_recipes_config():
    made = arguments()
    assert made["load_format"] == "dummy" and made["kv_cache_dtype"] == "fp8" and made["dtype"] == "bfloat16"
    assert made["hf_overrides"]["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.skipif(not KEEPS_COMMITS, reason="this version of transformers keeps no commits")
def test_the_engine_is_of_the_policys_commit(checkpoint, tmp_path, monkeypatch):
    assert "revision" not in arguments()  # nor for a model in a folder
    folders = [checkpoint("qwen3"), checkpoint("qwen3", intermediate_size=384)]
    write_repository(folders, tmp_path, monkeypatch)
    for revision, folder in ((COMMITS[0], folders[0]), (None, folders[1])):
        config = AutoConfig.from_pretrained(NAME, revision=revision)
        made = Cpu().arguments(RECIPE, config, max_num_seqs=8, max_model_len=64)
        of_engine = ModelConfig(NAME, revision=made["revision"]).hf_config
        assert of_engine.intermediate_size == AutoConfig.from_pretrained(folder).intermediate_size
        user = Cpu().arguments(RECIPE, config, max_num_seqs=8, max_model_len=64, user={"revision": "main"})
        assert user["revision"] == "main"


def test_attention_is_pinned_to_what_reads_the_scales_anew():
    assert arguments()["attention_backend"] == "FLASH_ATTN"
    assert arguments(platform=ADA)["attention_backend"] == "TRITON_ATTN"
    assert "attention_backend" not in arguments(FP8Recipe(fp8_modules=("a",), kv_cache_dtype="auto"))


def of_type(model_type, recipe=RECIPE, platform=HOPPER, **fields):
    config = AutoConfig.for_model(model_type, **fields)
    return platform.arguments(recipe, config, max_num_seqs=8, max_model_len=64)


def test_attention_sinks_are_read_anew_with_a_bf16_cache_too():
    bf16 = FP8Recipe(fp8_modules=("a",), kv_cache_dtype="auto")
    assert of_type("gpt_oss", bf16)["attention_backend"] == "FLASH_ATTN"
    assert of_type("gpt_oss", bf16, Cuda((10, 0), 4))["attention_backend"] == "TRITON_ATTN"


def test_an_engine_on_cpu_without_a_kv_cache_has_memory_for_the_states_of_its_sequences():
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    made = of_type("qwen3_next", FP8Recipe(fp8_modules=("a",), kv_cache_dtype="auto"), Cpu(), **layers)
    matrices = 32 * 128 * 128 * 4  # of each layer, in FP32
    assert made["kv_cache_memory_bytes"] >= 8 * 2 * matrices


def test_a_copy_of_experts_biases_is_refused():
    experts = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(experts)
    experts.w13_bias = nn.Parameter(torch.zeros(4))
    backend, config = SimpleNamespace(name="TRITON"), SimpleNamespace(w1_bias=torch.zeros(4))
    experts.quant_method = SimpleNamespace(unquantized_backend=backend, moe_quant_config=config)
    with pytest.raises(ValueError, match="experts compute with a copy of w13_bias"):
        engine_layout(nn.ModuleDict({"experts": experts}), ())


def test_a_tensor_that_vllm_derives_otherwise_than_known_is_refused():
    attention = MLAAttention.__new__(MLAAttention)
    nn.Module.__init__(attention)
    attention.W_Q = nn.Parameter(torch.zeros(4))
    with pytest.raises(RuntimeError, match="vLLM derives attention.W_Q"):
        engine_layout(nn.ModuleDict({"attention": attention}), ())


def test_a_copy_of_attention_sinks_is_refused():
    attention = nn.Module()
    attention.sinks = nn.Parameter(torch.zeros(4))
    attention.attn = SimpleNamespace(impl=SimpleNamespace(sinks=attention.sinks.detach().clone()))
    with pytest.raises(ValueError, match="attention computes with a copy of sinks"):
        engine_layout(nn.ModuleDict({"layer": attention}), ())


@pytest.mark.parametrize("platform", [ADA, Cuda((12, 0), 2)], ids=str)
def test_fp8_latents_that_need_more_shared_memory_than_there_is_are_refused(platform):
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8' with latents of 512 .* needs 100 KiB"):
        of_type("deepseek_v3", platform=platform)
    assert of_type("deepseek_v3", platform=platform, kv_lora_rank=256)["attention_backend"] == "TRITON_MLA"
    assert of_type("deepseek_v3")["attention_backend"] == "TRITON_MLA"
    bf16 = FP8Recipe(fp8_modules=("a",), kv_cache_dtype="auto")
    assert "attention_backend" not in of_type("deepseek_v3", bf16, platform)


def test_linears_are_left_to_what_is_measured():
    assert "linear_backend" not in arguments()
    assert arguments(user={"linear_backend": "triton"})["linear_backend"] == "triton"
    assert HOPPER.linear_backends(RECIPE) == ("cutlass", "deep_gemm", "flashinfer_cutlass", "triton")
    assert replace(HOPPER, capability=(10, 0)).linear_backends(RECIPE) == ("cutlass", "deep_gemm", "triton")
    assert HOPPER.linear_backends(FP8Recipe(fp8_modules=("a",), format=TENSOR)) == ("cutlass",)
    assert Cpu().linear_backends(FP8Recipe(fp8_modules=("a",), format=TENSOR)) == ("auto",)


def test_a_backend_in_the_users_kernel_config_is_not_overridden():
    """vLLM prefers an argument `moe_backend` to the entry of that name."""
    mixture = FP8Recipe(fp8_modules=("a",), fp8_experts=("b",))
    assert arguments(mixture)["moe_backend"] == "triton"
    made = arguments(mixture, user={"kernel_config": {"moe_backend": "marlin"}})
    assert "moe_backend" not in made and made["kernel_config"] == {"moe_backend": "marlin"}
    assert arguments(mixture, user={"moe_backend": "marlin"})["moe_backend"] == "marlin"
    assert arguments(mixture, user={"kernel_config": {"enable_jit_warmup": False}})["moe_backend"] == "triton"


def test_the_cache_of_a_cpu_engine_holds_as_many_sequences_as_the_user_allows():
    expected = arguments(platform=Cpu(), max_num_seqs=512)["kv_cache_memory_bytes"]
    made = arguments(platform=Cpu(), user={"max_num_seqs": 512})
    assert made["kv_cache_memory_bytes"] == expected > arguments(platform=Cpu())["kv_cache_memory_bytes"]


def test_mxfp8_starts_with_blackwell():
    recipe = FP8Recipe(fp8_modules=("a",), format=MXFP8)
    for gpu in (ADA, HOPPER):
        capability = ".".join(map(str, gpu.capability))
        with pytest.raises(ValueError, match=f"'mxfp8' on a GPU of compute capability {capability}.*starts with 10.0"):
            arguments(recipe, gpu)
    for gpu in (Cuda((10, 0), 4), Cuda((12, 0), 2)):
        assert gpu.linear_backends(recipe) == ("flashinfer_cutlass",)
        assert arguments(recipe, gpu)["hf_overrides"]["quantization_config"]["quant_method"] == "mxfp8"
    assert arguments(FP8Recipe((), format=MXFP8))["kv_cache_dtype"] == "fp8"  # nothing has the format


def test_a_trainer_that_shares_kernels_pins_which():
    assert not {"compilation_config", "kernel_config"} & arguments().keys()
    made = arguments(parts=[SharedKernelsPart()])
    assert made["kernel_config"]["ir_op_priority"]["fused_add_rms_norm"] == ["trl_fp8"]
    assert made["compilation_config"]["custom_ops"] == ["all", "-rms_norm"]
    assert made["attention_backend"] == "FLASH_ATTN"
    assert made["compilation_config"]["pass_config"]["fuse_norm_quant"] is False


@pytest.mark.parametrize("platform", [ADA, Cuda((10, 0), 4), Cuda((12, 0), 2)], ids=str)
def test_a_gpu_without_one_attention_kernel_for_all_batches_is_refused(platform):
    capability = ".".join(map(str, platform.capability))
    with pytest.raises(
        ValueError, match=f"fp8_forward='one_forward' on a GPU of compute capability {capability}.*TRITON_ATTN"
    ):
        arguments(platform=platform, parts=[SharedKernelsPart()])


def test_operations_compiled_apart_for_one_row_and_for_many_are_refused():
    sizes = {"max_num_seqs": 8, "max_model_len": 64, "parts": [SharedKernelsPart()]}
    with pytest.raises(
        ValueError, match="fp8_forward='one_forward' with a policy of type 'cohere' on cuda: .* its norms"
    ):
        HOPPER.arguments(RECIPE, tiny_models.config("cohere"), **sizes)
    longrope = tiny_models.config("phi3")
    longrope.rope_parameters = {"rope_type": "longrope"}
    with pytest.raises(ValueError, match="policy of type 'phi3' on cuda: .* rotary"):
        HOPPER.arguments(RECIPE, longrope, **sizes)
    assert Cpu().arguments(RECIPE, tiny_models.config("cohere"), **sizes)["enforce_eager"]


def test_the_users_settings_win_one_by_one():
    user = {"compilation_config": {"cudagraph_mode": "NONE", "pass_config": {"fuse_act_quant": True}}, "seed_like": 3}
    made = arguments(parts=[SharedKernelsPart()], user=user)
    compilation = made["compilation_config"]
    assert compilation["cudagraph_mode"] == "NONE" and compilation["custom_ops"][0] == "all" and made["seed_like"] == 3
    assert (
        compilation["pass_config"]["fuse_act_quant"] is True and compilation["pass_config"]["fuse_norm_quant"] is False
    )
    assert arguments(parts=[SharedKernelsPart()], user={"compilation_config": 0})["compilation_config"] == 0


def with_adapters(layer, rank):
    config = LoraConfig(r=rank, target_modules=[layer])
    return BasePart(SimpleNamespace(model=get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)))


def test_vllms_compile_cache_is_told_of_adapters_and_of_this_packages_source(monkeypatch, tmp_path):
    user = {"additional_config": {"gdn_prefill_backend": "triton"}}
    bases = [], [with_adapters("0", 4)], [with_adapters("0", 8)], [with_adapters("1", 4)]
    made = [arguments(parts=parts, user=user)["additional_config"] for parts in bases]
    assert all(each.pop("gdn_prefill_backend") == "triton" for each in made)
    assert len({json.dumps(each) for each in made}) == 4
    (tmp_path / "linear.py").write_text("another kernel")
    monkeypatch.setattr(platform, "__file__", str(tmp_path / "engine" / "vllm" / "platform.py"))
    platform._source_digest.cache_clear()
    assert arguments()["additional_config"] != made[0]
    platform._source_digest.cache_clear()


@pytest.mark.parametrize(("capability", "flash"), [((10, 0), 4), ((11, 0), None), ((12, 1), 2), ((13, 0), 4)])
def test_later_gpus_get_experts_and_attention_that_can_be_verified_anywhere(capability, flash):
    experts = FP8Recipe(fp8_modules=("a",), fp8_experts=("b",))
    made = arguments(experts, Cuda(capability, flash))
    assert (made["moe_backend"], made["attention_backend"]) == ("triton", "TRITON_ATTN")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_gpus_without_fp8_units_are_refused(capability):
    with pytest.raises(ValueError, match=rf"capability {capability[0]}\.{capability[1]}, which has no units for e4m3"):
        arguments(platform=Cuda(capability))


def test_the_cpu_engine_gets_a_kv_cache_for_all_sequences_but_not_all_of_the_memory():
    cpu = Cpu()
    per_block = 2 * 2 * 2 * 64 * 128  # k and v, layers, kv heads, head size, tokens; one byte each
    assert arguments(platform=cpu)["kv_cache_memory_bytes"] == per_block * 2 * 8
    bf16 = FP8Recipe(fp8_modules=("a",), kv_cache_dtype="auto")
    assert arguments(bf16, cpu)["kv_cache_memory_bytes"] == 2 * per_block * 2 * 8
    assert arguments(platform=cpu, max_num_seqs=10**6)["kv_cache_memory_bytes"] == 2 * 2**30
    assert arguments(platform=cpu)["enforce_eager"] is True


def test_nothing_fp8_means_no_quantization_whatever_the_folder_says():
    made = arguments(FP8Recipe(fp8_modules=(), kv_cache_dtype="auto"), Cpu())
    assert made["hf_overrides"] == {"quantization_config": None} and "kv_cache_dtype" not in made


def test_skipped_kv_layers_reach_vllm_by_number():
    recipe = FP8Recipe(fp8_modules=("a",), kv_cache_skip_layers=(0, 3))
    made = arguments(recipe, Cpu())
    assert made["kv_cache_dtype_skip_layers"] == ["0", "3"]
    whole = arguments(FP8Recipe(fp8_modules=("a",)), Cpu())
    assert "kv_cache_dtype_skip_layers" not in whole
    assert made["kv_cache_memory_bytes"] == 2 * whole["kv_cache_memory_bytes"]


def test_a_platform_has_the_capability_of_its_device_and_not_of_the_current_one(monkeypatch):
    second = torch.device("cuda", 1)
    of_device = lambda device=None: (9, 0) if device == second else (8, 9)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", of_device)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 2)
    assert platform_of(second) == Cuda((9, 0), 2) and platform_of(torch.device("cuda")) == Cuda((8, 9), 2)


def test_other_devices_are_no_cpu():
    assert platform_of(torch.device("cpu")).name == "cpu"
    with pytest.raises(ValueError, match="the trainer runs on 'mps': FP8 rollouts run on NVIDIA GPUs"):
        platform_of(torch.device("mps"))
