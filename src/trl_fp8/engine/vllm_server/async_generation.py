"""`AsyncGeneration`: a server from which another process fetches completions while the trainer computes.

The trainer syncs, and generates nothing itself. So it cannot verify the engine before each generation. Before
each sync it verifies that the server still holds what the previous sync delivered, so that all completions in between
came from those weights.
"""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

from trl_fp8.sync.records import Tensors
from trl_fp8.sync.shards import gathering
from trl_fp8.sync.weight_stream import NamedTensor

from .server_generation import ServerGeneration


class AsyncGeneration(ServerGeneration):
    """Server of an asynchronous trainer.

    Args:
        tensors: Called for each write. Returns a context manager that yields the policy's `(checkpoint name, full
            tensor)` pairs. The call and the iteration are collectives.
        **kwargs: Arguments of `ServerGeneration`.
    """

    _alone = False  # True while the first rank works without the others

    def __init__(self, *, tensors: Tensors, **kwargs):
        self._source = tensors
        super().__init__(**kwargs)

    def _connect(self) -> None:
        """Do nothing: the trainer has no client that generates."""

    def _require_context(self, served: int) -> None:
        """Raise `ValueError` if the server's sequences are too short for a completion and its prompt."""
        if self.max_completion_length >= served:
            raise ValueError(
                f"max_completion_length={self.max_completion_length}, but {self.engine.base_url} serves sequences of "
                f"up to {served} tokens, prompt included. Lower it, or start the server with a larger --max-model-len."
            )
        self.max_model_length = served

    def _of_first(self, value: Any) -> Any:
        """Return the first rank's value on all ranks; without communication while that rank works alone."""
        return value if self._alone else super()._of_first(value)

    def sync_weights(self) -> None:
        """Deliver the policy. Collective.

        Raises:
            RuntimeError: Rollouts since the last sync may come from another policy, or `Delivery.deliver` failed.
        """
        # A restarted server has nothing to verify: it holds no policy, and generates nothing before it gets one
        if self.delivery.last is not None and not self.engine.on_first(self.is_replaced):
            self.delivery.verify()
        self.delivery.deliver(lambda: closing(self._gathered()))
        for part in self.parts:
            part.synced(self)
        self.after_sync()

    def _gathered(self) -> Iterator[NamedTensor]:
        """Yield the policy's tensors. With FSDP2 a failed gather is `GatherFailed`, after which no rank may retry."""
        gather_errors = gathering() if self._dist.is_fsdp else nullcontext()
        with gather_errors, self._source() as pairs:
            yield from pairs

    def is_replaced(self) -> bool:
        """Return whether the server was restarted since the latest sync.

        On the first rank alone. Waits for a server that is being started.
        """
        [server] = self.engine.servers
        server.control.wait_until_up(self.server_timeout)
        answering = [answer["instance"] for answer in server.control.rpc("fp8_instance")]
        return answering != [state["instance"] for state in server.states]

    def restore(self) -> None:
        """Bring the policy of the latest sync to a server that was started again. On the first rank alone."""
        self._alone = True
        try:
            self.delivery.repeat()
        finally:
            self._alone = False
