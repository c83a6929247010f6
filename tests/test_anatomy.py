"""The benchmarks of mismatch and gradients on fixed tokens: their simulated engine, their statistics, their files."""

import gzip
import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import bench_anatomy, bench_gradient, evidence
from benchmarks.bench_gradient import Case, inner_products, statistics
from benchmarks.simulated_engine import Sequences, SimulatedEngine, calibrated_scales, log_probs
from testing import fp8_oracle, record


PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]] * 4


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # sharp enough that rounding moves log-probs
    return model


def sampled(engine, tokens=16):
    """Return completions with the engine's log-probs, in one row."""
    found = engine.sample(PROMPTS, tokens, seed=0)
    return Sequences.of(PROMPTS, [ids.tolist() for ids, _ in found]), torch.cat([logps for _, logps in found])


def chosen(model, sequences):
    return bench_anatomy.chosen_log_probs(model, sequences)


# -- the simulated engine


def test_a_simulated_fp8_linear_multiplies_the_rounded_operands(policy):
    engine = SimulatedEngine(policy)
    name = "layers.0.mlp.down_proj"
    module = engine.linears[name]
    weight = module.weight.detach().clone()
    x = torch.randn(8, 384, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[:, ::13] *= 20
    engine.round([name])
    # groups of 128 of a token, scales floored as vLLM floors them on CPU
    rows = fp8_oracle.rounded(x, 1, "pow2", amax_floor=1 / 512)
    expected = rows @ fp8_oracle.rounded(weight, 128, "pow2").T
    terms = rows.abs() @ fp8_oracle.rounded(weight, 128, "pow2").abs().T
    # sums in FP32, one rounding to BF16
    assert ((module(x).double() - expected).abs() <= 2**-8 * expected.abs() + fp8_oracle.gamma(384) * terms).all()
    engine.round()
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight))


def test_samples_and_scores_of_a_simulated_engine_differ_by_less_than_its_rounding(policy):
    """Other shapes of a batch are other sums in BF16, which can flip an FP8 code."""
    engine = SimulatedEngine(policy)
    sequences, logps = sampled(engine)
    scales = calibrated_scales(policy, sequences.token_lists())
    scales = type(scales)(scales.values / 4)  # too small, so that a cache that does not round shows
    engine.round(kv_scales=scales)
    sequences, logps = sampled(engine)
    itself = (logps - chosen(engine.model, sequences)).abs().mean()
    engine.round()
    assert itself < 0.3 * (logps - chosen(engine.model, sequences)).abs().mean()


def test_rounding_is_undone(policy):
    engine = SimulatedEngine(policy)
    sequences, _ = sampled(engine)
    before = chosen(engine.model, sequences)
    engine.round(engine.linears, kv_scales=calibrated_scales(policy, sequences.token_lists()))
    assert not torch.equal(before, chosen(engine.model, sequences))
    engine.round()
    assert torch.equal(before, chosen(engine.model, sequences))


def test_log_probs_are_those_of_the_completions(policy):
    sequences = Sequences.of(PROMPTS, [[9, 10 + row] for row in range(len(PROMPTS))])
    found = torch.cat([logps[range(len(tokens)), tokens] for logps, tokens in log_probs(policy, sequences)])
    for row, prompt in enumerate(PROMPTS):
        logits = policy(input_ids=torch.tensor([[*prompt, 9, 10 + row]])).logits[0].log_softmax(-1)
        expected = torch.stack([logits[len(prompt) - 1, 9], logits[len(prompt), 10 + row]])
        torch.testing.assert_close(found[2 * row : 2 * row + 2], expected, rtol=1e-4, atol=1e-4)


# -- statistics


def lognormal(variance, sequences=4000, tokens=8):
    """Return log-ratios whose products over all tokens have a logarithm of this variance, as seen by the trainer."""
    of_token = variance / tokens
    noise = np.random.default_rng(0).normal(0, of_token**0.5, (sequences, tokens))
    return noise + of_token / 2  # E[1 / r] = 1


