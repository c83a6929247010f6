"""The layers that are compared by name, in a model whose output head vLLM keeps in the embeddings."""

import pytest

from testing.runs import arguments, training
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine


def test_embeddings_that_are_the_output_head_are_no_linear_layer(checkpoint, tmp_path):
    """vLLM's Gemma 2 has no module `lm_head`, and calls its embeddings with token ids."""
    name = "model.layers.1.mlp.down_proj"
    args = arguments(tmp_path, fp8_forward="one_forward", max_steps=1)
    with training(checkpoint("gemma2"), args) as trainer:
        module = engine_model(trainer.vllm_generation.llm).get_submodule(name)
        module.register_forward_hook(lambda module, args, output: (1.01 * output[0], *output[1:]))
        with pytest.raises(RuntimeError, match=f"the output of {name}, from token"):
            trainer.train()
