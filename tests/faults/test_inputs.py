"""Inputs that no one means to give: each either works or is one error that says what to do."""

import math
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.runs import arguments, dataset, rows, training
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.run.syncs import Syncs


# Every flag of ours and those of TRL's that it looks at, with right and wrong values
FLAGS = {
    "fp8_weights": st.booleans(),
    "fp8_scale_format": st.sampled_from(["pow2", "fp32", "ue8m0"]),
    "fp8_ignored_modules": st.sampled_from([None, [], ["model.layers.0.mlp.down_proj"]]),
    "kv_cache_dtype": st.sampled_from(["fp8", "auto", "fp8_e4m3", "fp8_e5m2", "int8"]),
    "kv_cache_skip_layers": st.sampled_from([None, ["0"], ["auto"], 1, "auto", ["a"], [0, -1]]),
    "kv_calibration": st.sampled_from([None, "rollout", "policy", "none"]),
    "kv_scale_margin": st.sampled_from([1.0, 1.05, 2.0, 0.5, -1.0, math.nan]),
    "kv_calibration_tokens": st.sampled_from([1, 8192, 0, -5]),
    "simulate_kv_cache": st.sampled_from([None, True, False]),
    "fp8_forward": st.sampled_from(["off", "one_forward", "full", "weights"]),
    "fp8_forward_check": st.sampled_from(["error", "warn", "off"]),
    "fp8_backward": st.sampled_from(["bf16", "fp8", "int8"]),
    "fp8_gemm_backend": st.sampled_from(["fake_quant", "scaled_mm", "cutlass"]),
    "router_replay": st.sampled_from(["off", "monitor", "rollout", "policy", "r4"]),
    "rollout_correction": st.sampled_from(
        [
            None,
            "monitor",
            "fp8_token_tis",
            "nemo_icepop",
            "no_such_preset",
            {"level": "token"},
            {"bound_max": 0.5},
            {"x": 1},
        ]
    ),
    "vllm_engine_kwargs": st.sampled_from(
        [None, {"enforce_eager": True}, {"quantization": "fp8"}, {"kv_cache_dtype": "auto"}]
    ),
    "vllm_importance_sampling_mode": st.sampled_from([None, "token_truncate", "sequence_mask", "token"]),
    "vllm_importance_sampling_clip_max": st.sampled_from(["auto", None, 2.0, 0.5]),
    "vllm_importance_sampling_correction": st.booleans(),
    "use_vllm": st.sampled_from([None, True, False]),
    "vllm_mode": st.sampled_from(["colocate", "server"]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "temperature": st.sampled_from([1.0, 0.7]),
    "mask_truncated_completions": st.booleans(),
    "fp16": st.booleans(),
}
SOME_FLAGS = st.sets(st.sampled_from(sorted(FLAGS)), max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: FLAGS[name] for name in sorted(names)})
)
# What a message may call a flag or value that is the cause, besides flags that were given
DEFAULTS_THAT_ARE_NAMED = {"bf16", "fp8_weights", "kv_cache_dtype", "use_vllm", "rollout_correction", "bound_max"}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(SOME_FLAGS)
def test_any_combination_of_flags_is_a_config_or_one_error_that_names_a_flag_and_what_to_do(flags):
    if "fp16" in flags:
        flags |= {"bf16": False}
    try:
        made = FP8GRPOConfig("out", use_cpu=True, report_to="none", **flags)
    except ValueError as error:
        message = str(error)
        assert any(name in message for name in {*flags, *DEFAULTS_THAT_ARE_NAMED}), message
        assert any(
            word in message.lower()
            for word in (
                "use ",
                "set ",
                "remove",
                "expected",
                "give",
                "must",
                "choose",
                "drop",
                "is unknown",
                "presets are",
                "for example",
                "fields are",
            )
        ), message
    else:
        assert made.kv_cache_dtype in ("fp8", "auto") and made.kv_scale_margin >= 1
        assert made.correction is None or made.use_vllm


PROMPTS = {
    "empty": "",
    "only special tokens": "<pad><bos><eos>",
    "unknown characters": "\u4f60\u597d \U0001f600",
    "half a surrogate pair, escaped": "1+1\\ud800=",
    "blank": "   \n",
    "long": "12+34=" * 6,
}