def test_effective_sample_sizes_of_lognormal_weights():
    found = bench_anatomy.window_weights(lognormal(0.5), 8)
    for estimate in (found["measured"], found["lognormal"]):
        assert estimate["value"] == pytest.approx(np.exp(-0.5), rel=0.05)
        assert estimate["low"] < np.exp(-0.5) < estimate["high"]
    assert bench_anatomy.extrapolated(lognormal(0.5), 16)["value"] == pytest.approx(np.exp(-1.0), rel=0.1)


def sketches(mean, noise, seed, prompts=8, repeats=96, bins=64):
    drawn = torch.randn(prompts, repeats, bins, generator=torch.Generator().manual_seed(seed))
    return mean + noise * drawn


def test_bias_cosine_and_noise_of_known_gradients():
    """Noise is eight times the mean. Of two equal arms the squared bias has a standard deviation of 0.03; products of
    groups with themselves would add 0.17.
    """
    mean = torch.zeros(64)
    mean[0] = 1.0
    turned = torch.zeros(64)
    turned[0], turned[1] = 0.6, 0.8
    reference, other = sketches(mean, 1.0, 1), sketches(turned, 2.0, 2)
    arms = [inner_products(reference, reference, True), inner_products(other, reference, False)]
    arms = [{part: values.numpy() for part, values in arm.items()} for arm in arms]
    found = statistics(arms[1], arms[0], np.arange(8))
    assert found["bias_squared"] == pytest.approx(0.8, abs=0.25)  # 0.4^2 + 0.8^2
    assert found["cosine"] == pytest.approx(0.6, abs=0.15)
    assert found["noise"] == pytest.approx(4.0, rel=0.1)
    again = inner_products(sketches(mean, 1.0, 3), reference, False)
    none = statistics({part: values.numpy() for part, values in again.items()}, arms[0], np.arange(8))
    assert abs(none["bias_squared"]) < 0.1
    assert statistics(arms[0], arms[0], np.arange(8))["bias_squared"] == 0


def test_the_gradient_of_a_group_is_autograds(policy):
    engine = SimulatedEngine(policy)
    sequences, _ = sampled(engine)
    case = Case(policy, PROMPTS, 1, 16, None, lambda prompt, completions: [], [policy.model.layers[-1]])
    factor = torch.randn(sequences.completion[:, 1:].shape) * sequences.completion[:, 1:]
    [(_, found)] = bench_gradient.gradients(case, bench_gradient.scored(case, sequences), {"none": factor})
    logits = policy(input_ids=sequences.ids, attention_mask=sequences.real.long()).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, sequences.ids[:, 1:, None])[..., 0]
    expected = torch.cat([each.flatten() for each in torch.autograd.grad((logps * factor).sum(), case.parameters)])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    assert bench_gradient.sketched(found).norm() == pytest.approx(found.norm().item(), rel=0.1)


# -- the committed files


def committed(name):
    return json.loads((record.RESULTS / f"{name}_cpu.json").read_text())["results"]


def test_results_follow_from_the_committed_raw_tables(monkeypatch):
    """`make evidence` checks the training runs, too, which takes a minute."""
    assert list(evidence.anatomy()) == list(evidence.gradient()) == []
    assert set(committed("anatomy")["precisions"]) == set(bench_anatomy.read_log_ratios(record.RESULTS)) - {"entropy"}
    changed = committed("anatomy")
    changed["precisions"]["linears_kv"]["k3"]["value"] *= 1.01
    del changed["precisions"]["bf16"]["by_entropy"][-1]
    monkeypatch.setattr(evidence, "stored", lambda name: changed)
    entries, value = evidence.anatomy()
    assert entries == "anatomy bf16 by_entropy: another number of entries"
    assert value.startswith("anatomy linears_kv k3 value: ")


def test_mismatch_does_not_grow_with_position_as_the_page_says():
    first, *later = committed("anatomy")["precisions"]["linears_kv"]["by_position"]
    assert max(later) < first


def test_committed_tokens_are_as_many_as_the_file_says():
    rows = [json.loads(line) for line in gzip.decompress(bench_anatomy.TABLE.read_bytes()).splitlines()]
    found = committed("anatomy")
    assert len(rows) == found["sequences"] and {len(row["completion"]) for row in rows} == {found["tokens"]}
