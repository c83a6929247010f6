"""The check that the engine computes the policy's model, after the first sync and before anything is sampled.

The policy runs one short sequence, and its modules are compared with the engine's (witness.py). With one forward a
difference is an error, unless fp8_forward_check='warn': gradients would be those of one model and values those of
another, without a mismatch. Without one forward a difference is a warning, because `mismatch/*` shows it, too.
"""

from contextlib import ExitStack
from typing import Any

import torch
from accelerate.logging import get_logger

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import AttentionHook, hooked
from trl_fp8.policy.swapped import scored_by
from trl_fp8.recipe.messages import listed
from trl_fp8.run.feature import Feature, as_rollouts_saw
from trl_fp8.sync.audit import all_reduce_max

from .followed_head import followed_head
from .following import Following
from .one_forward import OneForward
from .witness import Witness


logger = get_logger(__name__)

TEXT = "In 1969 three people flew to the moon: 2 + 1 = 3. They came back after eight days, and the sea was calm."
TOKENS = 32
SHOWN = 6  # differences in a message


class SameModel(Feature):
    """Raises `RuntimeError` if the policy follows an engine that computes another model; else warns of that."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.witness: Witness | None = None  # of the latest comparison
        self._compared = False

    def engine_part(self):
        if self.trainer.feature(Following):  # it has a part that provides them
            return None
        from .engine_kernels import KernelsPart  # needs vllm

        return KernelsPart()

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        self._kernels = kernels

    def after_sync(self) -> None:
        if self._compared or self._kernels is None:  # nothing to compare with
            return
        following = self.trainer.feature(Following)
        with hooked(self.trainer.model) as hook:
            self.witness = compare_modules(self.trainer, self._kernels, hook, following and following.forward)
        self._report(follows=following is not None)
        self._compared = True  # not before: a run that goes on after the error is compared again

    def _report(self, follows: bool) -> None:
        """Raise or warn on every rank if any rank found a difference. Collective."""
        differences = torch.tensor(len(self.witness.findings.differences), device=self.trainer.accelerator.device)
        if self.trainer.accelerator.num_processes > 1:
            all_reduce_max(differences)
        if not differences:
            return
        named = listed(self.witness.findings.lines(), SHOWN, "\n  ") or "modules on another rank"
        kind = self.trainer.recipe.model_type
        if not follows:
            logger.warning(
                f"The engine computes a different model than the policy (type {kind!r}):\n  {named}\nRollouts will "
                "not be the policy's own, as mismatch/* will show. Train a model that both compute the same way."
            )
            return
        text = (
            f"fp8_forward='one_forward': the engine computes a different model than the policy (type {kind!r}). First "
            f"differences, on the same inputs:\n  {named}\nThe trainer would follow the engine's model, with no "
            "mismatch to show it. Set fp8_forward='off' (rollouts will still be those of a different model), or "
            "fp8_forward_check='warn' to go on."
        )
        if self.trainer.args.fp8_forward_check == "error":
            raise RuntimeError(text)
        logger.warning(text)


def compare_modules(trainer: Any, kernels: EngineKernels, hook: AttentionHook, forward: OneForward | None) -> Witness:
    """Run a short text through the policy and return what its modules have in common with the engine's.

    `forward` lets the policy follow the engine; None: it does not.
    """
    positions = hook.base.config.get_text_config().max_position_embeddings
    longest = trainer.args.vllm_max_model_length or positions
    witness = Witness(trainer.model, kernels, hook, longest, forward)
    with torch.no_grad(), ExitStack() as around:
        if forward is not None:
            # The policy calls the engine, whose cache rounds k and v, and the output head is compared, too
            around.enter_context(as_rollouts_saw(trainer.features))
            around.enter_context(forward.switched(on=True))
            around.enter_context(scored_by(followed_head(forward, witness.values.head)))
        around.enter_context(witness.watching())
        # A short text, the same on all ranks, through TRL's own method: no other feature takes part in the pass
        tokens = trainer._tokenizer(TEXT)["input_ids"][: min(TOKENS, longest)]
        ids = torch.tensor([tokens], device=trainer.accelerator.device)
        mask = torch.ones_like(ids)
        trainer.score_alone(ids, mask, len(tokens) - 1)
    return witness
