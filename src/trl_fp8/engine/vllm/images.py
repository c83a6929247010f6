"""Images in prompts, whose tokens TRL has put in place.

TRL's processor writes as many image tokens as an image has embeddings, which is what the trainer's forward needs. vLLM
0.31 takes the first of them for a placeholder and writes all of them once more, so that rollouts would come from
another prompt than the one that is scored.
"""

from transformers import PretrainedConfig
from vllm import LLM
from vllm.multimodal.processing.processor import MultiModalPromptUpdates, PlaceholderFeaturesInfo


def leave_image_tokens(llm: LLM) -> None:
    """From now on prompts that have all tokens of their images stay as they are; others vLLM completes."""
    if (processor := llm.renderer.mm_processor) is None:
        return
    complete = processor._apply_prompt_updates

    def located(
        token_ids: list[int], updates: MultiModalPromptUpdates
    ) -> tuple[list[int], dict[str, list[PlaceholderFeaturesInfo]]]:
        found = processor._find_mm_placeholders(token_ids, updates)
        if all(len(found.get(modality, ())) == len(items) for modality, items in updates.items()):
            return token_ids, found
        return complete(token_ids, updates)

    processor._apply_prompt_updates = located


def require_awake(config: PretrainedConfig) -> None:
    """Raise `ValueError` for a model whose engine keeps, beside its weights, what a sleep takes and no sync brings."""
    if getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None):
        raise ValueError(
            f"vllm_enable_sleep_mode=True with a model of type {config.model_type!r}: vLLM adds tensors that lose "
            "what they hold in its sleep to the states of the first layers, with images or without. Set "
            "vllm_enable_sleep_mode=False."
        )


def require_same_prompts(sent: list[list[int]], returned: list[list[int]]) -> None:
    """Raise `RuntimeError` if the engine continued other prompts than those that the trainer scores."""
    other = [number for number, pair in enumerate(zip(sent, returned, strict=True)) if list(pair[0]) != list(pair[1])]
    if other:
        first = other[0]
        raise RuntimeError(
            f"vLLM continued {len(other)} of {len(sent)} prompts with other tokens than the trainer scores, the first "
            f"with {len(returned[first])} instead of {len(sent[first])}: its processor divides images otherwise than "
            "processing_class. Save processing_class into the model's folder, or give vLLM its settings: "
            "vllm_engine_kwargs={'mm_processor_kwargs': {...}}."
        )
