"""Outlines from a config.json are those of the models that transformers builds from it."""

import json
import subprocess
import sys
from time import perf_counter

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MistralConfig

from testing import other_models, published, tiny_models
from trl_fp8.recipe.architectures import ARCHITECTURES
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.outline import outline_of_config


INSIDE_OTHERS = ("qwen2_5_vl_text", "qwen3_vl_text")
KINDS = [kind for kind in ARCHITECTURES if kind not in INSIDE_OTHERS]
CONFIGS = {
    **{kind: lambda kind=kind: other_models.config(kind) for kind in KINDS},
    **{f"default {kind}": lambda kind=kind: CONFIG_MAPPING[kind]() for kind in KINDS},
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
