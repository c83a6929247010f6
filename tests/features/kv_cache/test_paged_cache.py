"""The real paged cache against the trainer's simulation of it, and the guards around recalibrated scales."""

import pytest
import torch
from vllm import SamplingParams

from testing import engines
from testing.rollouts import calibrated, follow
from trl_fp8.engine.vllm.cpu.reference_attention import ReferenceAttentionImpl, keys_and_values
from trl_fp8.engine.vllm.numerics import attention_layers, quantizes_query
from trl_fp8.engine.vllm.scale_copies import fp8_attention_layers
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.quantization.codec.e4m3 import cache_codes
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

PROMPT = [4 + 7 * position % 50 for position in range(20)]
DECODED = 32


def start(checkpoint, **options):
    """A synced engine with scales of its own policy, and the policy's hook."""
    generation = engines.start(checkpoint, **options)
    return generation, *calibrated(generation, engines.PROMPTS + [PROMPT])


def decode(generation, prompt=PROMPT):
    """Greedy tokens and, per layer, what entered the cache write and in which slots."""
    written = {layer: [] for layer in attention_layers(engine_model(generation.llm))}
    original = ReferenceAttentionImpl.do_kv_cache_update

    def record(self, layer, key, value, kv_cache, slot_mapping):
        original(self, layer, key, value, kv_cache, slot_mapping)
        number = next(n for n, m in attention_layers(engine_model(generation.llm)).items() if m is layer)
        real = slot_mapping >= 0
        written[number].append((key[: len(real)][real].clone(), value[: len(real)][real].clone(), slot_mapping[real]))

    ReferenceAttentionImpl.do_kv_cache_update = record
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=DECODED + 1, ignore_eos=True)
        output = generation.llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
    finally:
        ReferenceAttentionImpl.do_kv_cache_update = original
    tokens = prompt + list(output.outputs[0].token_ids)[:DECODED]
    return tokens, {layer: [torch.cat(parts) for parts in zip(*rows, strict=True)] for layer, rows in written.items()}


