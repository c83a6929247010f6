"""Flags: defaults, parsing, and an error with flag, value, reason and remedy for everything that cannot work."""

import dataclasses

import pytest
from trl import GRPOConfig, TrlParser

from trl_fp8 import FP8GRPOConfig
from trl_fp8.features.correction.presets import PRESETS
from trl_fp8.run.facts import _changed_flags


OFF = {"fp8_weights": False, "kv_cache_dtype": "auto"}


def config(**flags):
    return FP8GRPOConfig("out", **({"use_cpu": True} | flags))


def test_defaults_are_fp8_with_token_truncation_at_two():
    made = config()
    assert made.use_vllm and made.fp8_weights and made.kv_cache_dtype == "fp8" and made.any_fp8
    assert made.vllm_importance_sampling_mode == "token_truncate" and made.vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize("flags", [{"fp8_weights": False}, {"kv_cache_dtype": "auto"}])
def test_one_half_off_is_still_fp8(flags):
    assert config(**flags).vllm_importance_sampling_mode == "token_truncate"


def test_routes_need_this_projects_engine_also_without_fp8():
    made = config(router_replay="rollout", use_vllm=True, **OFF)
    assert made.own_engine and made.routes_returned and not made.any_fp8
    assert not config(**OFF).own_engine


@pytest.mark.parametrize(
    "flags, returned",
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 20, "min_p": 0.1}, True),
        ({"generation_kwargs": {"min_p": 0.1}}, True),
        ({"generation_kwargs": {"top_p": 1.0}, "top_p": 0.9}, False),  # what the engine is told
        ({"top_k": -1, "min_p": 0.0}, False),
        ({"top_p": 0.9, "vllm_importance_sampling_correction": False}, False),
        ({"top_p": 0.9, "use_vllm": True} | OFF, False),  # as TRL
        ({"top_p": 0.9, "use_vllm": True, "rollout_correction": "nemo_icepop"} | OFF, True),
    ],
)
def test_survivors_are_returned_where_sampling_is_truncated_and_corrected_here(flags, returned):
    made = config(**flags)
    assert made.survivors_returned == returned and made.own_engine == (made.any_fp8 or returned)


def test_a_run_names_the_flags_that_were_set_and_not_what_defaults_came_to():
    assert _changed_flags(config(bf16=False)) == {"output_dir": "out", "use_cpu": True, "bf16": False}
    made = config(bf16=False, steps_per_generation=4, vllm_importance_sampling_clip_max=3.0)
    made.learning_rate = 1e-5  # after it was made
    assert _changed_flags(made).keys() - {"output_dir", "use_cpu", "bf16"} == {
        *("steps_per_generation", "vllm_importance_sampling_clip_max", "learning_rate")
    }


