"""`FP8AsyncGRPOTrainer`: TRL's `AsyncGRPOTrainer` with FP8 rollouts from a server of `trl-fp8 serve`.

TRL's worker fetches completions from the server in a process of its own while the trainer computes. After every
`weight_sync_steps` steps TRL calls `weight_transfer.send_weights`, which delivers the policy, calibrates its KV scales
and proves that all of it arrived (engine/vllm_server/async_generation.py). Features treat each micro-batch as a
generation: `after_generation`, `scoring` around the forward, `extend_batch`, and then TRL's loss.

Three policies give a token log-probs: mu_v, the engine that sampled it (FP8, version v), pi_prox, the policy at the
start of the step, and pi, the policy in the loss. TRL 1.16 clips one combined ratio pi / mu_v. With a correction the
loss of a token with advantage A is

    loss_t = -w(pi_prox / mu_v) min(u A, clip(u, 1 - epsilon_low, 1 + epsilon_high) A),    u = pi / pi_prox

which is decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298), with w the weight of a
`RolloutCorrection`: truncated, masked, by token or sequence, with rejection. The bounds of w limit the effect of
precision and age of the rollouts; epsilon limits the change of the policy in the step. With bypass=True the loss has
the combined ratio pi / mu_v again, as in verl's bypass mode and in TRL without a correction.

TRL trains once on each sample, and weights do not change within a step. So pi_prox has the values of pi without its
gradient: the forward of the loss gives both, and no pass is added. TRL computes its loss from that forward.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from itertools import islice
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.packing import TreeRow

from trl_fp8.config import FP8Config, documented, groups_for
from trl_fp8.engine.protocol import RolloutEngine
from trl_fp8.rollouts import FP8Rollouts
from trl_fp8.run.batch import (
    COMPLETION_MASK,
    LOSS_TOKENS,
    LOSS_WEIGHTS,
    ROLLOUT_LOGPS,
    TOOL_MASK,
    TRAINER_LOGPS,
    VERSION_AGES,
    Rollouts,
)
from trl_fp8.upstream.patches import substituted

from .compared import ComparedFlags
from .packed_terms import PackedTerms
from .rollout_worker import RolloutWorker
from .versioned_samples import OLDEST_VERSION, SEQUENCES, VERSIONS, VersionedCollator, VersionedQueueDataset


logger = get_logger(__name__)
PROMPTS = 64  # prompts of the dataset that calibrate KV scales before there are rollouts


@dataclass
class AsyncConfig(FP8Config):
    """Base of the config. Adds attributes of GRPO's config that TRL's asynchronous one lacks; they are not flags."""

    vllm_mode = "server"
    use_vllm = True
    vllm_tensor_parallel_size = 1
    vllm_gpu_memory_utilization = 0.9
    vllm_max_model_length = None
    vllm_enable_sleep_mode = False
    vllm_model_impl = "vllm"
    use_transformers_continuous_batching = transformers_continuous_batching_config = None
    generation_kwargs = generation_batch_size = loss_type = None
    steps_per_generation = 1
    beta = 0.0

    setting_against_full_pass = None  # the forward of the loss sees every token of every rollout

    REFUSED: ClassVar[dict[str, str]] = {  # flag -> why
        "fp8_forward": "its kernels need an engine in the trainer's process",
        "fp8_base": "TRL's asynchronous trainer sends merged weights",
        "router_replay": "the server returns no routes",
        "vllm_engine_kwargs": "the engine starts in the server, which takes vLLM's own options",
    }

    def __post_init__(self):
        if self.use_vllm is False:
            raise ValueError(
                f"use_vllm=False with {type(self).__name__}: rollouts come from a vLLM server. Set use_vllm=True, or "
                "take FP8GRPOTrainer."
            )
        if "," in (self.vllm_server_base_url or ""):
            raise ValueError(
                f"vllm_server_base_url={self.vllm_server_base_url!r} with {type(self).__name__}: TRL's worker takes "
                "its rollouts from one server. Set it to the address of one, or take FP8GRPOTrainer."
            )
        if self.simulate_kv_cache:
            raise ValueError(
                f"simulate_kv_cache=True with {type(self).__name__}: rollouts of several versions, whose caches had "
                "other scales, share a forward. Set simulate_kv_cache=False."
            )
        self.simulate_kv_cache = False  # None would switch it on
        super().__post_init__()


@dataclass
class _ComparedConfig(ComparedFlags, AsyncGRPOConfig):
    """TRL's `AsyncGRPOConfig` with the flags of a correction."""