def cached(generation, layer, slots):
    """Bytes of k and v `[T, G, D]` in vLLM's paged cache."""
    held = keys_and_values(attention_layers(engine_model(generation.llm))[layer].kv_cache).unbind(2)
    return [half[slots // half.shape[2], :, slots % half.shape[2]] for half in held]


def test_the_cache_holds_the_bytes_that_the_trainer_computes_from_the_same_states(checkpoint):
    """52 tokens through prefill and 32 decode steps: every byte of every layer, read from the cache itself."""
    generation, _, scales = start(checkpoint("qwen3"))
    tokens, written = decode(generation)
    for layer, (key, value, slots) in written.items():
        assert len(slots) == len(PROMPT) + DECODED == len(tokens)
        for which, states, held in zip("kv", (key, value), cached(generation, layer, slots), strict=True):
            expected = cache_codes(states, scales.scale(layer, which)).view(torch.uint8)
            assert torch.equal(held, expected)
            half = cache_codes(states, scales.scale(layer, which) / 2).view(torch.uint8)
            assert (held != half).float().mean() > 0.9  # a scale that is off by one step gives other bytes
    engines.shutdown(generation.llm)


def trainer_bytes(generation, hook, scales, ids, mask, monkeypatch):
    """Per layer, the codes of k and v `[B, G, T, D]` that the trainer's attention reads."""
    seen, attend = [], AttentionHook.attend

    def record(self, function, module, query, key, value, *args, **kwargs):
        pair = zip((key, value), scales.values[module.layer_idx, 1:], strict=True)
        seen.append([cache_codes(states, scale).view(torch.uint8) for states, scale in pair])
        return attend(self, function, module, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(AttentionHook, "attend", record)
        hook.simulate(scales.values)
        generation.model(input_ids=ids, attention_mask=mask)
        hook.simulate(None)
    return seen


def test_the_trainers_own_forward_ends_on_the_bytes_in_the_cache(checkpoint, monkeypatch):
    """A prompt and 32 decoded tokens, left-padded beside a longer sequence as TRL runs them,
    in the engine's precision.

    Two-sided: a trainer in FP32 misses bytes of both layers,
    and without the engine's positions RoPE turns k elsewhere.
    """
    generation, hook, scales = start(checkpoint("qwen3"))
    tokens, written = decode(generation)
    pad = 11
    ids = torch.tensor([[0] * pad + tokens, tokens[:pad] + tokens])
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    in_fp32 = trainer_bytes(generation, hook, scales, ids, mask, monkeypatch)
    forward = follow(generation, hook)
    ours = trainer_bytes(generation, hook, scales, ids, mask, monkeypatch)
    before = AttentionHook._before_forward

    def without_positions(*args):
        inputs, options = before(*args)
        return inputs, {name: value for name, value in options.items() if name != "position_ids"}

    monkeypatch.setattr(AttentionHook, "_before_forward", without_positions)
    hook.remove()
    shifted_hook = AttentionHook(generation.model)
    shifted_hook.replace(forward)
    shifted = trainer_bytes(generation, shifted_hook, scales, ids, mask, monkeypatch)
    for layer, (_, _, slots) in written.items():
        for column, held in enumerate(cached(generation, layer, slots)):  # k, v
            row = (layer, column, 0, slice(None), slice(pad, None))
            assert torch.equal(pick(ours, *row), held)
            assert (pick(in_fp32, *row) != held).float().mean() > 0.01
        assert (
            pick(shifted, layer, 0, 0, slice(None), slice(pad, None)) != cached(generation, layer, slots)[0]
        ).float().mean() > 0.5
    assert not quantizes_query(engine_model(generation.llm))
    engines.shutdown(generation.llm)


def pick(bytes_by_layer, layer, column, sequence, heads, positions):
    """`[T, G, D]` of one sequence."""
    return bytes_by_layer[layer][column][sequence, heads, positions].transpose(0, 1)


def test_skipped_layers_stay_in_bf16_and_equal_a_fresh_engine(checkpoint, tmp_path):
    generation, _, scales = start(checkpoint("qwen3"), kv_cache_skip_layers=(0,))
    layers = attention_layers(engine_model(generation.llm))
    assert [module.kv_cache.dtype for module in layers.values()] == [torch.bfloat16, torch.uint8]
    _, written = decode(generation)
    key, value, slots = written[0]
    assert all(
        torch.equal(held, states) for held, states in zip(cached(generation, 0, slots), (key, value), strict=True)
    )
    synced = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, scales) == synced


def test_bf16_weights_have_calibrated_scales_too(checkpoint):
    generation, _, scales = start(checkpoint("qwen3"), fp8_weights=False)
    before = engines.log_probs(generation.llm)
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == before
    held = [module._k_scale_float for module in attention_layers(engine_model(generation.llm)).values()]
    assert held == scales.values[:, 1].tolist() and 1.0 not in held
    engines.shutdown(generation.llm)


def test_scales_that_change_between_sync_and_rollout_are_caught_by_name(checkpoint):
    generation, _, scales = start(checkpoint("qwen3"))
    generation.generate([PROMPT], None, 1)
    layers = attention_layers(engine_model(generation.llm))

    layers[1]._v_scale_float /= 2  # host float out of step with the device tensor
    with pytest.raises(RuntimeError, match="layer 1 v_scale: host float") as error:
        generation.generate([PROMPT], None, 1)
    assert "device tensor" not in str(error.value) and "layer 0" not in str(error.value)
    with pytest.raises(RuntimeError, match="no complete policy"):
        generation.generate([PROMPT], None, 1)

    generation.sync_weights()
    of_engine = engines.scales_of(generation)
    earlier, of_engine.calibrate = of_engine.value, lambda: KVScales(scales.values * 2)
    generation.sync_weights()
    of_engine.value = earlier  # as if a stale engine held the new ones
    with pytest.raises(RuntimeError, match="layer 0 q_scale: device tensor holds .*, sent"):
        generation.generate([PROMPT], None, 1)
    assert generation.audit_failures == 2
    engines.shutdown(generation.llm)


def test_attention_that_cannot_be_recalibrated_is_refused_by_name(checkpoint, monkeypatch):
    generation, _, _ = start(checkpoint("qwen3"))
    model = engine_model(generation.llm)
    assert list(fp8_attention_layers(model, (0, 1))) == [0, 1]
    with pytest.raises(RuntimeError, match="layer 1: KV cache of type fp8"):
        fp8_attention_layers(model, (0, 1), skip_layers=(1,))
    with pytest.raises(RuntimeError, match=r"in layers \[0, 1\], the policy in \[1\].*use_vllm=False"):
        fp8_attention_layers(model, (1,))
    impl = attention_layers(model)[0].impl
    impl.__class__ = type("FlashInferImpl", (type(impl),), {})
    with pytest.raises(RuntimeError, match="layer 0: FlashInferImpl may keep copies"):
        fp8_attention_layers(model, (0, 1))
    engines.shutdown(generation.llm)
