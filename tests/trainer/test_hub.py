"""`push_to_hub` through huggingface_hub's real client, against a stand-in server on loopback."""

import json
import re
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi
from safetensors.torch import load

from testing.hub_stand_in import HubStandIn
from testing.runs import arguments, dataset, reward_digits, training
from trl_fp8 import FP8GRPOTrainer


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.engine
def test_push_to_hub_writes_the_high_precision_policy_and_push_fp8_to_hub_the_other_with_cards(
    checkpoint, tmp_path, monkeypatch, capfd
):
    flags = {"push_to_hub": True, "hub_model_id": "user/policy", "hub_token": "hf_secret"}
    with HubStandIn() as hub:
        hub.connect(monkeypatch)
        with training(checkpoint("qwen3"), arguments(tmp_path / "out", max_steps=1, **flags)) as trainer:
            trainer.train()
            trainer.push_to_hub(commit_message="the final policy", blocking=True)
            for _ in range(2):  # the second replaces the export, and finds its files on the Hub
                assert "/user/policy-FP8/commit/" in trainer.push_fp8_to_hub().commit_url
            export, earlier = tmp_path / "out" / "_fp8", tmp_path / "out" / "._fp8.trl_fp8_earlier"
            before = {path.name: path.stat().st_ino for path in export.iterdir()}
            export.rename(earlier)  # as if a push had been interrupted between its renames
            weight = next(trainer.model.parameters()).data
            finite = weight.clone()
            weight.fill_(float("nan"))
            with pytest.raises((RuntimeError, ValueError), match="holds NaN or infinite values"):
                trainer.push_fp8_to_hub()
            weight.copy_(finite)
            assert before == {path.name: path.stat().st_ino for path in export.iterdir()}
            earlier.mkdir()
            (earlier / "config.json").touch()  # an export that was deleted in part
            trainer.push_fp8_to_hub()
            assert before.keys() == {path.name for path in export.iterdir()}
            assert not earlier.exists() and not export.with_name("_fp8.new").exists()
        files, exported = hub.repos["user/policy"], hub.repos["user/policy-FP8"]
        assert len(hub.uploads) == len(set(hub.uploads)) == 2  # weights in high precision, and in FP8
    assert "the final policy" in hub.commits
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()
    weights = load(files["model.safetensors"])
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (256, 128)
    assert not any("scale" in name or "float8" in str(tensor.dtype) for name, tensor in weights.items())
    assert "quantization_config" not in json.loads(files["config.json"])
    card = files["README.md"].decode()
    name = Path(checkpoint("qwen3")).name
    assert f"a fine-tuned version of {name}." in card and "None" not in card.partition("## Training procedure")[0]
    assert "- fp8" in card and "- grpo" in card and "- trl" in card
    assert (
        "## FP8 rollouts" in card
        and "## FP8 checkpoint" not in card
        and "| syncs that failed their audit | 0 |" in card
    )
    assert re.search(
        r"mean absolute log-prob difference of engine and trainer, nats, last 1 logged steps \| 0\.\d+", card
    )
    assert (
        "Model Card for policy" in card
        and str(tmp_path) not in card
        and card.count("model.layers.*.mlp.down_proj") == 1
    )
    assert "14 linear layers" in card and "bound=truncate, bound_max=2.0" in card and "trl-fp8 0." in card
    assert contents(tmp_path / "out" / "_fp8") == exported
    assert "quantization_config" in json.loads(exported["config.json"])
    assert any("k_scale" in name for name in json.loads(exported["model.safetensors.index.json"])["weight_map"])
    for part in (
        "## FP8 rollouts",
        "## FP8 checkpoint",
        'kv_cache_dtype="fp8"',
        "- fp8",
        "KV cache scales are included",
    ):
        assert part in exported["README.md"].decode(), part
    assert hub.tokens == {"Bearer hf_secret"} and "hf_secret" not in "".join(capfd.readouterr())


def test_a_hub_out_of_reach_is_an_error_that_names_the_flag(checkpoint, tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise httpx.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "create_repo", unreachable)
    refused = r"the Hub did not create the repository \(.* not known\)\. .* log in .* set push_to_hub=False, and call"
    with pytest.raises(OSError, match=refused):
        FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, arguments(tmp_path, push_to_hub=True), dataset())
