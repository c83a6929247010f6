"""A run whose engine computes another model than its policy: ends before anything is sampled, or is told so."""

import pytest

from testing.runs import arguments, column, recorded, training
from trl_fp8.features.one_forward.same_model import SameModel


pytestmark = pytest.mark.engine

# vLLM's Llama turns half of the channels, transformers' all of them
HALF_TURNED = {"partial_rotary_factor": 0.5}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
BY_HALVES = [
    f"model.layers.{n}.self_attn: turned channels (the policy turns 64 of a head, the engine 32)" for n in range(2)
]
# transformers' Mistral has its window in all layers, vLLM's in those of `layer_types`; transformers' Llama has none
OPEN = "model.layers.1.self_attn: window of attention (a query at position 31 sees 16 keys, the engine's 32)"
CLOSED = "model.layers.0.self_attn: window of attention (a query at position 16 sees 17 keys, the engine's 16)"


def run(folder, checkpoint, **flags):
    """A trainer, its records of warnings' texts, and of calls of the engine."""
    return training(checkpoint, arguments(folder, max_steps=1, **flags))


@pytest.mark.parametrize(
    "architecture, options, expected", [("llama", HALF_TURNED, BY_HALVES), ("mistral", WINDOWED, [OPEN])]
)
def test_a_policy_that_would_follow_is_stopped_before_anything_is_sampled(
    architecture, options, expected, checkpoint, tmp_path
):
    with run(tmp_path, checkpoint(architecture, **options), fp8_forward="one_forward") as trainer:
        sampled = recorded(trainer.vllm_generation.llm, "generate", lambda outputs, *args, **kwargs: len(outputs))
        with pytest.raises(RuntimeError, match="computes a different model than the policy") as raised:
            trainer.train()
        with pytest.raises(RuntimeError, match="computes a different model"):  # nothing is taken for compared
            trainer.train()
    lines = [line.strip() for line in str(raised.value).splitlines()]
    assert lines[1:-1] == expected and not sampled
    assert "Set fp8_forward='off'" in lines[-1] and "fp8_forward_check='warn'" in lines[-1]


def test_a_warning_once_where_it_is_asked_for(checkpoint, tmp_path, caplog):
    args = {"fp8_forward": "one_forward", "fp8_forward_check": "warn"}
    with (
        run(tmp_path, checkpoint("llama", **WINDOWED), **args) as trainer,
        caplog.at_level("WARNING", logger="trl_fp8"),
    ):
        trainer.train()
        trainer.vllm_generation.sync_weights()
    warnings = [record.message for record in caplog.records if "a different model" in record.message]
    assert len(warnings) == 1 and CLOSED in warnings[0]
    assert column(trainer, "mismatch/logp_difference_mean") == [0]  # which is why it has to be told


@pytest.mark.parametrize(
    "options, expected",
    [
        (HALF_TURNED, BY_HALVES),
        ({}, []),
    ],
    ids=["half turned", "the same"],
)
def test_a_policy_that_does_not_follow_is_warned(options, expected, checkpoint, tmp_path, caplog):
    """Also without an FP8 KV cache, which has a hook on attention."""
    with run(tmp_path, checkpoint("llama", **options), kv_cache_dtype="auto") as trainer:
        implementation = trainer.model.config._attn_implementation
        with caplog.at_level("WARNING", logger="trl_fp8"):
            trainer.train()
    warnings = [record.message for record in caplog.records if "a different model" in record.message]
    lines = [line.strip() for text in warnings for line in text.splitlines()]
    assert lines[1:-1] == expected and len(warnings) == bool(expected)
    findings = trainer.feature(SameModel).witness.findings
    assert findings.compared > 10 and trainer.model.config._attn_implementation == implementation


def test_torchs_attention_leaves_out_the_soft_cap_of_gemma_2(checkpoint, tmp_path, caplog):
    for implementation in "sdpa", "eager":
        args = {"model_init_kwargs": {"attn_implementation": implementation}}
        with run(tmp_path / implementation, checkpoint("gemma2"), **args) as trainer:
            with caplog.at_level("WARNING", logger="trl_fp8"):
                trainer.train()
        warnings = [record.message for record in caplog.records if "a different model" in record.message]
        assert len(warnings) == 1, implementation
    [line] = [line.strip() for line in warnings[0].splitlines() if "layers.0" in line]
    assert line.startswith(
        "model.layers.0.self_attn: soft cap of scores, for which attn_implementation has to be 'eager'"
    )
    assert line.endswith("(the policy's none, the engine's 4)")
