"""vLLM's engine with lighter sleep, with hooks around each generation (`EnginePart`), and with seeded sampling.

TRL puts the engine to sleep at level 2 after each generation: the engine discards its weights, and the next generation
begins with a sync. Between batches of an evaluation and turns of a conversation the weights stay the same. There the
engine sleeps at level 1, which moves them to host memory and back. If a trainer computes with the engine's weights
(`share_weights`), they stay in device memory, and only the KV cache is freed.

vLLM samples with global random generators, and its seed for them depends only on the rank. On a CPU, and with the V1
model runner, vLLM draws from torch's generator. The V2 model runner (CUDA) seeds each request from NumPy's generator.
Reward functions use both generators, too, and dropout uses torch's, so the states of the generators may differ between
ranks. But ranks that share an engine have to sample the same tokens, or they wait for each other forever. So each call
of `generate` seeds both generators from the number of the engine (TRL's `seed` for vLLM), the `Occasion`, and the
number of the call.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import numpy as np
import torch
from vllm import LLM, RequestOutput, SamplingParams

from trl_fp8.sync.records import Occasion
from trl_fp8.upstream import vllm as upstream


@contextmanager
def generators_seeded(*seed: int) -> Iterator[None]:
    """Seed global generators inside the block: NumPy's, torch's for the CPU, and torch's for the current GPU. Restore
    their states afterwards.
    """
    numpy_state = np.random.get_state()
    has_gpu = torch.cuda.is_available()
    gpus = [torch.cuda.current_device()] if has_gpu else []
    with torch.random.fork_rng(gpus):
        np.random.seed(seed)
        torch_seed = np.random.randint(2**32)
        # `torch.manual_seed` would also seed other devices, whose generators `fork_rng` does not restore
        torch.default_generator.manual_seed(torch_seed)
        if has_gpu:
            torch.cuda.manual_seed(torch_seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)


class Weights(Enum):
    """Place of an engine's weights."""

    AWAKE = "in device memory of an engine that is awake"
    LEFT_IN_PLACE = "in device memory of an engine that sleeps, because the trainer computes with them"
    ON_HOST = "in host memory"
    DISCARDED = "nowhere: the next generation begins with a sync"


class RolloutLLM(LLM):
    """`vllm.LLM` that sleeps at level 1 instead of 2 while `keep_weights` is set, and at level 0 with shared weights.

    Args:
        parts: `EnginePart`s (typed `Any`, because part.py imports this module). Their hooks run around each
            generation, and `explain` may replace an error that vLLM raises when it starts.
        kwargs: Arguments of `vllm.LLM`. Ranks that share an engine must have the same `seed`.
    """

    keep_weights = False  # whether the next generation needs the same weights
    _place = Weights.AWAKE
    _shares_weights = False  # whether the trainer computes with the engine's weights
    occasion: Occasion | None = None  # seeds the sampling; None: vLLM samples with the generators' current states
    _calls: Mapping[Occasion, int] = {}  # occasions of the current step -> number of calls of `generate`

    def __init__(self, *, parts: Sequence[Any] = (), **kwargs):
        self._parts = parts
        self._seed = kwargs.get("seed") or 0
        # Before a sleep, vLLM by default aborts requests and resets its prefix cache. An engine that returns routed
        # experts refuses the reset, and the sleep fails. For such an engine `sleep` keeps requests (mode "keep")
        self._keeps_requests = bool(kwargs.get("enable_return_routed_experts"))
        try:
            super().__init__(**kwargs)
        except ValueError as error:
            for part in parts:
                explained = part.explain(error)
                if explained is not None:
                    raise explained from error
            raise

    def begin(self, occasion: Occasion, keep_weights: bool) -> None:
        """Set `occasion` and `keep_weights` for the next generation. Parts forget their notes on the previous one."""
        self.occasion = occasion
        self.keep_weights = keep_weights
        for part in self._parts:
            part.begin()

    def generate(self, *args, **kwargs) -> list[RequestOutput]:
        seeded = nullcontext()
        if self.occasion is not None:
            current = self.occasion
            # Drop counts of earlier steps. This step may have several occasions: training and evaluation may alternate
            calls = {}
            for occasion, count in self._calls.items():
                if (occasion.run_seed, occasion.step) == (current.run_seed, current.step):
                    calls[occasion] = count
            calls[current] = calls.get(current, 0) + 1
            self._calls = calls
            seeded = generators_seeded(self._seed, *current, calls[current])
        with seeded:
            outputs = super().generate(*args, **kwargs)
        for part in self._parts:
            part.generated(outputs)
        return outputs

    def prefill(self, tokens: list[int], prompt_logprobs: int | None = None) -> RequestOutput:
        """Run a whole sequence through the layers at once. Parts are not called, because this is no rollout."""
        # The sampled token is not used. top_k=1: with `return_sampling_mask` vLLM refuses requests without top_k,
        # because top_k bounds the size of the mask. vLLM draws random numbers all the same, so the generators' states
        # are restored afterwards
        parameters = SamplingParams(
            max_tokens=1, top_k=1, skip_reading_prefix_cache=True, prompt_logprobs=prompt_logprobs
        )
        with generators_seeded(self._seed):
            [output] = super().generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        return output

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Return the log-probs `[T - 1]` that the engine computes for a sequence's tokens 1 .. T - 1."""
        rows = self.prefill(tokens, prompt_logprobs=1).prompt_logprobs[1:]
        return torch.tensor([row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)])

    def share_weights(self) -> None:
        """Keep the weights in device memory from now on, so that the trainer can compute with them during sleep."""
        self._shares_weights = True

    @property
    def asleep_with_weights(self) -> bool:
        """Return whether the engine sleeps and its weights still exist, on the device or in host memory."""
        return self._place in (Weights.LEFT_IN_PLACE, Weights.ON_HOST)

    def sleep(self, level: int = 1, **kwargs) -> None:
        if self._keeps_requests:
            kwargs.setdefault("mode", "keep")
        if level == 0:  # vLLM pauses and frees nothing
            super().sleep(level=0, **kwargs)
            return
        if self._shares_weights:
            # Sleep at level 0, then free the cache alone. For this vLLM must have no requests (`finish`), and weights
            # and cache must be in device memory. vLLM raises if the weights were asleep when they were shared
            upstream.finish(self)
            super().sleep(level=0, **kwargs)
            self.release_kv_cache_memory()
            self._place = Weights.LEFT_IN_PLACE
            return
        if self.keep_weights:
            level = 1
        super().sleep(level=level, **kwargs)
        self._place = Weights.ON_HOST if level == 1 else Weights.DISCARDED

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None:
            super().wake_up(None)  # everything that sleeps
            self._place = Weights.AWAKE
            return
        sleeping = list(tags)
        if self._place in (Weights.AWAKE, Weights.LEFT_IN_PLACE):
            # The weights do not sleep: vLLM would wake nothing, and warn
            sleeping = [tag for tag in tags if tag != "weights"]
        if sleeping:
            super().wake_up(sleeping)
        if "weights" in tags:
            self._place = Weights.AWAKE
