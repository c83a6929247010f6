"""A full flow whose rollouts show a mismatch is not silent, and says why as far as it knows."""

import pytest

from trl_fp8.policy.flow.precision_flow import LIMIT, VERIFIED, VERIFIED_WITH_FP8_EXPERTS, flow_warning


def test_a_flow_that_holds_says_nothing():
    assert (
        flow_warning(1e-5, "cohere") is flow_warning(LIMIT, "cohere") is flow_warning(float("nan"), "cohere") is None
    )


@pytest.mark.parametrize(
    "flags, model_type, reason",
    [
        (
            {},
            "cohere",
            "model_type='cohere' is not one of those that were shown to be followed (gemma, gemma3_text, llama",
        ),
        ({}, VERIFIED[0], "GPU kernels round in other places"),
        ({}, VERIFIED_WITH_FP8_EXPERTS[0], "with FP8 experts where it has experts"),
        ({"adapters": True}, "qwen3", "the trainer the base alone"),
        ({"adapters": True, "kv_cache_left_out": True}, "qwen3", "simulate_kv_cache=False leaves out"),
    ],
)
def test_the_reason_is_named(flags, model_type, reason):
    warning = flow_warning(0.0123, model_type, **flags)
    assert warning.startswith(
        "fp8_forward='full', but the mean difference of log-probs of the latest rollouts is 0.012"
    )
    assert reason in warning and "fp8_forward='off' is faster" in warning
