"""Survivors of truncated sampling, as an engine returns them and as a log finds them again."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import LLM
from vllm.config import VllmConfig
from vllm.outputs import CompletionOutput, SamplingMask

from testing import tiny_models
from trl_fp8.engine.vllm.platform import Cpu, Cuda
from trl_fp8.engine.vllm.rollout_llm import RolloutLLM
from trl_fp8.features.truncated_sampling.engine_survivors import SurvivorLog, returned_survivors
from trl_fp8.recipe.recipe import FP8Recipe


def output(prompt, completion, survivors=None):
    """What `LLM.generate` returns for one request, as far as it is read here."""
    mask = None if survivors is None else SamplingMask(survivors)
    finished = CompletionOutput(0, "", completion, None, None, sampling_mask=mask)
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[finished])


def found(log, *sequences):
    return [(note.counts_T.tolist(), note.ids_E.tolist()) for note in log.notes_on([list(each) for each in sequences])]


def test_survivors_that_vllm_returns_belong_to_tokens_after_the_prompt():
    log = SurvivorLog(returned_survivors)
    log.generated([output([1, 2], [3, 4], [[3], [4, 7, 9]]), output([1], [5], [[5, 6]])])
    assert found(log, [1, 2, 3, 4], [1, 5]) == [([0, 0, 1, 3], [3, 4, 7, 9]), ([0, 2], [5, 6])]
    assert all(note.ids_E.dtype == note.counts_T.dtype == np.int32 for note in log.notes_on([[1, 5]]))
    log.begin()
    with pytest.raises(RuntimeError, match=r"1 of 1 rollouts were not generated .*otherwise set top_p=1.0"):
        log.notes_on([[1, 5]])
    with pytest.raises(RuntimeError, match="return_sampling_mask was set"):
        log.generated([output([1, 2], [3])])


def test_turns_of_a_conversation_are_joined():
    log = SurvivorLog(returned_survivors)
    log.generated(
        [output([1, 2], [3], [[3]]), output([1, 2], [3, 4], [[3, 8], [4, 5]])]
    )  # the first ended where this goes on
    log.generated([output([1, 2, 3, 4, 9, 9], [6, 7], [[6], [7, 0]])])
    whole = [1, 2, 3, 4, 9, 9, 6, 7]
    assert found(log, whole) == [([0, 0, 2, 2, 0, 0, 1, 2], [3, 8, 4, 5, 6, 7, 0])]
    assert found(log, whole[:-1]) == [([0, 0, 2, 2, 0, 0, 1], [3, 8, 4, 5, 6])]  # cut at max_completion_length
    assert found(log, [*whole, 9]) == [([0, 0, 2, 2, 0, 0, 1, 2, 0], [3, 8, 4, 5, 6, 7, 0])]  # a tool's last result


def test_an_engine_is_asked_for_survivors_where_vllm_can_return_them():
    options = {"max_num_seqs": 8, "max_model_len": 64, "parts": [SurvivorLog()]}
    told = [
        platform.arguments(FP8Recipe((), kv_cache_dtype="auto"), tiny_models.config("qwen3"), **options)
        for platform in (Cuda((9, 0)), Cpu())
    ]
    assert [arguments.get("return_sampling_mask") for arguments in told] == [True, None]


def test_an_engine_that_cannot_return_survivors_says_which_flags_asked(monkeypatch):
    def refuse(llm, **kwargs):
        model = SimpleNamespace(return_sampling_mask=True)
        try:
            VllmConfig._verify_sampling_replay_config(SimpleNamespace(model_config=model, use_v2_model_runner=False))
        except ValueError as error:  # as pydantic tells it
            raise ValueError(f"1 validation error for VllmConfig\n  Value error, {error} [type=value_error]") from None

    monkeypatch.setattr(LLM, "__init__", refuse)
    with pytest.raises(ValueError, match=r"top_p, top_k or min_p .*Model Runner V2\. Otherwise set top_p=1.0"):
        RolloutLLM(parts=[SurvivorLog()])
