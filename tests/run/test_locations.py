"""Models and datasets that are not where a user says: the Hub is asked once, and a folder of like name is named."""

import socket
import time
from pathlib import Path

import datasets
import httpx
import pytest
from huggingface_hub import HfApi

from trl_fp8.run.locations import require_dataset, require_model


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs/quickstart").mkdir(parents=True)
    return tmp_path


def answering(monkeypatch, answer):
    """The Hub gives this answer to whether it has a repository; the questions."""
    questions = []

    def repo_exists(self, name, repo_type=None):
        questions.append((name, repo_type))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(HfApi, "repo_exists", repo_exists)
    return questions


CHECKS = {"model": require_model, "dataset": require_dataset}


@pytest.mark.parametrize("kind", CHECKS)
def test_misspelt_folders_are_refused_without_the_hub(kind, here, monkeypatch):
    questions = answering(monkeypatch, True)
    for name in ("./quickstrat", "/no/such/folder", "outputs/runs/quickstart"):
        with pytest.raises(ValueError, match="there is no such folder, seen from"):
            CHECKS[kind](name, "a_flag")
    assert questions == []


@pytest.mark.parametrize("kind", CHECKS)
def test_the_hub_is_asked_once_for_what_may_be_there(kind, here, monkeypatch):
    questions = answering(monkeypatch, True)
    CHECKS[kind]("outputs/quickstrat", "a_flag")
    assert questions == [("outputs/quickstrat", kind)]
    answering(monkeypatch, False)
    with pytest.raises(ValueError, match=f"^a_flag='outputs/quickstrat': there is .*, and no {kind} of .* read: did"):
        CHECKS[kind]("outputs/quickstrat", "a_flag")
    answering(monkeypatch, httpx.ConnectError("Name or service not known"))
    with pytest.raises(OSError, match=r"cannot be asked .*\(Name or .*\): did you mean outputs/quickstart\?"):
        CHECKS[kind]("outputs/quickstrat", "a_flag")


def test_folders_and_builders_of_datasets_need_no_hub(here, checkpoint, monkeypatch):
    answering(monkeypatch, httpx.ConnectError("nobody there"))
    require_model(checkpoint("qwen3"), "model")
    require_dataset("outputs", "dataset_name")
    require_dataset("json", "dataset_name")
    with pytest.raises(OSError, match="cannot be asked"):
        require_dataset("jsn", "dataset_name")


@pytest.mark.parametrize(
    ("name", "folder"),
    [("openai/gsm8k", "openai___gsm8k"), ("trl-lib/DeepMath-103K", "trl-lib___deep_math-103_k"), ("C4", "c4")],
)
def test_a_dataset_in_the_cache_needs_no_hub(name, folder, here, monkeypatch):
    """`load_dataset` writes names in camel case as snake case."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(here / "cache"))
    answering(monkeypatch, httpx.ConnectError("offline"))
    with pytest.raises(OSError, match="cannot be asked"):
        require_dataset(name, "dataset_name")
    (here / "cache" / folder).mkdir(parents=True)
    require_dataset(name, "dataset_name")


def test_addresses_are_left_to_the_library_that_reads_them(here, monkeypatch):
    questions = answering(monkeypatch, False)
    for address in ("hf://datasets/openai/gsm8k", "hf://buckets/user/bucket/data", "buckets/user/bucket"):
        require_dataset(address, "dataset_name")
    assert questions == []


def test_an_unreachable_hub_costs_no_retries(here, monkeypatch):
    def unreachable(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    start = time.monotonic()
    with pytest.raises(OSError, match="cannot be asked"):
        require_model("somebody/model", "model")
    assert time.monotonic() - start < 10  # transformers takes a minute
