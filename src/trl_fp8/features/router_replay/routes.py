"""The feature that brings the engine's routes (experts of each token and layer) into the trainer's forwards.

    generation     the engine returns routes [T - 1, all layers, K] of each sequence         `after_generation`
    old log-probs  routes are aligned with TRL's padding, and replayed or compared           `scoring`
    batch          the batch gets the routes [B, S, L, K], a row for each sequence, because
                   TRL shuffles sequences                                                    `extend_batch`
    loss           routes are replayed                                                       `begin_loss`

With router_replay='rollout' the policy's forward uses the experts that the FP8 engine chose. The reference (`beta >
0`) chooses experts by itself, so TRL's `kl` does not start at 0. `kl_floor`, which is logged once, is the value of
`kl` before the first optimizer step: compare later values of `kl` with `kl_floor`.

Shape letters: B sequences, T tokens of one, S tokens of a padded sequence, L layers with routers, K experts per token.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from accelerate.logging import get_logger

from trl_fp8.recipe.names import NOWHERE
from trl_fp8.run.batch import COMPLETION_IDS, PROMPT_IDS, Batch, Rollouts, mean_of
from trl_fp8.run.feature import Feature

from .replay import RouterReplay, RouteTally


logger = get_logger(__name__)

ROUTES = "routed_experts"  # key of a batch, [B, S, L, K]: experts that the loss's forward uses


class Routes(Feature):
    """Passes the engine's routes to the policy's routers, one generation at a time."""

    def __init__(self, trainer):
        super().__init__(trainer)
        args = trainer.args
        self.mode = args.router_replay
        self.replay = RouterReplay(trainer.model, f"router_replay={self.mode!r}")
        # Routes `[T - 1, all layers, K]` and prompt lengths of a generation; None after its batch is complete
        self._arrived: tuple[list[np.ndarray], list[int]] | None = None
        self._tally: RouteTally | None = None  # made in TRL's old-log-prob pass over the latest generation
        self._loss_routes_BSLK: torch.Tensor | None = None
        self._logs_floor = bool(args.beta) and self.mode == "rollout" and not args.policy_calls_engine
        if self._logs_floor:
            logger.warning(
                f"beta={args.beta} with router_replay={self.mode!r}: the reference chooses experts by itself, so kl "
                "does not start at 0. kl_floor in the log is the value of kl before the first step. With "
                "fp8_forward='one_forward' kl starts at 0."
            )

    def engine_part(self):
        from .engine_routes import RouteLog  # needs vllm

        self.log = RouteLog()
        return self.log

    def after_generation(self, rollouts: Rollouts) -> None:
        routes = self.log.notes_on(rollouts.sequences)
        self._arrived = routes, [len(prompt) for prompt in rollouts.prompt_ids]
        self._tally = None
        self._loss_routes_BSLK = None

    @contextmanager
    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> Iterator[None]:
        """Replay or compare routes in TRL's first pass over a generation. Do nothing in any other pass."""
        if self._arrived is None or self._tally is not None:
            yield
            return
        columns = mask.shape[1]
        routes_BSLK = padded_routes(self.replay, *self._arrived, columns - logits_to_keep, columns)
        self._tally = RouteTally(self.trainer.accelerator.device)
        replays = self.mode == "rollout"
        records = self.mode == "policy"
        with self.replay.during(routes_BSLK, replay=replays, tally=self._tally, record=records):
            yield
        if replays:
            self._loss_routes_BSLK = routes_BSLK
        elif records:
            self._loss_routes_BSLK = self.replay.recorded()

    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self.replay.suspended()  # the reference may be the policy itself, inside a loss that replays

    def extend_batch(self, batch: Batch) -> None:
        if self._loss_routes_BSLK is None and self.mode == "rollout":  # there was no old-log-prob pass
            prompt_columns = batch.tensors[PROMPT_IDS].shape[1]
            columns = prompt_columns + batch.tensors[COMPLETION_IDS].shape[1]
            self._loss_routes_BSLK = padded_routes(self.replay, *self._arrived, prompt_columns, columns)
        if self._loss_routes_BSLK is not None:
            batch.tensors[ROUTES] = self._loss_routes_BSLK
        self._arrived = None
        if self._tally is not None:
            # Shares of the known routes that differ from the rollout's routes in the old-log-prob pass: in the routes
            # that the forward used, and in the routes that the routers themselves chose
            known, used, own = self.trainer.accelerator.reduce(self._tally.counts, "sum").tolist()
            batch.metrics["router/disagreement"] = mean_of(known - used, known)
            batch.metrics["router/own_disagreement"] = mean_of(known - own, known)

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        if ROUTES in inputs:
            self.replay.begin(inputs[ROUTES], replay=True)

    def end_loss(self) -> None:
        self.replay.end()
        trainer = self.trainer
        kl = trainer.logged.get("kl")  # empty if the loss failed
        if self._logs_floor and trainer.model.training and kl:
            self._logs_floor = False
            if trainer.state.global_step == 0:
                trainer.logged["kl_floor"].append(kl[0])


def padded_routes(
    replay: RouterReplay, routes: list[np.ndarray], prompts: list[int], prompt_columns: int, columns: int
) -> torch.Tensor:
    """Return routes `[B, S, L, K]` for the layers of `replay`, in TRL's padding, with `NOWHERE` at unknown routes.

    Args:
        replay: The policy's replay.
        routes: `[T - 1, all layers, K]` of each sequence.
        prompts: Number of prompt tokens of each sequence.
        prompt_columns: Number of prompt columns. All prompts end in the last prompt column, and all completions begin
            in the column after it: TRL pads prompts on the left and completions on the right.
        columns: S.
    """
    layers = list(replay.layers)
    shape = len(routes), columns, len(layers), replay.experts_per_token
    padded = torch.full(shape, NOWHERE, dtype=replay.dtype)
    for row, sequence_routes, prompt in zip(padded, routes, prompts, strict=True):
        start = prompt_columns - prompt
        row[start : start + len(sequence_routes)] = torch.from_numpy(sequence_routes[:, layers].astype(np.int16))
    return padded
