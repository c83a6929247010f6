"""`ColocatedEngine`: vLLM in this process, with what a delivery needs of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn
from vllm import LLM

from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.recipe.from_model import caches_of, persistent_buffers
from trl_fp8.recipe.outline import kv_layers
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


class Generation(EngineOfPolicy, Protocol):
    """The part of `FP8VLLMGeneration` that an `EnginePart` may use."""

    platform: Platform
    llm: RolloutLLM
    engine: "ColocatedEngine"
    weights: PolicyWeights
    delivery: InPlaceDelivery
    replicas: Replicas | None
    generation_kwargs: dict  # sampling parameters of TRL's, which win over its flags
    top_k: int

    def wake_weights(self) -> bool:
        """Wake the weights. Return True if the engine lost them in its sleep."""

    def cache_awake(self) -> AbstractContextManager[None]:
        """Wake the KV cache inside the block."""

    def largest(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum of `values` over all ranks of the job. Collective."""

    def sample_with(self, **parameters: object) -> None:
        """Set sampling parameters of vLLM for each generation from now on."""


class ColocatedEngine:
    """`sync.delivery.Engine` whose tensors are written in place; `wake` gives them memory if the engine sleeps.

    `ValueError` if it holds tensors under other names than the policy's, or where no sync can reach; `RuntimeError` if
    a kernel does not keep what it is sent.
    """

    def __init__(self, llm: LLM, policy: nn.Module, recipe: FP8Recipe, wake: Callable[[], bool]):
        self.llm, self.wake, self._recipe = llm, wake, recipe
        self.model = upstream.engine_model(llm)
        keep_untiled_scales(self.model)
        require_auditable(self.model)
        buffers = {recipe.engine_name(name) for name, _ in persistent_buffers(policy)}
        of_policy = engine_layout(self.model, recipe.linears, buffers)
        require_same_tensors(policy, recipe, of_policy)
        added = [piece for each in self.model.modules() if isinstance(each, Added) for piece in each.pieces()]
        self.layout = Layout([*of_policy.pieces.values(), *added])
        self.numerics = EngineNumerics(
            fp8_kernels(self.model), activation_scaling(self.model), query_rounded=quantizes_query(self.model)
        )
        self._kv_layers = kv_layers(caches_of(policy.config.get_text_config()))

    def kv_scales(self) -> KVScaleCopies:
        """Return the scales of the FP8 KV cache. Raises as `fp8_attention_layers`."""
        return KVScaleCopies(fp8_attention_layers(self.model, self._kv_layers, self._recipe.kv_cache_skip_layers))

    def constants(self, device: torch.device) -> TensorGroup:
        """Return the buffers that no policy has: rotary angles, normalizers of embeddings, maps of experts.

        vLLM makes them at its start and only reads them. If an audit finds one changed, all are written again from
        copies on the host, which a stray write on the device cannot reach. vLLM restores buffers itself when it wakes.
        Scales of k, v and q are left out: `KVScaleCopies` verifies those that an FP8 KV cache uses, and nothing reads
        the others.
        """
        copies: dict[str, torch.Tensor] = {}
        layout = constants_layout(self.model, self.layout)

        def as_found() -> AbstractContextManager[Iterator[NamedTensor]]:
            if not copies:
                copies.update((name, tensor.to("cpu", copy=True)) for name, tensor in layout.held.items())
            return nullcontext((name, tensor.to(device)) for name, tensor in copies.items())

        return TensorGroup(layout, as_found, survives_sleep=True)

    def arrive(self) -> None:
        """Do nothing: what was written is where the engine's kernels read it."""

    def reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight sync, because requests are still running: cached "
                "prefixes of the old weights would be reused. Finish or abort running requests before the sync."
            )
        self.llm.llm_engine.reset_encoder_cache()  # what a vision tower made of images
