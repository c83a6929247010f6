"""LoRA under one forward: values of the merged weights, PEFT's own gradients, and what is refused by name."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from transformers import AutoModelForCausalLM

from testing.linears import followed_and_plain
from testing.quantization_counter import QuantizationCounter
from testing.runs import arguments, column, training
from trl_fp8.features.one_forward.followed_linear import FollowedLinear
from trl_fp8.features.one_forward.following import Following
from trl_fp8.features.one_forward.one_forward import require_lora


FULL = {"fp8_forward": "one_forward"}
MISMATCH = "mismatch/logp_difference_mean"
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]  # and of fused layers not all


def lora(**options):
    return LoraConfig(**({"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options))


@pytest.mark.engine
@pytest.mark.parametrize(
    "adapters, flags",
    [
        ({"init_lora_weights": False}, {"learning_rate": 1e-2, "bf16": False}),
        (
            {"lora_dropout": 0.3, "use_rslora": True},
            {"learning_rate": 1e-2, "gradient_checkpointing": True, "fp8_weight_format": "mxfp8"},
        ),
        ({"modules_to_save": ["embed_tokens", "norm", "k_proj"]}, {"num_iterations": 2, "max_steps": 4}),
        ({"init_lora_weights": False}, {"fp8_backward": "fp8", "fp8_weight_format": "tensor", "beta": 0.1}),
    ],
    ids=["moving", "dropout", "saved_modules", "fp8_backward"],
)
def test_the_mismatch_stays_at_rounding_while_adapters_train(adapters, flags, checkpoint, tmp_path):
    model = checkpoint("qwen3")
    with training(model, arguments(tmp_path, **(FULL | flags)), peft_config=lora(**adapters)) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        after = dict(trainer.model.named_parameters())
    mismatch = column(trainer, MISMATCH)
    assert len(mismatch) == (2 if "num_iterations" in flags else 3) and max(mismatch) < 1e-5, mismatch
    steps = {name: (after[name].detach() - old).abs().max() for name, old in before.items()}
    assert all(steps[name] > 1e-5 for name, parameter in after.items() if parameter.requires_grad)
    # PEFT adds to the base what it subtracts after a sync, in FP32
    assert all(steps[name] < 1e-6 for name, parameter in after.items() if not parameter.requires_grad)


@pytest.mark.engine
def test_adapters_get_the_gradients_that_peft_computes(checkpoint, tmp_path):
    args = arguments(tmp_path, max_steps=1, bf16=False, **FULL)
    with training(checkpoint("qwen3"), args, peft_config=lora(init_lora_weights=False)) as trainer:
        trainer.train()
        forward = trainer.feature(Following).forward
        layers = {name: module for name, module in trainer.model.named_modules() if isinstance(module, LoraLinear)}
        assert len(layers) == 2 * len(TARGETS)
        for name, layer in layers.items():
            x, dy = (torch.randn(3, 7, n).bfloat16().float() for n in (layer.in_features, layer.out_features))
            found = followed_and_plain(forward, layer, x, dy)
            value, plain = found[True][0], found[False][0]
            assert torch.equal(value, layer.base_layer.value(x)), name
            assert 0.01 < (value - plain).norm() / plain.norm() < 0.1, name  # e4m3, twice
            for own, theirs in zip(found[True][1][1:], found[False][1][1:], strict=True):
                assert torch.equal(own, theirs) and theirs.any(), name
            own, theirs = found[True][1][0], found[False][1][0]
            # base and adapters are two FP32 GEMMs on both sides
            assert (own - theirs).norm() < 1e-6 * theirs.norm(), name


@pytest.mark.engine
def test_nothing_is_quantized_in_the_trainer(checkpoint, tmp_path, monkeypatch):
    counter = QuantizationCounter(monkeypatch)
    with training(checkpoint("qwen3"), arguments(tmp_path, **FULL)) as trainer:
        trainer.train()
        modules = trainer.feature(Following).forward.modules.values()
        linears = [module for module in modules if isinstance(module, FollowedLinear)]
        assert linears and counter.calls == 0


def adapted(checkpoint, config):
    return get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint("qwen3")), config)


@pytest.mark.parametrize(
    "config, named",
    [
        (lora(use_dora=True), r"layers\.0\.self_attn\.q_proj \(DoraLinearVariant\).* and 5 more"),
        (lora(target_modules=["embed_tokens", "q_proj"]), r"model\.embed_tokens \(lora\.Embedding\)"),
        (
            IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
            r"k_proj \(ia3\.Linear\)",
        ),
    ],
    ids=["dora", "embedding", "ia3"],
)
def test_adapters_that_do_more_than_add_are_refused_by_name(config, named, checkpoint):
    with pytest.raises(
        ValueError, match=f"not plain LoRA on linear layers, experts or routers: .*{named}.*or set fp8_forward='off'"
    ):
        require_lora(adapted(checkpoint, config))
