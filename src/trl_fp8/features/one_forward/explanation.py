"""The feature that splits the mismatch into what the engine's number formats explain and what they do not.

    trainer's log-probs
        <- scoring ->      the policy's forward, in evaluation mode and by TRL's own method
        <- explained ->    the engine's kernels on the policy's weights
        <- unexplained ->  rollouts

On the first rollouts and every `explain_mismatch_steps` steps the policy makes two more passes over them: by itself,
and following the engine, as with one forward. Two faults would hide if the second took what the engine holds for
granted, so both are looked for:

    rollouts of other weights      the policy is sent once more before the pass, and its arrival proven
    a sync that sends other ones   each module is compared with its own forward (witness.py). If rounding does not
                                   explain a difference, all of the mismatch is unexplained

A policy that follows anyway (`fp8_forward="one_forward"`) needs no pass: its whole mismatch is unexplained. There, and
with `router_replay="rollout"`, scoring is not measured. The parts are a k3 each, and do not add up exactly.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import Tensor

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import hooked
from trl_fp8.policy.swapped import scored_by
from trl_fp8.recipe.messages import listed
from trl_fp8.run.batch import (
    COMPLETION_IDS,
    COMPLETION_MASK,
    PROMPT_IDS,
    Batch,
    log_ratio,
    mean_of,
    values_of,
)
from trl_fp8.run.feature import Feature, as_rollouts_saw

from .followed_head import followed_head
from .followed_linear import BackwardPrecision
from .forward_flags import replaced_forward
from .one_forward import OneForward, require_followable
from .same_model import SHOWN, compare_modules
from .unexplained import EXPLAINED, SCORING, UNEXPLAINED, explained_note, mismatch_warnings


logger = get_logger(__name__)
# Arguments of vLLM that may choose other kernels than the policy would call
OTHER_KERNELS = "kernel_config", "compilation_config", "enforce_eager"


class Explanation(Feature):
    """Logs `mismatch/scoring_k3`, `explained_k3` and `unexplained_k3`, and warns once of the first and of the last."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.passes = 0  # of a policy that follows
        self._obstacle: str | None = None
        self._latest: int | None = None  # step of the latest explanation
        self._noted: set[str] = set()
        self._state: object | None = None  # of the trainer, one for each call of `train`

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        self._kernels = kernels
        if self.trainer.args.one_forward:
            return
        self._obstacle = obstacle(self.trainer, numerics, kernels)
        if self._obstacle is None:
            try:  # a module may have no counterpart in the engine
                require_followable(self.trainer.model, self.trainer.recipe, "bf16")
                with self._followed():
                    pass
            except ValueError as error:
                self._obstacle = str(error).partition(" Set fp8_forward")[0].rstrip(".")
        if self._obstacle is not None:
            self.trainer.accelerator.print(
                f"No split of the mismatch into an explained and an unexplained part: {self._obstacle}.", flush=True
            )

    def extend_batch(self, batch: Batch) -> None:
        trainer, ratio = self.trainer, batch.ratio
        if trainer.state is not self._state:  # another call of `train`, whose steps count from 0
            self._state, self._latest, self._noted = trainer.state, None, set()
        step = trainer.state.global_step
        waits = self._latest is not None and step - self._latest < trainer.args.explain_mismatch_steps
        if self._obstacle is not None or ratio is None or not trainer.model.training or waits:
            return
        self._latest = step
        differences, plain_BT, logps_BT = [], ratio.trainer_BT, ratio.trainer_BT
        pairs = {}
        if not trainer.args.one_forward:
            trainer.vllm_generation.send_weights()
            if getattr(trainer.args, "router_replay", "off") != "rollout":  # else the trainer takes other experts
                plain_BT = self._plainly_scored(batch)
                pairs[SCORING] = ratio.trainer_BT, plain_BT
            with self._followed() as (hook, forward):
                with as_rollouts_saw(trainer.features), scored_by(followed_head(forward)):
                    logps_BT = self._scored(batch)
                differences = compare_modules(trainer, self._kernels, hook, forward).findings.lines()
            self.passes += 1
        differs = trainer.accelerator.reduce(torch.tensor(float(len(differences)), device=logps_BT.device)) > 0
        if differs:
            logps_BT = plain_BT
        pairs[EXPLAINED] = plain_BT, logps_BT
        pairs[UNEXPLAINED] = logps_BT, ratio.rollout_BT
        metrics = {}
        for name, pair in pairs.items():
            parts = torch.stack(k3_parts(*pair, ratio.mask_BT))
            metrics[name] = mean_of(*trainer.accelerator.gather(parts).view(-1, 2).sum(0).tolist())
        batch.metrics |= metrics
        named = listed(differences, SHOWN, "\n  ") or "modules on another rank"
        self._report(values_of(metrics), named if differs else "")

    def _report(self, values: dict[str, float], differences: str) -> None:
        """Warn of an unexplained part, and say what lowers a large explained one, each once a run."""
        for name, text in mismatch_warnings(values).items():
            if name not in self._noted:
                self._noted.add(name)
                modules = f" Modules that differ by more than rounding:\n  {differences}" if differences else ""
                logger.warning(text + modules)
        note = explained_note(values)
        if note and EXPLAINED not in self._noted:
            self._noted.add(EXPLAINED)
            self.trainer.accelerator.print(note, flush=True)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch gradients and dropout off inside the block."""
        training = self.trainer.model.training
        self.trainer.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.trainer.model.train(training)

    @contextmanager
    def _followed(self) -> Iterator[tuple]:
        """Let the policy compute as its engine inside the block, without gradients and dropout."""
        trainer = self.trainer
        backward = BackwardPrecision(format=trainer.recipe.format, scale_format=trainer.recipe.scale_format)
        with hooked(trainer.model) as hook, self._evaluating():
            forward = OneForward(trainer.model, trainer.recipe, self._kernels, backward, hook)
            try:
                yield hook, forward
            finally:
                forward.remove()

    def _plainly_scored(self, batch: Batch) -> Tensor:
        """Return log-probs `[B, T]` by the policy's own forward, with a simulated KV cache if the trainer has one."""
        trainer = self.trainer
        with hooked(trainer.model) as hook, self._evaluating(), as_rollouts_saw(trainer.features):
            if trainer.recipe.fp8_kv_cache and not trainer.args.simulate_kv_cache:
                with hook.as_engine(None):
                    return self._scored(batch)
            return self._scored(batch)

    def _scored(self, batch: Batch) -> Tensor:
        """Return the log-probs `[B, T]` of the rollouts that the policy has now.

        Through TRL's own method: under this trainer's override other features would observe the pass.
        """
        trainer, tensors = self.trainer, batch.tensors
        ids = torch.cat([tensors[PROMPT_IDS], tensors[COMPLETION_IDS]], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors[COMPLETION_MASK]], dim=1)
        completion, size = tensors[COMPLETION_IDS].shape[1], trainer.args.per_device_train_batch_size
        score = trainer.trl_class()._get_per_token_logps_and_entropies
        return score(trainer, trainer.model, ids, mask, completion, batch_size=size)[0]


