"""`FP8VLLMGeneration`: TRL's `VLLMGeneration`, wired to a colocated FP8 engine and its `InPlaceDelivery`.

start       `_init_vllm` lets TRL create a `RolloutLLM` with dummy weights and with the arguments of `Platform` and of
            parts (`quantization_config`, `kv_cache_dtype`, ...). Then it builds `engine`, `weights` and `delivery`
sync        `sync_weights` (delivered.py) calls `InPlaceDelivery.deliver(PolicyWeights.tensors_to_send)`
generate    calls `InPlaceDelivery.require_whole`, then TRL's `generate`, in which `InPlaceDelivery.verify` runs before
            vLLM samples
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import trl.generation.vllm_generation as trl_generation
from accelerate.logging import get_logger
from transformers import PretrainedConfig
from vllm import LLM
from vllm.multimodal.processing.processor import MultiModalPromptUpdates, PlaceholderFeaturesInfo

from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.servable import require_same_positions
from trl_fp8.sync.audit import Replicas, all_reduce_max
from trl_fp8.sync.delivery import InPlaceDelivery
from trl_fp8.sync.records import Occasion
from trl_fp8.upstream import vllm as upstream
from trl_fp8.upstream.patches import substituted

from .colocated import ColocatedEngine
from .cpu.shared_memory import remove_abandoned_memory
from .delivered import DeliveredGeneration
from .gemms import pinned_gemm
from .platform import Platform, platform_of
from .policy_weights import PolicyWeights
from .rollout_llm import RolloutLLM


logger = get_logger(__name__)


class FP8VLLMGeneration(DeliveredGeneration):
    """Colocated vLLM engine whose weights and KV cache follow a recipe.

    Args:
        recipe: Which tensors are FP8. Without FP8 tensors the engine is BF16, and syncs work in the same way.
        engine_kwargs: The user's `vllm_engine_kwargs`.
        parts: Hooks of features into the engine, see `EnginePart`.
        after_sync: Called after each sync for a generation, before anything is sampled.
        **kwargs: The arguments of TRL's `VLLMGeneration`.

    Attributes, beside those of `RolloutEngine`:
        llm: vLLM's `LLM`.
        engine: The interface of the same engine for deliveries.
        weights: The source of the tensors that a sync sends.
        delivery: The `InPlaceDelivery` of these tensors to `engine`.
    """

    def __init__(self, *, engine_kwargs: dict | None = None, **kwargs):
        self.engine_kwargs = engine_kwargs
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        require_same_positions(outline_of(self.model), self.max_model_length)
        if self.enable_sleep_mode:
            require_sleep_supported(self.model.config)

        # 1. Start the engine
        self.platform: Platform = platform_of(self.accelerator.device)
        self._start_engine()
        leave_image_tokens(self.llm)
        for part in self.parts:
            part.started(self)
        self.engine = ColocatedEngine(self.llm, self.model, self.recipe, self.wake_weights)
        self.numerics = self.engine.numerics

        # 2. Prepare the delivery of weights
        if self.accelerator.num_processes > 1:
            reduce_in_engine = None
            if self.tensor_parallel_size > 1:
                reduce_in_engine = partial(all_reduce_max, group=self.tp_group)
            rank = self.accelerator.process_index
            self.replicas = Replicas(rank, self.tensor_parallel_size, all_reduce_max, reduce_in_engine)
        self.weights = self._one_of("weights") or PolicyWeights(self)
        if self.platform.name == "cpu" and not self.enable_sleep_mode:
            # vLLM's first forward may replace a table of rotary angles by a table in the engine's dtype. Run a forward
            # before `constants` lists such tables. On a GPU vLLM has run a forward by now, to measure its memory
            with torch.random.fork_rng(devices=[]):
                self.llm.prefill([0])
        constants = self.engine.constants(self.accelerator.device)
        self.delivery = InPlaceDelivery(
            self.engine,
            self.model,
            self.recipe,
            frozen=(*self.weights.frozen, constants),
            one_by_one=self.weights.yields_one_by_one(self.model),
            replicas=self.replicas,
            carried=self._one_of("carried"),
        )
        if not self.enable_sleep_mode:  # in sleep mode the first sync wakes the engine, and sends the constants then
            self.delivery.send(constants)

        # 3. Let features prepare what they need of the engine
        for part in self.parts:
            part.ready(self)
        kernels = [part.kernels for part in self.parts if part.kernels is not None]
        self.kernels = kernels[0] if kernels else None
        logger.info(f"engine: {self.numerics}")

    def _start_engine(self) -> None:
        """Let TRL create the engine, with arguments of the platform and of parts, and inside their contexts."""
        platform = self.platform
        recipe = self.recipe
        config = self.model.config
        arguments = platform.arguments(
            recipe,
            config,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_length,
            parts=self.parts,
            user=self.engine_kwargs,
        )
        if platform.name == "cpu" and recipe.tensor_parallel_size > 1:
            remove_abandoned_memory(self.accelerator.process_index, recipe.tensor_parallel_size)
        with ExitStack() as contexts:
            contexts.enter_context(platform.ready(recipe))
            for part in self.parts:
                contexts.enter_context(part.starting(platform, recipe))
            self.pinned = pinned_gemm(
                platform.linear_backends(recipe),
                recipe,
                policy=self.model,
                device=self.accelerator.device,
                user=self.engine_kwargs,
                agree=self.largest,
                max_num_seqs=self.max_num_seqs,
                batch_invariant=any(part.batch_invariant for part in self.parts),
            )
            upstream.import_engine_class(tuple(config.architectures or ()))
            if outline_of(self.model).experts:
                upstream.make_group_of_experts()

            def make_engine(**trl_arguments: Any) -> RolloutLLM:
                all_arguments = trl_arguments | arguments | self.pinned
                return RolloutLLM(parts=self.parts, **all_arguments)

            with substituted(trl_generation, "LLM", make_engine):
                super()._init_vllm()

    def largest(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum of `values` over all ranks of the job. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            all_reduce_max(tensor)
        return tensor.tolist()

    def sample_with(self, **parameters: object) -> None:
        """Set sampling parameters of vLLM for each generation from now on."""
        self.generation_kwargs = self.generation_kwargs | parameters

    def begin(self, occasion: Occasion, keep_weights: bool) -> None:
        self.llm.begin(occasion, keep_weights)

    def generate(
        self, prompts: list, images: list | None, num_generations: int, profiler: AbstractContextManager | None = None
    ) -> tuple:
        """Generate as TRL does, but only from an engine that holds what was delivered.

        Ranks that share an engine call this together. Other ranks do not wait.

        Raises:
            ValueError: Ranks that share an engine have different numbers of prompts.
            RuntimeError: The engine holds no complete policy, or was changed since the last sync.
        """
        if self.tensor_parallel_size > 1:
            self._require_as_many_prompts(len(prompts))
        if self.enable_sleep_mode and self.llm.asleep_with_weights:
            self.wake_weights()  # The last sync's weights still exist. If they slept on, TRL would sync again
        # If the engine's weights were discarded, TRL syncs before it samples, so there is nothing to check yet
        weights_discarded = self.enable_sleep_mode and self._llm_weights_sleeping
        if not weights_discarded:
            self.delivery.require_whole()
        output = super().generate(prompts, images, num_generations, self._verified(profiler or nullcontext()))
        require_same_prompts(prompts, output[0])
        return output

    def _require_as_many_prompts(self, count: int) -> None:
        """Raise `ValueError` unless all ranks of the engine have `count` prompts. TRL 1.16 assumes equal numbers: it
        finds a rank's completions by the number of the rank's own prompts.
        """
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
        if self.tensor_parallel_size > 1:
            objects = [tokens]  # replaced in place by the first rank's tokens
            torch.distributed.broadcast_object_list(objects, group=self.tp_group, group_src=0)
            [tokens] = objects
        with self.cache_awake():
            self.llm.prefill(tokens)
        return tokens

    @contextmanager
    def cache_awake(self) -> Iterator[None]:
        """Wake the KV cache inside the block. The weights are awake already: the policy computes with them."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            if self.enable_sleep_mode:
                self.llm.sleep(level=2)

    @contextmanager
    def _verified(self, profiler: AbstractContextManager) -> Iterator[None]:
        """Verify the engine, then enter `profiler`. TRL enters this context after waking the KV cache and before it
        samples.
        """
        self.delivery.verify()
        with profiler:
            yield

    def wake_weights(self) -> bool:
        """Wake the weights. Return whether the engine lost them in its sleep."""
        lost = self.enable_sleep_mode and self._llm_weights_sleeping and not self.llm.asleep_with_weights
        if self.enable_sleep_mode:
            trl_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        return lost


