"""Training adapters on an FP8 base that trainer and engine share."""

from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.trainer.utils import create_model_from_path

from testing import tiny_models
from testing.linears import followed_and_plain
from testing.runs import arguments, column, dataset, reward_digits, training
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.features.one_forward.following import Following
from trl_fp8.features.shared_base.adaptable import require_adaptable, require_trainable_base
from trl_fp8.features.shared_base.base_in_engine import without_base
from trl_fp8.features.shared_base.shared_modules import SharedLinear
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.run.feature import Construction


MISMATCH = "mismatch/logp_difference_mean"
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]  # and of fused layers not all
SHARED, FULL = {"fp8_base": True}, {"fp8_forward": "one_forward", "learning_rate": 1e-2}


def lora(**options):
    return LoraConfig(**({"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options))


def policy(checkpoint, architecture="qwen3", dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(checkpoint(architecture), dtype=dtype)


def require_arrived(trainer):
    """The engine holds each adapter as the policy has it, scaled, in BF16."""
    trainer.vllm_generation.sync_weights()
    held, slots = trainer.vllm_generation.engine.layout.held, trainer.vllm_generation.weights.slots
    layers = {checkpoint_name(n): m for n, m in trainer.model.named_modules() if isinstance(m, LoraLayer)}
    assert layers and set(layers) <= set(slots)
    for name, layer in layers.items():
        a, b = (getattr(layer, which)["default"].weight.detach() for which in ("lora_A", "lora_B"))
        rows, columns = len(a), slice(first := slots[name].index * slots[name].rank, first + len(a))
        assert torch.equal(held[f"{name}.lora_A.weight"][:rows], a.bfloat16()), name
        assert torch.equal(held[f"{name}.lora_B.weight"][:, columns], (layer.scaling["default"] * b).bfloat16()), name


LINEARS = ["q_proj"]
REFUSED = {
    "alone": (None, "without adapters.*Pass a peft_config"),
    "dora": (lora(use_dora=True), "q_proj .DoraLinearVariant.*Use plain LoRA.*fp8_base=False"),
    "lora_bias": (lora(target_modules=["o_proj"], lora_bias=True), "o_proj .lora_bias=True"),
    "ia3": (IA3Config(target_modules=LINEARS, feedforward_modules=[], task_type="CAUSAL_LM"), "q_proj .ia3"),
    "embedding": (lora(target_modules=["embed_tokens"]), "embed_tokens .Embedding"),
    "pissa": (lora(init_lora_weights="pissa"), "init_lora_weights='pissa'.*from the base's weights"),
    "saved": (lora(modules_to_save=["k_proj"]), "modules_to_save that are FP8: model.layers.0.self_attn.k_proj"),
    "container": (lora(modules_to_save=["mlp"]), "modules_to_save that are FP8: model.layers.0.mlp.gate_proj"),
    "ending": (lora(modules_to_save=["wn_proj"]), "that are FP8: model.layers.0.mlp.down_proj.*Use longer names"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_settings_that_a_shared_base_cannot_have_are_refused_by_name(which, checkpoint, tmp_path):
    config, message = REFUSED[which]
    model = policy(checkpoint)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        with training(model, arguments(tmp_path, **SHARED), peft_config=config):
            pass
    # so that the advice can be followed with the same model
    after = {checkpoint_name(name): p for name, p in model.named_parameters()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_experts_and_routers_that_all_linear_means_are_refused_with_what_to_name(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="ParamWrapper.*target_modules=.'q_proj', 'k_proj', 'v_proj', 'o_proj'."):
        with training(
            checkpoint("qwen3_moe"), arguments(tmp_path, **SHARED), peft_config=lora(target_modules="all-linear")
        ):
            pass


def test_adapters_on_the_gate_of_a_shared_expert_are_refused():
    model = tiny_models.build("qwen2_moe")
    recipe = recipe_for_model(model, expert_kernels=False)
    adapted = get_peft_model(model, lora(target_modules=["q_proj", "shared_expert_gate"]))
    with pytest.raises(ValueError, match="no room for: .*shared_expert_gate .the gate of a shared expert"):
        require_adaptable(adapted, recipe)


def test_frozen_adapters_are_refused(checkpoint, tmp_path):
    model = get_peft_model(policy(checkpoint), lora()).requires_grad_(False)
    with pytest.raises(ValueError, match="adapters that are frozen.*is_trainable=True"):
        with training(model, arguments(tmp_path, **SHARED)):
            pass


def test_zero3_is_refused(checkpoint, tmp_path):
    args = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    with pytest.raises(ValueError, match="fp8_base=True under ZeRO-3.*DDP, FSDP2 or ZeRO-2"):
        require_trainable_base(args, lora(), None)


def test_several_adapters_at_once_are_refused(checkpoint, tmp_path):
    model = get_peft_model(policy(checkpoint), lora(), adapter_name="one")
    model.add_adapter("two", lora())
    model.base_model.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match="2 active adapters .one, two.*set_adapter"):
        with training(model, arguments(tmp_path, **SHARED)):
            pass


def test_flags_that_do_not_go_with_it_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="fp8_base=True with fp8_weights=False"):
        FP8GRPOConfig(str(tmp_path), fp8_base=True, fp8_weights=False)
    with pytest.raises(ValueError, match="kv_cache_skip_layers='auto' with fp8_base=True"):
        arguments(tmp_path, **SHARED, kv_cache_skip_layers="auto")
    config = BitsAndBytesConfig(load_in_4bit=True)
    refused = r"^load_in_4bit=True: QLoRA is not supported. Set fp8_base=True instead, for LoRA on an FP8 base.$"
    for flags, quantization in (({"model_init_kwargs": {"quantization_config": config}}, None), ({}, config)):
        with pytest.raises(ValueError, match=refused):
            args, options = arguments(tmp_path, **flags), {"peft_config": lora(), "quantization_config": quantization}
            FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, args, dataset(), **options)
    config, args = BitsAndBytesConfig(load_in_8bit=True), arguments(tmp_path, **SHARED)
    for model in (checkpoint("qwen3"), policy(checkpoint)):
        with pytest.raises(ValueError, match="quantization_config=BitsAndBytesConfig"):
            FP8GRPOTrainer(model, reward_digits, args, dataset(), peft_config=lora(), quantization_config=config)
    args = arguments(tmp_path, **SHARED, model_init_kwargs={"quantization_config": config})
    with pytest.raises(ValueError, match="fp8_base=True with quantization_config=.*Remove quantization_config"):
        FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, args, dataset(), peft_config=lora())


@pytest.mark.parametrize(
    "config, dtype",
    [
        (lora(), torch.bfloat16),
        (lora(modules_to_save=["embed_tokens"]), torch.float32),
        (lora(bias="lora_only"), torch.float32),
    ],
    ids=["adapters", "modules", "biases"],
)
def test_trained_parameters_of_a_model_by_name_are_fp32(config, dtype, checkpoint, tmp_path):
    args = arguments(tmp_path, **SHARED)
    construction = Construction(args, {"model": checkpoint("qwen3"), "peft_config": config}, create_model_from_path)
    with without_base(construction):
        model = construction.create_model(checkpoint("qwen3"))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        model = construction.create_model(checkpoint("qwen3"), dtype="float16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


@pytest.mark.engine
@pytest.mark.parametrize(
    "adapters, flags",
    [
        ({"init_lora_weights": False}, {"bf16": False}),
        (
            {"lora_dropout": 0.3, "use_rslora": True, "lora_alpha": 5},
            {"gradient_checkpointing": True, "fp8_weight_format": "mxfp8"},
        ),
        ({"modules_to_save": ["embed_tokens", "norm"]}, {"num_iterations": 2, "max_steps": 4}),
        ({"init_lora_weights": False}, {"fp8_backward": "fp8", "fp8_weight_format": "tensor", "beta": 0.1}),
    ],
    ids=["moving", "dropout", "saved_modules", "fp8_backward"],
)
def test_trainer_and_engine_agree_while_adapters_train(adapters, flags, checkpoint, tmp_path):
    model = policy(checkpoint)
    with training(model, arguments(tmp_path, **(SHARED | FULL | flags)), peft_config=lora(**adapters)) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        after = dict(trainer.model.named_parameters())
        require_arrived(trainer)
        assert trainer.vllm_generation.audit_failures == 0
    mismatch = column(trainer, MISMATCH)
    assert len(mismatch) == (2 if "num_iterations" in flags else 3) and max(mismatch) < 1e-5, mismatch
    steps = {name: (after[name].detach() - old).abs().max() for name, old in before.items()}
    assert all(steps[name] > 1e-5 for name, parameter in after.items() if parameter.requires_grad)
    assert all(steps[name] == 0 for name, parameter in after.items() if not parameter.requires_grad)
    linears = [module for module in trainer.model.modules() if isinstance(module, SharedLinear)]
    assert len(linears) == len(trainer.recipe.fp8_modules) == 14


@pytest.mark.engine
def test_without_the_engines_forward_the_base_is_no_mismatch_either(checkpoint, tmp_path):
    """What is left is the rounding of activations: the merged path has that of the weights, too."""
    found = {}
    for shared in (True, False):
        torch.manual_seed(0)
        args = arguments(
            tmp_path / str(shared), fp8_base=shared, max_steps=2, learning_rate=1e-2, kv_cache_dtype="auto"
        )
        with training(policy(checkpoint), args, peft_config=lora(init_lora_weights=False)) as trainer:
            trainer.train()
            if shared:
                require_arrived(trainer)
                lengths = {row["fp8/sync_bytes"] for row in trainer.state.log_history if "fp8/sync_bytes" in row}
                assert min(lengths) == trainer.vllm_generation.last_sync.bytes_sent
        found[shared] = column(trainer, MISMATCH)[0]
    assert 0 < found[True] < found[False]


@pytest.mark.engine
def test_the_gradient_of_an_adapter_is_that_of_peft_on_the_dequantized_base(checkpoint, tmp_path):
    args = arguments(tmp_path, max_steps=1, bf16=False, **(SHARED | FULL))
    with training(policy(checkpoint), args, peft_config=lora(init_lora_weights=False)) as trainer:
        trainer.train()
        trainer.vllm_generation.sync_weights()
        forward = trainer.feature(Following).forward
        for name, layer in trainer.model.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            x, dy = (torch.randn(3, 7, n).bfloat16().float() for n in (layer.in_features, layer.out_features))
            found = followed_and_plain(forward, layer, x, dy)
            (value, ours), (plain, theirs) = found[True], found[False]
            assert 0.005 < (value - plain).norm() / plain.norm() < 0.1, name  # activations in e4m3
            assert all(torch.equal(a, b) and b.any() for a, b in zip(ours[1:], theirs[1:], strict=True)), name
            assert (ours[0] - theirs[0]).norm() < 1e-6 * theirs[0].norm(), name


@pytest.mark.engine
def test_a_model_that_shared_its_base_before_needs_the_same_flags(checkpoint, tmp_path):
    """Also one that followed an engine with all its weights before."""
    model = policy(checkpoint)
    kept = {"fp8_ignored_modules": ["model.layers.0.mlp.down_proj"]}
    others = {"fp8_base": False}, SHARED | {"fp8_weight_format": "tensor"}, SHARED | kept
    others = [arguments(tmp_path, **flags) for flags in others]  # after an engine they would make a process group
    with training(model, arguments(tmp_path, fp8_forward="one_forward")):
        pass
    for _ in range(2):
        with training(model, arguments(tmp_path, **(SHARED | FULL)), peft_config=lora()) as trainer:
            trainer.train()
            assert max(column(trainer, MISMATCH)) < 1e-5
        model = trainer.model.unload()
        with pytest.raises(ValueError, match="leave them out.*merge_and_export"):
            model.save_pretrained(tmp_path / "saved")
    for args in others:
        with pytest.raises(ValueError, match="shared this model's FP8 base with its engine.*Load the model anew"):
            FP8GRPOTrainer(model, reward_digits, args, dataset(), peft_config=lora())
