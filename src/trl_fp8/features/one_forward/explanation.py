"""The feature that splits the mismatch into a part that the engine's number formats explain, and other parts.

Four computations give log-probs of the rollouts. Each part of the mismatch is the k3 (measures.py) between neighbours:

    the trainer's old-log-prob pass
        <- scoring ->
    the policy's own forward, in evaluation mode and by TRL's own method
        <- explained ->
    the engine's kernels, called by the policy
        <- unexplained ->
    the engine, when it sampled the rollouts

On the first rollouts and every `explain_mismatch_steps` steps the policy scores the rollouts twice more: by its own
forward, and with the engine's kernels as in one forward. The second pass computes with the weights in the engine. If
these are wrong, the pass has the same fault as the rollouts and would hide it. So two faults are brought to light:

    rollouts from wrong weights      the weights are sent once more before the passes, and an audit proves that they
                                     arrived. Then only the rollouts have the fault, and it counts as unexplained
    syncs that send wrong weights    each module is compared with its own forward (same_model.py). If rounding does
                                     not explain a difference, the whole mismatch counts as unexplained

With `fp8_forward="one_forward"` the trainer's log-probs already come from the engine's kernels, so no pass is needed
and the whole mismatch is unexplained. Scoring is not measured there, nor with `router_replay="rollout"`. The three
parts do not add up exactly to the k3 of the mismatch.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import Tensor

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import hooked
from trl_fp8.policy.swapped import scored_by
from trl_fp8.recipe.messages import listed
from trl_fp8.run.batch import COMPLETION_IDS, COMPLETION_MASK, PROMPT_IDS, Batch, log_ratio, mean_of, values_of
from trl_fp8.run.feature import Feature, as_rollouts_saw

from .followed_head import followed_head
from .followed_linear import BackwardPrecision
from .forward_flags import forward_replacing_flags
from .one_forward import OneForward, require_followable
from .same_model import SHOWN, compare_modules
from .unexplained import EXPLAINED, SCORING, UNEXPLAINED, explained_note, mismatch_warnings


logger = get_logger(__name__)
# Arguments of vLLM that may choose other kernels than the policy would call
OTHER_KERNELS = "kernel_config", "compilation_config", "enforce_eager"


class Explanation(Feature):
    """Logs `mismatch/scoring_k3`, `explained_k3` and `unexplained_k3`. Warns of large values, once for each metric."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.passes = 0  # number of passes in which the policy followed the engine
        self._obstacle: str | None = None  # why there are no explanations
        self._latest: int | None = None  # step of the latest explanation
        self._noted: set[str] = set()  # metrics for which a warning or note was printed
        self._state: object | None = None  # the trainer's state; each call of `train` makes a new one

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        self._kernels = kernels
        if self.trainer.args.policy_calls_engine:
            return
        self._obstacle = obstacle(self.trainer, numerics, kernels)
        if self._obstacle is None:
            try:
                require_followable(self.trainer.model, self.trainer.recipe, "bf16")
                with self._followed():  # follow once, to find modules without a counterpart in the engine
                    pass
            except ValueError as error:
                # Leave out the remedy, which is about a flag that is not set in this run
                reason, _, _ = str(error).partition(" Set fp8_forward")
                self._obstacle = reason.rstrip(".")
        if self._obstacle is not None:
            self.trainer.accelerator.print(
                f"No split of the mismatch into an explained and an unexplained part: {self._obstacle}.", flush=True
            )

    def extend_batch(self, batch: Batch) -> None:
        trainer, ratio = self.trainer, batch.ratio
        if trainer.state is not self._state:  # another call of `train`, whose steps count from 0
            self._state = trainer.state
            self._latest, self._noted = None, set()
        step = trainer.state.global_step
        is_early = self._latest is not None and step - self._latest < trainer.args.explain_mismatch_steps
        if self._obstacle is not None or ratio is None or not trainer.model.training or is_early:
            return
        self._latest = step
        # Log-probs of the policy's own forward, and of the engine's kernels. Without a pass they are the trainer's
        plain_BT = ratio.trainer_BT
        kernels_BT = ratio.trainer_BT
        differences: list[str] = []
        pairs = {}  # metric -> the log-probs whose k3 it is
        if not trainer.args.policy_calls_engine:
            trainer.vllm_generation.send_weights()
            # This pass does not replay the rollouts' experts. If the trainer does, scoring is not measured
            if getattr(trainer.args, "router_replay", "off") != "rollout":
                plain_BT = self._plainly_scored(batch)
                pairs[SCORING] = ratio.trainer_BT, plain_BT
            with self._followed() as (hook, forward):
                with as_rollouts_saw(trainer.features), scored_by(followed_head(forward)):
                    kernels_BT = self._scored(batch)
                differences = compare_modules(trainer, self._kernels, hook, forward).findings.lines()
            self.passes += 1
        count = torch.tensor(float(len(differences)), device=kernels_BT.device)
        is_other_model = trainer.accelerator.reduce(count) > 0  # on any rank
        if is_other_model:
            kernels_BT = plain_BT  # the explained part is then 0, and the whole mismatch unexplained
        pairs[EXPLAINED] = plain_BT, kernels_BT
        pairs[UNEXPLAINED] = kernels_BT, ratio.rollout_BT
        metrics = {}
        for name, pair in pairs.items():
            sum_and_count = torch.stack(k3_parts(*pair, ratio.mask_BT))
            by_rank = trainer.accelerator.gather(sum_and_count).view(-1, 2)
            total, tokens = by_rank.sum(0).tolist()
            metrics[name] = mean_of(total, tokens)
        batch.metrics |= metrics
        modules = ""
        if is_other_model:
            modules = listed(differences, SHOWN, "\n  ") or "modules on another rank"
        self._report(values_of(metrics), modules)

    def _report(self, values: dict[str, float], differences: str) -> None:
        """Warn of large scoring and unexplained parts, and print a note on a large explained part, each once a run."""
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
        """Let the policy compute with the engine's kernels inside the block, without gradients and dropout."""
        trainer = self.trainer
        backward = BackwardPrecision(format=trainer.recipe.format, scale_format=trainer.recipe.scale_format)
        with hooked(trainer.model) as hook, self._evaluating():
            forward = OneForward(trainer.model, trainer.recipe, self._kernels, backward, hook)
            try:
                yield hook, forward
            finally:
                forward.remove()

    def _plainly_scored(self, batch: Batch) -> Tensor:
        """Return log-probs `[B, T]` of the policy's own forward. It simulates the KV cache if the trainer does."""
        trainer = self.trainer
        with hooked(trainer.model) as hook, self._evaluating(), as_rollouts_saw(trainer.features):
            # `as_rollouts_saw` simulates an FP8 KV cache; scales of None switch that off
            switch_off = trainer.recipe.fp8_kv_cache and not trainer.args.simulate_kv_cache
            with hook.as_engine(None) if switch_off else nullcontext():
                return self._scored(batch)

    def _scored(self, batch: Batch) -> Tensor:
        """Return the log-probs `[B, T]` of the rollouts, computed by the policy as it is now."""
        # Call TRL's own method: this trainer's override would let other features observe the pass
        trainer, tensors = self.trainer, batch.tensors
        ids = torch.cat([tensors[PROMPT_IDS], tensors[COMPLETION_IDS]], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors[COMPLETION_MASK]], dim=1)
        columns = tensors[COMPLETION_IDS].shape[1]
        score = trainer.trl_class()._get_per_token_logps_and_entropies
        rows = trainer.args.per_device_train_batch_size
        return score(trainer, trainer.model, ids, mask, columns, batch_size=rows)[0]