def leave_image_tokens(llm: LLM) -> None:
    """Make vLLM insert image tokens only into prompts that lack some, and leave complete prompts as they are.

    TRL's processor writes as many image tokens as an image has embeddings, because the trainer's forward needs them.
    vLLM 0.31 takes the first image token for a placeholder and inserts all image tokens once more. Rollouts would then
    continue another prompt than the prompt that the trainer scores.
    """
    processor = llm.renderer.mm_processor
    if processor is None:
        return
    insert_tokens = processor._apply_prompt_updates

    def insert_missing_tokens(
        token_ids: list[int], updates: MultiModalPromptUpdates
    ) -> tuple[list[int], dict[str, list[PlaceholderFeaturesInfo]]]:
        placeholders = processor._find_mm_placeholders(token_ids, updates)
        for modality, items in updates.items():
            if len(placeholders.get(modality, ())) != len(items):  # the prompt lacks tokens of some image
                return insert_tokens(token_ids, updates)
        return token_ids, placeholders

    processor._apply_prompt_updates = insert_missing_tokens


def require_sleep_supported(config: PretrainedConfig) -> None:
    """Raise `ValueError` for a model whose engine loses tensors in sleep mode that no sync restores."""
    if getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None):
        raise ValueError(
            f"vllm_enable_sleep_mode=True with a model of type {config.model_type!r}: vLLM adds buffers to the states "
            "of the first layers, with images or without, and these lose their contents in its sleep. Set "
            "vllm_enable_sleep_mode=False."
        )


def require_same_prompts(sent: list[list[int]], returned: list[list[int]]) -> None:
    """Raise `RuntimeError` if the engine continued prompts that differ from those that the trainer scores."""
    different = []  # numbers of prompts
    for number, (prompt, continued) in enumerate(zip(sent, returned, strict=True)):
        if list(prompt) != list(continued):
            different.append(number)
    if different:
        first = different[0]
        raise RuntimeError(
            f"vLLM continued {len(different)} of {len(sent)} prompts with other tokens than the trainer scores, the "
            f"first with {len(returned[first])} instead of {len(sent[first])}: its processor divides images otherwise "
            "than processing_class. Save processing_class into the model's folder, or give vLLM its settings: "
            "vllm_engine_kwargs={'mm_processor_kwargs': {...}}."
        )
