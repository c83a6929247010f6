"""The feature that lets the policy follow the engine (`fp8_forward="one_forward"`), and checks that it does.

To follow means that the policy's modules call the engine's kernels.

engine started     the policy's modules get classes that can follow
scoring, loss      the policy follows. If the weights may have changed since the last sync, they are sent first
first rollouts     log-probs of trainer and rollouts are compared. If they differ by more than the platform guarantees,
                   an error names the first layer that differs. With an FP8 base, later rollouts are compared, too,
                   until B of an adapter is not zero. While B = 0, log-probs are the same even if the engine lacks the
                   adapter
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import hook_of
from trl_fp8.policy.swapped import Logits, release, scored_by
from trl_fp8.run.batch import Batch, Rollouts, quotient
from trl_fp8.run.feature import Feature, as_rollouts_saw
from trl_fp8.sync.shards import local_part

from .followed_head import engine_logits, followed_head
from .followed_linear import BackwardPrecision, FollowedLinear, require_backend
from .followed_reference import FollowedReference
from .one_forward import OneForward, require_followable


logger = get_logger(__name__)

# TRL's flag. If it is off, TRL does not compute the trainer's log-probs of rollouts, so nothing can be compared
CORRECTION = "vllm_importance_sampling_correction"


class Following(Feature, TrainerCallback):
    """Lets the policy, and the reference of `beta > 0`, follow the engine.

    The constructor raises `ValueError` if this policy cannot follow. `engine_started` raises `ValueError` if the
    engine lacks modules of the policy, and `RuntimeError` if its kernels cannot be shared.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self.forward: OneForward | None = None  # made by `engine_started`
        self.followed_reference: FollowedReference | None = None  # made by `engine_started` if beta > 0
        self._is_outdated = True  # the policy's weights may have changed since the last sync
        self._is_checked = False  # whether the comparison of log-probs is done
        release(trainer.model)  # modules that an earlier trainer swapped would hide what this policy is
        # Raise the errors that can be found without an engine before one starts
        args, recipe = trainer.args, trainer.recipe
        require_followable(trainer.model, recipe, args.fp8_backward)
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        require_backend(args.fp8_gemm_backend, capability)

    def engine_part(self):
        from .engine_kernels import SharedKernelsPart  # needs vllm

        self.in_engine = SharedKernelsPart()
        return self.in_engine

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        trainer = self.trainer
        if not numerics.kernels:
            raise RuntimeError(
                f"fp8_forward={trainer.args.fp8_forward!r}: expected FP8 kernels for "
                f"{len(trainer.recipe.fp8_modules)} linear layers and {len(trainer.recipe.fp8_experts)} layers of "
                "experts in the engine, but none of the kernels that vLLM chose is one. Remove linear_backend and "
                "moe_backend from vllm_engine_kwargs, or set fp8_forward='off'."
            )
        if numerics.linears is not None and numerics.linears.scope == "tensor":
            raise RuntimeError(
                f"fp8_forward={trainer.args.fp8_forward!r}: the engine's kernels {sorted(numerics.kernels)} quantize "
                "activations with one scale per batch, so a token's output depends on the other tokens. Remove "
                "linear_backend from vllm_engine_kwargs, or set fp8_forward='off'."
            )
        if kernels is None:
            raise RuntimeError(
                f"fp8_forward={trainer.args.fp8_forward!r}: the engine offers no kernels that the trainer could call. "
                "Set fp8_forward='off'."
            )
        self._mismatch_bound = self.in_engine.mismatch_bound
        backward = BackwardPrecision(
            precision=trainer.args.fp8_backward,
            backend=trainer.args.fp8_gemm_backend,
            format=trainer.recipe.format,
            scale_format=trainer.recipe.scale_format,
            operand_scale_format="pow2" if numerics.linears is None else numerics.linears.scale_format,
        )
        self.forward = OneForward(trainer.model, trainer.recipe, kernels, backward, hook_of(trainer.model))
        self.forward.switch(on=False)
        # When the trainer is deleted, its policy has to compute by itself again and must keep no engine alive. The
        # finalizer has only a weak reference to the forward, because the forward refers to the engine's kernels: with
        # a strong reference the engine would survive the trainer. When Python exits there is nothing to restore
        finalizer = weakref.finalize(trainer, remove_if_alive, weakref.ref(self.forward))
        finalizer.atexit = False
        if trainer.args.beta:
            self.followed_reference = FollowedReference(trainer, self.forward, self.in_engine)

    def banner(self) -> str:
        reference = ", the reference likewise" if self.followed_reference else ""
        return f"the engine's kernels on its tensors{reference}, backward {self.forward.backward.precision}"

    def after_generation(self, rollouts: Rollouts) -> None:
        self._is_outdated = False  # TRL has sent the weights

    def _weights_may_change(self, args, state, control, **kwargs) -> None:
        self._is_outdated = True

    on_optimizer_step = on_train_begin = _weights_may_change
    on_train_end = _weights_may_change  # load_best_model_at_end loads other weights
    on_evaluate = on_predict = _weights_may_change  # callbacks may evaluate other weights, such as averaged ones

    def _bring_up_to_date(self) -> None:
        """Send the weights to the engine if they may have changed since the last sync.

        They may have changed after an optimizer step without a sync (num_iterations > 1). And a resumed run that
        begins with rollouts saved in the checkpoint has had no sync yet.
        """
        if self._is_outdated:
            self.trainer.vllm_generation.send_weights()
            self._is_outdated = False

    @contextmanager
    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> Iterator[None]:
        self._bring_up_to_date()
        with self.forward.switched(on=True), scored_by(followed_head(self.forward)):
            yield

    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        return self.followed_reference.scored()

    def logits(self, reference: bool) -> Logits:
        return partial(engine_logits, self.followed_reference.forward if reference else self.forward)

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._bring_up_to_date()
        # The policy follows until `end_loss`, because gradient checkpointing runs the forward again in the backward
        self.forward.switch(on=True)

    def end_loss(self) -> None:
        self.forward.switch(on=False)

    def extend_batch(self, batch: Batch) -> None:
        """Compare log-probs of trainer and engine in the first batch with scored tokens (run/batch.py).

        With an FP8 base, compare each batch until an adapter has changed. Collective until the comparison is done.
        Raises `RuntimeError` if the log-probs differ too much, unless fp8_forward_check='warn'.
        """
        if self._is_checked:
            return
        args, accelerator = self.trainer.args, self.trainer.accelerator
        if not getattr(args, CORRECTION, False):
            self._warn_that_nothing_compares()
            self._is_checked = True
            return
        ratio = batch.ratio
        own_sums = torch.stack(
            [
                ratio.values_BT.double().abs().sum(),
                ratio.scored_BT.sum().double(),
                ratio.broken_BT.sum().double(),
            ]
        )
        sums_by_rank = accelerator.gather(own_sums).view(-1, len(own_sums))
        distance, scored, broken = sums_by_rank.sum(0).tolist()
        mismatch = quotient(distance, scored)  # mean |log r|
        if mismatch > self._mismatch_bound or broken > 0:  # broken: tokens whose trainer log-prob is not a number
            found = f"the mean absolute difference of log-probs of the rollouts is {mismatch:.2g}"
            if broken > 0:
                found = f"{broken:.0f} of the trainer's log-probs of the rollouts are no numbers"
            text = (
                f"fp8_forward='one_forward', but {found}. With shared kernels the difference is at most "
                f"{self._mismatch_bound:g} for a policy of type {self.trainer.recipe.model_type!r}. "
                f"{self._first_difference(batch)} Set fp8_forward='off' (rollout "
                "correction works without it), or fp8_forward_check='warn' to go on."
            )
            if args.fp8_forward_check == "error":
                raise RuntimeError(text)
            logger.warning(text)
        elif math.isnan(mismatch):  # no token was scored, so compare the next rollouts
            return
        # As long as B of every adapter is zero, nothing shows whether the engine has the adapters
        self._is_checked = not args.base_in_engine or self._any_adapter_changed()

    def _warn_that_nothing_compares(self) -> None:
        args = self.trainer.args
        if hasattr(args, CORRECTION):
            cause = f"{CORRECTION}=False"
            remedy = (
                " Set it to True. If you want no correction, add rollout_correction='monitor', which only measures."
            )
        else:
            cause = type(self.trainer).__name__
            remedy = ""
        logger.warning(
            f"fp8_forward={args.fp8_forward!r} with {cause}: the trainer never compares its log-probs with those of "
            f"the rollouts, so nothing shows whether both share a forward.{remedy}"
        )

    def _any_adapter_changed(self) -> bool:
        """Return whether B of any adapter is not zero, on any rank. Collective."""
        parameters = self.trainer.model.named_parameters()
        has_changed = any(bool(local_part(parameter).any()) for name, parameter in parameters if ".lora_B." in name)
        accelerator = self.trainer.accelerator
        changed_ranks = accelerator.reduce(torch.tensor(float(has_changed), device=accelerator.device))
        return bool(changed_ranks > 0)

    def _first_difference(self, batch: Batch) -> str:
        """Return a sentence on the first layer that differs, found by running a rollout of this rank on both sides."""
        trainer = self.trainer
        comparison = Comparison(self.forward)
        with comparison.engine():
            tokens = trainer.vllm_generation.prefill(worst_rollout(batch))
        ids = torch.tensor([tokens], device=trainer.accelerator.device)
        # Call TRL's own method. In this trainer's override other features would take part: they would calibrate KV
        # scales on this pass, or force the rollouts' experts
        mask = torch.ones_like(ids)
        columns = 1  # logits_to_keep: the comparison watches linear layers and needs no log-probs
        with torch.no_grad(), as_rollouts_saw(trainer.features), self.scoring(mask, columns), comparison.policy():
            trainer.trl_class()._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, columns)
        difference = comparison.first_difference()
        if difference is not None:
            return f"When both compute one of the rollouts, the first difference is {difference}."
        if not comparison.layers:
            return (
                "The engine is compiled, so its layers cannot be watched. With vllm_engine_kwargs="
                "{'enforce_eager': True} this message names the first layer that differs."
            )
        return (
            f"When both compute one of the rollouts, all {comparison.layers} linear layers agree. The difference is "
            "in the output head, or in how the engine decodes few tokens at a time."
        )


