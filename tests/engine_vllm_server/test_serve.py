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
from testing.hub_cache import COMMITS, KEEPS_COMMITS, NAME, write_repository
from trl_fp8.commands.cli import main
from trl_fp8.commands.serve import SERVER, command
from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.engine.vllm_server import plugin, server_process
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
    assert environment["TRL_FP8_SCALES"] == recipe.scale_format
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["TRL_FP8_SERVER"] == "1"


def test_a_server_is_of_the_commit_that_the_user_names(checkpoint, tmp_path, monkeypatch):
    folders = [checkpoint("qwen3"), checkpoint("qwen3", intermediate_size=384)]
    write_repository(folders, tmp_path, monkeypatch)
    newest = COMMITS[1] if KEEPS_COMMITS else None  # None: vLLM takes the newest
    for flags, commit in (([], newest), (["--revision", COMMITS[0]], COMMITS[0])):
        assert parsed(command([NAME, *SIZES, *flags])[0]).revision == commit


def test_an_empty_variable_of_the_folder_means_the_default(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "DEFAULT_FOLDER", str(tmp_path / "default"))
    monkeypatch.setenv("TRL_FP8_TRANSFER", "")
    _, environment, text = command([checkpoint("qwen3"), *SIZES])
    assert environment["TRL_FP8_TRANSFER"] == str(tmp_path / "default")
    assert f"TRL_FP8_TRANSFER={tmp_path / 'default'}\n" in text


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


def test_further_flags_go_to_vllm(checkpoint):
    words, _, _ = command([checkpoint("qwen3"), *SIZES, "--no-fp8-weights", "--kv-cache-dtype", "auto", "--seed", "5"])
    assert parsed(words).seed == 5
    assert parsed(words).enforce_eager == parsed(command([checkpoint("qwen3"), *SIZES])[0]).enforce_eager


FORBIDDEN_SPELLINGS = {  # flag in the message -> the words of a user that set it
    "--api-key": ["--api-key x"],
    "--compilation-config": ["--compilation-config {}", "-cc {}", "-cc.mode 3"],
    "--config": ["--config f", "--config=f"],
    "--data-parallel-size": ["--data-parallel-size 2", "--data_parallel_size=2", "-dp 2"],
    "--enable-expert-parallel": ["-ep"],
    "--enable-lora": ["--enable_lora", "--enable-lor", "--no-enable-lora"],
    "--enable-prefix-caching": ["--no-enable-prefix-caching"],
    "--kv-transfer-config": ["--kv-transfer-config {}"],
    "--load-format": ["--load-format=auto"],
    "--middleware": ["--middleware a.B"],
    "--model-impl": ["--model-impl transformers"],
    "--pipeline-parallel-size": ["--pipeline-parallel-size 2", "-pp 2"],
    "--quantization": ["--quantization fp8", "-q fp8"],
    "--quantization-config": ["--quantization-config {}"],
    "--tensor-parallel-size": ["-tp 2"],
    "--weight-transfer-config": ["--weight-transfer-config.backend nccl"],
}


def test_vllms_flags_that_change_the_recipe_or_bypass_checks_are_refused_in_every_spelling(checkpoint, monkeypatch):
    arguments, environment = server_process.server_arguments(checkpoint("qwen3"), max_num_seqs=8)
    arguments.append("--enable-prefix-caching")  # as some recipes need it
    monkeypatch.setattr(server_process, "server_arguments", lambda *args, **kwargs: (arguments, environment))
    for flag, spellings in FORBIDDEN_SPELLINGS.items():
        for words in spellings:
            with pytest.raises(ValueError, match=f"does not take {flag}:"):
                command([checkpoint("qwen3"), *SIZES, *words.split()])
    for words in ("--quantum", "0.9", "--seed x"):
        with pytest.raises(ValueError, match=words.split()[0]):
            command([checkpoint("qwen3"), *SIZES, *words.split()])


def test_flags_are_taken_with_underscores_and_an_abbreviation_of_one_is_refused(checkpoint):
    words, _, text = command([checkpoint("qwen3"), "--max_model_len=64", "--max_num_seqs", "8"])
    assert (parsed(words).max_model_len, parsed(words).max_num_seqs) == (64, 8)
    assert "--vllm_max_model_length 64" in text
    with pytest.raises(ValueError, match="knows --max-model-len, --max-num-seqs by the whole name alone"):
        command([checkpoint("qwen3"), *SIZES, "--max-model-le", "32", "--max-num-se", "4"])
    with pytest.raises(ValueError, match="knows --host, --port by the whole name alone"):
        command([checkpoint("qwen3"), *SIZES, "--hos", "0.0.0.0", "--por", "9000"])


def test_the_model_comes_first_because_values_of_vllms_flags_would_be_taken_for_it(checkpoint, capsys):
    assert main(["serve", "--gpu-memory-utilization", "0.9", checkpoint("qwen3")]) == 2
    assert "takes MODEL first: trl-fp8 serve MODEL --gpu-memory-utilization ..." in capsys.readouterr().err
    assert main(["serve", "./no/such/model"]) == 2
    assert "no/such/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host, url",
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("fd00::2", "http://[fd00::2]:8000")],
)
def test_a_trainer_can_connect_to_the_address_in_the_text(host, url, checkpoint):
    words, _, text = command([checkpoint("qwen3"), *SIZES, "--host", host])
    assert parsed(words).host == host
    assert f"--vllm_server_base_url {url} " in text or f"--vllm_server_base_url '{url}' " in text


def test_the_kernel_that_passes_its_check_is_pinned(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "pinned_gemm", lambda *args, **kwargs: {"linear_backend": "triton"})
    words, _, _ = command([checkpoint("qwen3"), *SIZES])
    assert words[words.index("--linear-backend") + 1] == "triton"

    def none_passes(*args, **kwargs):
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
