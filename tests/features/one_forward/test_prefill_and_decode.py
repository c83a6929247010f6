"""A CPU engine gives a token the same bits in a prefill and in a decode step, while its batch shrinks to one row."""

import random

import pytest
import torch
from vllm import SamplingParams

from testing import engines, other_models, tiny_models
from trl_fp8.engine.vllm.cpu.reference_attention import attend_packed
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.quantization.codec.e4m3 import cache_codes
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

FP8, BF16_CACHE = {}, {"kv_cache_dtype": "auto"}
BF16 = {"fp8_weights": False, "kv_cache_dtype": "auto"}
# 50 tokens of prompt and completion, the first request ends after 10 decode steps, the last is alone for 8
PROMPT_LENGTHS, LENGTH = (2, 10, 18, 24, 31, 40), 50


def prompts():
    chosen = random.Random(0)
    return [[chosen.randrange(4, 50) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture
def engine(checkpoint, tmp_path):
    """`engine("qwen3", **flags)`: a synced engine of a policy without a zero or a one."""
    started = []

    def start(architecture, **flags):
        if architecture in tiny_models.ARCHITECTURES:
            folder = checkpoint(architecture, tied=architecture == "cohere")
        else:
            other_models.policy(architecture).to(torch.bfloat16).save_pretrained(tmp_path)
            tiny_models.tokenizer().save_pretrained(tmp_path)
            folder = str(tmp_path)
        scales = engines.some_scales(2, 6) if "kv_cache_dtype" not in flags else None
        generation = engines.start(folder, scales, parts=[SharedKernelsPart()], **flags)
        started.append(generation)
        engines.perturb(generation.model, seed=1)
        generation.sync_weights()
        return generation

    yield start
    for generation in started:
        engines.shutdown(generation.llm)


def generate(llm, tokens, **parameters):
    lengths = [LENGTH - len(ids) if "max_tokens" not in parameters else parameters["max_tokens"] for ids in tokens]
    sampling = [
        SamplingParams(temperature=1.0, seed=1, ignore_eos=True, **(parameters | {"max_tokens": length}))
        for length in lengths
    ]
    return llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        *(("qwen3", flags) for flags in (BF16, BF16_CACHE, FP8)),
        *(("qwen3_moe", BF16), ("olmoe", FP8), ("cohere", BF16_CACHE), ("gemma3_text", FP8), ("gemma2", FP8)),
    ],
)
def test_log_probs_of_decode_steps_are_those_of_a_prefill(engine, architecture, flags):
    llm = engine(architecture, **flags).llm
    decoded = {}
    for output in generate(llm, prompts(), logprobs=0):
        completion = output.outputs[0]
        rows = zip(completion.logprobs, completion.token_ids, strict=True)
        decoded[(*output.prompt_token_ids, *completion.token_ids)] = [row[token].logprob for row, token in rows]
    assert {len(found) for found in decoded.values()} == {LENGTH - length for length in PROMPT_LENGTHS}
    assert len({value for found in decoded.values() for value in found}) > 100
    for together in (list(decoded), *([tokens] for tokens in decoded)):
        llm.reset_prefix_cache()
        for output in generate(llm, [list(tokens) for tokens in together], prompt_logprobs=0, max_tokens=1):
            tokens = tuple(output.prompt_token_ids)
            prefilled = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
            assert prefilled[-len(decoded[tokens]) :] == decoded[tokens]


@pytest.mark.parametrize(
    ("architecture", "flags"), [("qwen3", FP8), ("qwen3", BF16_CACHE), ("gemma3_text", FP8), ("gemma2", BF16_CACHE)]
)
def test_packed_attention_has_the_engines_bits(engine, architecture, flags):
    """Sequences side by side in one prefill, and one through prefill and decode."""
    generation = engine(architecture, **flags)
    layers, seen = attention_layers(engine_model(generation.llm)), {}
    for number, layer in layers.items():
        layer.register_forward_hook(
            lambda layer, states, output, number=number: seen.setdefault(number, []).append(
                [one.clone() for one in (*states[:3], output)]
            )
        )
    impls = [layer.impl for layer in layers.values()]
    assert (architecture == "gemma2") == all(impl.logits_soft_cap is not None for impl in impls)
    assert architecture.startswith("gemma") == any(impl.sliding_window is not None for impl in impls)
    for tokens, decoded in (prompts(), 1), ([prompts()[1]], 30):
        seen.clear()
        generation.llm.reset_prefix_cache()
        generate(generation.llm, tokens, max_tokens=decoded)
        starts = torch.tensor([0, *(len(ids) + decoded - 1 for ids in tokens)]).cumsum(0)
        for number, layer in layers.items():
            query, key, value, output = (torch.cat(states) for states in zip(*seen[number], strict=True))
            impl = layer.impl
            heads = query.view(len(query), impl.num_heads, impl.head_size)
            as_cached = []
            for states, scale in (key, layer._k_scale_float), (value, layer._v_scale_float):
                states = states.view(len(states), impl.num_kv_heads, impl.head_size)
                fp8 = layer.kv_cache.dtype == torch.uint8
                as_cached.append(cache_codes(states, scale).float() * scale if fp8 else states)
            options = {"scaling": impl.scale, "window": impl.sliding_window, "softcap": impl.logits_soft_cap}
            found, lse = attend_packed(heads, *as_cached, starts, **options)
            assert torch.equal(found.flatten(1), output.view(len(output), -1))
            assert lse.shape == (impl.num_heads, len(heads)) and lse.dtype == torch.float64
            for setting, other in ("window", 5), ("softcap", 0.5):
                changed, _ = attend_packed(heads, *as_cached, starts, **(options | {setting: other}))
                assert not torch.equal(changed, found)
