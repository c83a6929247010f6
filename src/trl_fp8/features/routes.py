"""Experts that the engine's routers chose, in the trainer's forwards (`router_replay`)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from trl import GRPOTrainer

from trl_fp8.policy.router.replay import RouterReplay
from trl_fp8.policy.router.routes import RolloutRoutes

from .feature import Batch, Feature, Rollouts


class Routes(Feature):
    """From the engine's answer to the routers of the policy.

    Attributes:
        replay: Installed on the policy.
        routes: Of the generation at hand.
    """

    def __init__(self, trainer: GRPOTrainer):
        super().__init__(trainer)
        mode = trainer.args.router_replay
        self.replay = RouterReplay(trainer.model, f"router_replay={mode!r}")
        self.routes = RolloutRoutes(self.replay, mode)

    def after_generation(self, rollouts: Rollouts) -> Mapping[str, float]:
        chosen = self.trainer.vllm_generation.llm.routes.of(rollouts.sequences)
        self.routes.arrived(chosen, [len(prompt) for prompt in rollouts.prompt_ids])
        return {}

    def scoring(self, shape: tuple[int, int], logits_to_keep: int) -> AbstractContextManager:
        return self.routes.old_log_probs(shape, logits_to_keep, self.trainer.accelerator.device)

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
