"""Image tokens that are there stay as they are; an engine that continues other prompts is found out."""

from types import SimpleNamespace

import pytest
import torch

from trl_fp8.engine.vllm.cpu.reference_attention import _unmask_images
from trl_fp8.engine.vllm.generation import leave_image_tokens, require_same_prompts, require_sleep_supported


IMAGE, TEXT = 64, 5


class Processor:
    """vLLM's of one image of three tokens, which completes the first placeholder that it sees."""

    def _find_mm_placeholders(self, token_ids, updates):
        whole = any(token_ids[start : start + 3] == [IMAGE] * 3 for start in range(len(token_ids)))
        return {"image": ["found"]} if whole else {}

    def _apply_prompt_updates(self, token_ids, updates):
        first = token_ids.index(IMAGE)
        return [*token_ids[:first], *[IMAGE] * 3, *token_ids[first + 1 :]], {"image": ["made"]}


def test_images_are_completed_once():
    processor = Processor()
    updates, whole = {"image": [["one image"]]}, [TEXT, IMAGE, IMAGE, IMAGE, TEXT]
    assert len(processor._apply_prompt_updates(whole, updates)[0]) == 7  # as vLLM does by itself
    leave_image_tokens(SimpleNamespace(renderer=SimpleNamespace(mm_processor=processor)))
    assert processor._apply_prompt_updates(whole, updates) == (whole, {"image": ["found"]})
    assert processor._apply_prompt_updates([TEXT, IMAGE, TEXT], updates) == (whole, {"image": ["made"]})
    leave_image_tokens(SimpleNamespace(renderer=SimpleNamespace(mm_processor=None)))  # of a text model


def test_prompts_that_an_engine_changed_are_named():
    require_same_prompts([[1, 2], [3]], [[1, 2], [3]])
    with pytest.raises(RuntimeError, match="continued 1 of 2 prompts .* with 3 instead of 1: .*mm_processor_kwargs"):
        require_same_prompts([[1, 2], [3]], [[1, 2], [3, 4, 5]])


@pytest.mark.parametrize("first", [0, 1, 4])
def test_tokens_of_an_image_see_all_of_it(first):
    """Positions 1 - 2 and 4 - 5 are images; queries begin at `first`, as where a prefix was cached."""
    seen = torch.ones(7, 7).tril().bool()[first:]
    _unmask_images([(1, 2), (4, 5)], seen, first)
    expected = [[key <= query or (query, key) in ((1, 2), (4, 5)) for key in range(7)] for query in range(first, 7)]
    assert seen.tolist() == expected


def test_a_model_that_a_sleep_would_break_is_refused():
    require_sleep_supported(SimpleNamespace(vision_config=SimpleNamespace()))
    deep = SimpleNamespace(model_type="qwen3_vl", vision_config=SimpleNamespace(deepstack_visual_indexes=[8]))
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode=True with a model of type 'qwen3_vl'"):
        require_sleep_supported(deep)