def test_flags_of_the_user_go_before_defaults():
    made = config(vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=5.0)
    assert (made.vllm_importance_sampling_mode, made.vllm_importance_sampling_clip_max) == ("sequence_mask", 5.0)
    unbounded = config(vllm_importance_sampling_clip_max=None, vllm_importance_sampling_clip_min=0.5)
    assert unbounded.vllm_importance_sampling_clip_max is None
    assert config(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"


@pytest.mark.parametrize("text, bound", [("None", None), ("null", None), ("7", 7.0), ("auto", 2.0)])
def test_an_upper_bound_may_come_as_text(text, bound):
    made = config(vllm_importance_sampling_clip_max=text, vllm_importance_sampling_clip_min=0.5)
    assert made.vllm_importance_sampling_clip_max == bound == made.correction.bound_max


@pytest.mark.parametrize("fp8", [{}, {"use_vllm": True} | OFF])
@pytest.mark.parametrize("name", [name for name, p in PRESETS.items() if p.correction.fits_vespo])
def test_vespo_goes_with_each_preset_that_fits_it(name, fp8):
    """TRL refuses VESPO beside a sequence-level mode, whichever ratio replaces the mode's."""
    made = config(loss_type="vespo", rollout_correction=name, **fp8)
    assert made.correction == PRESETS[name].correction
    assert made.vllm_importance_sampling_mode in ("token_truncate", "token_mask")


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            {"kv_cache_dtype": "fp8_per_token_head"},
            ["kv_cache_dtype='fp8_per_token_head'", "Use 'fp8' (e4m3), or 'auto' (the model's own dtype)."],
        ),
        (
            {"fp8_weight_format": "tensor", "fp8_weights": False},
            ["fp8_weight_format='tensor' with fp8_weights=False", "remove it"],
        ),
        (
            {"fp8_weight_format": "mxfp8", "fp8_scale_format": "fp32"},
            ["fp8_scale_format='fp32'", "'mxfp8'", "Use ['pow2']"],
        ),
        ({"fp8_weight_format": "rows"}, ["fp8_weight_format='rows'", "'tensor'"]),
        ({"fp8_scale_format": "ue8m0"}, ["fp8_scale_format='ue8m0'", "'pow2'"]),
        ({"kv_scale_margin": 0.9}, ["kv_scale_margin=0.9", "would not fit", "1.05"]),
        ({"kv_scale_margin": float("nan")}, ["kv_scale_margin=nan"]),
        ({"kv_scale_margin": float("inf")}, ["kv_scale_margin=inf", "not a finite number"]),
        ({"kv_calibration_tokens": 0}, ["kv_calibration_tokens=0", "8192"]),
        ({"kv_calibration": "none"}, ["kv_calibration='none'", "no default scale", "'rollout', 'policy'"]),
        ({"kv_cache_skip_layers": ["first"]}, ["kv_cache_skip_layers=['first']", "'auto'", "[0, 27]"]),
        (
            {"kv_cache_skip_layers": [1], "simulate_kv_cache": True, "kv_cache_dtype": "auto"},
            ["simulate_kv_cache=True", "kv_cache_skip_layers=['1']", "kv_cache_dtype='auto'"],
        ),
        *(
            (
                {"fp8_forward": "one_forward", "simulate_kv_cache": False, "kv_cache_dtype": dtype},
                [
                    "simulate_kv_cache=False with fp8_forward='one_forward'",
                    "Remove simulate_kv_cache",
                    "fp8_forward='off'",
                ],
            )
            for dtype in ("fp8", "fp8_e4m3")
        ),
        (
            {"fp8_forward": "one_forward", "vllm_tensor_parallel_size": 2},
            [
                "vllm_tensor_parallel_size=2 with fp8_forward='one_forward'",
                "the engine's own tensors",
                "Set vllm_tensor_parallel_size=1, or fp8_forward='off'",
            ],
        ),
        (
            {"fp8_forward": "one_forward", "fp16": True, "bf16": False},
            ["fp8_forward='one_forward'", "fp16=True", "bf16=True"],
        ),
        ({"vllm_engine_kwargs": {"kv_cache_dtype_skip_layers": ["0"]}}, ["kv_cache_dtype_skip_layers"]),
        ({"vllm_engine_kwargs": {"enable_return_routed_experts": True}}, ["enable_return_routed_experts"]),
        (
            {"fp8_forward": "one_forward", "torch_compile_mode": "default"},
            ["torch_compile_mode='default' with fp8_forward='one_forward'", "Remove torch_compile_mode"],
        ),
        ({"vllm_engine_kwargs": {"enable_lora": True}}, ["enable_lora=True", "fp8_base=True"]),
        ({"vllm_engine_kwargs": {"enable_expert_parallel": True}}, ["enable_expert_parallel=True", "tensor_parallel"]),
        (
            {"vllm_engine_kwargs": {"additional_config": {"trl_fp8": {}}}},
            ["additional_config={'trl_fp8': {}}", "without 'trl_fp8'"],
        ),
        ({"router_replay": "R3"}, ["router_replay='R3'", "'monitor', 'rollout', 'policy'"]),
        (
            {"router_replay": "rollout", "fp8_weights": False, "kv_cache_dtype": "auto"},
            ["router_replay='rollout'", "use_vllm=False", "router_replay='off'"],
        ),
        (
            {"router_replay": "policy", "vllm_importance_sampling_correction": False},
            ["router_replay='policy'", "vllm_importance_sampling_correction=False", "router_replay='rollout'"],
        ),
        (
            {"router_replay": "monitor", "mask_truncated_completions": True},
            ["router_replay='monitor'", "mask_truncated_completions=True"],
        ),
        ({"use_vllm": False}, ["use_vllm=False", "fp8_weights=True", "Set use_vllm=True", "fp8_weights=False"]),
        (
            {"vllm_mode": "server", "vllm_engine_kwargs": {"enforce_eager": True}},
            ["vllm_engine_kwargs={'enforce_eager': True}", "vllm_mode='server'", "trl-fp8 serve"],
        ),
        (
            {"vllm_mode": "server", "vllm_enable_sleep_mode": True},
            ["vllm_enable_sleep_mode=True", "trainer's process"],
        ),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "http://a,http://b", "fp8_forward": "one_forward"},
            ["vllm_server_base_url='http://a,http://b' with fp8_forward='one_forward'", "fp8_forward='off'"],
        ),
        ({"vllm_server_transport": "nccl"}, ["vllm_server_transport='nccl'", "one of auto, broadcast, cuda_ipc"]),
        ({"vllm_server_transport": "broadcast"}, ["vllm_server_transport='broadcast'", "vllm_mode='colocate'"]),
        ({"vllm_server_transport": "broadcast", "vllm_mode": "server"} | OFF, ["fp8_weights=False", "something FP8"]),
        ({"vllm_mode": "server", "router_replay": "rollout"}, ["router_replay='rollout'", "vllm_mode='colocate'"]),
        ({"vllm_mode": "server", "top_p": 0.9}, ["top_p=0.9 with", "renormalized", "vllm_mode='colocate'"]),
        ({"vllm_model_impl": "transformers"}, ["vllm_model_impl='transformers'", "Set vllm_model_impl='vllm'"]),
        (
            {"vllm_importance_sampling_clip_max": "two"},
            ["vllm_importance_sampling_clip_max='two' is not", "None for no bound"],
        ),
        (
            {"use_transformers_continuous_batching": True},
            ["use_transformers_continuous_batching=True with use_vllm=True", "would be ignored. Remove it"],
        ),
        (
            {"transformers_continuous_batching_config": {"block_size": 32}},
            ["transformers_continuous_batching_config={'block_size': 32}", "Remove it"],
        ),
        ({"vllm_importance_sampling_mode": "tokens"}, ["vllm_importance_sampling_mode='tokens'", "token_truncate"]),
        (
            {"repetition_penalty": 1.1, "top_k": 5},
            ["repetition_penalty=1.1 with", "another distribution", "vllm_importance_sampling_correction=False"],
        ),
        (
            {"top_p": 0.9, "vllm_mode": "server", "rollout_correction": "nemo_icepop"} | OFF,
            ["top_p=0.9 with", "vllm_mode='server'", "renormalized", "Set vllm_mode='colocate'"],
        ),
        ({"generation_kwargs": {"logit_bias": {5: 1.0}, "min_tokens": 4}}, ["logit_bias={5: 1.0}", "min_tokens=4"]),
        ({"generation_kwargs": {"watermarking": True, "thinking_token_budget": 9}}, ["watermarking=True", "budget=9"]),
        ({"vllm_structured_outputs_regex": r"\d+"}, ["vllm_structured_outputs_regex='", "another distribution"]),
        (
            {"kv_calibration": "rollout", "vllm_importance_sampling_correction": False},
            ["kv_calibration='rollout' with vllm_importance_sampling_correction=False", "does not see", "'policy'"],
        ),
        (
            {"kv_calibration": "rollout", "mask_truncated_completions": True},
            ["kv_calibration='rollout' with mask_truncated_completions=True", "leave it unset"],
        ),
        ({"vllm_engine_kwargs": {"seed": 1, "kv_cache_dtype": "auto"}}, ["['kv_cache_dtype', 'seed']", "own"]),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, ["FSDP1", "embeddings", "fsdp_config={'version': 2}"]),
        ({"fp8_forward": "fp8"}, ["fp8_forward='fp8'", "['off', 'one_forward']"]),
        (
            {"fp8_forward": "one_forward", "use_liger_kernel": True},
            ["use_liger_kernel=True", "Remove"],
        ),
        (
            {"fp8_forward": "one_forward", "cast_lm_head_to_fp32": True},
            ["cast_lm_head_to_fp32=True with fp8_forward='one_forward'"],
        ),
        ({"fp8_forward": "one_forward", "fp8_backward": "off"}, ["fp8_backward='off'", "['bf16', 'fp8']"]),
        (
            {"fp8_forward": "one_forward", "fp8_gemm_backend": "scaled_mm"},
            ["fp8_gemm_backend='scaled_mm' with fp8_backward='bf16'", "Set fp8_backward='fp8'"],
        ),
        (
            {
                "fp8_forward": "one_forward",
                "fp8_backward": "fp8",
                "fp8_gemm_backend": "scaled_mm",
                "fp8_weight_format": "tensor",
            },
            ["fp8_gemm_backend='scaled_mm' with fp8_weight_format='tensor'", "Use one of ['fake_quant']"],
        ),
        (
            {"fp8_forward": "one_forward", "fp8_backward": "fp8", "fp8_gemm_backend": "torchao"},
            ["fp8_gemm_backend='torchao'", "['fake_quant', 'scaled_mm']"],
        ),
        ({"fp8_forward": "one_forward", "fp8_forward_check": "off"}, ["fp8_forward_check='off'", "['error', 'warn']"]),
        (
            {"fp8_forward": "one_forward", "fp8_weights": False},
            [
                "fp8_forward='one_forward' with fp8_weights=False",
                "no FP8 forward to share",
                "Set fp8_weights=True",
                "fp8_forward='off'",
            ],
        ),
        (
            {"fp8_backward": "fp8"},
            ["fp8_backward='fp8' with fp8_forward='off'", "has no effect", "remove fp8_backward"],
        ),
        (
            {"fp8_forward_check": "warn"},
            [
                "fp8_forward_check='warn' with fp8_forward='off'",
                "fp8_forward='one_forward'",
                "remove fp8_forward_check",
            ],
        ),
        *(
            (
                {"vllm_engine_kwargs": {name: value}},
                [f"vllm_engine_kwargs={{'{name}': {value!r}}} with vllm_importance_sampling_correction=True"],
            )
            for name, value in {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
                "spec_method": "ngram",
                "logits_processors": ["package.module:Class"],
                "watermark_config": {"algorithm": "gumbel"},
            }.items()
        ),
        *(
            ({"temperature": temperature}, [f"temperature={temperature}", "importance ratio", "Set temperature=0.01"])
            for temperature in (0.009, 0.0)
        ),
        *(
            (
                {"vllm_engine_kwargs": {name: value}, "vllm_importance_sampling_correction": False},
                [f"vllm_engine_kwargs sets {name}={value!r}", "keys and values of older weights", "Remove it"],
            )
            for name, value in {
                "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
                "kv_offloading_size": 4.0,
                "ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"},
            }.items()
        ),
        (
            {"fp8_gemm_backend": "scaled_mm"},
            [
                "fp8_gemm_backend='scaled_mm' with fp8_forward='off'",
                "fp8_forward='one_forward'",
                "remove fp8_gemm_backend",
            ],
        ),
    ],
)
def test_bad_flags_are_named_with_reason_and_remedy(flags, words):
    with pytest.raises(ValueError) as error:
        config(**flags)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_old_name_of_one_forward_is_taken_with_a_note_of_the_first_rank(caplog, monkeypatch):
    with caplog.at_level("WARNING", logger="trl_fp8"):
        assert config(fp8_forward="full").fp8_forward == config(fp8_forward="one_forward").fp8_forward == "one_forward"
        monkeypatch.setenv("RANK", "1")
        assert config(fp8_forward="full").fp8_forward == "one_forward"
    assert [record.message for record in caplog.records if "fp8_forward" in record.message] == [
        "fp8_forward='full' is now called 'one_forward', which is used."
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {"top_p": 0.9, "vllm_importance_sampling_correction": False},
        {"top_k": -1, "min_p": 0.0, "generation_kwargs": {"min_tokens": 0, "stop": ["\n"]}},
        {"generation_kwargs": {"logit_bias": {}, "bad_words": []}},
        {"fsdp": True, "fsdp_config": {"version": 2}},
        {"vllm_engine_kwargs": {"enforce_eager": True, "logits_processors": [], "speculative_config": None}},
        {"vllm_engine_kwargs": {"spec_method": "ngram"}, "vllm_importance_sampling_correction": False},
        {"temperature": 0.01},
        {"kv_calibration_tokens": 0, "kv_cache_dtype": "auto"},
        {"temperature": 0.001, "vllm_importance_sampling_correction": False},
        {"fp8_forward": "one_forward", "fp8_forward_check": "warn"},
        {"fp8_forward": "one_forward", "fp8_backward": "fp8", "fp8_gemm_backend": "scaled_mm"},
        {"fp8_forward": "off", "fp8_weights": False, "fp8_backward": "bf16", "fp8_gemm_backend": "fake_quant"},
    ],
)
def test_good_flags_pass(flags):
    config(**flags)


