"""The kernels of an engine, for a policy: to be compared with it, or to compute with them."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn
from transformers import PretrainedConfig

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import Platform
from trl_fp8.features.one_forward.followed_reference import ReferenceWeights
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import Part
from trl_fp8.upstream import vllm as upstream

from .invariance import CUDA, Invariance, invariant_on_cuda, require_cuda_kernels, require_invariant_routers
from .vllm_kernels import VLLMKernels


# Largest mean |log-prob difference| of a trainer that calls the same kernels. On CPU reductions in FP64 have one
# result, whatever the batch, and both sides compute log-softmax in FP32. The bound of CUDA is a third of what BF16
# rollouts leave at 2 layers, and has not been measured
MISMATCH_BOUNDS = {"cpu": 1e-5, "cuda": 1e-3}


class KernelsPart(EnginePart):
    """`kernels` can be called as soon as the engine is there."""

    def ready(self, generation: FP8VLLMGeneration) -> None:
        if generation.platform.name == "cuda":
            from .flash_attention import PackedAttention  # vLLM's CPU build has no FlashAttention
        else:
            from .cpu_packed import PackedAttention  # imports the reference kernels of a CPU engine
        engine = generation.engine
        # The engine has made room for so many tokens at once
        tokens = upstream.engine_config(generation.llm).scheduler_config.max_num_batched_tokens
        self.kernels = VLLMKernels(engine.model, engine.layout, generation.recipe, PackedAttention, tokens)


class SharedKernelsPart(KernelsPart):
    """A trainer computes with them, so the engine runs kernels that it can share, and those alone."""

    batch_invariant = True
    mismatch_bound: float  # of `MISMATCH_BOUNDS`, from `started` on

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        if platform.name == "cuda":
            require_cuda_kernels(config.get_text_config(), platform.capability, platform.flash_attention)
        return invariance_of(platform).arguments()

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        return invariant_on_cuda() if platform.name == "cuda" else nullcontext()

    def started(self, generation: FP8VLLMGeneration) -> None:
        self.mismatch_bound = MISMATCH_BOUNDS[generation.platform.name]
        invariance_of(generation.platform).require(upstream.engine_config(generation.llm))
        require_invariant_routers(upstream.engine_model(generation.llm))
        generation.llm.share_weights()

    def reference_weights(self, generation: FP8VLLMGeneration, model: nn.Module) -> ReferenceWeights:
        """Of the reference `model`: a copy of the policy, or the policy itself, which has its adapters disabled, or
        those of the reference active, whenever these weights are held.
        """
        weights, layout = generation.weights, generation.engine.layout
        frozen = {name for part in generation.delivery.frozen for name in part.layout.names}
        pieces = layout.pieces.values()
        read = {p.name for p in pieces if isinstance(p.parameter, nn.Parameter) and self.kernels.reads(p)}
        part = layout.part(read - frozen)
        names = frozenset(part.names)
        part = Part(part, partial(weights.reference, model, names), at_once=weights.at_once(model))
        parameters = partial(weights.parts_of_reference, model, names)
        replicas = generation.replicas
        return ReferenceWeights(generation.delivery, part, parameters, replicas and replicas.reduce_max)


def invariance_of(platform: Platform) -> Invariance:
    if platform.name == "cuda":
        return CUDA
    from trl_fp8.engine.vllm.cpu_platform import KERNELS

    return Invariance(KERNELS)
