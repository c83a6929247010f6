"""Adapters that were trained on a shared FP8 base, as others load them: vLLM by its own LoRA, and PEFT."""

import gc
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from testing import engines
from testing.runs import arguments, training
from trl_fp8.export.export import export_fp8
from trl_fp8.features.shared_base import engine_adapters as adapters
from trl_fp8.policy.model import dequantizing_config
from trl_fp8.recipe.recipe import FP8Recipe


pytestmark = pytest.mark.engine
VOCABULARY, STEPS = 64, 4
PROMPTS = [[4 + (7 * row + 13 * column) % 50 for column in range(3 + 4 * row)] for row in range(8)]
LARGE = {"max_logprobs": VOCABULARY}


class Run(NamedTuple):
    """What a run leaves, and log-probs of its engine, as of `log_probs`, and of its policy."""

    folder: Path  # with the adapters and the FP8 base
    recipe: FP8Recipe
    engine_BSV: Tensor
    before_BSV: Tensor  # before the last optimizer step
    unrounded_BSV: Tensor  # of the engine, if it did not round between A and B
    policy_BV: Tensor


def log_probs(llm, **options) -> Tensor:
    """Of all tokens after a prompt, and after each of those that follow it greedily."""
    greedy = SamplingParams(temperature=0.0, max_tokens=STEPS, logprobs=VOCABULARY, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": row} for row in PROMPTS], greedy, use_tqdm=False, **options)
    steps = ([[step[token].logprob for token in range(VOCABULARY)] for step in o.outputs[0].logprobs] for o in outputs)
    return torch.tensor(list(steps))


@torch.no_grad()
def first_log_probs(model) -> Tensor:
    """Those after a prompt, of a transformers model."""
    return torch.cat([model(input_ids=torch.tensor([row])).logits[:, -1] for row in PROMPTS]).log_softmax(-1)


def distance(found_BSV: Tensor, expected_BSV: Tensor) -> float:
    """Mean |difference| where the same tokens came before."""
    agree = (found_BSV.argmax(-1) == expected_BSV.argmax(-1)).cumprod(-1)[:, :-1].bool()
    same_BS = torch.cat([torch.ones(len(agree), 1, dtype=torch.bool), agree], dim=1)
    return (found_BSV - expected_BSV).abs()[same_BS].mean().item()


def unrounded(self, layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """B A x in FP32, rounded once, together with what it is added to."""
    y = super(adapters._WithAdapter, self).apply(layer, x, bias)
    product = x.float() @ layer.lora_a.weight.float().T @ layer.lora_b.weight.float().T
    return (y.float() + product).to(y.dtype)


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    gc.collect()  # an engine that a module before this one left would end, and its process group, while ours starts
    folder, source = tmp_path_factory.mktemp("run"), checkpoint("qwen3")
    flags = {"fp8_base": True, "kv_cache_dtype": "auto", "bf16": False, "vllm_engine_kwargs": LARGE}
    config = LoraConfig(  # scaled by a power of two: vLLM rounds B before it scales, the sync afterwards
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    export_fp8(model, AutoTokenizer.from_pretrained(source), folder / "base")
    args = arguments(folder, max_steps=1, learning_rate=3e-2, **flags)
    with training(model, args, peft_config=config) as trainer, pytest.MonkeyPatch.context() as patched:
        generation = trainer.vllm_generation
        trainer.train()
        trainer.save_model(folder / "adapters")
        before = log_probs(generation.llm)
        generation.sync_weights()
        after, policy = log_probs(generation.llm), first_log_probs(trainer.model.eval())
        patched.setattr(adapters._WithAdapter, "apply", unrounded)
        return Run(folder, generation.recipe, after, before, log_probs(generation.llm), policy)


def test_stock_vllm_gives_the_log_probs_of_the_engine(run):
    """Its LoRA rounds where the engine's layers do, but adds up in FP32 and in another order: a sum next to the middle
    of two BF16 numbers may be rounded to the other one, which is rare.
    """
    with engines.loaded(run.folder / "base", run.recipe, LARGE | {"enable_lora": True, "max_lora_rank": 8}) as llm:
        found = log_probs(llm, lora_request=LoRARequest("trained", 1, str(run.folder / "adapters")))
        base = log_probs(llm)
    rounding = distance(run.unrounded_BSV, run.engine_BSV)
    assert rounding > 0
    assert distance(found, run.engine_BSV) <= rounding and (found == run.engine_BSV).float().mean() > 0.5
    assert distance(found, run.before_BSV) > 10 * rounding and distance(found, base) > 10 * rounding


def test_peft_gives_the_log_probs_of_the_policy(run, checkpoint):
    """On the base that was exported, dequantized: all bits. On the one that it was made from: but for quantization."""
    base, source = str(run.folder / "base"), checkpoint("qwen3")
    exact = {"quantization_config": dequantizing_config(base)}
    plain, found = {}, {}
    for name, loading in ((base, exact), (source, {})):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **loading).eval()
        plain[name] = first_log_probs(model)
        found[name] = first_log_probs(PeftModel.from_pretrained(model, run.folder / "adapters").eval())
    assert torch.equal(found[base], run.policy_BV)
    quantization = (plain[base] - plain[source]).abs().mean()
    assert (found[source] - run.policy_BV).abs().mean() < 2 * quantization
    assert (plain[base] - run.policy_BV).abs().mean() > 10 * quantization