@pytest.mark.parametrize(
    "flags, source",
    [
        ({}, "rollout"),
        ({"vllm_importance_sampling_correction": False}, "policy"),
        ({"mask_truncated_completions": True}, "policy"),
        ({"kv_calibration": "policy"}, "policy"),
    ],
)
def test_scales_come_from_the_rollouts_unless_these_are_not_seen_whole(flags, source):
    assert config(**flags).kv_calibration == source


@pytest.mark.parametrize(
    "given, numbers",
    [(None, ()), ([0, 27], (0, 27)), (["0", "27"], (0, 27)), ("3", (3,)), ("auto", None), (["auto"], None)],
)
def test_skipped_layers_come_in_every_form_a_command_line_or_yaml_gives(given, numbers):
    assert config(kv_cache_skip_layers=given).skip_layers == numbers


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"rollout_correction": "monitor"},
        {"rollout_correction": {"level": "token", "reject": ["token_ratio:0.5:2.0"]}, "use_vllm": True, **OFF},
        {"fp8_forward": "one_forward", "num_generations": 4},
        {"fp8_forward": "one_forward", "kv_cache_dtype": "auto"},
        {"kv_cache_skip_layers": [0], "vllm_importance_sampling_clip_max": 5.0},
        OFF,
    ],
)
def test_a_config_can_be_made_of_the_fields_of_another(flags):
    made = config(**flags)
    for again in (FP8GRPOConfig(**made.to_dict()), dataclasses.replace(made)):
        values = [{f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.init} for one in (made, again)]
        assert values[0] == values[1]
    assert dataclasses.replace(made, seed=5).seed == 5


