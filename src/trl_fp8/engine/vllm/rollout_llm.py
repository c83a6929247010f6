"""vLLM's engine with a lighter sleep, parts that take notes, and random numbers of its own.

TRL puts the engine to sleep at level 2 after each generation: weights are discarded, and the next generation begins
with a sync. Between batches of an evaluation and turns of a conversation weights stay the same: there level 1 moves
them to host memory and back. If a trainer computes with the engine's weights (`share_weights`), they stay where
they are, and only the KV cache is freed.

vLLM samples with global generators, which it seeds by the rank alone: torch's on CPU and in its first model runner;
in its second one (CUDA) NumPy's seeds each request. Reward functions and dropout draw from both as well, but ranks
that share an engine have to draw the same tokens, or they wait for each other forever. So each call
starts both generators from the run's seed, the engine's rank, the step and the number of the call.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import numpy as np
import torch
from vllm import LLM, RequestOutput, SamplingParams

from trl_fp8.upstream import vllm as upstream


@contextmanager
def generators_seeded(*seed: int) -> Iterator[None]:
    """Start NumPy's and torch's global generators from `seed` inside the block; restore them after it."""
    state = np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        np.random.seed(seed)
        torch.manual_seed(np.random.randint(2**32))
        try:
            yield
        finally:
            np.random.set_state(state)


class RolloutListener:
    """Base of parts that `RolloutLLM` notifies of its start and its generations. Methods do nothing by default."""

    def explain(self, error: ValueError) -> ValueError | None:
        """Return an error that names this feature's flag if it kept vLLM from starting; None if unrelated."""
        return None

    def begin(self) -> None:
        """Forget the notes on the last generation."""

    def generated(self, outputs: list[RequestOutput]) -> None:
        """Take notes on the rollouts of one call of the engine."""


class Weights(Enum):
    """The place of an engine's weights."""

    AWAKE = "in device memory, and awake"
    SHARED = "in device memory, while the engine sleeps"
    ON_HOST = "in host memory"
    DISCARDED = "nowhere: the next generation begins with a sync"


class RolloutLLM(LLM):
    """`vllm.LLM` whose level-2 sleep becomes level 1 while `keep_weights` is set, and 0 if its weights are shared.

    `parts` explain why vLLM refuses to start, and are told of each generation. `seed` is the same on ranks that share
    an engine.
    """

    keep_weights = False  # the next generation needs the same weights
    _weights = Weights.AWAKE
    _weights_shared = False  # the trainer computes with them
    # The run's seed, its step, and 1 if it trains. A resumed run has the same ones, so it samples as an
    # uninterrupted run does. None leaves the global generators as they are
    occasion: tuple[int, int, int] | None = None
    _calls: Mapping[tuple[int, int, int], int] = {}  # occasions of the latest step -> calls of `generate`

    def __init__(self, *, parts: Sequence[RolloutListener] = (), **kwargs):
        self._parts = parts
        self._seed = kwargs.get("seed") or 0
        # vLLM aborts requests before it sleeps, which fails with routes: it refuses to reset its prefix cache
        self._keeps_requests = bool(kwargs.get("enable_return_routed_experts"))
        try:
            super().__init__(**kwargs)
        except ValueError as error:
            reasons = (part.explain(error) for part in parts)
            if (reason := next(filter(None, reasons), None)) is not None:
                raise reason from error
            raise

    def begin(self, occasion: tuple[int, int, int], keep_weights: bool) -> None:
        """Set the occasion of the next generation, and forget the notes on the last one."""
        self.occasion, self.keep_weights = occasion, keep_weights
        for part in self._parts:
            part.begin()

    def generate(self, *args, **kwargs) -> list[RequestOutput]:
        with self._seeded():
            outputs = super().generate(*args, **kwargs)
        for part in self._parts:
            part.generated(outputs)
        return outputs

    def _seeded(self) -> AbstractContextManager[None]:
        """Return the block in which the next call of the occasion samples."""
        if self.occasion is None:
            return nullcontext()
        calls = {when: count for when, count in self._calls.items() if when[:2] == self.occasion[:2]}  # of this step
        calls[self.occasion] = calls.get(self.occasion, 0) + 1
        self._calls = calls
        return generators_seeded(self._seed, *self.occasion, calls[self.occasion])

    def prefill(self, tokens: list[int], prompt_logprobs: int | None = None) -> RequestOutput:
        """Run a whole sequence through the layers at once. It is no rollout: parts are not notified."""
        # top_k: an engine that returns the tokens it draws from needs a bound on their number
        parameters = SamplingParams(
            max_tokens=1, top_k=1, skip_reading_prefix_cache=True, prompt_logprobs=prompt_logprobs
        )
        with generators_seeded(self._seed):
            [output] = super().generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        return output

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Return log-probs `[T - 1]` of a sequence's tokens but the first, as the engine computes them now."""
        rows = self.prefill(tokens, prompt_logprobs=1).prompt_logprobs[1:]
        return torch.tensor([row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)])

    def share_weights(self) -> None:
        """Keep the weights in device memory from now on: the trainer computes with them while the engine sleeps."""
        self._weights_shared = True

    @property
    def weights_kept(self) -> bool:
        """Return whether the engine sleeps and has its weights."""
        return self._weights in (Weights.SHARED, Weights.ON_HOST)

    def sleep(self, level: int = 1, **kwargs) -> None:
        if self._keeps_requests:
            kwargs.setdefault("mode", "keep")
        if self._weights_shared:
            upstream.finish(self)
            super().sleep(level=0, **kwargs)
            self.release_kv_cache_memory()  # vLLM raises if weights still sleep
            self._weights = Weights.SHARED
            return
        if self.keep_weights:
            level = 1
        self._weights = Weights.ON_HOST if level == 1 else Weights.DISCARDED
        super().sleep(level=level, **kwargs)

    def wake_up(self, tags: list[str] | None = None) -> None:
        wakes_weights = tags is None or "weights" in tags
        if self._weights in (Weights.AWAKE, Weights.SHARED) and tags is not None:
            tags = [tag for tag in tags if tag != "weights"]  # vLLM would warn, and wake nothing
        if tags is None or tags:
            super().wake_up(tags)
        if wakes_weights:
            self._weights = Weights.AWAKE
