"""After the first sync, before anything is sampled: does the engine compute the model that the policy is?

The policy runs one short sequence, and its modules are compared with the engine's (policy/witness). Where the policy
calls the engine (`fp8_forward="full"`) a difference is an error, unless fp8_forward_check='warn': gradients would
be those of one model and values those of another, and no mismatch would show it. Elsewhere it is a warning, because
`mismatch/*` shows it, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.features.kv_cache.kv_cache import KVCache
from trl_fp8.features.one_forward.witness.witness import Witness
from trl_fp8.policy.hook import AttentionHook
from trl_fp8.recipe.messages import listed
from trl_fp8.run.feature import Feature
from trl_fp8.sync.audit import all_reduce_max

from .following import Flow
from .head import engine_head, engine_logits, scored_by
from .one_forward import OneForward


if TYPE_CHECKING:
    from .engine_part.kernels_part import KernelsPart

logger = get_logger(__name__)

TEXT = "In 1969 three people flew to the moon: 2 + 1 = 3. They came back after eight days, and the sea was calm."
TOKENS = 32
SHOWN = 6  # differences in a message


class SameModel(Feature):
    """`RuntimeError` for a policy that follows an engine which computes another model."""

    def __init__(self, trainer: GRPOTrainer):
        super().__init__(trainer)
        self.witness: Witness | None = None  # of the latest comparison
        self._compared = False

    def engine_part(self) -> "KernelsPart | None":
        if self.trainer.feature(Flow):  # which has its own
            return None
        from .engine_part.kernels_part import KernelsPart  # needs vllm

        return KernelsPart()

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels) -> None:
        self._kernels = kernels

    def after_sync(self) -> None:
        if self._compared:
            return
        flow, kv_cache = self.trainer.feature(Flow), self.trainer.feature(KVCache)
        forward = flow and flow.forward
        with self._hook() as hook:
            longest = (
                self.trainer.args.vllm_max_model_length or hook.base.config.get_text_config().max_position_embeddings
            )
            self.witness = Witness(self.trainer.model, self._kernels, hook, longest, forward)
            as_cached = kv_cache.simulated() if kv_cache and flow else nullcontext()
            with torch.no_grad(), as_cached, self._following(forward), self.witness.watching():
                ids = self._tokens(longest)
                mask = torch.ones_like(ids)
                inputs = self.trainer, self.trainer.model, ids, mask, ids.shape[1] - 1
                GRPOTrainer._get_per_token_logps_and_entropies(*inputs)
        self._tell(len(self.witness.findings.differences), follows=flow is not None)
        self._compared = True  # not before: a run that goes on after the error is compared again

    @contextmanager
    def _hook(self) -> Iterator[AttentionHook]:
        """That of the run, or one for the block."""
        features = (self.trainer.feature(kind) for kind in (KVCache, Flow))
        if (feature := next((one for one in features if one), None)) is not None:
            yield feature.hook if isinstance(feature, KVCache) else feature.forward.hook
            return
        hook = AttentionHook(self.trainer.model)
        try:
            yield hook
        finally:
            hook.remove()

    @contextmanager
    def _following(self, forward: OneForward | None) -> Iterator[None]:
        """Inside the block the policy calls the engine, and its output head is compared."""
        if forward is None:
            yield
            return
        with forward.switched(on=True), scored_by(witnessed_head(self.witness, forward)):
            yield

    def _tokens(self, longest: int) -> Tensor:
        """A short text, `[1, T]`, the same on all ranks."""
        ids = self.trainer._tokenizer(TEXT)["input_ids"][: min(TOKENS, longest)]
        return torch.tensor([ids], device=self.trainer.accelerator.device)

    def _tell(self, found: int, follows: bool) -> None:
        """A collective, so that all ranks end together."""
        if self.trainer.accelerator.num_processes > 1:
            all_reduce_max(most := torch.tensor(found, device=self.trainer.accelerator.device))
            found = int(most)
        if not found:
            return
        differ = (
            listed(map(str, self.witness.findings.differences.values()), SHOWN, "\n  ") or "modules on another rank"
        )
        kind = self.trainer.recipe.model_type
        if not follows:
            logger.warning(
                f"the engine computes another model than the policy, of type {kind!r}:\n  {differ}\nRollouts will not "
                "be the policy's own, as mismatch/* will show. Train a model that both compute alike."
            )
            return
        text = (
            f"fp8_forward='full', but the engine computes another model than the policy, of type {kind!r}. First to "
            f"differ, on the same inputs:\n  {differ}\nThe trainer would follow the engine's model, with no mismatch "
            "to show it. Set fp8_forward='off' (rollouts will still be those of another model), or "
            "fp8_forward_check='warn' to go on as it is."
        )
        if self.trainer.args.fp8_forward_check == "error":
            raise RuntimeError(text)
        logger.warning(text)


def witnessed_head(witness: Witness, forward: OneForward) -> type:
    """TRL's `ChunkedLogProbFunction` as a policy that follows has it, and compared."""
    head = engine_head(forward)

    class WitnessedHead:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs):
            logits = engine_logits(forward, weight, bias)(hidden)
            witness.values.head(hidden, weight, bias, logit_scale, softcap, logits)
            return head.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)

    return WitnessedHead
