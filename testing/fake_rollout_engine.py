"""`RolloutEngine` over plain transformers: a second engine behind the contract of `engine/protocol.py`, for tests.

It holds a model of its own, into which a delivery copies the policy as into an engine of another process: one tensor
after another, each proven by its checksum. FP8 weights are held dequantized, and activations are not quantized. So
rollouts differ from the policy by the rounding of weights alone.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from testing.fake_engine import FakeEngine
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import hook_of
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.records import CarriedValue, Occasion, SyncReport, Tensors


class CopyingDelivery:
    """A `Delivery` that copies into `model`. `calls` records the calls."""

    def __init__(self, model: nn.Module, recipe: FP8Recipe, calls: list[str], carried: CarriedValue | None = None):
        self._carried = carried
        self.held, self._recipe, self._calls = dict(model.named_parameters()), recipe, calls
        self.last: SyncReport | None = None
        self.failures = 0
        self._sent: dict[str, int] | None = None  # checksums; None: the latest delivery did not succeed

    def deliver(self, tensors: Tensors, *, prepare: bool = True) -> SyncReport:
        self._calls.append("deliver")
        start, self._sent, sent = perf_counter(), None, {}
        if self._carried and prepare:
            self._carried.prepare()
        with tensors() as parameters:
            for name, tensor in parameters:
                arriving = self._as_held(name, tensor.detach())
                sent[name] = digest(arriving).item()
                self.held[name].copy_(arriving)
        if self._carried:
            self._carried.write()
        self._sent = sent
        self._require_unchanged("weight sync failed its audit")
        self.last = SyncReport(
            seconds=perf_counter() - start,
            quantize_seconds=0.0,
            prepare_seconds=0.0,
            audited_tensors=len(sent),
            bytes_sent=sum(tensor.nbytes for tensor in self.held.values()),
            fp8_weights=len(self._recipe.fp8_tensors),
            weight_relative_error=0.0,
            dead_blocks={},
            carried={self._carried.name: self._carried.value} if self._carried else {},
        )
        return self.last

    def require_whole(self) -> None:
        if self._sent is None:
            raise RuntimeError("the engine holds no complete policy")

    def verify(self) -> None:
        self._calls.append("verify")
        self.require_whole()
        self._require_unchanged("the engine has changed since the last sync")

    def _as_held(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in self._recipe.fp8_tensors:
            [codes] = quantize_fused([weight.bfloat16()], self._recipe.format, self._recipe.scale_format)
            return dequantize_weight(codes, torch.float32)
        return weight.bfloat16().float()

    def _require_unchanged(self, otherwise: str) -> None:
        changed = [name for name, tensor in self.held.items() if digest(tensor).item() != self._sent.get(name)]
        if changed:
            self._sent, self.failures = None, self.failures + 1
            raise RuntimeError(f"{otherwise}: {changed}")
        if self._carried:
            self._carried.verify()


class SimulatedScales:
    """A `KVScaleStore` over plain transformers, whose attention rounds k and v as an FP8 cache does."""

    def __init__(self, model: nn.Module, skip_layers: tuple[int, ...]):
        self._hook = hook_of(model)
        self._hook.skip(skip_layers)

    def write(self, scales: KVScales) -> None:
        self._hook.simulate(scales.values)

    def verify(self, scales: KVScales) -> None:
        if self._hook.scales_L3 is None or not torch.equal(self._hook.scales_L3, scales.values):
            raise RuntimeError("KV cache scales did not arrive in the engine")


class FakeRolloutEngine:
    """Samples one token after another, from a generator of its own. `calls` notes the calls of the contract."""

    pinned, replicas, sync_metrics = {}, None, {}

    def __init__(
        self,
        recipe: FP8Recipe,
        parts: Sequence[Any],
        after_sync: Callable[[], None],
        *,
        model,
        temperature,
        max_completion_length,
        **_,
    ):
        self.calls: list[str] = []
        self.model, self._after_sync = model, after_sync
        self._temperature, self._longest = temperature, max_completion_length
        self._end = model.config.get_text_config().eos_token_id
        # Random weights, as vLLM's dummy ones. A copy of the policy would share its forward, which TRL has patched
        self.kernels = FakeEngine(AutoModelForCausalLM.from_config(model.config), recipe)
        self.numerics = EngineNumerics(kernels={"FakeLinear": len(recipe.fp8_modules)})
        self.recipe, self.engine = recipe, self
        carried = [each for part in parts for each in [part.carried(self)] if each is not None]
        self.delivery = CopyingDelivery(self.kernels.held, recipe, self.calls, *carried)
        self._generator = torch.Generator().manual_seed(0)

    def kv_scales(self) -> SimulatedScales:
        return SimulatedScales(self.kernels.held, self.recipe.kv_cache_skip_layers)

    @property
    def last_sync(self) -> SyncReport | None:
        return self.delivery.last

    @property
    def audit_failures(self) -> int:
        return self.delivery.failures

    def begin(self, occasion: Occasion, keep_weights: bool) -> None:
        self.calls.append("begin")
        self._generator.manual_seed(2 * occasion[0] + occasion[1])  # a resumed run draws what the whole one drew

    def sync_weights(self) -> None:
        self.calls.append("sync_weights")
        self.delivery.deliver(self.policy_tensors)
        self.calls.append("after_sync")
        self._after_sync()

    def send_weights(self) -> None:
        self.delivery.deliver(self.policy_tensors, prepare=False)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        self.calls.append("generate")
        self.delivery.verify()
        with profiler or nullcontext(), torch.no_grad():
            completions, log_probs = zip(*map(self._continued, prompts), strict=True)
        return prompts, list(completions), list(log_probs), [[[token] for token in ids] for ids in completions]

    def _continued(self, prompt: list[int]) -> tuple[list[int], list[list[float]]]:
        tokens, log_probs = [], []
        while len(tokens) < self._longest and tokens[-1:] != [self._end]:
            logits = (
                self.kernels.held(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1] / self._temperature
            )
            row = logits.log_softmax(-1)
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=self._generator)))
            log_probs.append([row[tokens[-1]].item()])
        return tokens, log_probs

    def prefill(self, tokens: list[int]) -> list[int]:
        self.kernels.held(torch.tensor([tokens]))
        return tokens

    def policy_tensors(self):
        return nullcontext(self.model.named_parameters())


class FakeEngineTrainer(FP8GRPOTrainer):
    """A trainer whose rollouts come from a `FakeRolloutEngine`."""

    def _start_engine(self, recipe, parts, **kwargs) -> FakeRolloutEngine:
        return FakeRolloutEngine(recipe, parts, self._after_sync, **kwargs)
