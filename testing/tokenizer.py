"""The tokenizer of every model here: the addition demo's, a token per character."""

from transformers import PreTrainedTokenizerFast

from examples.addition_task import build_tokenizer


def tokenizer(max_length: int = 128) -> PreTrainedTokenizerFast:
    built = build_tokenizer()
    built.model_max_length = max_length
    return built
