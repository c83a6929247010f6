"""The trainer's half of syncs to a server, with the engine and the delivery that a trainer has."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_fp8.engine.protocol import KVScaleStore
from trl_fp8.engine.vllm_server.staged_engine import StagedEngine
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KV_SCALES
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.delivery import InPlaceDelivery
from trl_fp8.sync.records import SyncReport

from .engines import perturb, some_scales
from .forked_server import ForkedServer


class SomeScales:
    """`CarriedValue` of KV scales that nobody calibrated."""

    name = KV_SCALES

    def __init__(self, store: KVScaleStore, layers: int, step: int = 1):
        self.store = store
        self.value = some_scales(layers, step)

    def prepare(self) -> None: ...
    def write(self) -> None:
        self.store.write(self.value)

    def verify(self) -> None:
        self.store.verify(self.value)

    def digest(self) -> torch.Tensor:
        return digest(self.value.values)


class StagedTrainer:
    """A policy, perturbed by `seed`, and what brings it to a server, through the server's folder or another one."""

    def __init__(
        self, server: ForkedServer, seed: int, folder: str | None = None, transport: str = "auto", **recipe_flags
    ):
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
        perturb(self.model, seed)
        self.recipe = recipe_for_model(self.model, **recipe_flags)
        self.control = server.control()
        folder = folder or server.folder
        self.engine = StagedEngine([self.control], self.model, self.recipe, folder, patience=20, transport=transport)
        [self.server] = self.engine.servers
        self.scales = SomeScales(self.engine.kv_scales(), self.model.config.num_hidden_layers, seed)
        self.delivery = InPlaceDelivery(self.engine, self.model, self.recipe, carried=self.scales)

    @torch.no_grad()
    def step(self, size: float = 1e-5) -> None:
        """Change each weight by at most `size`, as an optimizer step does."""
        for parameter in self.model.parameters():
            parameter.add_(torch.empty_like(parameter).uniform_(-size, size))

    def push(self) -> None:
        """Send all that is in the file, which it has to have since a sync, in an update that has begun."""
        push = self.engine.next_push()
        with self.server.sent(push) as sent:
            self.server.push(push, sent)

    def sync(self) -> SyncReport:
        return self.delivery.deliver(lambda: nullcontext(self.model.named_parameters()))


def with_changed_patch(change: Callable[[bytes], bytes]) -> Callable[[dict], list[dict]]:
    """Return a function that changes the bytes of an update's patch, and returns the update in a list."""

    def changed(update: dict) -> list[dict]:
        path = Path(update["patch"]["file"])
        path.write_bytes(change(path.read_bytes()))
        return [update]

    return changed
