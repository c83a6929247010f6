"""The experts that the engine chose for a generation, on their way into the trainer's forwards (`router_replay`).

    generated      -> [T - 1, L, K] of each sequence                         `arrived`
    old log-probs  -> aligned with TRL's padding, replayed or compared       `old_log_probs`
    batch          -> a row per sequence, which TRL shuffles and splits      `batch_field`
    training       -> replayed while the loss is computed                    `RouterReplay.begin`

Shape letters: B sequences, T tokens of one, S tokens of a padded sequence, L layers with routers, K experts per token.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from trl import GRPOTrainer

from trl_fp8.recipe.names import NOWHERE
from trl_fp8.run.feature import Batch, Feature, Rollouts
from trl_fp8.run.metric import Metric, mean_of

from .replay import RouterReplay, RouteTally


if TYPE_CHECKING:
    from .engine_routes import RouteLog


class Routes(Feature):
    """From the engine's answer to the routers of the policy."""

    def __init__(self, trainer: GRPOTrainer):
        super().__init__(trainer)
        mode = trainer.args.router_replay
        self.replay = RouterReplay(trainer.model, f"router_replay={mode!r}")
        self.routes = RolloutRoutes(self.replay, mode)

    def engine_part(self) -> "RouteLog":
        from .engine_routes import RouteLog  # needs vllm

        self.log = RouteLog()
        return self.log

    def after_generation(self, rollouts: Rollouts) -> None:
        chosen = self.log.of(rollouts.sequences)
        self.routes.arrived(chosen, [len(prompt) for prompt in rollouts.prompt_ids])

    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self.routes.old_log_probs(mask.shape, logits_to_keep, self.trainer.accelerator.device)

    def extend_batch(self, batch: Batch) -> None:
        prompt_columns = batch.tensors["prompt_ids"].shape[1]
        columns = prompt_columns + batch.tensors["completion_ids"].shape[1]
        if (routes := self.routes.batch_field(prompt_columns, columns)) is not None:
            batch.tensors["routed_experts"] = routes
        batch.metrics |= self.routes.metrics(lambda sums: self.trainer.accelerator.reduce(sums, "sum"))

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        if "routed_experts" in inputs:
            self.replay.begin(inputs["routed_experts"], replay=True)

    def end_loss(self) -> None:
        self.replay.end()


class RolloutRoutes:
    """Routes of one generation at a time.

    Args:
        replay: Installed on the policy.
        mode: `"monitor"`, `"rollout"` or `"policy"`, see `RouterFlags.router_replay`.
    """

    def __init__(self, replay: RouterReplay, mode: str):
        self.replay = replay
        self.mode = mode
        self._arrived: list[np.ndarray] | None = None
        self._prompts: list[int] = []
        self._tally: RouteTally | None = None
        self._field_BSLK: torch.Tensor | None = None

    def arrived(self, routes: list[np.ndarray], prompt_lengths: list[int]) -> None:
        """Take over a generation: routes `[T - 1, all layers, K]` and number of prompt tokens of each sequence."""
        self._arrived, self._prompts = routes, prompt_lengths
        self._tally = self._field_BSLK = None

    @contextmanager
    def old_log_probs(self, shape: tuple[int, int], logits_to_keep: int, device: torch.device) -> Iterator[None]:
        """Around TRL's pass over the generation that arrived; does nothing around any other."""
        if self._arrived is None or self._tally is not None:
            yield
            return
        routes_BSLK = self._aligned(*shape, shape[1] - logits_to_keep)
        self._tally = RouteTally(device)
        options = {"replay": self.mode == "rollout", "tally": self._tally, "record": self.mode == "policy"}
        with self.replay.during(routes_BSLK, **options):
            yield
        if self.mode != "monitor":
            self._field_BSLK = routes_BSLK if self.mode == "rollout" else self.replay.recorded()

    def batch_field(self, prompt_columns: int, columns: int) -> torch.Tensor | None:
        """`[B, S, L, K]` to replay in the training forwards, or None. Ends the generation."""
        if self._field_BSLK is None and self.mode == "rollout":  # TRL made no pass of its own
            self._field_BSLK = self._aligned(len(self._arrived), columns, prompt_columns)
        self._arrived = None
        return self._field_BSLK

    def metrics(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Metric]:
        """Of TRL's pass: share of (token, layer) routes that differ from the rollout's. Waits for the device once.

        Args:
            reduce_sum: Adds a tensor up over ranks.
        """
        if self._tally is None:
            return {}
        known, used, own = reduce_sum(self._tally.counts).tolist()
        return {
            "router/disagreement": mean_of(known - used, known),
            "router/own_disagreement": mean_of(known - own, known),
        }

    def _aligned(self, rows: int, columns: int, prompt_columns: int) -> torch.Tensor:
        """TRL pads prompts on the left and completions on the right, so a prompt ends at `prompt_columns`."""
        layers = list(self.replay.layers)
        shape = rows, columns, len(layers), self.replay.experts_per_token
        aligned = torch.full(shape, NOWHERE, dtype=self.replay.dtype)
        for row, routes, prompt in zip(aligned, self._arrived, self._prompts, strict=True):
            start = prompt_columns - prompt
            row[start : start + len(routes)] = torch.from_numpy(routes[:, layers].astype(np.int16))
        return aligned
