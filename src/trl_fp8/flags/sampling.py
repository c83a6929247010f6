"""`generation_kwargs` of a run whose rollouts come from vLLM: they have vLLM's names, which are not transformers'."""

from collections.abc import Mapping
from typing import Any


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


# What the trainer sets itself -> why no other value goes
_THE_TRAINERS = {
    "n": "num_generations decides how many completions a prompt has",
    "seed": "every completion of a prompt would be the same; the config's seed decides what is sampled",
    "logprobs": "the correction reads the sampled token's",
}


def check_generation_kwargs(given: Mapping[str, Any], temperature: float) -> None:
    """Raise `ValueError` for what vLLM's `SamplingParams` does not have, or the trainer sets; it says what to do.

    Args:
        given: The flag.
        temperature: The config's, by which the trainer's log-probs are divided.
    """
    if taken := [name for name in given if name in _THE_TRAINERS]:
        reasons = "; ".join(f"{name}: {_THE_TRAINERS[name]}" for name in taken)
        raise ValueError(f"generation_kwargs sets {taken}, which the trainer sets itself ({reasons}). Remove them.")
    if given.get("temperature", temperature) != temperature:
        raise ValueError(
            f"generation_kwargs sets temperature={given['temperature']}, and the config temperature={temperature}: "
            "rollouts and the trainer's log-probs would be of two distributions. Set "
            f"temperature={given['temperature']} in the config instead."
        )
    unknown = [name for name in given if name not in VLLM_NAMES]
    if unknown:
        use = [f"{_INSTEAD[name]} for {name}" for name in unknown if name in _INSTEAD]
        raise ValueError(
            f"generation_kwargs sets {unknown}, but rollouts come from vLLM, whose SamplingParams has no such names "
            "(transformers' GenerationConfig may have; vLLM always samples). "
            + (f"Use {', '.join(use)}; remove them from generation_kwargs." if use else "Remove them.")
        )
