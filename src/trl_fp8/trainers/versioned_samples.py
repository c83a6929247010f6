"""Samples of an asynchronous trainer, with the version of the policy in the engine when they were requested.

TRL's worker reports the version of each sample. TRL's dataset drops a sample staler than `max_staleness`. All
samples of a prompt have one version, that of its first request. If a sync happens during a completion, the later
tokens were sampled by a newer version than the sample reports.

Shape letters, all but P padded: P ranks, M trained tokens of a rank, S samples of a rank, L tokens of a sample.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, RolloutQueueDataset
from trl.trainer.utils import pad


DROPPED = "sample/dropped_of_other_run_total"  # metric
# Keys of a batch beside TRL's
VERSIONS = "model_versions"  # [P, M] int64: for each trained token the version of its sample, -1 at padding
SEQUENCES = "sequence_ids"  # [P, S, L] int64: token ids of each sample, -1 at padding


class _RememberingQueue:
    """Queue with the attribute `latest`, the sample that `get` returned last."""

    def __init__(self, queue: Any):
        self._queue = queue
        self.latest: Any = None

    def get(self, *args, **kwargs) -> Any:
        self.latest = self._queue.get(*args, **kwargs)
        return self.latest

    def qsize(self) -> int:
        return self._queue.qsize()


class VersionedQueueDataset(RolloutQueueDataset):
    """TRL's dataset. Its samples have a key `model_version`.

    Args:
        while_empty: Called while TRL waits for a sample.
        first_version: Returns the first version that this run has sent. Samples of earlier versions are dropped: a
            worker that outlived another run made them, with weights and KV scales that this run does not know.
        **kwargs: Further arguments of TRL's dataset.
    """

    def __init__(
        self,
        rollout_queue: Any,
        check_health_fn: Callable[[float], None],
        while_empty: Callable[[], None],
        first_version: Callable[[], int],
        **kwargs,
    ):
        self._first_version = first_version

        # TRL calls this whenever it has waited for a sample in vain
        def check_health(stale_after_s: float) -> None:
            check_health_fn(stale_after_s)
            while_empty()

        super().__init__(rollout_queue=_RememberingQueue(rollout_queue), check_health_fn=check_health, **kwargs)

    def __iter__(self) -> Iterator[dict]:
        for sample in super().__iter__():
            version = self.queue.latest.model_version
            if version < self._first_version():
                self.metrics[DROPPED].append(1.0)
                continue
            yield sample | {"model_version": version}


class VersionedCollator(DataCollatorForRollout):
    """TRL's collator, whose batches have the keys `VERSIONS` and `SEQUENCES`."""

    def torch_call(self, examples: list) -> dict[str, Any]:
        batch = super().torch_call(examples)
        [rows_of_ranks] = examples  # TRL's loader has batch size 1: one micro-batch, with a row for each rank
        versions = []
        sequences = []
        for row in rows_of_ranks:
            # `[1:]` as in TRL's packing: the first token has no predecessor, so it is no term of the loss
            trained_tokens_S = torch.tensor([int(sample["completion_mask"][1:].sum()) for sample in row.samples])
            versions_S = torch.tensor([sample["model_version"] for sample in row.samples])
            versions.append(versions_S.repeat_interleave(trained_tokens_S))  # TRL packs trained tokens in this order
            ids = [torch.as_tensor(sample["input_ids"]) for sample in row.samples]
            sequences.append(pad(ids, padding_value=-1))
        batch[VERSIONS] = pad(versions, padding_value=-1)
        batch[SEQUENCES] = pad(sequences, padding_value=-1)
        return batch