def obstacle(trainer, numerics: EngineNumerics, kernels: EngineKernels | None) -> str | None:
    """Return why the policy cannot follow the engine (a flag or a fact of the platform), or None if it can."""
    args, scaling = trainer.args, numerics.linears
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    truncated = getattr(args, "truncated_by", {})
    replacing = forward_replacing_flags(args)
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
        (replacing, f"{', '.join(replacing)} replaces the policy's forward"),
        (args.fp16, "fp16=True, and the engine's activations are BF16"),
        (other_kernels, f"vllm_engine_kwargs has {sorted(other_kernels)}, which may choose other kernels"),
        (scaling and scaling.scope == "tensor", "the engine quantizes activations with one scale per batch"),
    )
    for applies, reason in reasons:
        if applies:
            return reason
    return None


def k3_parts(logps_BT: Tensor, other_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of r - 1 - log r over the scored tokens (run/batch.py), and their number.

    log r is `logps_BT` minus `other_BT`.
    """
    ratio = log_ratio(logps_BT, other_BT, mask_BT)
    log_r_BT = ratio.values_BT.double()  # 0 where not scored
    r_minus_1_BT = torch.expm1(log_r_BT)
    return (r_minus_1_BT - log_r_BT).sum(), ratio.scored_BT.sum().double()
