"""Prompts that an engine cannot continue, named before anything is calibrated or synced for them."""

from collections.abc import Sequence, Sized


def require_prompts(prompt_ids: Sequence[Sequence[int]], max_model_length: int | None) -> None:
    """Raise `ValueError` for prompts without tokens, or with more than the engine's context holds (None: not
    known here).
    """
    if empty := sum(not prompt for prompt in prompt_ids):
        raise ValueError(
            f"{empty} of {len(prompt_ids)} prompts are empty: there is no token to continue from. Filter them out of "
            "train_dataset, or put a system message before them."
        )
    longest = max(map(len, prompt_ids), default=0)
    if max_model_length is not None and longest > max_model_length:
        raise ValueError(
            f"vllm_max_model_length={max_model_length}, but a prompt has {longest} tokens, and its completion comes "
            "on top. Raise vllm_max_model_length, or filter long prompts out of train_dataset."
        )


def require_rows(dataset: object) -> None:
    """Raise `ValueError` for a dataset (or None) of known length without rows: training would end at once,
    without a word.
    """
    if isinstance(dataset, Sized) and not len(dataset):
        raise ValueError("train_dataset is empty. Check the split and the filters that it went through.")
