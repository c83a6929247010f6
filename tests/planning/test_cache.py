"""Bytes of KV cache per kind of attention, against formulas of their own."""

import pytest

from testing import published
from trl_fp8.planning.plan import plan_for
from trl_fp8.recipe.recipe import recipe_for


KIB = 1024


def cache_of(name, **options):
    outline = published.outline(name)
    return plan_for(outline, recipe_for(outline, **{"fp8_weights": False} | options)).cache


def test_ordinary_attention_keeps_k_and_v_of_every_token():
    cache = cache_of("Qwen/Qwen3-8B", kv_cache_skip_layers=(0, 35))
    assert cache.token_bytes(fp8=False) == 36 * 2 * 8 * 128 * 2
    assert cache.token_bytes(fp8=True) == (34 + 2 * 2) * 2 * 8 * 128  # two layers stay in BF16
    assert cache.sequence_bytes(1000, fp8=False) == 1000 * 144 * KIB


@pytest.mark.parametrize("ranks, shares", [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_ranks_divide_kv_heads_and_copy_them_where_there_are_too_few(ranks, shares):
    cache = cache_of("Qwen/Qwen3-8B", tensor_parallel_size=ranks)
    assert cache.sequence_bytes(1000, fp8=False) == 1000 * 144 * KIB / shares


def test_a_latent_is_small_and_every_rank_has_it_whole():
    """DeepSeek-V3: 512 numbers and 64 of the rotary part, in 61 layers: 69 KiB, and not the 1.9 MiB of 128 heads."""
    one, eight = (
        cache_of("deepseek-ai/DeepSeek-V3", kv_cache_dtype="auto", tensor_parallel_size=ranks) for ranks in (1, 8)
    )
    assert one.token_bytes(fp8=False) == 61 * (512 + 64) * 2 == 70_272
    assert one.sequence_bytes(10, fp8=False) == eight.sequence_bytes(10, fp8=False) == 702_720


def test_layers_of_linear_attention_keep_a_state_and_no_tokens():
    cache = cache_of("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_cache_dtype="auto")
    assert cache.token_bytes(fp8=False) == 12 * 2 * 2 * 256 * 2 == 24 * KIB  # 12 of 48 layers
    states = cache.sequence_bytes(0, fp8=False)
    assert states >= 36 * 32 * 128 * 128 * 2  # a matrix of each of 32 heads
    assert cache.sequence_bytes(100, fp8=False) == states + 100 * 24 * KIB


@pytest.mark.parametrize("tokens", [10, 1024, 1025, 50_000])
def test_a_window_caps_what_its_layers_keep(tokens):
    """Gemma 3 12B: 40 of 48 layers see 1,024 tokens, 8 all of them; 8 KV heads of 256."""
    cache = cache_of("google/gemma-3-12b-it", kv_cache_dtype="auto")
    assert cache.windows == {1024: 40}
    assert cache.sequence_bytes(tokens, fp8=False) == (40 * min(tokens, 1024) + 8 * tokens) * 2 * 8 * 256 * 2
