"""Capacity: whether trainer and engine fit, on shared GPUs or each on its own GPUs, and which alternatives fit.

A plan fits under two conditions. The trainer's memory and the engine's share leave room on each GPU for memory that is
not counted (`FREE`). And the engine's KV cache has room for a few sequences of full length (`LEAST_SEQUENCES`).

    Capacity                computes both conditions for one plan, setup and share of a GPU
    Planner.capacity        chooses the tensor parallel size and the share, unless the setup has them
    Planner.alternatives    varies a setup that does not fit, and returns the variants that fit
    server_capacity         does the same as Planner.capacity for an engine on its own GPUs
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import Any

from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import recipe_for

from .plan import Plan, plan_for
from .trainer_memory import GIB, Setup, TrainerMemory, trainer_memory


# Memory that vLLM needs beside weights and KV cache: CUDA graphs, CUDA's context, activations of a few thousand tokens
RESERVED_BYTES = 3 * GIB
FREE = 0.15  # share of a GPU that stays free for memory that is not counted
LEAST_SEQUENCES = 8  # sequences of full length that a KV cache must hold at once, unless a generation has fewer
MOST_GPUS = 64  # the most GPUs that an alternative uses
SHARES = tuple(share / 20 for share in range(18, 0, -1))  # shares of a GPU to try for an engine: 0.9 falls to 0.05
SERVER_SHARE = 0.9  # vLLM's share of a server's GPU, on which nothing else runs
SIZES = (1, 2, 4, 8)  # tensor parallel sizes to try
MOST_FP8_RATIO = 1.1  # a tensor parallel size is skipped if size 1 has this many times more parameters in FP8
LORA_RANK = 32  # rank of the adapters of an alternative with LoRA


class Capacity:
    """Memory of each GPU under a plan, in bytes, and the tokens that an engine's KV cache holds.

    Attributes:
        sequences: Completions of a generation that one engine samples.
        engine_bytes: The engine's share of a GPU: weights, `RESERVED_BYTES`, and KV cache.
        weight_bytes: The engine's weights, and the tensors that features add to them.
        kv_bytes: The KV cache. Negative if the weights do not fit.
        kv_tokens: Tokens that the KV cache holds, in sequences of full length. Keys: "bf16", an engine without FP8;
            "fp8_linears", with FP8 weights; "fp8_kv" or "fp8_linears_kv", with an FP8 cache and BF16 or FP8 weights.
            There are entries only for what the plan has in FP8.
        cache_tokens: The entry of `kv_tokens` with the plan's own precisions.
        weights_sleep: Whether sleep mode frees the weights, too.
        total_bytes: Counted bytes of trainer and engine together, at the peak.
        limit_bytes: The largest `total_bytes` that fits.
    """

    def __init__(self, plan: Plan, trainer: TrainerMemory, setup: Setup, utilization: float):
        self.plan = plan
        self.trainer = trainer
        self.setup = setup
        self.utilization = utilization  # the engine's share of a GPU, a fraction
        self.ranks = plan.recipe.tensor_parallel_size
        self.sequences = ceil(setup.completions * self.ranks / setup.gpus)
        self.engine_bytes = utilization * setup.gpu_bytes
        self.weight_bytes = plan.bytes_after / self.ranks + trainer.in_engine
        self.kv_bytes = self.engine_bytes - RESERVED_BYTES - self.weight_bytes
        kv_bytes_without_fp8 = self.engine_bytes - RESERVED_BYTES - plan.bytes_before / self.ranks
        fp8_weights = plan.recipe.fp8_weights
        fp8_kv_cache = plan.recipe.fp8_kv_cache
        self.kv_tokens = {"bf16": self._tokens(kv_bytes_without_fp8)}
        if fp8_weights:
            self.kv_tokens["fp8_linears"] = self._tokens(self.kv_bytes)
        if fp8_kv_cache:
            name = "fp8_linears_kv" if fp8_weights else "fp8_kv"
            self.kv_tokens[name] = self._tokens(self.kv_bytes, fp8=True)
        self.cache_tokens = self._tokens(self.kv_bytes, fp8=fp8_kv_cache)
        # Sleep mode keeps the engine's weights if the policy also computes with these weights
        self.weights_sleep = not (setup.args.policy_calls_engine or setup.args.base_in_engine)
        freed = 0.0  # bytes that sleep mode frees; `RESERVED_BYTES` stay allocated
        if setup.args.vllm_enable_sleep_mode:
            freed = self.kv_bytes
            if self.weights_sleep:
                freed += self.weight_bytes
            freed = max(0.0, freed)
        # At the peak, memory that sleep frees is used by the engine or by the trainer's step, never by both
        always_used = trainer.states + self.engine_bytes - freed
        self.total_bytes = always_used + max(trainer.forward_and_backward, freed)
        self.limit_bytes = setup.gpu_bytes - max(FREE * setup.gpu_bytes, trainer.uncounted)

    def _tokens(self, cache_bytes: float, fp8: bool = False) -> int:
        """Return the number of tokens that a KV cache of `cache_bytes` holds, in sequences of full length."""
        length = self.setup.tokens
        sequence_bytes = self.plan.cache.sequence_bytes(length, fp8)
        if not sequence_bytes:  # no layer has a cache, so all sequences fit if the weights do
            return self.sequences * length if cache_bytes > 0 else 0
        return int(max(0.0, cache_bytes) / sequence_bytes * length)

    @property
    def why_not(self) -> str | None:
        """Return why the plan does not fit, as a clause; None if it fits."""
        if self.total_bytes > self.limit_bytes:
            return f"{self.total_bytes / GIB:.1f} GiB are more than {self.limit_bytes / GIB:.1f}"
        return self.why_no_cache

    @property
    def why_no_cache(self) -> str | None:
        """Return why the KV cache is too small, as a clause; None if it is large enough."""
        least = min(self.sequences, LEAST_SEQUENCES)
        if self.cache_tokens < least * self.setup.tokens:
            return f"no KV cache for {least} sequences of {self.setup.tokens:,} tokens"
        return None


@dataclass(frozen=True)
class Planner:
    """Computes the capacities of one model under any setup."""

    outline: Outline
    recipe_options: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = SIZES  # tensor parallel sizes to choose from, ascending
    # Flags that save memory in training with adapters: name -> value that saves
    saving: Mapping[str, Any] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)  # plans made so far, by tensor parallel size

    def plan_at(self, size: int) -> Plan:
        """Return the plan for a tensor parallel size."""
        if size not in self.plans:
            recipe = recipe_for(self.outline, **{**self.recipe_options, "tensor_parallel_size": size})
            self.plans[size] = plan_for(self.outline, recipe)
        return self.plans[size]

    def capacity(self, setup: Setup) -> Capacity:
        """Return the capacity of a setup.

        If the setup sets no tensor parallel size, this is the capacity at the smallest size that fits, or at the
        smallest size of all if no size fits.
        """
        if setup.tensor_parallel_size is not None:
            return self._at(setup, setup.tensor_parallel_size)
        capacities = [self._at(setup, size) for size in self.sizes_on(setup.gpus)]
        fitting = [capacity for capacity in capacities if capacity.why_not is None]
        return fitting[0] if fitting else capacities[0]

    def alternatives(self, setup: Setup) -> list[Capacity]:
        """Return alternatives that fit, for a setup that does not. At most one of each kind.

        The kinds are: another share and tensor parallel size, LoRA, more GPUs, and LoRA on more GPUs (only if LoRA
        does not fit on the setup's GPUs).
        """
        full_setup = replace(setup, utilization=None, tensor_parallel_size=None)
        full_setups = [] if setup.lora_rank else [full_setup]
        # In order of preference: LoRA with the setup's flags, with a base shared with the engine, with a base in BF16
        lora_setup = replace(full_setup, lora_rank=setup.lora_rank or LORA_RANK)
        lora_setups = [lora_setup]
        if self.saving and self.plan_at(1).recipe.fp8_weights:
            lora_setups.append(lora_setup.with_flags(self.saving, dtype="bfloat16"))
        lora_setups.append(lora_setup.with_flags(dict.fromkeys(self.saving, False), dtype="bfloat16"))
        multiples = [setup.gpus * 2**power for power in range(1, 7)]
        more_gpus = [gpus for gpus in multiples if gpus <= MOST_GPUS]
        with_lora = self._first_fitting(lora_setups, [setup.gpus])
        alternatives = [self._first_fitting(full_setups, [setup.gpus]), with_lora]
        alternatives.append(self._first_fitting(full_setups, more_gpus))
        if with_lora is None:
            alternatives.append(self._first_fitting(lora_setups, more_gpus))
        return [capacity for capacity in alternatives if capacity is not None]

    def _first_fitting(self, setups: list[Setup], gpu_counts: list[int]) -> Capacity | None:
        """Return the capacity of the first setup that fits on the smallest possible number of GPUs.

        `gpu_counts` are ascending. Returns None if no setup fits.
        """
        for gpus in gpu_counts:
            for setup in setups:
                capacity = self.capacity(replace(setup, gpus=gpus))
                if capacity.why_not is None:
                    return capacity
        return None

    def sizes_on(self, gpus: int) -> list[int]:
        """Return the tensor parallel sizes that divide `gpus` and the attention heads, and keep most weights in FP8.

        A size that cuts through the blocks of FP8 weights would leave these weights in BF16.
        """
        sizes = [1]
        fp8_parameters = self.plan_at(1).fp8_parameters
        for size in self.sizes[1:]:
            if gpus % size == 0 and self.divides_heads(size):
                with suppress(ValueError):  # raised if no layer can be FP8 at this size
                    if MOST_FP8_RATIO * self.plan_at(size).fp8_parameters >= fp8_parameters:
                        sizes.append(size)
        return sizes

    def divides_heads(self, size: int) -> bool:
        """Return whether vLLM can divide the attention heads over `size` ranks."""
        heads = self.outline.heads
        kv_heads = self.outline.kv_heads
        if not heads or not kv_heads:  # layers differ in their number of heads, or have no heads
            return size == 1
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    def _at(self, setup: Setup, size: int) -> Capacity:
        """Return the capacity at a tensor parallel size, with the setup's share of a GPU for the engine.

        If the setup has no share, choose one of `SHARES`:

        1. Of the shares that fit, take the smallest with which a BF16 engine could hold all its sequences at once. If
           there is none, take the largest share that fits.
        2. If no share fits, take the smallest share with which the KV cache would be large enough. If there is none,
           take the largest share.
        """
        plan = self.plan_at(size)
        trainer = trainer_memory(self.outline, setup, plan.recipe)
        if setup.utilization is not None:
            return Capacity(plan, trainer, setup, setup.utilization)
        by_share = [Capacity(plan, trainer, setup, share) for share in SHARES]  # the largest share first
        fitting = [capacity for capacity in by_share if capacity.why_not is None]
        if fitting:
            with_all_sequences = [each for each in fitting if each.kv_tokens["bf16"] >= each.sequences * setup.tokens]
            return with_all_sequences[-1] if with_all_sequences else fitting[0]
        with_cache = [capacity for capacity in by_share if capacity.why_no_cache is None]
        return with_cache[-1] if with_cache else by_share[0]


@dataclass(frozen=True)
class ServerCapacity:
    """Memory of a trainer and of an engine that is a server, each on its own GPUs."""

    server: Capacity  # memory of each GPU of the server; the trainer has 0 bytes there
    trainer: Capacity  # memory of each GPU of the trainer; the engine has 0 bytes there

    @property
    def staged_bytes(self) -> int:
        """Return the bytes of the engine's weights. The trainer stages the weights for the server: on each of the
        trainer's GPUs, and once in the host's shared memory.
        """
        return self.server.plan.bytes_after

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes on each GPU of the trainer, staged weights included."""
        return self.trainer.total_bytes + self.staged_bytes

    @property
    def trainer_fits(self) -> bool:
        return self.trainer_bytes <= self.trainer.limit_bytes


def server_capacity(planner: Planner, setup: Setup) -> ServerCapacity:
    """Return the capacity of a server on the fewest GPUs that hold the model, and of its trainer.

    If `setup` has a tensor parallel size and a share of a GPU (`utilization`), they apply to the server.
    """
    # 1. The trainer, without an engine on its GPUs
    trainer = planner.capacity(replace(setup, tensor_parallel_size=1, utilization=0.0))

    # 2. The server at each tensor parallel size, without a trainer on its GPUs. But the adapters lie in the engine
    no_trainer = TrainerMemory(**{item.name: 0.0 for item in fields(TrainerMemory)})
    no_trainer = replace(no_trainer, in_engine=trainer.trainer.in_engine)
    share = setup.utilization if setup.utilization is not None else SERVER_SHARE
    sizes = [setup.tensor_parallel_size]
    if setup.tensor_parallel_size is None:
        # A server may have as many GPUs as it needs. All sizes divide the largest size, so none is left out
        sizes = planner.sizes_on(max(planner.sizes))
    servers = [Capacity(planner.plan_at(size), no_trainer, replace(setup, gpus=size), share) for size in sizes]

    # 3. Take the smallest size with a KV cache that is large enough, or the smallest size of all
    fitting = [server for server in servers if server.why_no_cache is None]
    server = fitting[0] if fitting else servers[0]
    return ServerCapacity(server, trainer)
