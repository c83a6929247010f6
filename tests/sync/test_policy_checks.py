"""Policies that no engine can follow are refused before one is started."""

import pytest
from transformers import AutoModelForCausalLM

from trl_fp8.sync.policy_checks import require_servable
from trl_fp8.upstream.vllm import engine_class


def test_a_policy_that_is_quantized_already_is_refused_with_what_to_do(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    require_servable(model, engine_class)
    model.is_quantized = True  # as bitsandbytes' quantizer leaves it
    with pytest.raises(ValueError, match="QLoRA.*use LoRA on an FP8 base .fp8_base=True"):
        require_servable(model, engine_class)