def obstacle(trainer, numerics: EngineNumerics, kernels: EngineKernels | None) -> str | None:
    """Return why the policy cannot follow the engine for a pass, by flags and platform; None if nothing is known."""
    args, scaling = trainer.args, numerics.linears
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    truncated = getattr(args, "truncated_by", {})
    other_kernels = set(args.vllm_engine_kwargs or {}) & set(OTHER_KERNELS)
    reasons = (
        (trainer.accelerator.device.type != "cpu", "on a GPU kernels are shared only by fp8_forward='one_forward'"),
        (
            not hasattr(trainer.trl_class(), "_get_per_token_logps_and_entropies"),
            f"TRL's {trainer.trl_class().__name__} scores rollouts by logits of the policy's own output head",
        ),
        (kernels is None, f"the trainer cannot call kernels of this engine (vllm_mode={args.vllm_mode!r})"),
        (not args.fp8_weights, "fp8_weights=False, and only engines with FP8 linears are followed"),
        (
            args.vllm_tensor_parallel_size > 1,
            "vllm_tensor_parallel_size is above 1, and the trainer has whole tensors",
        ),
        (args.vllm_enable_sleep_mode, "vllm_enable_sleep_mode=True, and the engine sleeps by then"),
        (sharded, "the policy is sharded"),
        (args.base_in_engine, "fp8_base=True, and the policy holds no weights to compare with"),
        (truncated, f"{', '.join(truncated)} leaves tokens out of the sampling"),
        (replaced_forward(args), f"{', '.join(replaced_forward(args))} replaces the policy's forward"),
        (args.fp16, "fp16=True, and the engine's activations are BF16"),
        (other_kernels, f"vllm_engine_kwargs has {sorted(other_kernels)}, which may choose other kernels"),
        (scaling and scaling.scope == "tensor", "the engine quantizes activations with one scale per batch"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def k3_parts(logps_BT: Tensor, other_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of r - 1 - log r over the tokens that both score, and their number; r is of the first."""
    ratio = log_ratio(logps_BT, other_BT, mask_BT)
    values_BT = ratio.values_BT.double()
    return (torch.expm1(values_BT) - values_BT).sum(), ratio.scored_BT.sum().double()
