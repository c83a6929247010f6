"""Bytes of KV cache per kind of attention, against formulas of their own."""

import pytest

from testing import published
from trl_fp8.planning.plan import KVCache, plan_for
from trl_fp8.recipe.outline import LayerCache
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
    """A page is a block of tokens that has room for a state: 544 tokens of 2 KiB for a state of 536 x 2 KiB."""
    cache = cache_of("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_cache_dtype="auto")
    assert cache.token_bytes(fp8=False) == 12 * 2 * 2 * 256 * 2 == 24 * KIB  # 12 of 48 layers
    state = cache.layers[0].state_bytes
    assert state == 32 * 128 * 128 * 2 + 3 * (2 * 16 + 32) * 128 * 2 == 536 * 2 * KIB  # matrices, and inputs
    for tokens, pages in ((0, 0), (1, 1), (544, 1), (545, 2), (4096, 8)):
        assert cache.sequence_bytes(tokens, fp8=False) == (2 * 36 + 12 * pages) * 544 * 2 * KIB


def test_a_layer_in_bf16_makes_pages_of_states_twice_as_large():
    """All pages have the size of the BF16 layer's. FP8 layers have twice the tokens in one."""
    cache = cache_of("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_cache_skip_layers=(3,))
    page = 1072 * 2 * KIB  # 1072 tokens of 1 KiB have room for a state
    for tokens, pages_in_bf16, pages_in_fp8 in ((1072, 1, 1), (1073, 2, 1), (2145, 3, 2)):
        assert cache.sequence_bytes(tokens, fp8=True) == (2 * 36 + pages_in_bf16 + 11 * pages_in_fp8) * page


def in_blocks(tokens):
    return -(-tokens // 16) * 16


@pytest.mark.parametrize("tokens", [10, 1024, 1025, 50_000])
def test_a_window_caps_what_its_layers_keep(tokens):
    """Gemma 3 12B: 40 of 48 layers see 1,024 tokens, 8 all of them; 8 KV heads of 256."""
    cache = cache_of("google/gemma-3-12b-it", kv_cache_dtype="auto")
    assert cache.windows == {1024: 40}
    kept = 40 * in_blocks(min(tokens, 1024)) + 8 * in_blocks(tokens)
    assert cache.sequence_bytes(tokens, fp8=False) == kept * 2 * 8 * 256 * 2


def test_vllm_pads_groups_of_layers():
    """Gemma 3 4B: 29 of 34 layers have a window, in groups of 5, the number of the others: memory for 30."""
    cache = cache_of("google/gemma-3-4b-it", kv_cache_dtype="auto")
    assert cache.windows == {1024: 29}
    assert cache.sequence_bytes(4096, fp8=False) == (30 * 1024 + 5 * 4096) * 2 * 4 * 256 * 2
    # 12 and 13 layers are groups of 13: smaller ones would need more padding
    layers = [LayerCache(512, window=128)] * 12 + [LayerCache(512)] * 13
    assert KVCache(tuple(layers), kv_heads=2).sequence_bytes(1024, fp8=False) == 13 * (128 + 1024) * 1024
