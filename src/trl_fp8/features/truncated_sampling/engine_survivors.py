"""Survivors: the tokens that top-k, top-p and min-p left to be sampled from, for every token of every rollout.

vLLM's second model runner (CUDA) returns them with each completion (`return_sampling_mask`). On CPU vLLM has only
the first runner: there `SamplerCapture` reads the log-probs that its sampler draws from.
"""

import re
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
    """Survivors of everything generated since `begin`."""

    unknown = "the tokens that top_p, top_k and min_p left are not known"
    otherwise = "sample from the full distribution (top_p=1.0, top_k=0, min_p=None)"

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        return {"return_sampling_mask": True} if platform.name == "cuda" else {}

    def explain(self, error: ValueError) -> ValueError | None:
        reason = re.search(r"sampling distribution replay[^\[\n]*", str(error))
        return reason and ValueError(
            f"top_p, top_k or min_p with a correction: vLLM cannot return the tokens that survive them here: "
            f"{reason[0].strip()}. Otherwise set top_p=1.0, top_k=0, min_p=None."
        )

    def started(self, generation: Generation) -> None:
        returned = generation.platform.name == "cuda"
        self.source = returned_survivors if returned else SamplerCapture(generation.llm)
        if (generation.generation_kwargs.get("top_k", generation.top_k) or 0) <= 0:
            # vLLM returns survivors only if top_k bounds their number. A bound of the whole vocabulary changes nothing
            vocabulary = upstream.engine_config(generation.llm).model_config.get_vocab_size()
            generation.sample_with(top_k=vocabulary)

    def merged(self, notes: list[Survivors], length: int) -> Survivors:
        """Join the turns of a conversation; another rollout that shares tokens with it has a part of one of them."""
        turns = [(int(np.flatnonzero(note.counts_T)[0]), note) for note in notes if note.counts_T.any()]
        counts_T = np.zeros(length, np.int32)
        ids = [np.zeros(0, np.int32)]
        end = 0
        for start, note in sorted(turns, key=lambda turn: (turn[0], -len(turn[1].counts_T))):
            if start >= end:
                counts = note.counts_T[start:length]
                end = start + len(counts)
                counts_T[start:end] = counts
                ids.append(note.ids_E[: counts.sum()])
        return Survivors(counts_T, np.concatenate(ids))


def returned_survivors(outputs: list[RequestOutput]) -> list[Survivors]:
    """Return the survivors that vLLM itself reported."""
    masks = [output.outputs[0].sampling_mask for output in outputs]
    if any(mask is None for mask in masks):
        raise RuntimeError("vLLM returned no sampling masks although return_sampling_mask was set.")
    return [_survivors(output, mask.token_ids) for output, mask in zip(outputs, masks, strict=True)]


class SamplerCapture:
    """Reads the sampler of an engine with the first model runner."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._chunks: dict[str, dict[int, np.ndarray]] = {}  # request -> tokens before a token -> its survivors
        upstream.sampler(llm).register_forward_hook(self._capture)

    def __call__(self, outputs: list[RequestOutput]) -> list[Survivors]:
        """Return survivors of the requests that just finished; none where a token was not drawn (temperature 0)."""
        chunks = self._chunks
        self._chunks = {}
        found = []
        for output in outputs:
            start = len(output.prompt_token_ids)
            of_request = chunks.get(output.request_id, {})
            sampled = range(start, start + len(output.outputs[0].token_ids))
            found.append(_survivors(output, [of_request.get(position, ()) for position in sampled]))
        return found

    def _capture(self, sampler: nn.Module, args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        survives = output[1] > -torch.inf
        ids = survives.nonzero()[:, 1].int().split(survives.sum(-1).tolist())
        # A row for each request, also where a chunk of its prompt, or of what was preempted, ends: what is drawn there
        # is thrown away. So a token keeps the survivors that were noted first
        for of_row, (request, position, start, end) in zip(ids, upstream.scheduled_tokens(self._llm), strict=True):
            self._chunks.setdefault(request, {}).setdefault(position + end - start, of_row.numpy())


def _survivors(output: RequestOutput, of_completion: list) -> Survivors:
    counts_T = np.zeros(len(output.prompt_token_ids) + len(of_completion), np.int32)
    counts_T[len(output.prompt_token_ids) :] = [len(ids) for ids in of_completion]
    return Survivors(counts_T, np.fromiter(chain.from_iterable(of_completion), np.int32, counts_T.sum()))
