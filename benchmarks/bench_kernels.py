"""Kernels without an engine: are they right, and how long does a call take?

    python -m benchmarks.bench_kernels [--size qwen3_8b] [--rows 1 16 64 65 4096] [--budget 55]

exact     this project's Triton kernels against torch's operations, bit for bit
check     each of vLLM's kernels for FP8 linears: its product against FP64, and the same bits in every batch
seconds   a call of each that passes, for every shape of the model, as a GPU runs it from a graph with an empty cache
tiles     a product with an unquantized weight under batch invariance, in vLLM's tile and in this project's
          (features/one_forward/engine_invariance.py): an adapter's A, a router, output heads

Prints a row after each. What fails is a row with "error", what is not for the device one with "left_out". On CPU the
engine's reference kernel takes the place of all.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from . import harness, shapes


UNQUANTIZED = [(96, 4096), (128, 2048), (151936, 2048), (151936, 4096)]
TINY_UNQUANTIZED = [(12, 64)]


def seconds(call: Callable[[], object]) -> float:
    from trl_fp8.engine.vllm.gemms import replayed_seconds

    return replayed_seconds(call) if shapes.DEVICE == "cuda" else shapes.seconds_of(call)


def rows(options: argparse.Namespace) -> Iterator[Callable[[], dict]]:
    """What makes each row, in order."""
    from trl_fp8.engine.vllm.cpu.reference_linear import register_cpu_kernel
    from trl_fp8.engine.vllm.gemms import Gemm
    from trl_fp8.engine.vllm.platform import platform_of
    from trl_fp8.quantization.codec.kernel_check import require_exact_kernels
    from trl_fp8.recipe.from_model import outline_of
    from trl_fp8.recipe.recipe import recipe_for_model

    config, device = shapes.config(options.size), torch.device(shapes.DEVICE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    recipe, platform = recipe_for_model(model), platform_of(device)
    if device.type == "cpu":
        register_cpu_kernel()
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        yield lambda: {"exact": require_exact_kernels(device) is None}
    passed = []
    for name in platform.linear_backends(recipe):
        gemm = Gemm(name, recipe.format, recipe.scale_format, device, config, batch_invariant=True)
        yield lambda gemm=gemm: (gemm.check(), passed.append(gemm), {"check": gemm.name})[-1]
    for count in options.rows:
        for shape in recipe.gemms(outline_of(model)):
            for gemm in passed if device.type == "cuda" else []:
                made = {"kernel": gemm.name, "shape": shape, "rows": count}
                yield lambda gemm=gemm, made=made: made | {"seconds": gemm.seconds(made["shape"], made["rows"])}
    for count in options.rows:
        for shape in UNQUANTIZED if options.size != "tiny" else TINY_UNQUANTIZED:
            yield partial(of_tiles, shape, count, device)


def of_tiles(shape: tuple[int, int], count: int, device: torch.device) -> dict:
    """Seconds of a product with an unquantized weight: torch's, which may go by the batch, and in both tiles (GPU)."""
    from vllm.model_executor.determinism import batch_invariant, batch_invariant_configs

    from trl_fp8.features.one_forward.engine_invariance import linear_tile
    from trl_fp8.upstream.patches import substituted

    weight, x = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in (shape, (count, shape[1])))
    found = {"unquantized": shape, "rows": count, "seconds_by_torch": seconds(lambda: x @ weight.T)}
    tiles = {"seconds": linear_tile, "seconds_in_vllms_tile": batch_invariant_configs._get_matmul_config}
    for name, tile in tiles.items() if device.type == "cuda" else ():
        with substituted(batch_invariant, "_get_matmul_config", tile):
            found[name] = seconds(partial(batch_invariant.linear_batch_invariant, x, weight))
    return found


@torch.no_grad()
def main() -> None:
    parser = harness.parser(__doc__, budget=55, engine=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 65, 4096])
    options = parser.parse_args()
    PartialState()  # the loggers of what is measured ask for it
    ends, failed = time.monotonic() + options.budget, 0
    for make in rows(options):
        if time.monotonic() > ends:
            harness.skip("the rest")
            break
        try:
            harness.emit(make())
        except ValueError as reason:  # not for this device, or switched off
            harness.emit({"left_out": str(reason)})
        except Exception as error:  # whatever a kernel dies of is a result
            failed += 1
            harness.emit({"error": f"{type(error).__name__}: {error}"})
    if failed:
        raise SystemExit(f"{failed} rows have errors")


if __name__ == "__main__":
    main()
