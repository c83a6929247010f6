"""How much faster rollouts may get with FP8: an estimate from bytes and operations, made of data sheets.

A decoding step of an engine reads its weights once and the KV cache of each running sequence once, and multiplies each
token with each weight. What takes longest of the two, reading or multiplying, is what a linear layer takes:

    linears     max(bytes / bandwidth, 2 * parameters * sequences / peak), for FP8 and BF16 weights apart
    attention   bytes of KV cache / bandwidth
    the rest    launches, a few per layer, with a few more for what is quantized on the way; sampling

With one forward no batch may change a row's bits, which costs time where a batch is small.
Attention does not split the keys of a sequence: one program goes through all of them for each sequence and key head.
Where these are fewer than the GPU's processors, the others wait. And an adapter's A is the work of a dozen programs,
each of which waits for every step of K (features/one_forward/engine_part/tiles.py).

A rollout is followed from its first token to the last: sequences end at lengths spread evenly up to the longest, and
no more run at a time than the KV cache holds. Prefills and the trainer are left out: a whole step gains less.

No GPU result of this project exists: nothing was measured here. The efficiencies are round numbers, fitted so that the
gains come out that others measured (tests/planning/test_roofline.py lists them): that they do is no evidence.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .plan import Plan, PlanRow


GIB = 2**30
POINTS = 32  # of a rollout at which a decoding step is priced
# Share of the data sheet's figure that kernels reach: bandwidth of GEMMs and of attention, peak of GEMMs
BANDWIDTH = {"bf16": 0.8, "fp8": 0.7, "kv_bf16": 0.75, "kv_fp8": 0.65}
PEAK = {"bf16": 0.7, "fp8": 0.5}
# Seconds of a step that no size changes: scheduling and sampling; launches of a layer, those that quantize the inputs
# of its linears and of its attention, two small GEMMs beside each linear that has adapters, and an all-reduce where
# ranks share an engine
STEP, LAYER, LAYER_FP8, LAYER_FP8_KV, LAYER_ADAPTERS, ALL_REDUCE = 2e-3, 30e-6, 8e-6, 5e-6, 24e-6, 10e-6
# With one forward, of the four A of a layer of 8 B: 192 steps of 128 columns in a row, each a fourth of the 0.8
# microseconds in which memory answers, since four loads are under way
LAYER_ADAPTERS_ONE_FORWARD = 40e-6


class GPU(NamedTuple):
    """Figures of a data sheet: GiB, bytes a second, dense operations a second in BF16 and in FP8, multiprocessors."""

    name: str
    memory: float
    bandwidth: float
    bf16: float
    fp8: float
    processors: int


GPUS = (
    GPU("RTX 4090", 24, 1.01e12, 165e12, 330e12, 128),
    GPU("L40S", 48, 0.86e12, 362e12, 733e12, 142),
    GPU("H100", 80, 3.35e12, 989e12, 1979e12, 132),
    GPU("H200", 141, 4.8e12, 989e12, 1979e12, 132),
    GPU("B200", 180, 8.0e12, 2250e12, 4500e12, 148),
)


def gpu_of(gpu_bytes: float) -> GPU:
    """The GPU whose memory is closest."""
    return min(GPUS, key=lambda gpu: abs(gpu.memory - gpu_bytes / GIB))


@dataclass(frozen=True)
class Rollout:
    """What an engine samples at once."""

    sequences: int  # of this engine
    prompt: int  # tokens
    completion: int  # tokens of the longest


def rollout_seconds(
    plan: Plan,
    gpu: GPU,
    rollout: Rollout,
    fp8_weights: bool,
    fp8_kv: bool,
    kv_bytes: float,
    adapters: float = 0,
    one_forward: bool = False,
) -> dict[str, float]:
    """Seconds of a rollout by what they go to; `kv_bytes` is what the KV cache has on each rank, `adapters` what
    adapters take there. `one_forward`: kernels are those that a trainer shares.
    """
    total = dict.fromkeys(("weights", "compute", "kv", "fixed"), 0.0)
    for point in range(POINTS):
        share = (point + 0.5) / POINTS
        context = int(rollout.prompt + share * rollout.completion)
        alive = max(1.0, rollout.sequences * (1 - share))
        held = kv_bytes / max(plan.cache.sequence_bytes(context, fp8_kv), 1)
        running = min(alive, max(1.0, held))
        steps = rollout.completion / POINTS * alive / running
        took = step_seconds(plan, gpu, running, context, fp8_weights, fp8_kv, adapters, one_forward)
        for part, seconds in took.items():
            total[part] += steps * seconds
    return total


def step_seconds(
    plan: Plan,
    gpu: GPU,
    running: float,
    context: int,
    fp8_weights: bool,
    fp8_kv: bool,
    adapters: float = 0,
    one_forward: bool = False,
) -> dict[str, float]:
    """Seconds of a decoding step of that many sequences with `context` tokens each, by what limits it."""
    ranks, layers = plan.recipe.tensor_parallel_size, len(plan.cache.layers)
    took = {"weights": 0.0, "compute": 0.0}
    for row in plan.rows:
        if row.is_looked_up:
            continue
        kind = row.precision if fp8_weights else "bf16"
        held = row.bytes_after if kind == "fp8" else 2 * row.parameters
        touched, used = _shares(row, plan.experts_per_token, running)
        peak = gpu.fp8 if kind == "fp8" else gpu.bf16
        reading = held * touched / ranks / (gpu.bandwidth * BANDWIDTH[kind])
        computing = 2 * row.parameters * used * running / ranks / (peak * PEAK[kind])
        took["weights" if reading >= computing else "compute"] += max(reading, computing)
    # BF16: two bytes, and two operations a token, of each parameter
    took["weights"] += adapters * max(1 / (gpu.bandwidth * BANDWIDTH["bf16"]), running / (gpu.bf16 * PEAK["bf16"]))
    bandwidth = gpu.bandwidth * BANDWIDTH["kv_fp8" if fp8_kv else "kv_bf16"]
    took["kv"] = running * plan.cache.sequence_bytes(context, fp8_kv) / bandwidth
    if one_forward and plan.cache.kv_heads:
        programs = running * max(1, plan.cache.kv_heads // ranks)
        took["kv"] *= max(1.0, gpu.processors / programs)
    launches = LAYER + LAYER_FP8 * fp8_weights + LAYER_FP8_KV * fp8_kv + ALL_REDUCE * (ranks > 1)
    launches += (LAYER_ADAPTERS + LAYER_ADAPTERS_ONE_FORWARD * one_forward) * (adapters > 0)
    return took | {"fixed": STEP + layers * launches}


def _shares(row: PlanRow, experts_per_token: int, running: float) -> tuple[float, float]:
    """Share of a row's weights that a step reads, and that a token is multiplied with."""
    if not row.is_of_experts or not experts_per_token:
        return 1.0, 1.0
    used = min(1.0, experts_per_token / row.shape[0])
    return 1 - (1 - used) ** running, used
