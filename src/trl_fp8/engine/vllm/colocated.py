"""`ColocatedEngine`: a vLLM engine in this process, to which weight syncs are delivered."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn
from vllm import LLM

from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.recipe.from_model import caches_of, persistent_buffers
from trl_fp8.recipe.outline import kv_layers_of
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.audit import Replicas
from trl_fp8.sync.delivery import InPlaceDelivery, TensorGroup
from trl_fp8.sync.pieces import Layout
from trl_fp8.sync.policy_checks import require_same_tensors
from trl_fp8.sync.writer import NamedTensor
from trl_fp8.upstream import vllm as upstream

from .layout import Added, constants_layout, engine_layout
from .numerics import activation_scaling, fp8_kernels, keep_untiled_scales, quantizes_query, require_auditable
from .platform import Platform
from .policy_weights import EngineOfPolicy, PolicyWeights
from .rollout_llm import RolloutLLM
from .scale_copies import KVScaleCopies, fp8_attention_layers


class Delivered(EngineOfPolicy, Protocol):
    """The attributes of `DeliveredGeneration` that an `EnginePart` may use, with a colocated engine or a server."""

    weights: PolicyWeights
    delivery: InPlaceDelivery
    replicas: Replicas | None


class Generation(Delivered, Protocol):
    """The attributes and methods of `FP8VLLMGeneration` that an `EnginePart` may use."""

    platform: Platform
    llm: RolloutLLM
    engine: "ColocatedEngine"
    generation_kwargs: dict  # TRL's `generation_kwargs`: sampling parameters, which override the flags
    top_k: int

    def wake_weights(self) -> bool:
        """Wake the engine's weights. Return whether sleep mode discarded their values."""

    def cache_awake(self) -> AbstractContextManager[None]:
        """Keep the KV cache awake inside the block."""

    def largest(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum of `values` over all ranks of the job. Collective."""

    def sample_with(self, **parameters: object) -> None:
        """Set sampling parameters of vLLM for all later generations."""


class ColocatedEngine:
    """A `sync.delivery.Engine` whose tensors a sync writes in place.

    Args:
        wake: Wakes the engine's weights and returns whether sleep mode discarded their values; see
            `Generation.wake_weights`.

    Raises:
        ValueError: The engine's tensor names differ from the policy's, or a sync cannot reach one of its tensors.
        RuntimeError: A kernel does not keep the weights in the form in which a sync sends them.
    """

    def __init__(self, llm: LLM, policy: nn.Module, recipe: FP8Recipe, wake: Callable[[], bool]):
        self.llm = llm
        self.wake = wake
        self._recipe = recipe
        self.model = upstream.engine_model(llm)
        keep_untiled_scales(self.model)
        require_auditable(self.model)
        buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(policy)}
        policy_layout = engine_layout(self.model, recipe.linears, buffers)
        require_same_tensors(policy, recipe, policy_layout)
        pieces = list(policy_layout.pieces.values())
        for module in self.model.modules():
            if isinstance(module, Added):  # a layer that a feature adds to vLLM's model, such as an adapter
                pieces += module.pieces()
        self.layout = Layout(pieces)
        self.numerics = EngineNumerics(
            fp8_kernels(self.model), activation_scaling(self.model), query_rounded=quantizes_query(self.model)
        )
        self._kv_layers = kv_layers_of(caches_of(policy.config.get_text_config()))

    def kv_scales(self) -> KVScaleCopies:
        """Return the engine's copies of the FP8 KV cache's scales.

        Raises `RuntimeError` if the engine has copies that a sync cannot set.
        """
        return KVScaleCopies(fp8_attention_layers(self.model, self._kv_layers, self._recipe.kv_cache_skip_layers))

    def constants(self, device: torch.device) -> TensorGroup:
        """Return the engine's constant buffers: rotary angles, normalizers of embeddings, maps of experts.

        The policy has no such tensors. vLLM creates the buffers at its start and only reads them afterwards. If an
        audit finds that one has changed, all are written again from copies in host memory, which a stray write on the
        device cannot reach. After sleep vLLM itself restores the buffers.

        KV scales are not among these buffers: `KVScaleCopies` verifies the scales of an FP8 KV cache, and nothing
        reads the scales of other layers.
        """
        copies: dict[str, torch.Tensor] = {}
        layout = constants_layout(self.model, self.layout)

        def original_values() -> AbstractContextManager[Iterator[NamedTensor]]:
            # The first delivery makes the copies
            if not copies:
                copies.update((name, tensor.to("cpu", copy=True)) for name, tensor in layout.held.items())
            return nullcontext((name, tensor.to(device)) for name, tensor in copies.items())

        return TensorGroup(layout, original_values, survives_sleep=True)

    def arrive(self) -> None:
        """Do nothing: a sync writes directly into the tensors that the engine's kernels read."""

    def reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight sync, because requests are still running: cached "
                "prefixes of the old weights would be reused. Finish or abort running requests before the sync."
            )
        self.llm.llm_engine.reset_encoder_cache()  # outputs of a vision tower, also of the old weights