def test_a_config_of_trls_becomes_one_of_ours_and_says_what_is_missing():
    of_trl = GRPOConfig("out", use_cpu=True, use_vllm=True, learning_rate=3e-5)
    made = FP8GRPOConfig(**of_trl.to_dict())
    assert made.any_fp8 and made.learning_rate == 3e-5 and made.hub_token is None
    assert made.vllm_importance_sampling_mode == of_trl.vllm_importance_sampling_mode
    fields = of_trl.to_dict() | {"use_vllm": False}
    with pytest.raises(ValueError, match="use_vllm=False with .*Set use_vllm=True"):
        FP8GRPOConfig(**fields)
    with pytest.raises(ValueError, match="generation_batch_size=8 with steps_per_generation=1 .*make it 16.*to None"):
        dataclasses.replace(made, per_device_train_batch_size=16)
    assert (
        dataclasses.replace(made, per_device_train_batch_size=16, generation_batch_size=None).generation_batch_size
        == 16
    )


@pytest.mark.parametrize("flags", [{"top_p": 0.9}, {"vllm_mode": "server"}, {"use_vllm": False}, {"top_k": 50}])
def test_with_fp8_off_trls_freedom_is_untouched(flags):
    made = config(**flags, **OFF)
    assert {name: getattr(made, name) for name in flags} == flags
    assert made.vllm_importance_sampling_clip_max == GRPOConfig.vllm_importance_sampling_clip_max