@pytest.mark.engine
def test_odd_prompts_train_together(checkpoint, tmp_path):
    prompts = Dataset.from_list([{"prompt": text} for text in PROMPTS.values() if text] * 6)
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=3), train=prompts) as trainer:
        trainer.train()
        logged = rows(trainer)
    assert len(logged) == 3 and all(math.isfinite(row["loss"]) for row in logged)
    assert all(row["mismatch/fraction_missing"] == 0 for row in logged)


@pytest.mark.engine
@pytest.mark.parametrize("case", ["empty", "too long"])
def test_prompts_that_cannot_be_generated_from_are_an_error_that_says_so(case, checkpoint, tmp_path):
    text = "" if case == "empty" else "1" * 100
    rows = Dataset.from_list([{"prompt": text}] * 8)
    said = "8 of 8 prompts are empty" if case == "empty" else "a prompt of 100 tokens.*Raise "
    with pytest.raises(ValueError, match=said):  # too long: before the engine starts
        with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=1), train=rows) as trainer:
            assert case == "empty"
            trainer.train()


@pytest.mark.parametrize(
    "prompt", ["1" * 60, [{"role": "user", "content": "1" * 50}, {"role": "user", "content": "1" * 10}]]
)
def test_the_longest_prompt_that_cuts_completions_is_warned_of_before_the_engine_starts(prompt, caplog):
    short = prompt[:10] if isinstance(prompt, str) else prompt[:1]
    rows = Dataset.from_list([{"prompt": short}, {"prompt": prompt}, {"prompt": short}])
    trainer = SimpleNamespace(
        args=SimpleNamespace(vllm_max_model_length=64, max_completion_length=8),
        environment_factories=None,
        rollout_func=None,
        train_dataset=rows,
        prompt_token_ids=lambda prompts: [[0] * (60 if prompts == [prompt] else 10)],
    )
    PartialState()
    Syncs._warn_of_long_prompts(SimpleNamespace(trainer=trainer))
    assert "the longest prompt has 60 tokens, and its completions end after 4 of max_comp" in caplog.text
    assert "raise vllm_max_model_length to 68" in caplog.text
    caplog.clear()
    trainer.train_dataset = rows.add_column("image", [None] * 3)  # of how many tokens TRL will know
    Syncs._warn_of_long_prompts(SimpleNamespace(trainer=trainer))
    trainer.train_dataset = iter(rows)
    Syncs._warn_of_long_prompts(SimpleNamespace(trainer=trainer))
    assert caplog.text == ""


def rewards_of(value):
    def reward(completions, **kwargs):
        return value(len(completions))

    return reward


@pytest.mark.engine
def test_odd_rewards_and_one_token_completions(checkpoint, tmp_path):
    """All alike, NaN for some, None for some: no gradient where there is nothing to learn,
    and no NaN in the policy.
    """
    mixed = iter([[0.5] * 8, [math.nan, *[0.0] * 7], [None, *[1.0] * 7]])
    args = arguments(tmp_path, max_steps=3, max_completion_length=1)
    with training(checkpoint("qwen3"), args, reward_funcs=rewards_of(lambda size: next(mixed))) as trainer:
        trainer.train()
        logged = rows(trainer)
        finite = [parameter.isfinite().all() for parameter in trainer.model.parameters()]
        assert all(finite)
    assert logged[0]["grad_norm"] == 0.0 and logged[0]["frac_reward_zero_std"] == 1.0


@pytest.mark.engine
def test_rewards_of_the_wrong_number_are_an_error(checkpoint, tmp_path):
    with training(
        checkpoint("qwen3"), arguments(tmp_path, max_steps=1), reward_funcs=rewards_of(lambda size: [1.0] * (size - 1))
    ) as trainer:
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            trainer.train()


def test_an_empty_dataset_is_an_error_before_an_engine_starts(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="train_dataset is empty"):
        FP8GRPOTrainer(checkpoint("qwen3"), rewards_of(lambda size: []), arguments(tmp_path), dataset(0))
