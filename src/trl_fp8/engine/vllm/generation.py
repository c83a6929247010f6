"""`FP8VLLMGeneration`: TRL's `VLLMGeneration`, wired to an FP8 engine and its `InPlaceDelivery`.

start:    LLM(dummy weights, quantization_config, kv_cache_dtype)   Platform.arguments
sync:     InPlaceDelivery.deliver
generate: TRL's own, behind require_whole; verify when the engine is awake
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol

import torch
import trl.generation.vllm_generation as trl_generation
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchao.quantization import Float8Tensor
from transformers import CONFIG_MAPPING
from trl.generation.vllm_generation import VLLMGeneration

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.features.one_forward.engine_part.invariance import require_invariant_routers
from trl_fp8.features.one_forward.reference_weights import ReferenceWeights
from trl_fp8.features.shared_base.adapter_tensors import (
    adapter_tensors,
    factors,
    merged,
    merges,
    reference_parameters,
    room_for,
)
from trl_fp8.features.shared_base.engine_adapters import adapters_installed
from trl_fp8.recipe.from_model import of_adapter, outline_of
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.recipe.servable import require_same_positions
from trl_fp8.sync.audit import Replicas, all_reduce_max
from trl_fp8.sync.delivery import InPlaceDelivery, Part, SyncReport
from trl_fp8.sync.policy_checks import require_servable
from trl_fp8.sync.shards import Sharded, gathered, gathering
from trl_fp8.sync.writer import Named, Sent
from trl_fp8.upstream import vllm as upstream
from trl_fp8.upstream.patches import substituted

from .colocated import ColocatedEngine
from .compiled import TOKENS, stale, unread_adapters
from .gemms import pinned_gemm
from .images import leave_image_tokens, require_awake, require_same_prompts
from .part import EnginePart
from .platforms import platform_of
from .rollout_llm import RolloutLLM


logger = get_logger(__name__)


@contextmanager
def own_configs() -> Iterator[None]:
    """After the block transformers makes configs as it did before. vLLM registers its own for types like Qwen3-Next,
    for the whole process, and they lack fields that transformers' models ask for.
    """
    before = dict(CONFIG_MAPPING._extra_content)
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(before)


class Base(Protocol):
    """The frozen FP8 weights of a policy that does without them as soon as the engine has them."""

    def tensors(self) -> Iterator[Sent]:
        """All of the recipe's FP8 weights, by checkpoint name; `RuntimeError` if they are there no more."""

    def share(self, codes: Callable[[str], Float8Tensor]) -> None:
        """Let the policy compute with the engine's `codes` of each of these weights."""

    def originals(self) -> Iterator[Named]:
        """The same weights as they were before they were quantized, or dequantized if they cannot be had."""


