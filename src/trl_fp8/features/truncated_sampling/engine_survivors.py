"""Survivors: for each sampled token of a rollout, the tokens that top-k, top-p and min-p left to sample it from.

vLLM's second model runner (CUDA) returns survivors with each completion (`return_sampling_mask`). On CPU vLLM has only
the first runner. There `SamplerCapture` reads the log-probs from which vLLM's sampler draws.

Shape letters: T tokens and E survivors of one sequence, R requests in a forward, V vocabulary.
"""

from itertools import chain

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from vllm import LLM, RequestOutput

from trl_fp8.engine.protocol import Survivors
from trl_fp8.engine.vllm.colocated import Generation
from trl_fp8.engine.vllm.part import RolloutLog
from trl_fp8.engine.vllm.platform import Platform
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream import vllm as upstream


class SurvivorLog(RolloutLog):
    """The survivors of each rollout since `begin`, as the notes of a `RolloutLog`."""

    not_known = "the tokens that top_p, top_k and min_p left are not known"
    cannot_return = "top_p, top_k or min_p with a correction: vLLM cannot return the tokens that survive them"
    vllm_reason = r"sampling distribution replay[^\[\n]*"
    remedy = "set top_p=1.0, top_k=0, min_p=None"

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        return {"return_sampling_mask": True} if platform.name == "cuda" else {}

    def started(self, generation: Generation) -> None:
        returned = generation.platform.name == "cuda"
        self.source = returned_survivors if returned else SamplerCapture(generation.llm)
        top_k = generation.generation_kwargs.get("top_k", generation.top_k) or 0
        if top_k <= 0:
            # vLLM returns survivors only if top_k bounds their number. The vocabulary's size as top_k drops no token
            vocabulary = upstream.engine_config(generation.llm).model_config.get_vocab_size()
            generation.sample_with(top_k=vocabulary)

    def merged(self, notes: list[Survivors], length: int) -> Survivors:
        """Return the survivors of a conversation, joined from the `notes` of its turns.

        `notes` may include a note of another rollout with the same first tokens. Such a note overlaps a longer note of
        this conversation, and is left out.
        """
        turns = []  # (index of the first sampled token, note)
        for note in notes:
            sampled = np.flatnonzero(note.counts_T)
            if len(sampled):
                turns.append((int(sampled[0]), note))
        # Sort by start. Of notes with the same start, the longest comes first
        turns.sort(key=lambda turn: (turn[0], -len(turn[1].counts_T)))
        counts_T = np.zeros(length, np.int32)
        ids = [np.zeros(0, np.int32)]
        end = 0  # of the tokens whose survivors are known
        for start, note in turns:
            if start >= end:
                counts = note.counts_T[start:length]
                end = start + len(counts)
                counts_T[start:end] = counts
                ids.append(note.ids_E[: counts.sum()])
        return Survivors(counts_T, np.concatenate(ids))


def returned_survivors(outputs: list[RequestOutput]) -> list[Survivors]:
    """Return the survivors of each output, from the sampling masks that vLLM returned."""
    masks = [output.outputs[0].sampling_mask for output in outputs]
    if any(mask is None for mask in masks):
        raise RuntimeError("vLLM returned no sampling masks although return_sampling_mask was set.")
    return [_survivors(output, mask.token_ids) for output, mask in zip(outputs, masks, strict=True)]


class SamplerCapture:
    """Records survivors in the sampler of an engine with vLLM's first model runner."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._chunks: dict[str, dict[int, np.ndarray]] = {}  # request -> position of a sampled token -> its survivors
        upstream.sampler(llm).register_forward_hook(self._capture)

    def __call__(self, outputs: list[RequestOutput]) -> list[Survivors]:
        """Return the survivors of each request that just finished. At temperature 0 there are none."""
        chunks = self._chunks
        self._chunks = {}
        found = []
        for output in outputs:
            start = len(output.prompt_token_ids)
            survivors_at = chunks.get(output.request_id, {})
            positions = range(start, start + len(output.outputs[0].token_ids))
            found.append(_survivors(output, [survivors_at.get(position, ()) for position in positions]))
        return found

    def _capture(self, sampler: nn.Module, args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Note the survivors of each request in the running forward, a row of the sampler's log-probs for each."""
        _, log_probs_RV = output
        survives_RV = log_probs_RV > -torch.inf
        counts = survives_RV.sum(-1).tolist()
        ids = survives_RV.nonzero()[:, 1].int().split(counts)  # token ids of each request's survivors
        # vLLM also draws a token at the end of each chunk of a prompt, and throws this token away. After a preemption
        # vLLM computes prompt and sampled tokens again in chunks, so each position keeps its first survivors
        for row_ids, (request, computed, start, end) in zip(ids, upstream.scheduled_tokens(self._llm), strict=True):
            position = computed + end - start  # of the token that is drawn
            self._chunks.setdefault(request, {}).setdefault(position, row_ids.numpy())


def _survivors(output: RequestOutput, completion_ids: list) -> Survivors:
    """Return the survivors of a request. `completion_ids` has, for each sampled token, the ids of its survivors."""
    prompt_length = len(output.prompt_token_ids)
    counts_T = np.zeros(prompt_length + len(completion_ids), np.int32)
    counts_T[prompt_length:] = [len(ids) for ids in completion_ids]
    ids_E = np.fromiter(chain.from_iterable(completion_ids), np.int32, counts_T.sum())
    return Survivors(counts_T, ids_E)
