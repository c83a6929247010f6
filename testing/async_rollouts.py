"""Asynchronous training on CPU: attention of packed rows, and a worker that samples in lock-step with the trainer."""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch
import trl.experimental.async_grpo.async_grpo_trainer as trl_module
import trl.experimental.async_grpo.packing as packing
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trl_fp8.engine.vllm_server.seeded_client import SeededClient

from .runs import dataset, reward_digits
from .tokenizer import tokenizer


def varlen_attention(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=True, window_size=(-1, -1), **_):
    """Compute what FlashAttention's `flash_attn_varlen_func` does, segment by segment.

    The queries of a segment are the last positions of its keys. `q` `[N, H, D]`, `k` and `v` `[K, G, D]`.
    """
    outputs, groups = [], q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        queries, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        count, seen = int(cu_q[i + 1] - cu_q[i]), int(cu_k[i + 1] - cu_k[i])
        mask = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
        if window_size[0] >= 0:
            mask &= torch.ones(count, seen, dtype=torch.bool).triu(seen - count - window_size[0])
        states = (
            q[queries].transpose(0, 1),
            k[keys].transpose(0, 1).repeat_interleave(groups, 0),
            v[keys].transpose(0, 1).repeat_interleave(groups, 0),
        )
        output = scaled_dot_product_attention(*states, attn_mask=mask, scale=softmax_scale)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@contextmanager
def without_flash_attention() -> Iterator[None]:
    """Let TRL's packed attention run on CPU inside the block."""
    before = packing._flash_attn, trl_module.get_peak_flops_per_device
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    trl_module.get_peak_flops_per_device = lambda *args: None
    try:
        yield
    finally:
        packing._flash_attn, trl_module.get_peak_flops_per_device = before


def conversations(rows: int = 32) -> Dataset:
    """Return the tiny task, each prompt as a conversation."""
    return dataset(rows).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def plain_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose chats are their contents, one after the other, up to <eos>."""
    processing = tokenizer()
    processing.padding_side = "left"
    processing.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    processing.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {"content": {"close": "<eos>", "content": "text"}},
    }
    return processing


def reward_digits_of_chats(completions: list, **kwargs) -> list[float]:
    """Reward conversations as `reward_digits` rewards texts. A worker of another process imports it."""
    return reward_digits([messages[-1]["content"] or "" for messages in completions])


def normalized(rewards: Sequence[float]) -> np.ndarray:
    """Return advantages of a group as TRL's asynchronous worker computes them."""
    values = np.asarray(rewards, dtype=float)
    return (values - values.mean()) / (values.std() + 1e-8)


class LockStepWorker:
    """TRL's `RolloutWorkerProtocol` in the trainer's process: step j trains on version max(1, j - staleness).

    It samples when the trainer tells a new version, and not before, with the seeds of the synchronous trainer.

    Args:
        url: Of the server.
        prompts: Token ids of all prompts, in the order of training; they repeat.
        groups, generations: Prompts of a step, and completions of each.
        first: Number of the first batch, for a run that is resumed.
        reward: Returns a number for each of several texts; `row` is the number of their prompt.
        advantages: Of one group, from its rewards.
    """

    def __init__(
        self,
        url: str,
        prompts: list[list[int]],
        reward: Callable[..., list[float]],
        *,
        staleness: int = 0,
        groups: int = 2,
        generations: int = 4,
        max_tokens: int = 8,
        seed: int = 0,
        first: int = 0,
        advantages: Callable[[Sequence[float]], np.ndarray] = normalized,
    ):
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        self.version = 0
        self.batches: list[list[RolloutSample]] = []  # in the order of training
        self._url, self._prompts, self._reward, self._advantages = url, prompts, reward, advantages
        self._staleness, self._groups, self._generations = staleness, groups, generations
        self._max_tokens, self._seed, self._first = max_tokens, seed, first
        self._tokenizer = tokenizer()
        self._client: SeededClient | None = None

    def start(self) -> None:
        self._client = SeededClient(base_url=self._url, connection_timeout=30)
        for _ in range(1 + self._staleness):
            self._sample()

    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version
        if self._client is not None:
            self._sample()

    def _sample(self) -> None:
        number = self._first + len(self.batches)
        rows = [(number * self._groups + i) % len(self._prompts) for i in range(self._groups)]
        self._client.set_seed((self._seed, number, 1, 1))
        options = {"n": self._generations, "max_tokens": self._max_tokens, "temperature": 1.0, "logprobs": 0}
        answer = self._client.generate([self._prompts[row] for row in rows], **options)
        if self._client.failure:
            raise RuntimeError(self._client.failure)
        samples = []
        for group, row in enumerate(rows):
            part = slice(group * self._generations, (group + 1) * self._generations)
            completions = answer["completion_ids"][part]
            texts = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
            rewards = self._reward(texts, row=row)
            for ids, logprobs, reward, advantage in zip(
                completions, answer["logprobs"][part], rewards, self._advantages(rewards), strict=True
            ):
                prompt = self._prompts[row]
                samples.append(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.asarray([*prompt, *ids]),
                        completion_mask=np.asarray([0] * len(prompt) + [1] * len(ids)),
                        old_log_probs=np.asarray([0.0] * len(prompt) + [token[0] for token in logprobs], np.float32),
                        advantage=float(advantage),
                        model_version=self.version,
                        group_id=number * self._groups + group,
                        metrics={"reward": float(reward)},
                    )
                )
        self.batches.append(samples)
        for sample in samples:
            self.rollout_buffer.put(sample)


class LockStep:
    """Base of a trainer that takes a batch when it trains on it. It stands before TRL's trainer.

    accelerate's dispatcher takes the next batch before the current one is trained on, and so before the next sync.
    """

    def get_train_dataloader(self):
        return super().get_train_dataloader().base_dataloader


class ReplayWorker:
    """TRL's `RolloutWorkerProtocol` over samples that are there already, by step."""

    def __init__(self, batches: list[list[RolloutSample]]):
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        for sample in chain.from_iterable(batches):
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...


class NoTransfer:
    """TRL's `WeightTransferProtocol` that sends nothing."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Iterator) -> None:
        iterator.close()


def random_samples(steps: int, seed: int = 0, tokens: int = 8) -> list[list[RolloutSample]]:
    """Return batches of two groups of four samples, whose log-probs are those of no policy. Each batch has the version
    that the trainer has when accelerate's dispatcher takes the batch, in advance.
    """
    rng = np.random.default_rng(seed)
    return [
        [
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=rng.integers(4, 60, 6 + tokens),
                completion_mask=np.asarray([0] * 6 + [1] * tokens),
                old_log_probs=rng.uniform(-5, -3, 6 + tokens).astype(np.float32),
                advantage=float(rng.normal()),
                model_version=max(1, step),
                group_id=2 * step + i // 4,
                metrics={"reward": float(rng.random())},
            )
            for i in range(8)
        ]
        for step in range(steps)
    ]
