"""`AsyncGeneration`: a server from which another process fetches completions while the trainer computes.

The trainer syncs, and generates nothing itself. So it cannot verify the engine before each generation. It verifies
before each sync that everything since the last one was sampled from what that one delivered.
"""

from typing import Any

from trl_fp8.sync.records import Tensors

from .server_generation import ServerGeneration


class AsyncGeneration(ServerGeneration):
    """Server of an asynchronous trainer.

    Args:
        tensors: Opens `(checkpoint name, full tensor)` of the policy, a collective; may be opened again.
        **kwargs: As for `ServerGeneration`.
    """

    _alone = False  # True while the first rank works without the others

    def __init__(self, *, tensors: Tensors, **kwargs):
        self._tensors = tensors
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
        return value if self._alone else super()._of_first(value)

    def sync_weights(self) -> None:
        """Deliver the policy. Collective.

        Raises:
            RuntimeError: Rollouts since the last sync may be of another policy, or as `Delivery.deliver`.
        """
        if self.delivery.last is not None and not self.engine.on_first(self.is_replaced):
            self.delivery.verify()
        self.delivery.deliver(self._tensors)
        for part in self.parts:
            part.synced(self)
        self.after_sync()

    def is_replaced(self) -> bool:
        """Return whether other workers answer than at the latest sync; they hold no policy, and generate nothing.

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
