"""What calibration observes: q, k, v after norm and RoPE, of real tokens, in every wrapping the trainer uses."""

import pytest
import tiny_models
import torch
from peft import LoraConfig, get_peft_model

from trl_fp8.policy.kv_calibration import OBSERVER, observe_qkv_amax


SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]


def build(architecture="qwen3", **overrides):
    torch.manual_seed(0)
    return tiny_models.ARCHITECTURES[architecture][1](tiny_models.config(architecture, **overrides)).eval()


def by_hooks(model, sequences):
    """Independent: one sequence at a time, no padding; q, k recomputed from the projections with the model's RoPE."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layers = model.model.layers
    amax = torch.zeros(len(layers), 3)
    for ids in sequences:
        inputs = {}
        handles = [
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, seen=inputs, index=index: seen.__setitem__(index, kwargs),
                with_kwargs=True,
            )
            for index, layer in enumerate(layers)
        ]
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
            for index, layer in enumerate(layers):
                attention, hidden = layer.self_attn, inputs[index]["hidden_states"]
                shape = (1, len(ids), -1, attention.head_dim)
                q, k = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
                if hasattr(attention, "q_norm"):
                    q, k = attention.q_norm(q), attention.k_norm(k)
                q, k = apply_rotary_pos_emb(
                    q.transpose(1, 2), k.transpose(1, 2), *inputs[index]["position_embeddings"]
                )
                v = attention.v_proj(hidden)
                amax[index] = torch.maximum(amax[index], torch.stack([q.abs().max(), k.abs().max(), v.abs().max()]))
        for handle in handles:
            handle.remove()
    return amax


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_observes_what_attention_sees(architecture, implementation):
    model = build(architecture)
    model.set_attn_implementation(implementation)
    observed = observe_qkv_amax(model, SEQUENCES)
    # batched and padded against one by one: fp32 matmuls in another order
    torch.testing.assert_close(observed, by_hooks(model, SEQUENCES), rtol=1e-4, atol=0)
    assert model.config._attn_implementation == implementation


def test_padding_is_not_observed():
    model = build()
    with torch.no_grad():
        model.model.embed_tokens.weight[0] *= 1000  # the padding token would dominate v
    torch.testing.assert_close(
        observe_qkv_amax(model, SEQUENCES), observe_qkv_amax(model, SEQUENCES, pad_token_id=60), rtol=1e-5, atol=0
    )


def test_tokens_are_bounded_and_repetitions_run_once():
    model, seen = build(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    observe_qkv_amax(model, SEQUENCES * 3)
    assert seen[-1].shape == (3, 6)
    observe_qkv_amax(model, SEQUENCES, max_tokens=9)
    assert seen[-1].shape == (2, 6)  # 6 + 3 tokens; the third would pass the bound
    observe_qkv_amax(model, [list(range(4, 44))], max_tokens=16)
    assert seen[-1].shape == (1, 16)
    with pytest.raises(ValueError, match="no prompt with at least one token"):
        observe_qkv_amax(model, [[]])


def test_observation_changes_neither_model_nor_later_forwards():
    model = build()
    ids = torch.tensor([SEQUENCES[0]])
    before = model(input_ids=ids).logits
    observe_qkv_amax(model, SEQUENCES)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_attention_implementation_is_restored_after_an_error():
    model = build()

    def fail(module, args):
        raise RuntimeError("forward broke")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="forward broke"):
        observe_qkv_amax(model, SEQUENCES)
    handle.remove()
    assert model.config._attn_implementation != OBSERVER
    assert (observe_qkv_amax(model, SEQUENCES) > 0).all()


def test_peft_models_are_looked_through():
    model = build()
    plain = observe_qkv_amax(model, SEQUENCES)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert torch.equal(observe_qkv_amax(wrapped, SEQUENCES), plain)


def test_the_policy_of_now_is_observed():
    model = build()
    before = observe_qkv_amax(model, SEQUENCES)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(4)
    after = observe_qkv_amax(model, SEQUENCES)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, :2], before[1, :2])
    torch.testing.assert_close(after[1, 2], 4 * before[1, 2], rtol=1e-5, atol=0)
