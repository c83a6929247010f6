"""`MirroredGeneration`: one forward with a server. The trainer has an engine of its own that holds the same bytes.

    sync           policy -> the trainer's engine, audited
    generation     tensors of the trainer's engine -> server, audited; the server generates
    scoring, loss  the policy calls the kernels of the trainer's engine on that engine's tensors

The trainer's engine takes memory for one more FP8 model on each trainer rank, beside the staged tensors
(staged_engine.py), and for the KV cache of one sequence: it computes single sequences in checks, and samples nothing.
On a CPU both engines run the same kernels, and a row does not depend on its batch. On GPUs a server has no
batch-invariant kernels, so GPUs are refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.policy_weights import PolicyWeights
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.sync.delivery import InPlaceDelivery
from trl_fp8.sync.records import CarriedValue, Occasion, SyncReport
from trl_fp8.sync.writer import SentTensor
from trl_fp8.upstream import vllm as upstream

from .seeded_client import SeededClient
from .served_model import shapes_beside
from .server_generation import ServerGeneration
from .staged_engine import StagedScales


MIB = 2**20


class HeldWeights(PolicyWeights):
    """Weights of a policy as the trainer's own engine holds them."""

    def __init__(self, generation: ServerGeneration, own: FP8VLLMGeneration):
        super().__init__(generation)
        self._held = own.engine.layout
        # Names of the policy's tensors, and of those that features add
        self._names = [*outline_of(generation.model).parameters, *generation.engine.beside]

    def yields_one_by_one(self, model: torch.nn.Module) -> bool:
        return False

    def tensors_to_send(self) -> AbstractContextManager[Iterator[SentTensor]]:
        return nullcontext(self._tensors())

    def _tensors(self) -> Iterator[SentTensor]:
        for name in self._names:
            engine_name = self.recipe.engine_name(name)
            if name in self.recipe.fp8_tensors:
                yield name, held_codes(self._held, engine_name, self.recipe.format)
            else:
                yield name, self._held.held[engine_name]


class MirroredScales:
    """`sync.records.CarriedValue` of a server: the KV scales of the trainer's engine."""

    def __init__(self, own: CarriedValue, store: StagedScales):
        self.name = own.name
        self._own = own
        self._store = store

    @property
    def value(self) -> KVScales | None:
        return self._own.value

    def prepare(self) -> None:
        """Do nothing: the sync of the trainer's engine has computed the scales."""

    def write(self) -> None:
        self._store.write(self.value)

    def verify(self) -> None:
        self._store.verify(self.value)

    def digest(self) -> torch.Tensor:
        return self._own.digest()


class Mirror(EnginePart):
    """`EnginePart` of a server that gets its weights and KV scales from the trainer's own engine."""

    def __init__(self, own: FP8VLLMGeneration):
        self._own = own

    def served(self, base_url: str, facts: Mapping[str, list]) -> dict[str, list[int]]:
        return shapes_beside(base_url, self._own.parts, facts)

    def weights(self, generation: ServerGeneration) -> HeldWeights:
        return HeldWeights(generation, self._own)

    def carried(self, generation: ServerGeneration) -> MirroredScales | None:
        delivery: InPlaceDelivery = self._own.delivery
        if delivery.carried is None:
            return None
        return MirroredScales(delivery.carried, generation.engine.kv_scales())


class MirroredGeneration(FP8VLLMGeneration):
    """Colocated engine whose kernels the policy calls, and a server that generates with the same tensors.

    Takes the arguments of `ServerGeneration`. `ValueError` on a GPU, for a server of several workers, and for one that
    runs other kernels.
    """

    def __init__(self, **kwargs):
        # Features act on the trainer's engine, once a sync. The server only copies this engine, so it gets no features
        self._server_kwargs = {name: value for name, value in kwargs.items() if name not in ("parts", "after_sync")}
        self._is_server_behind = True  # whether the trainer's engine has newer weights than the server
        self._sync_of_both: SyncReport | None = None
        own_kwargs = {name: value for name, value in kwargs.items() if name != "transport"}
        own_kwargs |= {"mode": "colocate", "max_num_seqs": 1}
        super().__init__(**own_kwargs)

    def _init_vllm(self) -> None:
        refused = "fp8_forward='one_forward' with vllm_mode='server'"
        if self.accelerator.device.type != "cpu":
            raise ValueError(
                f"{refused} on {self.accelerator.device.type}: a server's kernels are not batch invariant there. Set "
                "vllm_mode='colocate', or fp8_forward='off'."
            )
        workers = self.recipe.tensor_parallel_size  # of the server; `self.tensor_parallel_size` is the user's flag
        if workers > 1:
            raise ValueError(
                f"{refused}: the server has {workers} workers, which add up parts of each output, "
                "and the trainer computes whole ones. Start the server with --tensor-parallel-size 1, or set "
                "fp8_forward='off'."
            )
        super()._init_vllm()
        weights = sum(tensor.nbytes for tensor in self.engine.layout.held.values())
        cache = upstream.engine_config(self.llm).cache_config.kv_cache_memory_bytes
        self.accelerator.print(
            f"One forward: the trainer's own engine takes {weights / MIB:.1f} MiB for weights, which the server has, "
            f"too, and {cache / MIB:.1f} MiB for a KV cache of one sequence."
        )
        self.server = ServerGeneration(parts=[Mirror(self)], **self._server_kwargs)
        if self.server.numerics != self.numerics:
            raise ValueError(
                f"{refused}: the server's arithmetic differs from that of the trainer's own engine "
                f"({self.server.numerics}, {self.numerics}). Start it with `trl-fp8 serve` on a host of the same kind."
            )

    @property
    def vllm_client(self) -> SeededClient:
        """Return the client of the server, on the first rank: TRL reads the server's settings with it."""
        return self.server.vllm_client

    @property
    def last_sync(self) -> SyncReport | None:
        """Return the report of the trainer's own sync. Once the server's sync is done, its seconds are included."""
        return self.delivery.last if self._is_server_behind else self._sync_of_both

    @property
    def audit_failures(self) -> int:
        return self.delivery.failures + self.server.audit_failures

    @property
    def sync_metrics(self) -> Mapping[str, float]:
        return self.server.sync_metrics

    def begin(self, occasion: Occasion, keep_weights: bool) -> None:
        super().begin(occasion, keep_weights)
        self.server.begin(occasion, keep_weights)

    def sync_weights(self) -> None:
        self._is_server_behind = True
        super().sync_weights()

    def send_weights(self) -> None:
        self._is_server_behind = True
        super().send_weights()

    def generate(self, *args, **kwargs) -> tuple:
        """Send the tensors of the trainer's engine to a server that has older ones, which then generates. Collective.

        Raises what `ServerGeneration.generate` raises.
        """
        self.delivery.verify()
        if self._is_server_behind:
            self.server.send_weights()
            own = self.delivery.last
            self._sync_of_both = replace(own, seconds=own.seconds + self.server.last_sync.seconds)
            self._is_server_behind = False
        return self.server.generate(*args, **kwargs)
