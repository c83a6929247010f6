"""TRL's load-balancing loss with configs that count experts under another name."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing import other_models, tiny_models
from trl_fp8.policy.model import require_countable_experts


def test_experts_that_trl_cannot_count_are_refused_with_the_flag_that_helps():
    with torch.device("meta"):
        granite = AutoModelForCausalLM.from_config(other_models.config("granitemoe"))
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.001 .*'granitemoe'.*Set router_aux_loss_coef=0\.0"):
        require_countable_experts(granite, None)
    require_countable_experts(granite, 0.0)
    for architecture in ("qwen3_moe", "gpt_oss", "mixtral", "qwen3"):
        require_countable_experts(tiny_models.on_meta(architecture), None)
