"""FP8 linears as layers: installed in plain and wrapped models, cached, copied, checkpointed, removed, trained."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from testing import tiny_models
from testing.linears import Wrapped, inputs, installed, pair
from testing.quantization_counter import QuantizationCounter
from trl_fp8.policy.flow import matmul as fp8_matmul
from trl_fp8.policy.flow.linear import FP8Flow, FP8Linear, FP8Linears
from trl_fp8.quantization.formats.spec import ActivationScaling
from trl_fp8.recipe.recipe import recipe_for_model


FLOWS = [(forward, backward) for forward in ("weights", "full") for backward in ("bf16", "fp8")]


def current(layer):
    """Whether the codes that the layer would use are those of its weight."""
    fresh = layer.fp8_flow.quantize_weights([layer.weight])[0]
    used = layer.quantized_weight()
    return torch.equal(used.qdata.view(torch.uint8), fresh.qdata.view(torch.uint8)) and torch.equal(
        used.scale, fresh.scale
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_is_quantized_once_per_optimizer_step(fused, monkeypatch):
    model = Wrapped(256, 128)
    handle = installed(model, FP8Flow(backward="fp8"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    x, dy = inputs((9,), 256, 128)
    counter = QuantizationCounter(monkeypatch)

    def micro_batches():
        for _ in range(4):
            model(x).backward(dy)

    for _ in range(3):
        assert counter.during(micro_batches) == 1
        assert handle.modules["layer"].cached_weight() is model.layer.quantized_weight()
        optimizer.step()
        if fused:  # moves no version counter
            assert not current(model.layer)
            handle.invalidate()
        assert handle.modules["layer"].cached_weight() is None
    assert current(model.layer)


def test_a_write_to_data_needs_invalidation_and_a_new_storage_or_parameter_does_not():
    model = Wrapped(256, 128)
    handle = installed(model, FP8Flow())
    x, _ = inputs((9,), 256, 128)
    before = model(x)
    model.layer.weight.data.mul_(3)
    assert torch.equal(model(x), before)  # stale: why the trainer invalidates
    handle.invalidate()
    assert not torch.equal(model(x), before) and current(model.layer)
    model.layer.weight.data = model.layer.weight.data * 3
    assert handle.modules["layer"].cached_weight() is None and current(model.layer)
    same_storage = nn.Parameter(model.layer.weight.data)
    with torch.no_grad():
        while same_storage._version < model.layer.weight._version:
            same_storage.mul_(1)
    model.layer.weight = same_storage  # as when a freed parameter's memory is used again
    assert handle.modules["layer"].cached_weight() is None and current(model.layer)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    assert handle.modules["layer"].cached_weight() is None and current(model.layer)


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_without_a_cache_nothing_is_ever_stale(backward, monkeypatch):
    model = Wrapped(256, 128)
    handle = installed(model, FP8Flow(backward=backward, cache_weights=False))
    x, dy = inputs((9,), 256, 128)
    counter = QuantizationCounter(monkeypatch)
    for _ in range(2):
        assert counter.during(lambda: model(x).backward(dy)) == (2 if backward == "fp8" else 1)
        assert handle.modules["layer"].cached_weight() is None
        model.layer.weight.data.mul_(3)
        assert current(model.layer)


@pytest.mark.parametrize("rows, columns", [(128, 256), (130, 300)])
def test_the_cache_holds_one_byte_per_weight_and_the_scales(rows, columns):
    model = Wrapped(columns, rows)
    handle = installed(model, FP8Flow())
    before = set(model.layer.__dict__)
    codes = model.layer.quantized_weight()
    assert set(model.layer.__dict__) == before
    assert handle.modules["layer"].cached_weight() is codes
    assert codes.qdata.untyped_storage().nbytes() == rows * columns
    assert codes.scale.untyped_storage().nbytes() == 4 * -(-rows // 128) * -(-columns // 128)


def test_names_state_and_class_relations_stay():
    plain, twin = pair(256, 128, FP8Flow())
    twin.layer.quantized_weight()
    assert isinstance(twin.layer, nn.Linear)
    assert twin.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(twin.buffers()) == []
    plain.load_state_dict(twin.state_dict())
    weight = twin.layer.weight
    handle = installed(Wrapped(256, 128), FP8Flow())
    assert handle.modules["layer"].weight is not weight


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_hold_no_cache_and_train_on_their_own(clone):
    model = Wrapped(256, 128)
    handle = installed(model, FP8Flow())
    x, dy = inputs((9,), 256, 128)
    before = model(x)
    twin = clone(model)
    assert twin.layer.cached_weight() is None and handle.modules["layer"].cached_weight() is not None
    assert torch.equal(twin(x), before)
    twin(x).backward(dy)
    torch.optim.SGD(twin.parameters(), lr=10.0).step()
    assert not torch.equal(twin(x), before) and current(twin.layer)
    assert torch.equal(model(x), before) and model.layer.weight.grad is None


def test_remove_gives_the_plain_linear_back():
    plain, twin = Wrapped(256, 128), Wrapped(256, 128)
    x, _ = inputs((9,), 256, 128)
    handle = installed(twin, FP8Flow())
    assert not torch.equal(twin(x), plain(x))
    handle.remove()
    assert type(twin.layer) is nn.Linear and set(twin.layer.__dict__) == set(plain.layer.__dict__)
    assert torch.equal(twin(x), plain(x))
    installed(twin, FP8Flow("weights"))


def test_unfitting_layers_and_names_are_refused_together_and_nothing_changes():
    model = nn.Sequential(nn.Linear(128, 128), nn.Bilinear(8, 8, 8), nn.Linear(128, 128))
    with pytest.raises(ValueError, match=r"No linear layers of Sequential: \['1', '7'\].*for example \['0', '2'\]"):
        installed(model, FP8Flow(), ["0", "1", "7"])
    installed(model, FP8Flow(), ["0"])
    model[2] = nn.modules.linear.NonDynamicallyQuantizableLinear(128, 128)
    with pytest.raises(ValueError, match=r"(?s)0: is an FP8 linear already.*2: is a NonDynamicallyQuantizableLinear"):
        installed(model, FP8Flow(), ["0", "2"])
    assert not isinstance(model[2], FP8Linear)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"forward": "off"}, r"fp8_forward='off'.*\['weights', 'full'\]"),
        ({"backward": "fp16"}, r"fp8_backward='fp16'.*\['bf16', 'fp8'\]"),
        ({"backend": "deepgemm"}, r"fp8_gemm_backend='deepgemm'.*'scaled_mm'"),
        ({"scale_format": "ue8m0"}, "scale_format='ue8m0'"),
        ({"activation": ActivationScaling("e8m0")}, "scale_format='e8m0'"),
        ({"activation": ActivationScaling("pow2", 0.0)}, "amax_floor=0.0"),
        ({"backend": "scaled_mm", "forward": "weights"}, "fp8_gemm_backend='scaled_mm' with fp8_forward='weights'"),
        ({"backend": "torchao"}, "fp8_gemm_backend='torchao' with fp8_backward='bf16'"),
        ({"backend": "torchao", "backward": "fp8"}, "weight scales 'pow2' and activation scales 'pow2'"),
    ],
)
def test_wrong_flows_are_refused_by_flag(fields, message):
    with pytest.raises(ValueError, match=message):
        FP8Flow(**fields)


def token_batch():
    ids = torch.randint(4, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("forward, backward, autocast", [(*flow, False) for flow in FLOWS] + [("full", "fp8", True)])
def test_a_model_overfits_one_batch(forward, backward, autocast):
    model, losses = tiny_models.build().requires_grad_(False), []
    handle = installed(model, FP8Flow(forward, backward), recipe_for_model(model).fp8_modules)
    weights = [
        linear.weight.requires_grad_() for linear in handle.modules.values()
    ]  # no other part can learn for them
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    for _ in range(25):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**token_batch()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        handle.invalidate()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], losses  # high precision ends at 0.003 of it


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forward, backward, autocast", [(*flow, False) for flow in FLOWS] + [("full", "fp8", True)])
def test_gradient_checkpointing_changes_no_gradient(forward, backward, autocast, reentrant):
    found = []
    for checkpointing in (False, True):
        model = tiny_models.build()
        installed(model, FP8Flow(forward, backward), recipe_for_model(model).fp8_modules)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(**token_batch()).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
    assert found[0]["model.layers.0.self_attn.q_proj.weight"].any()


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_lora_adapters_stay_high_precision_over_a_frozen_fp8_base(backward, monkeypatch):
    model = get_peft_model(
        tiny_models.build(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    names = [name for name, _ in model.named_parameters()]
    recipe = recipe_for_model(model)
    handle = installed(model, FP8Flow(backward=backward), recipe.fp8_modules)
    assert tuple(handle.modules) == recipe.fp8_modules
    assert [name for name, _ in model.named_parameters()] == names
    lora = model.base_model.model.model.layers[0].self_attn.q_proj
    assert handle.modules["model.layers.0.self_attn.q_proj"] is lora.base_layer
    assert type(lora.lora_A["default"]) is nn.Linear is type(lora.lora_B["default"])
    x, _ = inputs((9,), 128, 256)
    adapter = lora.lora_B["default"](lora.lora_A["default"](x)) * lora.scaling["default"]
    assert torch.equal(lora(x), lora.base_layer(x) + adapter)
    monkeypatch.setattr(fp8_matmul, "_weight_gradient", None)  # no GEMM for a frozen weight
    model(**token_batch()).loss.backward()
    assert all((parameter.grad is not None) == ("lora_" in name) for name, parameter in model.named_parameters())
    # PEFT writes to .data when it merges
    before = handle.modules["model.layers.0.self_attn.q_proj"].quantized_weight()
    model.merge_adapter()
    handle.invalidate()
    assert not torch.equal(lora.base_layer.quantized_weight().qdata.float(), before.qdata.float())


def test_adapters_can_be_added_after_installation():
    model = tiny_models.build()
    name = "model.layers.0.self_attn.q_proj"
    handle = installed(model, FP8Flow(), [name])
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    assert wrapped.base_model.model.model.layers[0].self_attn.q_proj.base_layer is handle.modules[name]
    wrapped(**token_batch()).loss.backward()


@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_layers_add_the_partial_products_of_the_engines_ranks(bias):
    """Two ranks with half of K each: each product in BF16, the bias on the first rank, the sum rounded once."""
    model = nn.ModuleDict({"o_proj": Wrapped(512, 256, bias).layer, "q_proj": Wrapped(512, 256, bias).layer})
    FP8Linears.install(model, ["o_proj", "q_proj"], FP8Flow(), tensor_parallel_size=2)
    x, _ = inputs((9,), 512, 256, dtype=torch.bfloat16)
    halves = []
    for start in (0, 256):
        half = Wrapped(256, 256, bias and start == 0)
        with torch.no_grad():
            half.layer.weight.copy_(model["o_proj"].weight[:, start : start + 256])
            if half.layer.bias is not None:
                half.layer.bias.copy_(model["o_proj"].bias)
        installed(half, FP8Flow())
        halves.append(half(x[:, start : start + 256]).float())
    expected = sum(halves).to(torch.bfloat16)
    assert torch.equal(model["o_proj"](x), expected)
    assert not torch.equal(model["q_proj"](x), expected)  # column-parallel: one product of all of K
    grads = [torch.autograd.grad(model[name](x).float().sum(), model[name].weight)[0] for name in ("o_proj", "q_proj")]
    assert torch.equal(*grads)  # straight through
