"""Capacity: whether trainer and engine fit together on each GPU, and what to change where they do not.

A plan fits if the trainer's memory and the engine's share leave `FREE` of a GPU for what is not counted, and if the
engine's KV cache then holds a few sequences of full length. What is changed to make a plan fit is computed by the same
rules as the plan itself, and only offered if it fits.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import recipe_for

from .plan import Plan, plan_for
from .trainer_memory import GIB, Setup, TrainerMemory, trainer_memory


# CUDA graphs, activations of a few thousand batched tokens, the context: what vLLM keeps beside weights and KV cache
RESERVED_BYTES = 3 * GIB
FREE = 0.15  # of a GPU, for what is not counted
LEAST_SEQUENCES = 8  # of full length that a KV cache holds at once, or all of them if they are fewer
MOST_GPUS = 64
SHARES = tuple(share / 20 for share in range(18, 0, -1))  # of a GPU that an engine may get, largest first
SIZES = (1, 2, 4, 8)  # tensor parallel
LORA_RANK = 32


@dataclass(frozen=True)
class Capacity:
    """Memory of each GPU under a plan."""

    plan: Plan
    trainer: TrainerMemory
    setup: Setup
    utilization: float

    @property
    def ranks(self) -> int:
        return self.plan.recipe.tensor_parallel_size

    @property
    def engine_bytes(self) -> float:
        return self.utilization * self.setup.gpu_bytes

    @property
    def weights_sleep(self) -> bool:
        """Return whether sleep mode frees the engine's weights, too, while the trainer trains."""
        return not (self.setup.args.policy_calls_engine or self.setup.args.base_in_engine)

    @property
    def total_bytes(self) -> float:
        if not self.setup.args.vllm_enable_sleep_mode:
            return self.trainer.total + self.engine_bytes
        freed = self.engine_bytes if self.weights_sleep else max(0.0, self.kv_bytes)
        return self.trainer.states + self.engine_bytes - freed + max(self.trainer.passing, freed)

    @property
    def limit_bytes(self) -> float:
        return self.setup.gpu_bytes - max(FREE * self.setup.gpu_bytes, self.trainer.uncounted)

    @property
    def sequences(self) -> int:
        """Completions of a generation that one engine samples."""
        return -(-self.setup.completions * self.ranks // self.setup.gpus)

    @property
    def weight_bytes(self) -> float:
        """Bytes on each rank of an engine of weights, and of what features put beside them."""
        is_fp8 = self.plan.recipe.fp8_weights
        return (self.plan.bytes_after if is_fp8 else self.plan.bytes_before) / self.ranks + self.trainer.in_engine

    @property
    def kv_bytes(self) -> float:
        """Bytes on each rank that the engine's share leaves for a KV cache; negative if weights do not fit."""
        return self.engine_bytes - RESERVED_BYTES - self.weight_bytes

    @property
    def held_tokens(self) -> int:
        """Tokens, in sequences of full length, that the KV cache holds."""
        return self._tokens(self.kv_bytes, self.plan.recipe.fp8_kv_cache)

    @property
    def kv_tokens(self) -> dict[str, int]:
        """Precision -> tokens that the KV cache holds then: of a BF16 engine, and as far as the plan has FP8."""
        recipe = self.plan.recipe
        in_bf16 = self.engine_bytes - RESERVED_BYTES - self.plan.bytes_before / self.ranks
        found = {"bf16": self._tokens(in_bf16, fp8=False)}
        if recipe.fp8_weights:
            found["fp8_linears"] = self._tokens(self.kv_bytes, fp8=False)
        if recipe.fp8_kv_cache:
            found["fp8_linears_kv" if recipe.fp8_weights else "fp8_kv"] = self.held_tokens
        return found

    def _tokens(self, room: float, fp8: bool) -> int:
        length = self.setup.tokens
        size = self.plan.cache.sequence_bytes(length, fp8)
        return int(max(0.0, room) / size * length) if size else self.sequences * length * (room > 0)

    @property
    def why_not(self) -> str | None:
        """Return a sentence on what does not fit; None if everything fits."""
        if self.total_bytes > self.limit_bytes:
            return f"{self.total_bytes / GIB:.1f} GiB are more than {self.limit_bytes / GIB:.1f}"
        least = min(self.sequences, LEAST_SEQUENCES)
        if self.held_tokens < least * self.setup.tokens:
            return f"no KV cache for {least} sequences of {self.setup.tokens:,} tokens"
        return None


@dataclass(frozen=True)
class Planner:
    """Capacities of one model under any setup."""

    outline: Outline
    recipe_options: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = SIZES  # tensor parallel sizes that may be chosen
    saving: Mapping[str, Any] = field(default_factory=dict)  # flags with which adapters need less memory
    plans: dict[int, Plan] = field(default_factory=dict)

    def plan_at(self, size: int) -> Plan:
        """Return the plan of a tensor parallel size."""
        if size not in self.plans:
            recipe = recipe_for(self.outline, **{**self.recipe_options, "tensor_parallel_size": size})
            self.plans[size] = plan_for(self.outline, recipe)
        return self.plans[size]

    def capacity(self, setup: Setup) -> Capacity:
        """Return the capacity of a setup, at the smallest tensor parallel size that fits if it sets none."""
        if setup.tensor_parallel_size is not None:
            return self._at(setup, setup.tensor_parallel_size)
        found = [self._at(setup, size) for size in self._sizes(setup.gpus)]
        return next((capacity for capacity in found if capacity.why_not is None), found[0])

    def ways(self, setup: Setup) -> list[Capacity]:
        """Return what fits in place of a setup that does not, at most one of each kind: another split, LoRA, more
        GPUs, and LoRA on more GPUs if it does not fit on these.
        """
        ways, lora_fits = [], False
        for setups in self._changes(setup):
            first = setups[0]
            if lora_fits and first.lora_rank and first.gpus > setup.gpus:
                continue
            fitting = (way for way in map(self.capacity, setups) if way.why_not is None)
            if way := next(fitting, None):
                ways.append(way)
                lora_fits = lora_fits or first.lora_rank is not None
        return ways

    def _changes(self, setup: Setup) -> Iterator[list[Setup]]:
        free, rank = replace(setup, utilization=None, tensor_parallel_size=None), setup.lora_rank or LORA_RANK
        off = dict.fromkeys(self.saving, False)
        lora = [replace(free, lora_rank=rank)]
        if self.saving and self.plan_at(1).recipe.fp8_weights:
            lora.append(free.with_flags(self.saving, lora_rank=rank, dtype="bfloat16"))
        lora.append(free.with_flags(off, lora_rank=rank, dtype="bfloat16"))
        more = [setup.gpus * 2**power for power in range(1, 7) if setup.gpus * 2**power <= MOST_GPUS]
        for counts in filter(None, ([setup.gpus], more)):
            if not setup.lora_rank:
                yield [replace(free, gpus=gpus) for gpus in counts]
            yield [replace(each, gpus=gpus) for gpus in counts for each in lora]

    def _sizes(self, gpus: int) -> list[int]:
        """Return tensor parallel sizes that divide GPUs and attention heads, and not the blocks of FP8 weights."""
        found, whole = [1], self.plan_at(1).fp8_parameters
        for size in self.sizes[1:]:
            if gpus % size == 0 and self.splits(size):
                with suppress(ValueError):  # no layer can be FP8 at this size
                    if 1.1 * self.plan_at(size).fp8_parameters >= whole:
                        found.append(size)
        return found

    def splits(self, size: int) -> bool:
        """Return whether vLLM can divide the heads over that many ranks."""
        name = next((name for name in self.outline.linears if name.endswith((".q_proj", ".qkv_proj"))), None)
        kv_heads, head_dim = self.outline.kv_heads, self.outline.head_dim
        if name is None or not kv_heads or not head_dim:
            return size == 1
        queries = self.outline.linears[name][0] // head_dim - (2 * kv_heads if name.endswith(".qkv_proj") else 0)
        return queries % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    def _at(self, setup: Setup, size: int) -> Capacity:
        """Return the capacity at a tensor parallel size. Where the setup sets no share of the engine: enough for all
        sequences at once, were the engine in BF16, or the most that the trainer leaves; where that is not enough, the
        least that the engine needs.
        """
        plan = self.plan_at(size)
        trainer = trainer_memory(self.outline, setup, plan.recipe)
        if setup.utilization is not None:
            return Capacity(plan, trainer, setup, setup.utilization)
        shares = [Capacity(plan, trainer, setup, share) for share in SHARES]
        if fitting := [capacity for capacity in shares if capacity.why_not is None]:
            ample = [each for each in fitting if each.kv_tokens["bf16"] >= each.sequences * setup.tokens]
            return ample[-1] if ample else fitting[0]
        least = min(shares[0].sequences, LEAST_SEQUENCES) * setup.tokens
        return next((capacity for capacity in reversed(shares) if capacity.held_tokens >= least), shares[0])
