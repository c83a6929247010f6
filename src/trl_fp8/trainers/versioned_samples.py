"""Samples of an asynchronous trainer, with the version of the policy in the engine when they were requested.

TRL's worker reports the version of each sample. TRL's dataset drops a sample staler than `max_staleness`. All
samples of a prompt have one version, that of its first request. If a sync happens during a completion, the later
tokens were sampled by a newer version than the sample reports.

Shape letters: P ranks, M trained tokens of a rank, S samples of a rank, L tokens of a sample. Ranks and samples differ
in M, S and L, so these dims are padded to the longest.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, RolloutQueueDataset
from trl.trainer.utils import pad


logger = get_logger(__name__)
DROPPED = "sample/dropped_of_other_run_total"  # metric
# Keys of a batch beside TRL's
VERSIONS = "model_versions"  # [P, M] int64: for each trained token the version of its sample, -1 at padding
OLDEST_VERSION = "oldest_model_version"  # [P] int64: the lowest version of all samples of all ranks, P times
SEQUENCES = "sequence_ids"  # [P, S, L] int64: token ids of each sample, -1 at padding


class _RememberingQueue:
    """A queue that keeps the sample that `get` returned last, as `latest`.

    TRL's dataset turns the sample into a dictionary without its version, and yields this before it gets the next one.
    """

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
        first_version: Returns the first version that this run has sent. Samples of earlier versions, and of later ones
            than the present version, are dropped: a worker that outlived another run made them, with weights and KV
            scales that this run does not know.
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
        self._has_warned = False  # that samples are dropped, once a run

        # TRL calls this whenever it has waited for a sample in vain
        def check_health(stale_after_s: float) -> None:
            check_health_fn(stale_after_s)
            while_empty()

        super().__init__(rollout_queue=_RememberingQueue(rollout_queue), check_health_fn=check_health, **kwargs)

    def __iter__(self) -> Iterator[dict]:
        for sample in super().__iter__():
            version = self.queue.latest.model_version
            first, present = self._first_version(), self.model_version_fn()
            if not first <= version <= present:
                self.metrics[DROPPED].append(1.0)
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        f"samples of version {version} are dropped, because this run has sent versions {first} to "
                        f"{present}: their worker has outlived another run, or ignores update_model_version."
                    )
                continue
            yield sample | {"model_version": version}


class VersionedCollator(DataCollatorForRollout):
    """TRL's collator, whose batches have the keys `VERSIONS`, `OLDEST_VERSION` and `SEQUENCES`."""

    def torch_call(self, examples: list) -> dict[str, Any]:
        batch = super().torch_call(examples)
        [rows_of_ranks] = examples  # TRL's loader has batch size 1: one micro-batch, with a row for each rank
        versions = []
        sequences = []
        for row in rows_of_ranks:
            # `[1:]` as in TRL's packing: the first token has no predecessor, so it is no term of the loss
            trained_counts_S = torch.tensor([int(sample["completion_mask"][1:].sum()) for sample in row.samples])
            versions_S = torch.tensor([sample["model_version"] for sample in row.samples])
            versions.append(versions_S.repeat_interleave(trained_counts_S))  # TRL packs trained tokens in this order
            ids = [torch.as_tensor(sample["input_ids"]) for sample in row.samples]
            sequences.append(pad(ids, padding_value=-1))
        batch[VERSIONS] = pad(versions, padding_value=-1)
        oldest = min(sample["model_version"] for row in rows_of_ranks for sample in row.samples)
        batch[OLDEST_VERSION] = torch.full((len(rows_of_ranks),), oldest)
        batch[SEQUENCES] = pad(sequences, padding_value=-1)
        return batch
