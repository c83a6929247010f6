"""`DeliveredGeneration`: what TRL's `VLLMGeneration` does with the policy, by deliveries that prove themselves."""

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
    """Base of engines for TRL. A subclass starts one in `_init_vllm`, and sets what is declared here."""

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
        """Return what the one part with an answer to `hook` returns; None if no part has one."""
        answers = []
        for part in self.parts:
            answer = getattr(part, hook)(self)
            if answer is not None:
                answers.append(answer)
        if len(answers) > 1:
            raise RuntimeError(f"{len(answers)} features decide `{hook}` of one engine, and it takes one.")
        return answers[0] if answers else None

    @property
    def last_sync(self) -> SyncReport | None:
        return self.delivery.last

    @property
    def audit_failures(self) -> int:
        return self.delivery.failures

    def sync_weights(self) -> None:
        self.delivery.deliver(self.weights.sent)
        for part in self.parts:
            part.synced(self)
        self.after_sync()

    def send_weights(self) -> None:
        self.delivery.deliver(self.weights.sent, prepare=False)

    def policy_tensors(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        """Return the tensors of a checkpoint of the policy. What lives in the engine alone is among them on the main
        process only. Collective.
        """
        return self.weights.merged()

    def _iter_named_params(self) -> Iterator[NamedTensor]:
        """Iterate as TRL does, but merge adapters into one weight at a time."""
        reshard(self.model, self._dist)
        adapted = is_peft_model(self.model)
        adapters = adapters_of_parameters(self.model) if adapted else {}
        with (
            gathering() if self._dist.is_zero3 or self._dist.is_fsdp else nullcontext(),
            self._dist.gather_params(list(self.model.parameters()) if adapted else []),
        ):
            yield from () if adapted else super()._iter_named_params()
            for name, parameter in self.model.named_parameters() if adapted else ():
                if not of_adapter(name, self.model):
                    with merged(adapters.get(id(parameter), ())):
                        weight = parameter.detach()
                        if isinstance(weight, DTensor):
                            weight = weight.to(self.accelerator.device).full_tensor()
                        yield checkpoint_name(name), weight
