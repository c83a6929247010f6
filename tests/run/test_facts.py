"""What a run's log says of it."""

from peft import IA3Config, LoraConfig, get_peft_model

from testing.tiny_models import on_meta
from trl_fp8 import FP8GRPOConfig
from trl_fp8.run.facts import _changed_flags, _own_flags, trained_weights


def test_adapters_are_told_from_full_training_with_what_shapes_them():
    assert trained_weights(on_meta()) == "all weights"
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["v_proj", "q_proj"])
    assert trained_weights(get_peft_model(on_meta(), lora)) == "LoRA of rank 4, alpha 16, on q_proj, v_proj"
    lora = LoraConfig(r=4, target_modules=r".*\.q_proj")
    assert trained_weights(get_peft_model(on_meta(), lora)) == r"LoRA of rank 4, alpha 8, on .*\.q_proj"
    experts = "mlp.experts.gate_up_proj"
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=[experts])
    text = trained_weights(get_peft_model(on_meta("qwen3_moe"), lora))
    assert text == f"LoRA of rank 4, alpha 8, on q_proj, {experts}"
    other = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    assert trained_weights(get_peft_model(on_meta(), other)) == "IA3 adapters"


def test_tokens_in_dictionaries_of_arguments_are_left_out():
    """A run's log is pushed to the Hub, and its report is shown to others."""
    flags = {"vllm_engine_kwargs": {"hf_token": "hf_secret", "enforce_eager": True}}
    flags["model_init_kwargs"] = {"token": "hf_secret", "config": {"use_auth_token": "hf_secret"}, "revision": "v2"}
    args = FP8GRPOConfig("out", use_cpu=True, bf16=False, hub_token="hf_secret", **flags)
    for logged in (_changed_flags(args), _own_flags(args)):
        assert "hf_secret" not in str(logged) and logged["vllm_engine_kwargs"] == {"enforce_eager": True}
    assert _changed_flags(args)["model_init_kwargs"] == {"config": {}, "revision": "v2"}
    assert args.model_init_kwargs["token"] == args.vllm_engine_kwargs["hf_token"] == "hf_secret"
