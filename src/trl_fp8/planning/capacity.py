"""Capacity: whether trainer and engine fit together on each GPU, and what to change where they do not.

A plan fits if the trainer's memory and the engine's share leave `FREE` of a GPU for what is not counted, and if the
engine's KV cache then holds a few sequences of full length. What is changed to make a plan fit is computed by the same
rules as the plan itself, and only offered if it fits.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
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


class Capacity:
    """Memory of each GPU under a plan, in bytes, and the tokens that the KV cache of an engine holds."""

    def __init__(self, plan: Plan, trainer: TrainerMemory, setup: Setup, utilization: float):
        self.plan = plan
        self.trainer = trainer
        self.setup = setup
        self.utilization = utilization  # the engine's share of a GPU
        self.ranks = plan.recipe.tensor_parallel_size
        # Completions of a generation that one engine samples
        self.sequences = ceil(setup.completions * self.ranks / setup.gpus)
        # The engine's share: weights with what features put beside them, vLLM's own, and the KV cache, which is
        # negative if the weights do not fit
        self.engine_bytes = utilization * setup.gpu_bytes
        self.weight_bytes = plan.bytes_after / self.ranks + trainer.in_engine
        self.kv_bytes = self.engine_bytes - RESERVED_BYTES - self.weight_bytes
        # Tokens, in sequences of full length, by precision: of a BF16 engine, and as far as the plan has FP8
        fp8_weights, fp8_kv_cache = plan.recipe.fp8_weights, plan.recipe.fp8_kv_cache
        self.kv_tokens = {"bf16": self._tokens(self.engine_bytes - RESERVED_BYTES - plan.bytes_before / self.ranks)}
        if fp8_weights:
            self.kv_tokens["fp8_linears"] = self._tokens(self.kv_bytes)
        if fp8_kv_cache:
            name = "fp8_linears_kv" if fp8_weights else "fp8_kv"
            self.kv_tokens[name] = self._tokens(self.kv_bytes, fp8=True)
        self.held_tokens = list(self.kv_tokens.values())[-1]
        # Sleep mode frees the weights, too, unless the policy computes with them
        self.weights_sleep = not (setup.args.policy_calls_engine or setup.args.base_in_engine)
        freed = 0.0
        if setup.args.vllm_enable_sleep_mode:
            freed = self.engine_bytes if self.weights_sleep else max(0.0, self.kv_bytes)
        self.total_bytes = trainer.states + self.engine_bytes - freed + max(trainer.passing, freed)
        self.limit_bytes = setup.gpu_bytes - max(FREE * setup.gpu_bytes, trainer.uncounted)

    def _tokens(self, size: float, fp8: bool = False) -> int:
        """Return how many tokens, in sequences of full length, a KV cache of `size` bytes holds."""
        length = self.setup.tokens
        sequence = self.plan.cache.sequence_bytes(length, fp8)
        return int(max(0.0, size) / sequence * length) if sequence else self.sequences * length * (size > 0)

    @property
    def why_not(self) -> str | None:
        """Return a sentence on what does not fit; None if everything fits."""
        if self.total_bytes > self.limit_bytes:
            return f"{self.total_bytes / GIB:.1f} GiB are more than {self.limit_bytes / GIB:.1f}"
        return self.why_no_cache

    @property
    def why_no_cache(self) -> str | None:
        """Return a sentence on a KV cache that is too small; None if it is not."""
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
    plans: dict[int, Plan] = field(default_factory=dict)  # by tensor parallel size

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
        found = [self._at(setup, size) for size in self.sizes_on(setup.gpus)]
        return next((capacity for capacity in found if capacity.why_not is None), found[0])

    def ways(self, setup: Setup) -> list[Capacity]:
        """Return what fits in place of a setup that does not, at most one of each kind: another split, LoRA, more
        GPUs, and LoRA on more GPUs if it does not fit on these.
        """
        free = replace(setup, utilization=None, tensor_parallel_size=None)
        adapters = replace(free, lora_rank=setup.lora_rank or LORA_RANK)
        lora = [adapters]
        if self.saving and self.plan_at(1).recipe.fp8_weights:
            lora.append(adapters.with_flags(self.saving, dtype="bfloat16"))
        lora.append(adapters.with_flags(dict.fromkeys(self.saving, False), dtype="bfloat16"))
        full = [] if setup.lora_rank else [free]
        more = [setup.gpus * 2**power for power in range(1, 7) if setup.gpus * 2**power <= MOST_GPUS]
        ways = []
        for counts, setups in (([setup.gpus], full), ([setup.gpus], lora), (more, full), (more, lora)):
            if setups is lora and any(way.setup.lora_rank for way in ways):
                continue  # it fits on fewer GPUs
            changed = (self.capacity(replace(each, gpus=gpus)) for gpus in counts for each in setups)
            if way := next((capacity for capacity in changed if capacity.why_not is None), None):
                ways.append(way)
        return ways

    def sizes_on(self, gpus: int) -> list[int]:
        """Return tensor parallel sizes that divide GPUs and attention heads, and not the blocks of FP8 weights."""
        found = [1]
        whole = self.plan_at(1).fp8_parameters
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
        """Return the capacity at a tensor parallel size. If the setup sets no share, the engine gets enough for all
        sequences at once in BF16, or else the most that the trainer leaves. If that is too little, it gets the least
        that it needs.
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