class FP8VLLMGeneration(VLLMGeneration):
    """Colocated vLLM engine whose weights and KV cache follow a recipe.

    Args:
        recipe: What is FP8 (with nothing FP8: a BF16 engine through the same sync, which is what CPU needs).
        parts: What features need of the engine.
        after_sync: Called after each sync for a generation, before anything is sampled.
        engine_kwargs: The user's `vllm_engine_kwargs`.
        return_routes: Let `llm.routes` remember the experts that a mixture of experts' routers choose.
        return_survivors: Let `llm.survivors` remember the tokens that top-k, top-p and min-p leave.
        share_kernels: The trainer calls the engine's kernels, so run kernels that it can share, and those alone.
        base: What of the policy, whose LoRA adapters are trained, lives in the engine alone. None: nothing.
        **kwargs: As for TRL's `VLLMGeneration`.
    """

    pinned: dict[str, str]  # what was chosen on this device, as `vllm_engine_kwargs` would say it
    _adapters_read = True  # False: a compiled engine's have not been tried yet
    replicas: Replicas | None = None  # the ranks that have to hold the same bytes; None on one process

    def __init__(
        self,
        *,
        recipe: FP8Recipe,
        parts: Sequence[EnginePart] = (),
        after_sync: Callable[[], None] | None = None,
        engine_kwargs: dict | None = None,
        return_routes: bool = False,
        return_survivors: bool = False,
        share_kernels: bool = False,
        base: Base | None = None,
        **kwargs,
    ):
        self.recipe, self.engine_kwargs, self.parts = recipe, engine_kwargs, parts
        self.after_sync = after_sync or (lambda: None)
        self.return_routes, self.return_survivors = return_routes, return_survivors
        self.share_kernels, self.base = share_kernels, base
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        require_servable(self.model, upstream.engine_class)
        require_same_positions(outline_of(self.model), self.max_model_length)
        if self.enable_sleep_mode:
            require_awake(self.model.config)
        platform = platform_of(self.accelerator.device)
        sizes = {"max_num_seqs": self.max_num_seqs, "max_model_len": self.max_model_length}
        wanted = {name: getattr(self, name) for name in ("return_routes", "return_survivors", "share_kernels")}
        adapters = room_for(self.model) if self.base else {}
        options = wanted | {"adapters": adapters, "user": self.engine_kwargs}
        ours = platform.arguments(self.recipe, self.model.config, **sizes, **options)
        if self.return_routes:
            ours["routes_from"] = platform.routes_from
        if self.return_survivors:
            ours["survivors_from"] = platform.survivors_from
        as_rollout_llm = substituted(trl_generation, "LLM", lambda **trls: RolloutLLM(**(trls | ours)))
        invariant = platform.invariant(self.recipe) if self.share_kernels else nullcontext()
        room = adapters_installed(self.recipe, adapters) if self.base else nullcontext()
        with platform.ready(self.recipe), own_configs(), invariant, room, as_rollout_llm:
            backends = platform.linear_backends(self.recipe)
            device = self.accelerator.device
            asked = self.engine_kwargs, self._largest, self.share_kernels
            self.pinned = pinned_gemm(backends, self.recipe, self.model, device, *asked)
            ours |= self.pinned
            upstream.inspect_engine_class(tuple(self.model.config.architectures or ()))
            if outline_of(self.model).experts:
                upstream.make_group_of_experts()
            super()._init_vllm()
        leave_image_tokens(self.llm)
        if self.share_kernels:
            platform.invariance.require(upstream.engine_config(self.llm))
            require_invariant_routers(upstream.engine_model(self.llm))
        if self.share_kernels or self.base:
            self.llm.share_weights()
        if self.return_survivors and (self.generation_kwargs.get("top_k", self.top_k) or 0) <= 0:
            # vLLM returns survivors only where top_k bounds their number: by the whole vocabulary, which is no bound
            vocabulary = upstream.engine_config(self.llm).model_config.get_vocab_size()
            self.generation_kwargs = self.generation_kwargs | {"top_k": vocabulary}
        self.engine = ColocatedEngine(self.llm, self.model, self.recipe, platform, self._wake_weights)
        self.numerics = replace(self.engine.numerics, mismatch_bound=platform.mismatch_bound)
        if self.accelerator.num_processes > 1:
            of_engine = partial(all_reduce_max, group=self.tp_group) if self.tensor_parallel_size > 1 else None
            place = self.accelerator.process_index, self.tensor_parallel_size
            self.replicas = Replicas(*place, all_reduce_max, of_engine)
        # What is gathered, or merged, lasts until the next tensor is asked for
        dealt = self._dist.is_zero3 or self._dist.is_fsdp
        carried = (part.carried(self) for part in self.parts)
        base, constants = self._frozen(dealt) if self.base else (), self._constants()
        self.delivery = InPlaceDelivery(
            self.engine,
            self.model,
            self.recipe,
            frozen=(*base, constants),
            at_once=dealt or (is_peft_model(self.model) and not self.base),
            replicas=self.replicas,
            carried=[each for each in carried if each is not None],
        )
        if not self.enable_sleep_mode:  # else the first sync does, once it has woken the engine
            self.delivery.send(constants)
        if self.base:
            self._wake_weights()
            self.delivery.send(base[0])
            self.base.share(self.engine.kernels.codes)
        compiled = upstream.engine_config(self.llm).compilation_config.mode  # 0: nothing is
        self._adapters_read = not (self.base and compiled)  # the first sync tries them: now weights are random
        logger.info(f"engine: {self.numerics}")

    def _frozen(self, dealt: bool) -> tuple[Part, Part]:
        """The FP8 base, and what else of the policy nobody trains."""
        recipe, layout = self.recipe, self.engine.layout
        base = {name for w in recipe.fp8_tensors for name in (recipe.engine_name(w), recipe.scale_name(w))}
        kept = {recipe.engine_name(name) for name, parameter in self._parameters() if not parameter.requires_grad}

        def kept_tensors() -> AbstractContextManager[Iterator[Sent]]:
            return closing(self._whole(lambda: (p for p in self._parameters() if recipe.engine_name(p[0]) in kept)))

        base_part = Part(layout.part(base), lambda: closing(self.base.tensors()), at_once=True)
        return base_part, Part(layout.part(kept), kept_tensors, at_once=dealt)

    def _constants(self) -> Part:
        """The engine's constants, which are written again, as they were found, only after they changed.

        The copies are on the host: what wrote to the engine's memory by mistake does not reach them. vLLM itself saves
        buffers before it sleeps and restores them when it wakes.
        """
        layout, kept = self.engine.constants, {}

        def as_found() -> AbstractContextManager[Iterator[Named]]:
            if not kept:
                kept.update((name, tensor.to("cpu", copy=True)) for name, tensor in layout.held.items())
            return nullcontext((name, tensor.to(self.accelerator.device)) for name, tensor in kept.items())

        return Part(layout, as_found, survives_sleep=True)

    def _parameters(self) -> Iterator[Named]:
        """The policy's parameters by checkpoint name, without adapters and copies of modules that are not active."""
        for name, parameter in self.model.named_parameters():
            if not of_adapter(name, self.model):
                yield checkpoint_name(name), parameter

    def _largest(self, values: list[float]) -> list[float]:
        """Of each over all ranks of the job."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            all_reduce_max(tensor)
        return tensor.tolist()

    @property
    def last_sync(self) -> SyncReport | None:
        return self.delivery.last

    @property
    def audit_failures(self) -> int:
        return self.delivery.failures

    @property
    def kernels(self) -> EngineKernels:
        return self.engine.kernels

    def begin(self, occasion: tuple[int, int], keep_weights: bool) -> None:
        self.llm.begin(occasion, keep_weights)

    def policy_tensors(self) -> AbstractContextManager[Iterator[Named]]:
        """The policy's `(checkpoint name, full tensor)`, merged and gathered (a collective), in a `with` block. What
        lives in the engine alone is among them on the main process.
        """
        return closing(self._merged() if self.base else self._iter_named_params())

    def _merged(self) -> Iterator[Named]:
        named = self.model.named_parameters
        adapters = factors(self.model, self._whole(lambda: (each for each in named() if ".lora_" in each[0])))
        yield from merged(self._whole(self._parameters), adapters)
        if self.accelerator.is_main_process:
            yield from merged(self.base.originals(), adapters)

    def _iter_named_params(self) -> Iterator[Named]:
        """TRL's iteration; adapters that it merged are unmerged even if it is abandoned half-way."""
        self._reshard()
        try:
            with gathering() if self._dist.is_zero3 or self._dist.is_fsdp else nullcontext():
                for name, parameter in super()._iter_named_params():
                    if ".modules_to_save." not in name:  # of adapters that are not active, such as TRL's reference
                        yield name, parameter
        finally:
            if is_peft_model(self.model) and any(getattr(layer, "merged", False) for layer in self.model.modules()):
                self.model.unmerge_adapter()

    def _sent_tensors(self) -> AbstractContextManager[Iterator[Sent]]:
        """`policy_tensors`, but what FSDP2 and ZeRO-3 deal over ranks is gathered as the engine holds it. Beside a
        frozen base: adapters, and what else is trained.
        """
        if self.base:
            named = self.model.named_parameters
            sent = self._whole(lambda: (each for each in named() if each[1].requires_grad or ".lora_" in each[0]))
            return closing(adapter_tensors(self.model, self.engine.slots, sent))
        self._reshard()
        parameters = [(checkpoint_name(name), parameter) for name, parameter in self.model.named_parameters()]
        if is_peft_model(self.model) or not self._dealt_alike(parameters):
            return self.policy_tensors()
        return closing(gathered(parameters, self.recipe, self.engine.layout, self.accelerator.device))

    def _dealt_alike(self, parameters: list[Named]) -> bool:
        """FSDP2 or ZeRO-3 deals these over the same ranks, so that they are gathered as the engine holds them."""
        dealt = [Sharded.of(parameter) for _, parameter in parameters] if self._dist.is_zero3 else []
        return self._dist.is_fsdp or bool(dealt) and None not in dealt and len({part.group for part in dealt}) == 1

    def reference_weights(self, model: nn.Module) -> ReferenceWeights:
        """Of the reference `model`: a copy of the policy, or the policy itself, which has its adapters disabled, or
        those of the reference active, whenever these weights are held.
        """
        frozen = {name for part in self.delivery.frozen for name in part.layout.names}
        pieces = self.engine.layout.pieces.values()
        read = {p.name for p in pieces if isinstance(p.parameter, nn.Parameter) and self.engine.kernels.reads(p)}
        dealt = self._dist.is_zero3 or self._dist.is_fsdp
        layout = self.engine.layout.part(read - frozen)
        tensors = partial(self._reference_tensors, model, frozenset(layout.names))
        summed = is_peft_model(model) and not self.base
        return ReferenceWeights(self.delivery, Part(layout, tensors, at_once=dealt or summed))

    def _reference_tensors(self, model: nn.Module, names: Set[str]) -> AbstractContextManager[Iterator[Sent]]:
        """What the engine calls `names` of a reference."""
        sent = self._reference(model, names)
        if self.base:
            adapters = (each for each in model.named_parameters() if ".lora_" in each[0])
            sent = adapter_tensors(model, self.engine.slots, chain(self._whole(lambda: adapters), sent))
        return closing((name, tensor) for name, tensor in sent if self.recipe.engine_name(name) in names)

    def _reference(self, model: nn.Module, names: Set[str]) -> Iterator[Sent]:
        self._reshard(model)
        own = [each for each in reference_parameters(model) if self.recipe.engine_name(each[0]) in names]
        adapted = is_peft_model(model)
        summed = adapted and not self.base and merges(model)
        with self._dist.gather_params(list(model.parameters()) if adapted else []):
            if summed:
                model.merge_adapter()
            try:
                if self._dist.is_fsdp or (not adapted and self._dealt_alike(own)):
                    yield from gathered(own, self.recipe, self.engine.layout, self.accelerator.device)
                    return
                for name, parameter in own:
                    with self._dist.gather_params([] if adapted else [parameter]):
                        yield name, parameter.data
            finally:
                if summed:
                    model.unmerge_adapter()

    def _whole(self, parameters: Callable[[], Iterator[Named]]) -> Iterator[Named]:
        """Parameters, those that FSDP2 deals over ranks gathered, a collective, until the next one is asked for."""
        self._reshard()  # first: an unsharded parameter is another object, which has no memory any more
        dealt = (self.recipe, self.engine.layout, self.accelerator.device)
        yield from gathered(list(parameters()), *dealt) if self._dist.is_fsdp else parameters()

    def _reshard(self, model: nn.Module | None = None) -> None:
        """After a forward without backward FSDP2 leaves some parameters unsharded. `model`: None for the policy."""
        for module in (model or self.model).modules() if self._dist.is_fsdp else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sync_weights(self) -> None:
        self.delivery.deliver(self._sent_tensors)
        if not self._adapters_read:
            self._require_read_adapters()
            self._adapters_read = True
        self.after_sync()

    def _require_read_adapters(self) -> None:
        """Raise `RuntimeError` on all ranks if the compiled engine of one does not compute with its adapters."""
        with self._cache_awake():
            unread = unread_adapters(upstream.engine_model(self.llm), lambda: self.llm.log_probs(TOKENS))
            self.engine.reset_prefix_cache()
        [found] = self._largest([len(unread)])
        if found:
            raise stale(unread)

    def send_weights(self) -> None:
        """Bring the engine to the policy's current weights, and leave what a sync brings beside them as it is."""
        self.delivery.deliver(self._sent_tensors, prepare=False)

    def generate(
        self, prompts: list, images: list | None, num_generations: int, profiler: AbstractContextManager | None = None
    ) -> tuple:
        """As TRL's, but only from an engine that holds what was delivered.

        Ranks that share an engine call this together, with equally many prompts (`ValueError`). No others wait.
        """
        if self.tensor_parallel_size > 1:
            self._require_as_many_prompts(len(prompts))
        if self.enable_sleep_mode and self.llm.weights_kept:
            self._wake_weights()  # the weights of the last sync: TRL would sync again
        if not (self.enable_sleep_mode and self._llm_weights_sleeping):  # else TRL syncs first
            self.delivery.require_whole()
        output = super().generate(prompts, images, num_generations, self._verified(profiler or nullcontext()))
        require_same_prompts(prompts, output[0])
        return output

    def _require_as_many_prompts(self, count: int) -> None:
        """TRL 1.16 finds a rank's completions among its engine's by the number of that rank's own prompts."""
        counts = torch.tensor([count, -count], device=self.accelerator.device)
        all_reduce_max(counts, group=self.tp_group)
        most, least = counts[0].item(), -counts[1].item()
        if most != least:
            raise ValueError(
                f"vllm_generation.generate was called with {count} prompts on this rank, and with {least} to {most} "
                f"on the ranks of its engine (vllm_tensor_parallel_size={self.tensor_parallel_size}): TRL would hand "
                "completions of one rank to another. Let rollout_func call it equally often, with equally many "
                "prompts, on all of them, or set vllm_tensor_parallel_size=1."
            )

    def prefill(self, tokens: list[int]) -> list[int]:
        """Let the engine compute its layers for a sequence; ranks that share one do so together, for the first one's.

        Returns that sequence.
        """
        if self.tensor_parallel_size > 1:
            of_first = [tokens]
            torch.distributed.broadcast_object_list(of_first, group=self.tp_group, group_src=0)
            [tokens] = of_first
        with self._cache_awake():
            self.llm.prefill(tokens)
        return tokens

    @contextmanager
    def _cache_awake(self) -> Iterator[None]:
        """For a policy that computes with the engine's weights, which are awake."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            if self.enable_sleep_mode:
                self.llm.sleep(level=2)

    @contextmanager
    def _verified(self, profiler: AbstractContextManager) -> Iterator[None]:
        """TRL enters `profiler` after waking the KV cache and right before sampling."""
        self.delivery.verify()
        with profiler:
            yield

    def _wake_weights(self) -> bool:
        """True: the engine slept without its weights."""
        lost = self.enable_sleep_mode and self._llm_weights_sleeping and not self.llm.weights_kept
        if self.enable_sleep_mode:
            trl_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        return lost
