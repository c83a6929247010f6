"""`DeliveredGeneration`: TRL's `VLLMGeneration`, but with audited deliveries of weights (sync/delivery.py)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import Delivery, EngineNumerics
from trl_fp8.recipe.from_model import of_adapter
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.audit import Replicas
from trl_fp8.sync.records import SyncReport
from trl_fp8.sync.shards import gathering
from trl_fp8.sync.writer import NamedTensor

from .part import EnginePart
from .policy_weights import PolicyWeights, adapters_of_parameters, merged, reshard


class DeliveredGeneration(VLLMGeneration):
    """Base of the generation objects for colocated engines and servers.

    A subclass starts its engine in `_init_vllm` and sets the attributes declared here, which
    `engine.protocol.RolloutEngine` explains.
    """

    numerics: EngineNumerics
    weights: PolicyWeights
    delivery: Delivery
    pinned: dict[str, str]
    kernels: EngineKernels | None = None
    replicas: Replicas | None = None
    sync_metrics: Mapping[str, float] = {}

    def __init__(
        self,
        *,
        recipe: FP8Recipe,
        parts: Sequence[EnginePart] = (),
        after_sync: Callable[[], None] = lambda: None,
        **kwargs,
    ):
        self.recipe = recipe
        self.parts = parts
        self.after_sync = after_sync
        super().__init__(**kwargs)

    def _one_of(self, hook: str) -> Any:
        """Call the method `hook` of all parts. Return the only result that is not None, or None if there is none."""
        results = []
        for part in self.parts:
            result = getattr(part, hook)(self)
            if result is not None:
                results.append(result)
        if len(results) > 1:
            raise RuntimeError(f"{len(results)} features decide `{hook}` of one engine, and it takes one.")
        return results[0] if results else None

    @property
    def last_sync(self) -> SyncReport | None:
        return self.delivery.last

    @property
    def audit_failures(self) -> int:
        return self.delivery.failures

    def sync_weights(self) -> None:
        """Deliver the policy's weights and new KV scales before a generation, and let features check the engine."""
        self.delivery.deliver(self.weights.tensors_to_send)
        for part in self.parts:
            part.synced(self)
        self.after_sync()

    def send_weights(self) -> None:
        """Deliver the policy's weights before a loss, with the KV scales of the last sync."""
        self.delivery.deliver(self.weights.tensors_to_send, prepare=False)

    def policy_tensors(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        """Return an iterator over the policy's `(checkpoint name, full tensor)` pairs, in a `with` block. Collective.

        Tensors that exist only in the engine (a shared FP8 base) are yielded on the main process only.
        """
        return self.weights.policy_tensors()

    def _iter_named_params(self) -> Iterator[NamedTensor]:
        """Yield the same tensors as TRL, but merge and unmerge adapters weight by weight, not in the whole model."""
        reshard(self.model, self._dist)
        gather_errors = gathering() if self._dist.is_zero3 or self._dist.is_fsdp else nullcontext()
        if not is_peft_model(self.model):
            with gather_errors:
                yield from super()._iter_named_params()
            return
        adapters = adapters_of_parameters(self.model)
        with gather_errors, self._dist.gather_params(list(self.model.parameters())):
            for name, parameter in self.model.named_parameters():
                if not of_adapter(name, self.model):
                    with merged(adapters.get(id(parameter), ())):
                        weight = parameter.detach()
                        if isinstance(weight, DTensor):
                            weight = weight.to(self.accelerator.device).full_tensor()
                        yield checkpoint_name(name), weight
