"""What goes out to the engine, without an engine: names, order, dtypes, aliases, and what is refused."""

import pytest
import tiny_models
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from trl.distributed import DistributedBackend

from trl_fp8.engine.generation import FP8VLLMGeneration
from trl_fp8.engine.weight_stream import StreamReport, require_finite, weight_stream
from trl_fp8.numerics.blockwise import dequantize_weight, quantize_weight
from trl_fp8.numerics.kv_scales import KVScales
from trl_fp8.recipe import recipe_for_model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tiny_models.ARCHITECTURES["qwen3"][1](tiny_models.config())


def stream(model, **options):
    recipe = recipe_for_model(model, **options)
    scales = KVScales(torch.full((2, 3), 0.25))
    return list(weight_stream(model.named_parameters(), recipe, scales, StreamReport())), recipe


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


def test_nothing_aliases_a_policy_that_will_change(model):
    model = model.bfloat16()
    recipe = recipe_for_model(model)
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    for copy, expected in ((True, 0), (False, 11)):  # embedding, head, final norm and 4 norms in each of 2 layers
        sent = weight_stream(model.named_parameters(), recipe, None, StreamReport(), copy=copy)
        assert sum(tensor.data_ptr() in owned for _, tensor in sent) == expected


def test_a_loader_that_rounds_gets_the_policys_own_tensors(model):
    recipe, report = recipe_for_model(model), StreamReport()
    parameters = dict(model.named_parameters())
    sent = dict(weight_stream(parameters.items(), recipe, None, report, round_here=False))
    kept = [name for name in parameters if name.removesuffix(".weight") not in recipe.fp8_modules_set]
    assert len(kept) == 11 and all(sent[name].data_ptr() == parameters[name].data_ptr() for name in kept)
    rounded = StreamReport()
    list(weight_stream(parameters.items(), recipe, None, rounded))
    assert report.bytes_sent == rounded.bytes_sent  # of the engine's dtype


def test_a_module_that_vanished_is_named(model):
    recipe = recipe_for_model(model)
    parameters = [(name, p) for name, p in model.named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(RuntimeError, match=r"no weight for 1 modules .*model\.layers\.1\.mlp\.up_proj"):
        list(weight_stream(parameters, recipe, None, StreamReport()))


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
    generation = object.__new__(FP8VLLMGeneration)
    generation.model, generation._dist = policy, DistributedBackend(Accelerator(cpu=True))
    sent = dict(generation._iter_named_params())
    assert len(sent) == 25 and "lm_head.weight" in sent


@pytest.mark.parametrize("change", [lambda weight: weight.mul_(2), lambda weight: weight.add_(0.05)])
def test_weights_that_come_quantized_from_an_earlier_state_are_named(model, change):
    """A weight that doubled has the codes of before, under other scales."""
    recipe = recipe_for_model(model)
    linears = dict(model.named_modules())
    earlier = {name: quantize_weight(linears[name].weight.detach().bfloat16()) for name in recipe.fp8_modules}

    def send():
        report = StreamReport()
        list(weight_stream(model.named_parameters(), recipe, None, report, quantized=earlier.__getitem__))
        return report

    send().require_current()
    with torch.no_grad():
        change(linears["model.layers.1.mlp.up_proj"].weight)
    with pytest.raises(RuntimeError, match="current weights: model.layers.1.mlp.up_proj.weight. Trainer"):
        send().require_current()
