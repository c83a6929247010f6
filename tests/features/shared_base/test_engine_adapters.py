"""Adapters beside a frozen base in a real engine: what it computes, what it holds, and that all of it is proven."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer

from testing import engines
from testing.reference_experts import reference_fp8_experts
from trl_fp8.engine.vllm.cpu.reference_linear import linear
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.features.shared_base import engine_base
from trl_fp8.features.shared_base.adapter_tensors import adapter_tensors
from trl_fp8.features.shared_base.engine_adapters import ADAPTERS, _install
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.sync.shards import GatherFailed
from trl_fp8.upstream.vllm import engine_model


pytestmark = [pytest.mark.engine, pytest.mark.skipif(torch.cuda.is_available(), reason="bits of the CPU's reference")]
# of fused layers not all, and not of one rank; a scaling that is no power of two
LORA = {
    "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"],
    "r": 4,
    "lora_alpha": 5,
    "init_lora_weights": False,
}
PATTERNS = {"rank_pattern": {"v_proj": 6}, "alpha_pattern": {"o_proj": 3}, "use_rslora": True}


@pytest.fixture
def started(checkpoint):
    """`started(...)` -> a generation whose policy has adapters on a shared base; its engine ends with the test."""
    running = []

    def start(architecture="qwen3", lora=LORA, **options):
        config, scales = LoraConfig(task_type="CAUSAL_LM", **lora), engines.some_scales(2, 1)
        with reference_fp8_experts():
            running.append(engines.start_on_base(checkpoint(architecture), config, kv_scales=scales, **options))
        return running[-1]

    yield start
    for generation in running:
        engines.shutdown(generation.llm)


def codes_of(generation, weight):
    return held_codes(generation.engine.layout, generation.recipe.engine_name(weight), generation.recipe.format)


def adapters(model):
    return {checkpoint_name(n): layer for n, layer in model.named_modules() if isinstance(layer, LoraLayer)}


@pytest.mark.parametrize("patterns", [{}, PATTERNS], ids=["alike", "patterns"])
def test_an_engine_adds_the_adapters_to_its_base_bit_for_bit(patterns, started):
    generation = started(lora=LORA | patterns)
    generation.sync_weights()
    layers = adapters(generation.model)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}"
        call = generation.kernels.linear(name)
        x, start = torch.randn(5, call._module.input_size, generator=torch.Generator().manual_seed(1)).bfloat16(), 0
        base = call._module.quant_method
        plain = type(base).__mro__[2].apply(base, call._module, x, None)
        for peer in call.layers:
            rows = slice(start, start := start + len(codes_of(generation, f"{peer}.weight")))
            expected = plain[:, rows]
            if peer in layers:
                lora = layers[peer]
                a = lora.lora_A["default"].weight.detach().bfloat16()
                b = (lora.scaling["default"] * lora.lora_B["default"].weight.detach()).bfloat16()
                expected = expected + linear(linear(x, a), b)
                assert not torch.equal(expected, plain[:, rows])
            assert torch.equal(call(x)[:, rows], expected), peer


def test_every_element_that_the_engine_adds_is_sealed(started):
    generation = started()
    generation.sync_weights()
    generation.delivery.verify()
    module = engine_model(generation.llm).get_submodule("model.layers.0.self_attn.qkv_proj")
    for attribute in ADAPTERS.values():
        weight = module.get_submodule(attribute).weight.data
        for row, column in ((0, 0), (-1, 0), (0, -1), (-1, -1), (len(weight) // 2, weight.shape[1] // 2)):
            weight[row, column] = 1.5
            with pytest.raises(RuntimeError, match="have changed since the last sync.*lora_"):
                generation.delivery.verify()
            with pytest.raises(RuntimeError, match="holds no complete policy"):
                generation.delivery.require_whole()
            generation.sync_weights()
            assert weight[row, column] != 1.5
            generation.delivery.verify()


def test_a_sync_sends_adapters_and_nothing_else(started):
    generation = started()
    generation.sync_weights()
    first = generation.last_sync
    assert first.fp8_weights == len(generation.recipe.fp8_modules)
    bits = {name: held.clone() for name, held in generation.engine.layout.held.items()}
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    changed = {n for n, held in generation.engine.layout.held.items() if not torch.equal(held, bits[n])}
    assert changed and all("lora_" in name for name in changed)
    held = sum(t.nbytes for n, t in generation.engine.layout.held.items() if "lora_" in n)
    assert generation.last_sync.bytes_sent == held < first.bytes_sent
    assert generation.last_sync.weight_relative_error == first.weight_relative_error > 0.01


def test_the_policy_computes_on_the_engines_own_storage(started):
    generation = started("qwen3_moe", expert_kernels=True, lora=LORA | {"target_modules": ["q_proj", "o_proj"]})
    held = {tensor.data_ptr() for tensor in generation.engine.layout.held.values()}
    shared = [module for module in generation.model.modules() if getattr(module, "codes", None) is not None]
    codes = [
        c for module in shared for c in (module.codes.values() if isinstance(module.codes, dict) else [module.codes])
    ]
    assert len(codes) == len(generation.recipe.fp8_tensors) == 12
    assert all(each.qdata.data_ptr() in held and each.scale.data_ptr() in held for each in codes)


def test_a_base_that_was_changed_is_not_sampled_from_and_cannot_come_back(started):
    generation = started()
    generation.sync_weights()
    codes = codes_of(generation, "model.layers.0.mlp.down_proj.weight").qdata.view(torch.uint8)
    codes[3, 5] ^= 1
    with pytest.raises(RuntimeError, match="changed since the last sync: model.layers.0.mlp.down_proj.weight"):
        generation.delivery.verify()
    with pytest.raises(RuntimeError, match="pass the model by its name"):
        generation.sync_weights()
    with pytest.raises(RuntimeError, match="holds no complete policy"):
        generation.delivery.require_whole()


def test_an_adapter_that_came_later_and_does_not_fit_is_refused(started):
    generation = started()
    generation.model.add_adapter("wide", LoraConfig(r=16, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    generation.model.set_adapter("wide")
    with pytest.raises(
        ValueError, match="rank 16 at model.layers.0.self_attn.q_proj.*room for rank 4.*before the trainer"
    ):
        generation.sync_weights()


def test_adapters_that_nothing_has_room_for_are_named():
    with pytest.raises(ValueError, match="no linear layer for adapters of model.layers.0.somewhere"):
        _install(torch.nn.Module(), (), {"model.layers.0.somewhere": 4})


def test_adapters_that_peft_merged_are_not_sent(started):
    generation = started()
    layer = next(iter(adapters(generation.model).values()))
    layer.merged_adapters.append("default")
    with pytest.raises(ValueError, match="unmerge_adapter"):
        generation.sync_weights()


@pytest.mark.parametrize("error", [MemoryError, GatherFailed])
@pytest.mark.parametrize("failing", ["factors", "with_adapters"])
def test_a_rank_that_cannot_merge_enters_the_gathers_that_others_wait_in(failing, error, monkeypatch):
    """After a gather that broke off it enters none: the others would take it for the rest of that one."""
    gathered = []

    def gather(*names):
        for name in names:
            gathered.append(name)
            yield name, torch.ones(2, 2)

    def fail(*arguments):
        raise error("no memory")

    rank = SimpleNamespace(model=torch.nn.Linear(2, 2), parameters=None)
    rank._adapters = lambda model: gather("A", "B")
    rank.whole = lambda parameters: gather("up", "down")
    monkeypatch.setattr(engine_base, failing, fail)
    with engine_base.AdapterWeights.policy_tensors(rank) as tensors, pytest.raises(error):
        list(tensors)
    done = 2 if failing == "with_adapters" else 0
    assert gathered == ["A", "B", "up", "down"][: done if error is GatherFailed else None]


@pytest.mark.parametrize("error", [MemoryError, GatherFailed])
def test_a_rank_whose_adapters_do_not_arrive_enters_no_gather_after_one_that_broke_off(error):
    """Otherwise it enters those of the weights behind them, in which the others wait for it."""
    entered = []

    def broken():
        raise error("a gather")
        yield

    def weights():
        entered.append("weights")
        yield "up", torch.ones(2, 2)

    with pytest.raises(error):
        list(adapter_tensors(torch.nn.Linear(2, 2), {}, chain(broken(), weights())))
    assert entered == ([] if error is GatherFailed else ["weights"])


@pytest.mark.parametrize("second", [RuntimeError, GatherFailed])
def test_a_second_error_ends_the_gathers_only_if_a_gather_broke_off(second, monkeypatch):
    gathered = []

    def adapters(model):
        gathered.append("A")
        yield "A", torch.ones(2, 2)
        raise second("at the end of the source")

    def weights(parameters):
        gathered.append("up")
        yield "up", torch.ones(2, 2)

    def fail(model, lora_parameters):
        raise MemoryError("no memory")

    rank = SimpleNamespace(model=torch.nn.Linear(2, 2), parameters=None, _adapters=adapters, whole=weights)
    monkeypatch.setattr(engine_base, "factors", fail)
    expected = GatherFailed if second is GatherFailed else MemoryError
    with engine_base.AdapterWeights.policy_tensors(rank) as tensors, pytest.raises(expected):
        list(tensors)
    assert gathered == (["A"] if second is GatherFailed else ["A", "up"])
