"""What goes into a checkpoint, and into an engine, without an engine: names, order, dtypes, and what is refused."""

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trl.distributed import DistributedBackend

from testing import tiny_models
from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_weight
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.policy_checks import require_finite
from trl_fp8.sync.weight_stream import weight_stream


@pytest.fixture
def model():
    return tiny_models.build()


def stream(model, **options):
    recipe = recipe_for_model(model, **options)
    scales = KVScales(torch.full((2, 3), 0.25))
    return list(weight_stream(model.named_parameters(), recipe, scales)), recipe


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_fp8_weights_are_those_of_the_bf16_rounded_policy(model, scale_format):
    sent, recipe = stream(model, scale_format=scale_format)
    tensors = dict(sent)
    assert len(tensors) == len(sent) == 25 + 14 + 6
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") in recipe.fp8_modules:
            expected = quantize_weight(parameter.detach().bfloat16(), scale_format)
            from_master = quantize_weight(parameter.detach(), scale_format)
            assert torch.equal(tensors[name].view(torch.uint8), expected.qdata.view(torch.uint8))
            assert torch.equal(tensors[f"{name}_scale_inv"], expected.scale)
            # two roundings are not one: this is what quantizing the fp32 master would have sent
            assert not torch.equal(dequantize_weight(expected, torch.float32), dequantize_weight(from_master))
        else:
            assert torch.equal(tensors[name], parameter.detach().bfloat16())


def test_kv_scales_come_last_and_scales_follow_their_weight(model):
    names = [name for name, _ in stream(model)[0]]
    assert all(name.endswith(("q_scale", "k_scale", "v_scale")) for name in names[-6:])
    for index, name in enumerate(names):
        if name.endswith("_scale_inv"):
            assert names[index - 1] == name.removesuffix("_scale_inv")


def test_a_module_that_vanished_is_named(model):
    recipe = recipe_for_model(model)
    parameters = [(name, p) for name, p in model.named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(RuntimeError, match=r"lacks 1 weights .*model\.layers\.1\.mlp\.up_proj\.weight"):
        list(weight_stream(parameters, recipe))


def test_all_ranks_refuse_what_one_of_them_saw(model):
    require_finite(model)
    seen = []

    def other_rank_saw_the_third(flags):
        seen.append(flags.clone())
        flags[2] = 1

    with pytest.raises(ValueError, match=f"1 of 25 parameters: {list(dict(model.named_parameters()))[2]}"):
        require_finite(model, other_rank_saw_the_third)
    assert seen[0].shape == (25,) and seen[0].count_nonzero() == 0


def test_parameters_that_live_elsewhere_are_no_evidence(model):
    model.lm_head.weight.data = torch.empty(0)  # as ZeRO-3 leaves them
    require_finite(model)
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="1 of 25 parameters: model.norm.weight"):
        require_finite(model)


def test_the_shards_that_zero3_keeps_beside_an_empty_tensor_are_read(model):
    head = model.lm_head.weight
    head.ds_tensor, head.data = torch.full((7,), torch.inf), torch.empty(0)
    with pytest.raises(ValueError, match="1 of 25 parameters: lm_head.weight"):
        require_finite(model)


def test_weights_of_adapters_that_are_not_active_are_not_sent(model):
    """TRL adds a copy of a PEFT policy's adapter as its reference."""
    policy = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    policy.add_adapter("ref", policy.peft_config["default"])
    sent = dict(generation_of(policy)._iter_named_params())
    assert len(sent) == 25 and "lm_head.weight" in sent


def generation_of(policy):
    generation = object.__new__(FP8VLLMGeneration)
    generation.model, generation._dist = policy, DistributedBackend(Accelerator(cpu=True))
    return generation


@pytest.mark.parametrize(
    "architecture, adapter",
    [
        ("qwen3", LoraConfig(r=4)),
        ("qwen2", LoraConfig(r=4, bias="all", target_modules=["q_proj"], lora_bias=False)),
        ("qwen3", LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"])),
        ("qwen3", LoraConfig(r=4, target_modules=["embed_tokens", "v_proj"], modules_to_save=["norm"])),
        (
            "qwen3_moe",
            LoraConfig(
                r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            ),
        ),
        ("qwen3", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    ],
    ids=["linears", "bias", "dora", "embedding", "experts", "ia3"],
)
def test_merged_weights_are_those_that_peft_merges_and_the_base_keeps_its_bits(architecture, adapter):
    policy = get_peft_model(tiny_models.build(architecture), adapter)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    before = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    policy.merge_adapter()
    expected = {}
    for name, tensor in policy.named_parameters():
        if policy.prefix not in name and "original_module" not in name:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            expected[name.replace(".modules_to_save.default", "")] = tensor.detach().clone()
    policy.unmerge_adapter()
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            tensor.copy_(before[name])
    generation = generation_of(policy)
    for _ in range(3):
        found = {name: tensor.clone() for name, tensor in generation._iter_named_params()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    abandoned = generation._iter_named_params()
    [next(abandoned) for _ in range(len(expected) // 2)]
    abandoned.close()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.named_parameters())
    assert not any(getattr(module, "merged", False) for module in policy.modules())
    base = [name for name in before if ".base_layer." in name]
    plain = {name.removeprefix("base_model.model.").replace(".base_layer", ""): before[name] for name in base}
    assert any(not torch.equal(expected[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        VeraConfig(r=8, target_modules=["q_proj"]),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_the_outline_of_a_peft_policy_is_that_of_its_base(model, adapter):
    """Adapters, TRL's reference among them, are no tensors of the policy: an engine need not have them."""
    plain = outline_of(model)
    policy = get_peft_model(model, adapter)
    policy.add_adapter("ref", adapter)
    found = outline_of(policy)
    assert found.parameters == plain.parameters and found.linears == plain.linears
    assert not dict(persistent_buffers(policy))


def test_names_of_checkpointed_layers_are_those_of_the_checkpoint():
    """As accelerate wraps them for FSDP2's activation_checkpointing."""
    model = tiny_models.build("glm4_moe")
    names = {name for name, _ in persistent_buffers(model)}
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    assert (
        {name for name, _ in persistent_buffers(model)} == names == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    )


MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")


@pytest.mark.parametrize("architecture", MOE)
def test_experts_are_quantized_block_by_block_like_single_linears(architecture):
    model = tiny_models.build(architecture)
    recipe = recipe_for_model(model)
    sent = dict(weight_stream(model.named_parameters(), recipe))
    for name in recipe.fp8_experts:
        for parameter, tensor in model.get_submodule(name).named_parameters():
            codes, scales = (sent[recipe.engine_name(f"{name}.{parameter}") + suffix] for suffix in ("", "_scale_inv"))
            assert codes.dtype == torch.float8_e4m3fn and codes.shape == tensor.shape
            for expert, weight in enumerate(tensor.detach().bfloat16()):
                alone = quantize_weight(weight)
                assert torch.equal(codes[expert].view(torch.uint8), alone.qdata.view(torch.uint8))
                assert torch.equal(scales[expert], alone.scale)
    routers = [name for name in sent if name.endswith(".gate.weight")]
    assert len(routers) == 2 and all(sent[name].dtype == torch.bfloat16 for name in routers)