def remove_if_alive(forward: weakref.ref[OneForward]) -> None:
    """Give the policy's modules their own classes back, unless `forward` no longer exists."""
    alive = forward()
    if alive is not None:
        alive.remove()


def worst_rollout(batch: Batch) -> list[int]:
    """Return the tokens of the rollout with the largest sum of |log r|, or with a log-prob that is no number.

    The last token is left out, because it was sampled, but never was an input of the engine.
    """
    distance_BT = batch.ratio.values_BT.abs().masked_fill(batch.ratio.broken_BT != 0, math.inf)
    row = int(distance_BT.sum(-1).argmax())
    tokens = []
    for part in ("prompt", "completion"):
        ids, mask = batch.tensors[f"{part}_ids"][row], batch.tensors[f"{part}_mask"][row]
        tokens += ids[mask.bool()].tolist()
    return tokens[:-1]


class Comparison:
    """Finds the first linear layer whose input or output differs between the engine and a policy that follows it.

    Used as `with engine(): ...` and `with policy(): ...`, each around one forward of the same sequence. Both note, for
    each token and each linear layer, one checksum (8 bytes) of the layer's input and one of its output.
    `first_difference` compares these checksums in the order in which the policy computed them. If the first difference
    is an input's, the cause lies between the previous linear layer and this layer: in a norm, an activation function,
    attention or a router.
    """

    def __init__(self, forward: OneForward):
        followed = [module for module in forward.modules.values() if isinstance(module, FollowedLinear)]
        self._kernels = forward.kernels
        self._linears: dict[str, FollowedLinear] = {linear.name: linear for linear in followed}
        # (checkpoint name of a layer, "input" or "output") -> checksums `[T]`
        self._engine: dict[tuple[str, str], list[Tensor]] = defaultdict(list)  # one tensor for each call of the layer
        self._policy: dict[tuple[str, str], Tensor] = {}

    def engine(self) -> AbstractContextManager[None]:
        """Note checksums of the engine's linear layers inside the `with` block."""

        # One layer of the engine may compute several layers of the policy (q, k, v): each of them has its columns of y
        def note(layers: tuple[str, ...], x: Tensor, y: Tensor) -> None:
            for layer in layers:
                linear = self._linears[layer]
                self._engine[linear.name, "input"].append(checksums(x))
                self._engine[linear.name, "output"].append(checksums(y[..., linear.columns]))

        return self._kernels.watching(note)

    @contextmanager
    def policy(self) -> Iterator[None]:
        """Note checksums of the policy's linear layers inside the `with` block."""

        def note(linear: FollowedLinear, args: tuple[Tensor, ...], y: Tensor) -> None:
            self._policy[linear.name, "input"] = checksums(args[0])
            self._policy[linear.name, "output"] = checksums(y)

        with ExitStack() as handles:
            for linear in self._linears.values():
                handles.enter_context(linear.register_forward_hook(note))
            yield

    @property
    def layers(self) -> int:
        """Return the number of layers that ran on both sides. It is 0 for a compiled engine, which runs no hooks."""
        in_engine = {name for name, _ in self._engine}
        in_policy = {name for name, _ in self._policy}
        return len(in_engine & in_policy)

    def first_difference(self) -> str | None:
        """Return a noun phrase for the first difference; None if nothing differs."""
        for (name, end), own in self._policy.items():
            if (name, end) in self._engine:
                engine = torch.cat(self._engine[name, end])[: len(own)]
                wrong_tokens = (own != engine).nonzero().flatten().tolist()
                if wrong_tokens:
                    return f"the {end} of {name}, from token {wrong_tokens[0] + 1} of {len(own)} on"
        return None


def checksums(rows: Tensor) -> Tensor:
    """Return a checksum of each row of `rows` `[..., N]` in BF16, the engine's dtype: int64 `[T]`."""
    bits = rows.detach().to(torch.bfloat16).flatten(0, -2).contiguous().view(torch.int16)
    # Each element has its own odd key. So the sum changes if one element changes, or if two elements change places
    keys = 2 * torch.arange(bits.shape[-1], device=bits.device) + 1
    return (bits.long() * keys).sum(-1)
