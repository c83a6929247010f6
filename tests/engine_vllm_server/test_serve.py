"""`trl-fp8 serve` assembles the arguments of vLLM's own server."""

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from testing import tiny_models
from trl_fp8.commands.cli import main
from trl_fp8.commands.serve import SERVER, command
from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.engine.vllm_server import server_process
from trl_fp8.engine.vllm_server.guard import Guard
from trl_fp8.engine.vllm_server.staging import StagingFile
from trl_fp8.recipe.recipe import recipe_for_model


SIZES = ["--max-model-len", "64", "--max-num-seqs", "8"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("TRL_FP8_TOKEN", raising=False)
    monkeypatch.setenv("TRL_FP8_TRANSFER", str(tmp_path / "staged"))


def parsed(words):
    """Return what vLLM's own parser reads."""
    assert words[1:3] == ["-m", SERVER]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])


def test_vllm_reads_the_arguments_of_a_colocated_engine(checkpoint):
    folder = checkpoint("qwen3")
    words, environment, _ = command([folder, *SIZES])
    args = parsed(words)
    config = AutoConfig.from_pretrained(folder)
    recipe = recipe_for_model(tiny_models.on_meta("qwen3"))
    for name, value in platform_of().arguments(recipe, config, max_num_seqs=8, max_model_len=64).items():
        if isinstance(value, dict):
            word = words[words.index(f"--{name.replace('_', '-')}") + 1]
            assert json.loads(word) == value, name
        else:
            assert getattr(args, name) == value, name
    assert args.host == "127.0.0.1"
    assert args.middleware == [f"{Guard.__module__}.{Guard.__name__}"]
    assert args.weight_transfer_config.backend == "trl_fp8"
    assert args.logprobs_mode == "processed_logprobs"
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["TRL_FP8_SERVER"] == "1"


def test_each_start_has_another_token_and_says_how_a_trainer_connects(checkpoint, monkeypatch, tmp_path):
    first, second = (command([checkpoint("qwen3"), *SIZES, "--port", "8123"]) for _ in range(2))
    token = first[1]["TRL_FP8_TOKEN"]
    assert len(token) >= 32
    assert token != second[1]["TRL_FP8_TOKEN"]
    assert token not in first[0], "other users read command lines"
    assert f"TRL_FP8_TOKEN={token} TRL_FP8_TRANSFER={tmp_path / 'staged'}" in first[2]
    assert "--vllm_server_base_url http://127.0.0.1:8123" in first[2]
    monkeypatch.setenv("TRL_FP8_TOKEN", "chosen")
    _, environment, text = command([checkpoint("qwen3"), *SIZES])
    assert environment["TRL_FP8_TOKEN"] == "chosen" and "chosen" not in text, "it would stand in a job's log"
    assert "--vllm_max_model_length 64" in text


def test_a_start_removes_files_of_dead_trainers(checkpoint, tmp_path):
    (tmp_path / "staged").mkdir()
    dead = tmp_path / "staged" / "trl_fp8_1_x"
    dead.touch()
    living = StagingFile(str(tmp_path / "staged"), {})
    command([checkpoint("qwen3"), *SIZES])
    assert not dead.exists()
    assert Path(living.path).exists()
    living.remove()


def test_further_flags_go_to_vllm_and_those_of_the_recipe_are_refused(checkpoint, capsys):
    words, _, _ = command([checkpoint("qwen3"), *SIZES, "--no-fp8-weights", "--kv-cache-dtype", "auto", "--seed", "5"])
    assert parsed(words).seed == 5
    refused = [["--middleware", "a.B"], ["--load-format=auto"], ["--api-key", "x"], ["-tp", "2"], ["--config", "f"]]
    refused += [["--kv-transfer-config", "{}"], ["--enable_lora"], ["--weight-transfer-config.backend", "nccl"]]
    for flag in refused:
        assert main(["serve", checkpoint("qwen3"), *SIZES, *flag]) == 2
        assert flag[0].partition("=")[0].partition(".")[0].replace("_", "-") in capsys.readouterr().err
    assert main(["serve", "./no/such/model"]) == 2
    assert "no/such/model" in capsys.readouterr().err


def test_the_kernel_that_passes_its_check_is_pinned(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "pinned_gemm", lambda *args: {"linear_backend": "triton"})
    words, _, _ = command([checkpoint("qwen3"), *SIZES])
    assert words[words.index("--linear-backend") + 1] == "triton"

    def none_passes(*args):
        raise RuntimeError("no kernel of vLLM's passes its check")

    monkeypatch.setattr(server_process, "pinned_gemm", none_passes)
    assert main(["serve", checkpoint("qwen3"), *SIZES]) == 2
    assert "no kernel of vLLM's passes its check" in capsys.readouterr().err


def test_a_guard_without_a_token_does_not_start(monkeypatch):
    with pytest.raises(RuntimeError, match="TRL_FP8_TOKEN is not set"):
        Guard(None)


def test_vllm_finds_the_plugin_by_the_entry_point_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [entry] = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = entry.partition(":")
    assert callable(getattr(import_module(module), name))
