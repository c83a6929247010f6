"""What fits: trainer and engine together on each GPU, and what to change where they do not.

A plan fits if the trainer's memory and the engine's share leave `FREE` of a GPU for what is not counted, and if the
engine's KV cache then holds a few sequences of full length. What is changed to make a plan fit is computed by the same
rules as the plan itself, and only offered if it fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from trl_fp8.recipe.outline import Outline

from .plan import GIB, Plan
from .trainer_memory import TrainerMemory, Training, engine_adapters, trainer_memory


# CUDA graphs, activations of a few thousand batched tokens, the context: what vLLM keeps beside weights and KV cache
RESERVED_BYTES = 3 * GIB
FREE = 0.15  # of a GPU, for what is not counted
LEAST_SEQUENCES = 8  # of full length that a KV cache holds at once, or all of them if they are fewer
MOST_GPUS = 64
SHARES = tuple(share / 20 for share in range(18, 0, -1))  # of a GPU that an engine may get, largest first
SIZES = (1, 2, 4, 8)  # tensor parallel
LORA_RANK = 32
CONTEXT, COMPLETIONS, MOST_PROMPT = 4096, 256, 512  # tokens, samples, tokens: planned for where nothing is said


@dataclass(frozen=True)
class Setup:
    """What is run, and where. None: whatever fits best."""

    training: Training
    gpu_bytes: float
    prompt: int  # tokens of `training.tokens` that are given
    completions: int  # of a generation, on all GPUs
    group: int = 8  # num_generations, completions of a prompt
    tensor_parallel_size: int | None = None
    utilization: float | None = None  # vllm_gpu_memory_utilization, the engine's share of a GPU
    sleeps: bool = False  # vllm_enable_sleep_mode: the engine's memory is the trainer's while it trains
    shares_kernels: bool = False  # fp8_forward="one_forward": the trainer computes with the engine's weights

    @property
    def weights_sleep(self) -> bool:
        return self.sleeps and not (self.shares_kernels or self.training.fp8_base)


@dataclass(frozen=True)
class Capacity:
    """Memory of each GPU under a plan."""

    plan: Plan
    trainer: TrainerMemory
    setup: Setup
    utilization: float
    adapter_bytes: int = 0  # on each rank of an engine that computes adapters, in BF16

    @property
    def ranks(self) -> int:
        return self.plan.recipe.tensor_parallel_size

    @property
    def engine_bytes(self) -> float:
        return self.utilization * self.setup.gpu_bytes

    @property
    def total_bytes(self) -> float:
        if not self.setup.sleeps:
            return self.trainer.total + self.engine_bytes
        room = max(0.0, self.kv_bytes(self.plan.recipe.fp8_weights))
        freed = self.engine_bytes if self.setup.weights_sleep else room
        return self.trainer.states + self.engine_bytes - freed + max(self.trainer.passing, freed)

    @property
    def limit_bytes(self) -> float:
        return self.setup.gpu_bytes - max(FREE * self.setup.gpu_bytes, self.trainer.uncounted)

    @property
    def sequences(self) -> int:
        """Completions of a generation that one engine samples."""
        return -(-self.setup.completions * self.ranks // self.setup.training.gpus)

    def kv_bytes(self, fp8_weights: bool) -> float:
        """What the engine's share leaves for a KV cache on each rank; negative where it does not hold the weights."""
        return self.engine_bytes - RESERVED_BYTES - self.held_bytes(fp8_weights)

    def held_bytes(self, fp8_weights: bool) -> float:
        """Weights on each rank of an engine, and the adapters that are beside FP8 ones."""
        if not fp8_weights:
            return self.plan.bytes_before / self.ranks
        return self.plan.bytes_after / self.ranks + self.adapter_bytes

    @property
    def kv_tokens(self) -> dict[str, int]:
        """Precision -> tokens that the KV cache holds then: of a BF16 engine, and as far as the plan has FP8."""
        recipe, found = self.plan.recipe, {"bf16": self._tokens(False, False)}
        if recipe.fp8_weights:
            found["fp8_linears"] = self._tokens(True, False)
        if recipe.fp8_kv_cache:
            found["fp8_linears_kv" if recipe.fp8_weights else "fp8_kv"] = self.held_tokens
        return found

    @property
    def held_tokens(self) -> int:
        """Tokens that the plan's own KV cache holds."""
        return self._tokens(self.plan.recipe.fp8_weights, self.plan.recipe.fp8_kv_cache)

    def _tokens(self, fp8_weights: bool, fp8_kv: bool) -> int:
        """Of sequences of full length."""
        length = self.setup.training.tokens
        size = self.plan.cache.sequence_bytes(length, fp8_kv)
        room = max(0.0, self.kv_bytes(fp8_weights))
        return int(room / size * length) if size else self.sequences * length * (room > 0)

    @property
    def why_not(self) -> str | None:
        """What does not fit, in words; None if all does."""
        if self.total_bytes > self.limit_bytes:
            return f"{self.total_bytes / GIB:.0f} GiB are more than {self.limit_bytes / GIB:.0f}"
        least = min(self.sequences, LEAST_SEQUENCES)
        if self.held_tokens < least * self.setup.training.tokens:
            return f"no KV cache for {least} sequences of {self.setup.training.tokens:,} tokens"
        return None


