"""The reference attention against a float64 re-derivation, through vLLM's real paged cache."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from testing import engines
from trl_fp8.engine.vllm.cpu.latent import LatentMetadata, ReferenceLatentImpl
from trl_fp8.engine.vllm.cpu.reference_attention import ReferenceAttentionImpl, keys_and_values, visible
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.upstream.vllm import engine_model


BLOCK, HEADS, KV_HEADS, SIZE = 32, 4, 2, 64
SINKS = torch.tensor([-2.0, 0.5, 3.0, 1.25], dtype=torch.bfloat16)


class Layer(torch.nn.Module):
    _k_scale_float, _v_scale_float = 2**-6, 2**-5


def implementation(window=None, **options):
    return ReferenceAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, sliding_window=window, **options)


def metadata(query_lens, seq_lens, tables):
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    slots = []
    for query, total, table in zip(query_lens, seq_lens, tables, strict=True):
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(total - query, total)]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        causal=True,
    )


def round_trip(states, scale):
    return (states.double() / scale).clamp(-448, 448).to(E4M3).double() * scale


def oracle(q, k, v, query_len, window, softcap=None, sinks=None):
    """A request in float64; k, v `[S, G, D]` after the round trip, q `[Q, H, D]`; a sink is a key whose value is 0."""
    total, out = k.shape[0], []
    for i in range(query_len):
        position = total - query_len + i
        low = 0 if window is None else max(0, position - window + 1)
        rows = []
        for head in range(HEADS):
            keys, values = k[low : position + 1, head // 2], v[low : position + 1, head // 2]
            scores = keys @ q[i, head].double() * SIZE**-0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None].double()])
                values = torch.cat([values, torch.zeros_like(values[:1])])
            rows.append(torch.softmax(scores, 0) @ values)
        out.append(torch.stack(rows))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, None), (7, None, None), (7, None, SINKS), (None, 2.0, SINKS)],
    ids=str,
)
def test_prefill_chunk_and_decode_equal_the_formula(window, softcap, sinks):
    generator = torch.Generator().manual_seed(0)
    impl, layer = implementation(window, logits_soft_cap=softcap, sinks=sinks), Layer()
    seq_lens, tables = [40, 5, 33], [[3, 1], [0, 9], [7, 5]]
    cache = torch.full((10, KV_HEADS, BLOCK, 2 * SIZE), 0x7F, dtype=torch.uint8)  # NaN: unused slots must not matter
    states = [torch.randn(s, 2 * KV_HEADS + HEADS, SIZE, generator=generator).bfloat16() for s in seq_lens]
    done = [0, 0, 0]
    for query_lens in ([38, 4, 12], [1, 1, 20], [1, 0, 1]):  # prefill, decode beside a chunk, decode
        active = [i for i, length in enumerate(query_lens) if length]
        lens = [query_lens[i] for i in active]
        done = [d + length for d, length in zip(done, query_lens, strict=True)]
        new = torch.cat([states[i][done[i] - query_lens[i] : done[i]] for i in active])
        key, value, query = new.split([KV_HEADS, KV_HEADS, HEADS], dim=1)
        meta = metadata(lens, [done[i] for i in active], [tables[i] for i in active])
        impl.do_kv_cache_update(layer, key, value, cache, meta.slot_mapping)
        output = torch.full((len(new) + 2, HEADS * SIZE), 7.0, dtype=torch.bfloat16)
        impl.forward(layer, query, key, value, cache, meta, output)
        assert (output[len(new) :] == 7).all()  # padding rows are left alone
        start = 0
        for i, length in zip(active, lens, strict=True):
            k, v, _ = states[i][: done[i]].split([KV_HEADS, KV_HEADS, HEADS], dim=1)
            cached = round_trip(k, 2**-6), round_trip(v, 2**-5)
            expected = oracle(query[start : start + length], *cached, length, window, softcap, sinks)
            got = output[start : start + length].view(length, HEADS, SIZE)
            assert torch.equal(got, expected.float().bfloat16())  # whatever else is in the batch
            start += length


def test_padding_slots_are_not_written():
    cache = torch.zeros(2, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8)
    ones = torch.ones(3, KV_HEADS, SIZE)
    implementation().do_kv_cache_update(Layer(), ones, ones, cache, torch.tensor([-1, 33, -1]))
    keys, values = keys_and_values(cache).unbind(2)
    assert keys[1, :, 1].bool().all() and keys.count_nonzero() == KV_HEADS * SIZE
    assert values.count_nonzero() == KV_HEADS * SIZE


@pytest.mark.parametrize(
    "options, name",
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"attn_type": "encoder"}, "encoder attention"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "fp8_per_token_head"),
    ],
)
def test_unsupported_attention_is_refused_by_name(options, name):
    with pytest.raises(NotImplementedError, match=name):
        ReferenceAttentionImpl(HEADS, SIZE, 1.0, KV_HEADS, **options)


@pytest.mark.engine
def test_scales_reach_the_kernel_and_the_cache_holds_their_bytes(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    generation.sync_weights()
    layer = attention_layers(engine_model(generation.llm))[0]
    assert type(layer.impl) is ReferenceAttentionImpl and layer.kv_cache.dtype == torch.uint8
    base = engines.log_probs(generation.llm)
    saturating = engines.some_scales(2, 1)
    saturating.values.div_(64)
    engines.scales_of(generation).calibrate = lambda: saturating
    generation.sync_weights()
    assert engines.log_probs(generation.llm) != base
    engines.scales_of(generation).calibrate = lambda: engines.some_scales(2, 1)
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == base
    engines.shutdown(generation.llm)


PLAIN, ROTATED, RANK, VALUES = 16, 8, 24, 12


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3, torch.bfloat16])
def test_latents_are_read_as_the_keys_and_values_that_they_expand_to(dtype, monkeypatch):
    """Alone and beside another request, bit for bit; the oracle expands them, in float64."""
    torch.manual_seed(0)
    query_lens, seq_lens, tables, scale = [5, 1], [40, 33], [[3, 1], [0, 2]], torch.tensor(2**-6)
    layer = SimpleNamespace(W_UK_T=torch.randn(HEADS, PLAIN, RANK), W_UV=torch.randn(HEADS, RANK, VALUES))
    monkeypatch.setattr(ReferenceLatentImpl, "_layer", lambda self: layer)
    sizes = {"qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED, "qk_head_dim": PLAIN + ROTATED}
    sizes |= {"kv_lora_rank": RANK, "v_head_dim": VALUES, "q_lora_rank": None, "kv_b_proj": None}
    plain = dict.fromkeys(["alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"])
    impl = ReferenceLatentImpl(
        HEADS, RANK + ROTATED, 0.2, 1, kv_cache_dtype="auto", attn_type="decoder", **plain, **sizes
    )
    cache = torch.zeros(4, BLOCK, RANK + ROTATED, dtype=dtype)
    whole = metadata(seq_lens, seq_lens, tables)
    latent = torch.randn(sum(seq_lens), RANK + ROTATED).bfloat16()
    impl.do_kv_cache_update(latent[:, :RANK], latent[:, None, RANK:], cache, whole.slot_mapping, "auto", scale)
    q = torch.randn(sum(query_lens), HEADS, PLAIN + ROTATED).bfloat16()

    def attended(q, *batch):
        output = torch.empty(len(q), HEADS * VALUES, dtype=torch.bfloat16)
        read = cache.view(E4M3) if dtype.itemsize == 1 else cache  # as vLLM passes it
        impl.forward_mha(q, None, None, read, LatentMetadata(metadata(*batch)), scale, output)
        return output.view(len(q), HEADS, VALUES)

    found = attended(q, query_lens, seq_lens, tables)
    assert torch.equal(found[5:], attended(q[5:], query_lens[1:], seq_lens[1:], tables[1:]))
    held = round_trip(latent, scale.double()) if dtype.itemsize == 1 else latent.double()
    for rows, own in ((slice(0, 5), held[:40]), (slice(5, 6), held[40:])):
        keys = torch.einsum("sl,hnl->shn", own[:, :RANK], layer.W_UK_T.double())
        keys = torch.cat([keys, own[:, None, RANK:].expand(-1, HEADS, -1)], -1)
        values = torch.einsum("sl,hlv->shv", own[:, :RANK], layer.W_UV.double())
        scores = torch.einsum("qhd,shd->hqs", q[rows].double(), keys) * 0.2
        seen = torch.arange(len(own)) <= torch.arange(len(own) - scores.shape[1], len(own))[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hqs,shv->qhv", weights, values)
        # rounded once to BF16: 8 bits
        assert ((found[rows].double() - expected).abs() <= 2**-8 * expected.abs()).all()


def test_without_causality_each_query_sees_all_tokens_of_its_sequence():
    seen_RQS = visible(torch.tensor([2, 1]), torch.tensor([3, 2]), 3, window=None, causal=False)
    assert seen_RQS.tolist() == [[[True, True, True]] * 2, [[True, True, False]] * 2]
