"""Pushing an FP8 checkpoint through huggingface_hub's real client, against a stand-in server on loopback."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing.hub_stand_in import HubStandIn
from trl_fp8.commands.cli import main
from trl_fp8.export.export import INDEX, export_fp8
from trl_fp8.export.file_checksums import CHECKSUMS, verify_export
from trl_fp8.export.push import push_export


@pytest.fixture
def hub(monkeypatch):
    with HubStandIn() as hub:
        hub.connect(monkeypatch)
        yield hub


@pytest.fixture
def export(checkpoint, tmp_path):
    def write(name, **options):
        folder = checkpoint("qwen3")
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        return export_fp8(model, tokenizer, tmp_path / name, **options)

    return write


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_push_ends_with_exactly_the_files_of_the_export(hub, export):
    folder = export("fp8", shard_bytes=200_000)
    url = push_export(folder, "user/policy-FP8", token="hf_secret", private=True).commit_url
    assert hub.repos["user/policy-FP8"] == contents(folder) and hub.commits == ["Upload FP8 checkpoint"]
    assert url.startswith(f"{hub.endpoint}/user/policy-FP8/commit/") and hub.tokens == {"Bearer hf_secret"}
    card = hub.repos["user/policy-FP8"]["README.md"].decode()
    assert (
        card.startswith("---\n")
        and card.count("# FP8 checkpoint") == 1
        and "- fp8" in card
        and "model.layers.*.mlp.down_proj" in card
    )


def test_a_branch_that_does_not_exist_is_created(hub, export):
    folder = export("fp8")
    push_export(folder, "user/policy-FP8", token="t", revision="v2")
    assert hub.branches == ["v2"] and hub.repos["user/policy-FP8"] == contents(folder)
    push_export(folder, "user/policy-FP8", token="t", revision="refs/pr/5")
    assert hub.branches == ["v2"], "a pull request is no branch"


def test_an_interrupted_push_is_completed_by_repeating_it(hub, export):
    folder = export("fp8", shard_bytes=100_000)
    shards = len(list(folder.glob("*.safetensors")))
    assert shards > 3
    hub.broken_after = 2
    with pytest.raises(OSError, match=r"(?s)was not pushed to user/policy-FP8.*interrupted.*trl-fp8 push"):
        push_export(folder, "user/policy-FP8", token="t")
    assert hub.repos["user/policy-FP8"] == {} and hub.commits == [] and len(hub.uploads) == 2
    hub.broken_after = None
    push_export(folder, "user/policy-FP8", token="t")
    assert hub.repos["user/policy-FP8"] == contents(folder)
    assert len(hub.uploads) == len(set(hub.uploads)) == shards  # nothing was sent twice


def test_a_failed_push_is_repeated_with_the_same_flags(hub, export, tmp_path):
    folder = export("fp8 export")
    hub.broken_after = 0
    for flags, options in (("", {}), (" --private --revision v2", {"private": True, "revision": "v2"})):
        with pytest.raises(OSError) as failed:
            push_export(folder, "user/policy-FP8", token="t", **options)
        assert str(failed.value).endswith(f"repeat it with 'trl-fp8 push '{folder}' user/policy-FP8{flags}'.")


def test_weights_of_an_earlier_export_do_not_stay(hub, export):
    push_export(export("first", shard_bytes=60_000), "user/policy-FP8", token="t")
    before = set(hub.repos["user/policy-FP8"])
    second = export("second", shard_bytes=200_000)
    push_export(second, "user/policy-FP8", token="t")
    assert hub.repos["user/policy-FP8"] == contents(second) and before - set(contents(second))
    index = json.loads(hub.repos["user/policy-FP8"][INDEX])
    assert set(index["weight_map"].values()) == {n for n in hub.repos["user/policy-FP8"] if n.endswith("tensors")}


def test_a_push_removes_only_weights_that_a_loader_could_take_for_its_own(hub, export):
    folder = export("fp8")
    others = {"adapter_model.safetensors": b"a", "draft/model.safetensors": b"d", "model_notes.safetensors": b"n"}
    hub.repos["user/policy-FP8"] = others | {"model.safetensors": b"a checkpoint in one file"}
    push_export(folder, "user/policy-FP8", token="t")
    assert hub.repos["user/policy-FP8"] == contents(folder) | others


def test_an_incomplete_export_is_not_pushed(hub, export, tmp_path, capsys):
    folder = export("fp8")
    next(folder.glob("*.safetensors")).write_bytes(b"")
    assert main(["push", str(folder), "user/policy-FP8"]) == 2
    assert "is not as it was exported" in capsys.readouterr().err and hub.repos == {}
    assert main(["push", str(tmp_path / "none"), "user/policy-FP8"]) == 2
    assert f"has no {CHECKSUMS}" in capsys.readouterr().err


def test_the_command_pushes_too(hub, export, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = export("fp8")
    assert main(["push", str(folder), "user/other", "--private"]) == 0
    out = capsys.readouterr()
    assert "pushed: http" in out.out and hub.repos["user/other"] == contents(folder)
    assert verify_export(folder) == len(contents(folder)) - 1