@documented
@dataclass
class FP8AsyncGRPOConfig(AsyncConfig, *groups_for(_ComparedConfig), _ComparedConfig):
    """Configuration of `FP8AsyncGRPOTrainer`: every field of `trl.experimental.async_grpo.AsyncGRPOConfig`, and the
    ones below.
    """


class FP8WeightTransfer:
    """TRL's `WeightTransferProtocol`, in which `send_weights` runs a sync of this project.

    `pause` and `resume` do nothing, because a sync itself pauses the server for the time in which its workers copy the
    weights.
    """

    def __init__(self, trainer: "FP8AsyncGRPOTrainer"):
        self._trainer = trainer

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        iterator.close()  # not used: a sync may have to read all weights again, and so opens iterators itself
        self._trainer.vllm_generation.sync_weights()


class _VersionedAsyncGRPO(AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` whose features see each micro-batch before its loss. Shape letters: packed_terms.py."""

    features: tuple
    _delivers = False  # whether the server gets weights by this project's syncs, not by TRL's transfer
    _first_version = 0  # the first version that this run has sent; 0: this run has sent no version yet

    def get_train_dataloader(self) -> DataLoader:
        if not self.features:
            return super().get_train_dataloader()
        module = sys.modules[AsyncGRPOTrainer.__module__]
        queue_dataset = partial(
            VersionedQueueDataset, while_empty=self._while_empty, first_version=lambda: self._first_version
        )
        with (
            substituted(module, "RolloutQueueDataset", queue_dataset),
            substituted(module, "DataCollatorForRollout", VersionedCollator),
        ):
            return super().get_train_dataloader()

    def compute_loss(self, model: nn.Module, inputs: dict, *args, **kwargs) -> Tensor:
        if not self.features:
            return super().compute_loss(model, inputs, *args, **kwargs)
        is_term = inputs["token_index"] >= 0  # False at padding, with which all ranks have the same number of entries
        ages_M = self.model_version - inputs[VERSIONS][is_term]
        self._after_generation(inputs[SEQUENCES][0], self.model_version - int(inputs[OLDEST_VERSION][0]))

        # The forward of the loss. Features take it for the pass that scores the rollouts
        forward_arguments = self._forward_arguments(inputs, *args, **kwargs)
        start = time.time()
        mask = torch.ones_like(inputs["input_ids"])
        with ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.scoring(mask, mask.shape[1]))
            outputs = model(**forward_arguments)
        self._step_forward_s += time.time() - start
        logps_M = outputs.log_probs.flatten()[inputs["token_index"][is_term]].detach()

        # The batch as features know it, a row for each sample
        packed = PackedTerms(inputs["segment_id"][is_term])
        tensors = self.extend_batch(
            {
                COMPLETION_MASK: packed.table(torch.ones_like(ages_M)),
                TRAINER_LOGPS: packed.table(logps_M),
                ROLLOUT_LOGPS: packed.table(inputs["old_log_probs"][is_term]),
                VERSION_AGES: packed.table(ages_M),
            }
        )

        # TRL's loss is linear in the advantage of a term: min(u A, clip(u) A) w is min(u w A, clip(u) w A) for w >= 0
        corrected = {}
        correction = self.args.correction
        if correction is not None and not correction.monitor_only:
            # TOOL_MASK is 0 at tokens that the correction rejects
            loss_weights_BT = tensors[LOSS_WEIGHTS] * tensors.get(TOOL_MASK, 1)
            advantages_M = inputs["advantages"][is_term] * packed.terms(loss_weights_BT)
            corrected["advantages"] = _replace_terms(inputs["advantages"], is_term, advantages_M)
            proximal_logps_M = packed.terms(tensors[TRAINER_LOGPS])
            corrected["old_log_probs"] = _replace_terms(inputs["old_log_probs"], is_term, proximal_logps_M)
        if LOSS_TOKENS in tensors:
            corrected["global_n_tokens"] = torch.full_like(inputs["global_n_tokens"], float(tensors[LOSS_TOKENS]))
        # TRL calls a function in place of the model, which returns the outputs of the forward above
        return super().compute_loss(lambda **_: outputs, inputs | corrected, *args, **kwargs)

    def _while_empty(self) -> None:
        """Send the policy to a server that was started again. It generates nothing until it has weights."""
        if not self._delivers:
            return
        from trl_fp8.engine.vllm_server.client import ServerGone  # needs vllm

        try:
            if self.vllm_generation.is_replaced():
                logger.warning(
                    f"{self.args.vllm_server_base_url} was started again: it gets the latest weights once more."
                )
                self.vllm_generation.restore()
        except ServerGone as error:  # the server is dying: TRL calls again in seconds, and its own limit ends the wait
            logger.warning(str(error))

    def _after_generation(self, sequences_SL: Tensor, age: int) -> None:
        sequences = []
        for row in sequences_SL:
            ids = row[row >= 0].tolist()
            if ids:  # a rank with fewer samples than others has empty rows
                sequences.append(ids)
        rollouts = Rollouts(sequences, [[] for _ in sequences], age=age)
        for feature in self.features:
            feature.after_generation(rollouts)
        self._add_metrics(rollouts.metrics)

    def _forward_arguments(self, inputs: dict, *args, **kwargs) -> dict:
        """Return the arguments with which TRL's loss calls the model. Runs TRL's method up to that call."""

        def model(**arguments) -> NoReturn:
            raise _ModelCalled(arguments)

        try:
            super().compute_loss(model, inputs, *args, **kwargs)
        except _ModelCalled as call:
            return call.arguments
        raise RuntimeError("TRL's compute_loss did not call its model.")


class _ModelCalled(Exception):
    """Raised in place of the model's forward to end TRL's loss. It holds the arguments of the call."""

    def __init__(self, arguments: dict):
        self.arguments = arguments


def _replace_terms(padded: Tensor, is_term: Tensor, values_M: Tensor) -> Tensor:
    """Return a copy of `padded` that has `values_M` where `is_term`."""
    changed = padded.clone()
    changed[is_term] = values_M.to(padded.dtype)
    return changed


class FP8AsyncGRPOTrainer(FP8Rollouts, _VersionedAsyncGRPO):
    """TRL's `AsyncGRPOTrainer` whose rollouts run in FP8. Takes exactly its arguments.

    It also has the attributes `recipe`, `plan` and `features`, as `FP8GRPOTrainer` has.

    Raises:
        ValueError: `args` is not an `FP8AsyncGRPOConfig`, `weight_transfer` is set although this trainer has its own,
            prompts are no conversations, or the model, launcher or server does not go with its FP8 flags.
    """

    config_class = FP8AsyncGRPOConfig
    # Where `FP8Rollouts` replaces `VLLMGeneration`: the module of TRL's asynchronous trainer does not import it
    engine_module = "trl.generation.vllm_generation"
    _tag_names = ["trl", "async-grpo", "fp8"]
    _name = "AsyncGRPO with FP8 rollouts"
    num_iterations = 1
    _step = 0  # 0: checkpoints hold no rollouts. A resumed run samples again what was in the queue

    @wraps(AsyncGRPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        arguments = dict(signature(AsyncGRPOTrainer).bind(*args, **kwargs).arguments)
        config = arguments.get("args")
        # Without `args` FP8 is on by default. `FP8Rollouts` refuses a config of another class
        any_fp8 = not isinstance(config, FP8AsyncGRPOConfig) or config.own_engine
        if any_fp8 and arguments.get("weight_transfer") is not None:
            raise ValueError(
                f"weight_transfer={arguments['weight_transfer']!r} with FP8 rollouts: they come from a server of "
                "trl-fp8 serve, to which this trainer sends FP8 weights itself. Remove weight_transfer, or switch FP8 "
                "off: fp8_weights=False with kv_cache_dtype='auto'."
            )
        on_cpu = config is not None and config.device.type == "cpu"  # where TRL's own transfer, NCCL, does not run
        self._delivers = any_fp8 or (on_cpu and arguments.get("weight_transfer") is None)
        if self._delivers:
            arguments["weight_transfer"] = FP8WeightTransfer(self)
            _require_conversations(arguments.get("train_dataset"))
        self._prompt_options = {"tools": arguments.get("tools") or None}  # arguments of the chat template
        worker_class = RolloutWorker if self._delivers else AsyncRolloutWorker
        with substituted(sys.modules[AsyncGRPOTrainer.__module__], "AsyncRolloutWorker", worker_class):
            super().__init__(**arguments)
        if self._delivers:
            if self.is_deepspeed_enabled:
                raise ValueError(
                    "DeepSpeed in the accelerate configuration, with an asynchronous trainer: TRL 1.16 gathers "
                    "parameters of FSDP2 alone. Launch with FSDP2 or DDP."
                )
            self.vllm_generation = self._make_own_generation(
                model=self.model,
                accelerator=self.accelerator,
                processing_class=self.processing_class,
                mode="server",
                server_base_url=self.args.vllm_server_base_url,
                server_timeout=self.args.vllm_server_timeout,
                max_completion_length=self.args.max_completion_length,
            )
            self.context = self.vllm_generation.max_model_length

    def _start_engine(self, recipe: Any, parts: Any, **kwargs) -> RolloutEngine:
        from trl_fp8.engine.vllm_server.async_generation import AsyncGeneration  # needs vllm

        def tensors() -> AbstractContextManager:  # opened for each write of the weights, on every rank
            return closing(AsyncGRPOTrainer._streaming_iter(self))

        kwargs["transport"] = self.args.vllm_server_transport
        return AsyncGeneration(recipe=recipe, parts=parts, tensors=tensors, after_sync=self._after_sync, **kwargs)

    def _streaming_iter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that TRL sends."""
        # TRL calls `send_weights` on the main process only, but iterates on all ranks. The others join the sync here
        if self._delivers and not self.accelerator.is_main_process:
            self.vllm_generation.sync_weights()
            return
        yield from super()._streaming_iter()

    def _sync_weight(self) -> None:
        is_first = not self._first_version
        # Before the first sync there are no rollouts to calibrate KV scales on. Features calibrate on prompts, or use
        # what they loaded from a checkpoint
        if is_first and self._delivers:
            if self.state.global_step:  # a run that was killed may have sent more versions than its checkpoint knows
                self.model_version = max(self.model_version, self.vllm_generation.engine.version)
            prompts = [row["prompt"] for row in islice(self.train_dataset, PROMPTS) if row.get("prompt")]
            prompt_ids = self.prompt_token_ids(prompts)
            for feature in self.features:
                feature.before_turn(prompt_ids)
        super()._sync_weight()
        [self.model_version] = broadcast_object_list([self.model_version])  # TRL counts it on the main process only
        if is_first:
            self._first_version = self.model_version

    @property
    def _tokenizer(self) -> Any:
        return self.processing_class

    def prompt_token_ids(self, prompts: list) -> list[list[int]]:
        options = (self.args.chat_template_kwargs or {}) | self._prompt_options
        return [
            self.processing_class.apply_chat_template(prompt, return_dict=False, add_generation_prompt=True, **options)
            for prompt in prompts
        ]

    def packed_forward(self, model: nn.Module, rows: list[list[int]]) -> None:
        """Run `model` on sequences of token ids as TRL's loss does: packed into one row, with each shared prefix once.

        Returns nothing: callers observe the forward.
        """
        packed = TreeRow()
        for ids in rows:
            ids = torch.tensor(ids)
            zeros = torch.zeros(len(ids))
            packed.add({"input_ids": ids, "completion_mask": zeros, "old_log_probs": zeros, "group_id": 0})
        tensors = {name: tensor.to(self.accelerator.device) for name, tensor in packed.pack().items()}
        longest_q, longest_k = tensors["tree_max_seqlens"].tolist()
        model(
            input_ids=tensors["input_ids"][None],
            position_ids=tensors["position_ids"][None],
            shift_labels=tensors["shift_labels"][None],
            fused_lm_head=True,
            tree_kv_index=tensors["tree_kv_index"],
            tree_cu_seqlens_q=tensors["tree_cu_seqlens_q"],
            tree_cu_seqlens_k=tensors["tree_cu_seqlens_k"],
            tree_max_seqlen_q=longest_q,
            tree_max_seqlen_k=longest_k,
        )


def _require_conversations(dataset: object) -> None:
    """Raise `ValueError` if prompts are text. TRL's worker applies a chat template, which needs conversations."""
    first = next(iter(dataset), {}) if isinstance(dataset, Dataset) else {}
    if isinstance(first.get("prompt"), str):
        raise ValueError(
            "train_dataset has prompts that are text, and TRL's asynchronous trainer takes conversations. Map them: "
            "dataset.map(lambda row: {'prompt': [{'role': 'user', 'content': row['prompt']}]})."
        )
