"""The hook sees and changes what MLA caches. The oracle is transformers' own cache, which gets the same tensors."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from testing import other_models
from trl_fp8.features.kv_cache.observation import QKVObservation
from trl_fp8.features.one_forward.one_forward import require_followable
from trl_fp8.features.shared_base.adaptable import require_adaptable
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.recipe.recipe import recipe_for_model


TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


class FP8Cache(DynamicCache):
    """Holds latents and rotated keys as e4m3 under one scale per layer, where one is given, and their largest."""

    def __init__(self, scales):
        super().__init__()
        self.scales, self.largest = scales, {}

    def update(self, latent, rotated, layer, *args, **kwargs):
        self.largest[layer] = max(latent.abs().max(), rotated.abs().max()).item()
        if layer in self.scales:
            latent, rotated = (self._rounded(each, self.scales[layer]) for each in (latent, rotated))
        return super().update(latent, rotated, layer, *args, **kwargs)

    def _rounded(self, states, scale):
        codes = (states.bfloat16().float() / scale).clamp(-448, 448).to(E4M3)
        return codes.float() * scale


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def policy(request):
    return other_models.policy(request.param).eval()


@torch.no_grad()
def test_attention_reads_latents_as_an_fp8_cache_holds_them(policy):
    cache, plain = FP8Cache({0: 2**-6}), policy(TOKENS).logits
    expected = policy(TOKENS, past_key_values=cache, use_cache=True).logits
    hook = AttentionHook(policy, skip_layers=(1,))
    try:
        hook.simulate(torch.tensor([[9.0, 2**-6, 9.0], [9.0, 9.0, 9.0]]))
        found = policy(TOKENS, use_cache=False).logits
        observation = QKVObservation(hook.layers, hook.device, moments=True)
        hook.simulate(None)
        with hook.observing(observation):
            assert torch.equal(policy(TOKENS, use_cache=False).logits, plain)
    finally:
        hook.remove()
    assert torch.equal(found, expected) and not torch.equal(found, plain)
    assert torch.equal(policy(TOKENS, use_cache=False).logits, plain)
    seen = FP8Cache({})
    policy(TOKENS, past_key_values=seen, use_cache=True)
    for layer, largest in seen.largest.items():
        assert observation.amax_L3[layer, 1:].tolist() == [largest, largest]
    assert (observation.logit_error_L > 0).all()


def test_adapters_where_an_engine_has_paths_around_its_linears_are_refused(policy):
    recipe = recipe_for_model(policy)
    for targets, refused in (["q_b_proj", "o_proj"], None), (["kv_b_proj"], "kv_b_proj"), (["q_a_proj"], "q_a_proj"):
        adapted = get_peft_model(policy, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        with pytest.raises(ValueError, match=f"{refused} .a projection of MLA.*o_proj") if refused else nullcontext():
            require_adaptable(adapted, recipe)
        adapted.unload()


def test_one_forward_is_refused_for_what_an_engine_does_with_latents(policy):
    with pytest.raises(ValueError, match=r"latent \(MLA\).*Set fp8_forward='off'"):
        require_followable(policy, recipe_for_model(policy), "bf16")
