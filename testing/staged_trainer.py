"""The trainer's half of syncs to a server, with the engine and the delivery that a trainer has."""

from contextlib import nullcontext

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
    """A policy, perturbed by `seed`, and what brings it to a server."""

    def __init__(self, server: ForkedServer, seed: int, **recipe_flags):
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
        perturb(self.model, seed)
        self.recipe = recipe_for_model(self.model, **recipe_flags)
        self.control = server.control()
        self.engine = StagedEngine(self.control, self.model, self.recipe, server.folder, patience=20)
        self.scales = SomeScales(self.engine.kv_scales(), self.model.config.num_hidden_layers, seed)
        self.delivery = InPlaceDelivery(self.engine, self.model, self.recipe, carried=self.scales)

    def sync(self) -> SyncReport:
        return self.delivery.deliver(lambda: nullcontext(self.model.named_parameters()))