def test_flags_parse_from_the_command_line_and_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "output_dir: out\nuse_cpu: true\nkv_scale_margin: 1.5\nfp8_ignored_modules: [a.b, c.d]\n"
        "rollout_correction: {level: geometric, bound_max: 1.5, reject: ['token_veto:1e-4:']}\n"
    )
    parser = TrlParser(FP8GRPOConfig)
    engine = '{"enforce_eager": true, "max_num_batched_tokens": 512}'
    words = [
        "--config",
        str(path),
        "--fp8_weights",
        "false",
        "--vllm_engine_kwargs",
        engine,
        "--kv_cache_dtype",
        "fp8",
    ]
    (made,) = parser.parse_args_and_config(words)
    assert made.correction.level == "geometric" and made.correction.reject[0].statistic == "token_veto"
    assert made.kv_scale_margin == 1.5 and made.fp8_ignored_modules == ["a.b", "c.d"] and not made.fp8_weights
    assert made.vllm_engine_kwargs == {"enforce_eager": True, "max_num_batched_tokens": 512}
    path.write_text("output_dir: out\nuse_cpu: true\nvllm_importance_sampling_clip_min: 0.5\n")
    parser = TrlParser(FP8GRPOConfig)  # the other one keeps what it has read
    for text, bound in {"2.5": 2.5, "none": None}.items():
        words = ["--config", str(path), "--vllm_importance_sampling_clip_max", text]
        assert parser.parse_args_and_config(words)[0].correction.bound_max == bound


@pytest.mark.parametrize(
    "flags, simulated",
    [
        ({}, False),
        ({"fp8_forward": "one_forward"}, True),
        ({"fp8_weights": False}, True),
        ({"fp8_weights": False, "kv_cache_dtype": "auto"}, False),
        ({"fp8_forward": "one_forward", "kv_cache_dtype": "auto"}, False),
        ({"fp8_weights": False, "simulate_kv_cache": False}, False),
        ({"simulate_kv_cache": True}, True),
    ],
)
def test_the_kv_cache_is_simulated_by_default_where_nothing_larger_hides_it(flags, simulated):
    assert config(**flags).simulate_kv_cache is simulated
