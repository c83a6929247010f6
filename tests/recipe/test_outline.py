"""Outlines from a config.json are those of the models that transformers builds from it."""

import json
import subprocess
import sys
from time import perf_counter

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from testing import published, tiny_models
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.outline import CLASSES, outline_of_config


CONFIGS = {
    **{kind: lambda kind=kind: tiny_models.config(kind) for kind in CLASSES if kind != "mistral"},
    "tied": lambda: tiny_models.config(tied=True),
    "biases": lambda: tiny_models.config("llama", attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, vocab_size=64),
    "qwen3_8b": published.qwen3_8b,
    "qwen3_30b_a3b": published.qwen3_30b_a3b,
    "llama3_1_8b": published.llama3_1_8b,
    "dense_and_sparse": lambda: tiny_models.config(
        "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_outline_of_a_config_is_that_of_the_model(name, tmp_path):
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    config.name_or_path = "user/model"
    with torch.device("meta"):
        expected = outline_of(AutoModelForCausalLM.from_config(config))
    found = outline_of_config(json.loads((tmp_path / "config.json").read_text()), "user/model")
    assert found == expected and list(found.parameters) == list(expected.parameters)


@pytest.mark.parametrize("missing", ["tie_word_embeddings", "head_dim", "num_key_value_heads", "model_type"])
def test_what_a_config_leaves_open_is_not_guessed(missing):
    config = tiny_models.config("qwen3").to_dict()
    assert outline_of_config(config, "m") is not None
    assert outline_of_config({key: value for key, value in config.items() if key != missing}, "m") is None
    assert outline_of_config(tiny_models.config("olmoe").to_dict(), "m") is None
    moe = tiny_models.config("qwen3_moe").to_dict()
    assert (
        outline_of_config({k: v for k, v in moe.items() if not k.startswith("num_")} | {"num_layers": 2}, "m") is None
    )


@pytest.mark.parametrize(
    "name, weight_format",
    [("qwen3_8b", "blocks"), ("qwen3_30b_a3b", "blocks"), ("llama3_1_8b", "blocks"), ("qwen3_8b", "tensor")],
)
def test_a_plan_takes_less_than_three_seconds_in_a_new_process(name, weight_format, tmp_path):
    CONFIGS[name]().save_pretrained(tmp_path)
    code = (
        "import sys; from trl_fp8.cli import main\n"
        "status = main(['plan', sys.argv[1], '--json', '--weight-format', sys.argv[2]])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(status)"
    )
    began = perf_counter()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), weight_format], capture_output=True, text=True)
    seconds = perf_counter() - began
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["linears"]["fp8"] > 100
    assert seconds < 3
