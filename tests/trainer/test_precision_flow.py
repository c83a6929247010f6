"""Training with a full FP8 forward: the policy's log-probs stay the engine's while the weights move."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from testing import engines
from testing.played_attention import engine_with, played_attention
from testing.runs import arguments, column, training
from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.features.flow import Flow
from trl_fp8.quantization.formats.tensor import TENSOR
from trl_fp8.recipe.recipe import FP8Recipe


pytestmark = pytest.mark.engine

FULL = {"fp8_forward": "full"}
MISMATCH = "sampling/sampling_logp_difference/mean"
# Both sides take a log_softmax of the same logits in FP32, in other orders: a few 2**-24 of magnitudes around 5
ROUNDING = 1e-5
# What quantization alone makes of this model's log-probs is 0.05 and more (tests/engine/test_one_forward.py)
VISIBLE = 1e-3


def run(model, folder, **flags):
    options = {"peft_config": flags.pop("peft_config", None)}
    with training(model, arguments(folder, **flags), **options) as trainer:
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    "flags",
    [
        {"bf16": False},
        {"gradient_checkpointing": True, "optim": "adamw_torch_fused"},
        {"num_iterations": 2, "max_steps": 4},
        {"fp8_backward": "fp8", "bf16": False},
        {"fp8_weight_format": "tensor", "bf16": False},
        {"fp8_scale_format": "fp32", "fp8_weight_format": "tensor", "fp8_backward": "fp8"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_the_mismatch_stays_at_rounding_while_weights_change(flags, checkpoint, tmp_path):
    model = checkpoint("qwen3")
    trainer = run(model, tmp_path, **(FULL | flags))
    mismatch = column(trainer, MISMATCH)
    fresh = 2 if "num_iterations" in flags else 3
    assert len(mismatch) == fresh and max(mismatch) < ROUNDING, mismatch
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    moved = {name: value for name, value in trainer.model.state_dict().items() if not torch.equal(value, start[name])}
    assert len(moved) == len(start)
    assert trainer.vllm_generation.match_rounding  # compiled, the engine would keep its roundings
    assert min(column(trainer, "grad_norm")) > 0


def test_merged_adapters_are_sent_with_the_scales_that_their_sums_share(checkpoint, tmp_path):
    lora = LoraConfig(r=4, target_modules=["k_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    flags = {"fp8_weight_format": "tensor", "fp8_forward": "weights", "peft_config": lora}
    trainer = run(checkpoint("qwen3"), tmp_path, **flags)
    assert trainer.vllm_generation.audit_failures == 0 and len(column(trainer, MISMATCH)) == 3


@pytest.mark.parametrize("architecture, said", [("cohere", 1), ("llama", 0)])
def test_a_flow_without_effect_is_warned_about_once(architecture, said, checkpoint, tmp_path, caplog):
    model = checkpoint(architecture, tied=True, initializer_range=0.2)
    with caplog.at_level("WARNING", logger="trl_fp8"):
        mismatch = column(run(model, tmp_path, **FULL), MISMATCH)
    warnings = [record.message for record in caplog.records if "fp8_forward='full', but" in record.message]
    assert len(warnings) == said and all("model_type='cohere' is not one of those" in text for text in warnings)
    assert (max(mismatch) > VISIBLE) == bool(said)


def test_without_the_flow_the_mismatch_is_that_of_quantization(checkpoint, tmp_path):
    trainer = run(checkpoint("qwen3"), tmp_path, simulate_kv_cache=True)
    mismatch = column(trainer, MISMATCH)
    assert min(mismatch) > VISIBLE, mismatch
    assert not trainer.vllm_generation.match_rounding


def test_simulated_attention_weights_follow_an_engine_that_rounds_them(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_fp8.engine.vllm.numerics.attention_weight_offset", lambda engine: 256.0)
    flags = FULL | {"gradient_checkpointing": True}  # the chunks are made again within layers that are
    with engine_with(played_attention(torch.float8_e4m3fn)):
        followed, not_followed = (
            column(run(checkpoint("qwen3"), tmp_path / str(on), **flags, simulate_attention_weights=on), MISMATCH)
            for on in (True, False)
        )
    assert max(followed) < ROUNDING < VISIBLE < min(not_followed), (followed, not_followed)


def test_attention_weights_that_the_engine_does_not_round_are_not_simulated(checkpoint, tmp_path, monkeypatch):
    started, init_vllm = [], FP8VLLMGeneration._init_vllm

    def noted(generation):
        init_vllm(generation)
        started.append(generation.llm)

    monkeypatch.setattr(FP8VLLMGeneration, "_init_vllm", noted)
    with pytest.raises(ValueError, match="simulate_attention_weights=True, but the engine's attention does not round"):
        run(checkpoint("qwen3"), tmp_path, **FULL, simulate_attention_weights=True)
    engines.shutdown(started.pop())


def flow_trainer(recipe, sharded=False, **flags):
    """What a flow asks of a trainer before there is an engine."""
    flow = {"forward": "full", "backward": "bf16", "backend": "fake_quant"} | flags
    args = SimpleNamespace(fp8_forward="full", flow=flow)
    return SimpleNamespace(args=args, recipe=recipe, is_fsdp_enabled=sharded, is_deepspeed_enabled=False)


def test_what_flags_alone_rule_out_is_refused_before_an_engine_starts():
    recipe = FP8Recipe(("a",), format=TENSOR)
    Flow(flow_trainer(recipe))
    with pytest.raises(ValueError, match="fp8_gemm_backend='scaled_mm' with fp8_weight_format='tensor'"):
        Flow(flow_trainer(recipe, backend="scaled_mm"))
    with pytest.raises(ValueError, match="fp8_weight_format='tensor' with fp8_forward='full' under FSDP2"):
        Flow(flow_trainer(recipe, sharded=True))


def test_an_engine_without_fp8_kernels_has_nothing_to_follow():
    trainer = flow_trainer(FP8Recipe(("a", "b"), fp8_experts=("c",)))
    expected = "fp8_forward='full'.*2 linear layers and 1 layers of experts, found is none.*Remove linear_backend"
    with pytest.raises(RuntimeError, match=expected):
        Flow(trainer).engine_started(EngineNumerics(kernels={}))


def test_the_trained_policy_is_saved_and_generates_in_high_precision(checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, **FULL)) as trainer:
        assert trainer.args.bf16
        trainer.train()
        mismatch = column(trainer, MISMATCH)
        trainer.save_model(str(tmp_path / "saved"))
        policy = trainer.model
        held = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        assert {parameter.dtype for parameter in held.values()} == {torch.float32}
        linears = [module for module in policy.modules() if isinstance(module, FP8Linear)]
        assert len(linears) == 14
        ids = torch.tensor([[5, 6, 7, 8]])
        generated = policy.generate(input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert generated.shape == (1, 10) and torch.equal(generated[:, :4], ids)
    assert len(mismatch) == 3 and max(mismatch) < ROUNDING, mismatch
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert type(saved.lm_head) is torch.nn.Linear
    assert all(torch.equal(parameter, held[name]) for name, parameter in saved.named_parameters())
    weight, codes = linears[0].weight, linears[0].quantized_weight()
    assert not torch.equal(weight, codes.dequantize(torch.float32))
    assert not torch.equal(weight, weight.to(torch.bfloat16).float())


def test_a_fused_optimizers_steps_reach_trainer_and_engine(checkpoint, tmp_path):
    """It moves no version counter, so that only the callback tells the trainer that its quantized weights are old."""
    trainer = run(checkpoint("qwen3"), tmp_path, **(FULL | {"optim": "adamw_torch_fused", "learning_rate": 1e-2}))
    linears = [module for module in trainer.model.modules() if isinstance(module, FP8Linear)]
    stale = [module for module in linears if not holds(module, module.quantized_weight())]
    errors, mismatch = column(trainer, "fp8/weight_relative_error"), column(trainer, MISMATCH)
    assert max(mismatch) < ROUNDING
    assert len(linears) == 14 and not stale
    assert max(errors) < 0.04  # e4m3: steps of at most 1/8, a uniform error of at most 1/8 / sqrt(12)


def test_without_the_callback_each_sync_brings_trainer_and_engine_to_the_current_weights(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(Flow, "on_optimizer_step", lambda *args, **kwargs: None)
    with training(checkpoint("qwen3"), arguments(tmp_path, **(FULL | {"optim": "adamw_torch_fused"}))) as trainer:
        trainer.train()
        linears = [module for module in trainer.model.modules() if isinstance(module, FP8Linear)]
        assert not any(holds(module, module.quantized_weight()) for module in linears)  # the last step was not seen
        trainer.vllm_generation.sync_weights()
        assert all(holds(module, module.quantized_weight()) for module in linears)


def holds(linear, codes):
    """Whether `codes` are those of the layer's weight."""
    fresh = linear.fp8_flow.quantize_weights([linear.weight])[0]
    return torch.equal(codes.qdata.view(torch.uint8), fresh.qdata.view(torch.uint8))


def test_lora_trains_and_small_adapters_lower_its_mismatch(checkpoint, tmp_path, caplog):
    """The engine quantizes the merged weight, the trainer the base alone, so some mismatch is left: about half here.

    Adapters that move weights by whole e4m3 steps make the two roundings independent, and the gain is gone (measured
    at learning_rate=1e-2).
    """
    found = {}
    for forward in ("off", "full"):
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        flags = {"fp8_forward": forward, "simulate_kv_cache": True, "learning_rate": 1e-4, "peft_config": lora}
        trainer = run(checkpoint("qwen3"), tmp_path / forward, **flags)
        found[forward] = column(trainer, MISMATCH)
        adapters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert adapters and all(".lora_" in name and p.dtype == torch.float32 for name, p in adapters.items())
        assert all(p.any() for name, p in adapters.items() if ".lora_B." in name)  # they start at zero
    assert found["full"][0] < ROUNDING < max(found["full"])  # adapters that are zero at first
    assert sum("the trainer the base alone" in record.message for record in caplog.records) == 1
    assert all(full < 0.75 * off for full, off in zip(found["full"], found["off"], strict=True))
