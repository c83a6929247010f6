"""Whatever a run config or a command line hold, `trl-fp8 plan` answers or says in a line what is wrong."""

import contextlib
import io
import json
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider

from testing import published
from trl_fp8.commands.cli import main
from trl_fp8.recipe import from_model


NAMES = sorted(published.CONFIGS)
WORDS = (
    "",
    "auto",
    "fp8",
    "one_forward",
    "off",
    "rollout",
    "bfloat16",
    "1e400",
    "nan",
    "true",
    "7",
    "model.layers.0.mlp",
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 10**30, 128, 4096]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=4),
    st.lists(st.one_of(st.integers(-1, 40), st.sampled_from(WORDS)), max_size=3),
    st.dictionaries(st.sampled_from(("a", "hidden_size", "quant_method")), st.integers(0, 9), max_size=2),
)
KEYS = (
    *(
        "num_processes",
        "vllm_gpu_memory_utilization",
        "vllm_tensor_parallel_size",
        "use_peft",
        "lora_r",
        "fp8_base",
        "dtype",
        "beta",
    ),
    *("vllm_max_model_length", "max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "generation_batch_size", "vllm_enable_sleep_mode", "fp8_weights", "kv_cache_dtype"),
    *("kv_cache_skip_layers", "fp8_weight_format", "fp8_ignored_modules", "fp8_forward", "router_replay", "use_vllm"),
    *("kv_scale_margin", "kv_calibration", "kv_calibration_tokens", "simulate_kv_cache", "mask_truncated_completions"),
)
LINES = st.lists(
    st.sampled_from(
        [
            *(["--gpus", n] for n in ("1", "2", "3", "8", "0", "1000000")),
            *(["--gpu-memory", n] for n in ("24", "80", "-1", "nan", "1e9")),
            *(["--gpu-memory-utilization", n] for n in ("0.5", "0.01", "60", "-0.1", "inf")),
            *(["--tensor-parallel-size", n] for n in ("1", "2", "7", "-2")),
            *(["--context", n] for n in ("2", "4096", "100000000")),
            *(["--completions", n] for n in ("1", "256", "0")),
            *(["--kv-cache-dtype", n] for n in ("fp8", "fp8_e4m3", "auto")),
            *(["--weight-format", n] for n in ("blocks", "tensor")),
            *(
                ["--dtype", "bfloat16"],
                ["--lora"],
                ["--lora", "8"],
                ["--lora", "-8"],
                ["--fp8-base"],
                ["--engine", "cpu"],
            ),
            *(["--json"], ["--modules"], ["--nonsense"], ["--gpus", "two"]),
        ]
    ),
    max_size=4,
)


def outcome(words):
    """(status, stdout, stderr) of a command line; argparse ends by itself."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where models and recipes are written. Each outline is made once: configs of no use are in tests/recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_model, "outline_of_pretrained", cache(from_model.outline_of_pretrained))
        folder = tmp_path_factory.mktemp("any")
        for name in NAMES:
            published.write(name, folder / name)
        yield folder


def test_examples_do_not_depend_on_the_modules_that_other_tests_imported():
    """Hypothesis reads numbers and texts from the sources of imported modules."""
    provider = HypothesisProvider(None)
    for kind in ("integer", "float", "bytes", "string"):
        assert not provider._local_constants.set_for_type(kind), kind


# A busy host needs minutes. Hypothesis takes pytest's timeout for a failure of the example that is running, runs it
# again and calls the test flaky. `too_slow` counts seconds, too, in which the first examples are drawn
@pytest.mark.timeout(900)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(NAMES),
    lines=st.one_of(st.none(), st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3)),
    words=LINES,
)
def test_every_input_has_an_answer_or_one_message(folder, name, lines, words):
    line = ["plan", str(folder / name), *(word for group in words for word in group)]
    if lines is not None:
        (folder / "run.yaml").write_text(json.dumps(lines))  # JSON is YAML
        line += ["--config", str(folder / "run.yaml")]
    status, out, err = outcome(line)
    assert status in (0, 2) and (status == 0) == bool(out), (line, err)
    if status:
        assert err.startswith("trl-fp8: "), err
    elif "--json" in line:
        figures = json.loads(out)
        assert all(way["fits"] for way in figures["fits_instead"]) and figures["fits"] == bool(figures["flags"])
    else:
        assert ("DOES NOT FIT" in out) != (out.splitlines()[-1].startswith("flags: ")), out


@given(content=st.one_of(st.binary(max_size=12), st.sampled_from([b"[]", b"null", b"{}", b'"x"', b"[" * 10**5])))
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_config_of_any_bytes_has_one_message(folder, content):
    (folder / "config.json").write_bytes(content)
    status, out, err = outcome(["plan", str(folder)])
    assert (status, out) == (2, "") and err.startswith("trl-fp8: ") and err.count("\n") == 1
