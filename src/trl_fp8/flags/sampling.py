"""`generation_kwargs` of a run whose rollouts come from vLLM: they have vLLM's names, which are not transformers'."""

from collections.abc import Iterable


# Public fields of vLLM 0.31's SamplingParams
VLLM_NAMES = frozenset(
    """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
    trace_decode_token_ids
    """.split()
)
# transformers' name -> what does the same here
_INSTEAD = {
    "eos_token_id": "generation_kwargs={'stop_token_ids': [...]}",
    "max_length": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "num_return_sequences": "num_generations",
    "stop_strings": "generation_kwargs={'stop': [...]}",
}


def check_generation_kwargs(names: Iterable[str]) -> None:
    """Raise `ValueError` for names that vLLM's `SamplingParams` does not have; the message says what to set."""
    unknown = [name for name in names if name not in VLLM_NAMES]
    if unknown:
        use = [f"{_INSTEAD[name]} for {name}" for name in unknown if name in _INSTEAD]
        raise ValueError(
            f"generation_kwargs sets {unknown}, but rollouts come from vLLM, whose SamplingParams has no such names "
            "(transformers' GenerationConfig may have; vLLM always samples). "
            + (f"Use {', '.join(use)}; remove them from generation_kwargs." if use else "Remove them.")
        )