@dataclass(frozen=True)
class Planner:
    """Capacities of one model under any setup."""

    outline: Outline
    plan_at: Callable[[int], Plan]  # tensor parallel size -> plan
    sizes: tuple[int, ...] = SIZES  # that may be chosen
    may_share_base: bool = True  # nothing that is said goes against adapters on an FP8 base

    def capacity(self, setup: Setup) -> Capacity:
        """Of a setup, with the smallest tensor parallel size at which it fits where none is given."""
        if setup.tensor_parallel_size is not None:
            return self._at(setup, setup.tensor_parallel_size)
        found = [self._at(setup, size) for size in self._sizes(setup.training.gpus)]
        return next((capacity for capacity in found if capacity.why_not is None), found[0])

    def ways(self, setup: Setup) -> list[Capacity]:
        """What fits in place of a setup that does not: another split, LoRA, LoRA on an FP8 base, more GPUs; at most
        one of each kind.
        """
        ways = []
        for setups in self._changes(setup):
            for way in map(self.capacity, setups):
                if way.why_not is None:
                    ways.append(way)
                    break
        on_one = [way for way in ways if way.setup.training.gpus == setup.training.gpus]
        is_lora = any(way.setup.training.lora_rank for way in on_one)
        return [way for way in ways if way in on_one or not (way.setup.training.lora_rank and is_lora)]

    def _changes(self, setup: Setup) -> Iterator[list[Setup]]:
        free, training = replace(setup, utilization=None, tensor_parallel_size=None), setup.training
        rank = training.lora_rank or LORA_RANK
        lora = [replace(training, lora_rank=rank)]
        if self.may_share_base and self.plan_at(1).recipe.fp8_weights:
            lora.append(replace(training, lora_rank=rank, dtype="bfloat16", fp8_base=True))
        lora.append(replace(training, lora_rank=rank, dtype="bfloat16", fp8_base=False))
        more = [training.gpus * 2**power for power in range(1, 7) if training.gpus * 2**power <= MOST_GPUS]
        for counts in ([training.gpus], more):
            if not training.lora_rank:
                yield [replace(free, training=replace(training, gpus=gpus)) for gpus in counts]
            yield [replace(free, training=replace(one, gpus=gpus)) for gpus in counts for one in lora]

    def _sizes(self, gpus: int) -> list[int]:
        """Tensor parallel sizes that divide GPUs and attention heads, and not the blocks of FP8 weights."""
        found, whole = [1], self.plan_at(1).fp8_parameters
        for size in self.sizes[1:]:
            if gpus % size == 0 and self.splits(size) and 1.1 * self.plan_at(size).fp8_parameters >= whole:
                found.append(size)
        return found

    def splits(self, size: int) -> bool:
        """vLLM can divide the heads over that many ranks."""
        name = next((name for name in self.outline.linears if name.endswith((".q_proj", ".qkv_proj"))), None)
        kv_heads, head_dim = self.outline.kv_heads, self.outline.head_dim
        if name is None or not kv_heads or not head_dim:
            return size == 1
        queries = self.outline.linears[name][0] // head_dim - (2 * kv_heads if name.endswith(".qkv_proj") else 0)
        return queries % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    def _at(self, setup: Setup, size: int) -> Capacity:
        """Of a tensor parallel size, with the share that serves it best where none is given: enough for all sequences
        at once, were the engine in BF16, or the most that the trainer leaves; where that is not enough, the least that
        the engine needs.
        """
        plan, training = self.plan_at(size), setup.training
        trainer = trainer_memory(self.outline, training, plan.recipe, setup.shares_kernels)
        adapters = 2 * engine_adapters(self.outline, training.lora_rank) if training.fp8_base else 0
        if setup.utilization is not None:
            return Capacity(plan, trainer, setup, setup.utilization, adapters)
        made = [Capacity(plan, trainer, setup, share, adapters) for share in SHARES]
        if fitting := [capacity for capacity in made if capacity.why_not is None]:
            ample = [c for c in fitting if c.kv_tokens["bf16"] >= c.sequences * setup.training.tokens]
            return ample[-1] if ample else fitting[0]
        least = min(made[0].sequences, LEAST_SEQUENCES) * setup.training.tokens
        return next((capacity for capacity in reversed(made) if capacity.held_tokens >= least), made[0])
