"""The trainer's FP8 linears against BF16, layer by layer: fprop, dgrad and wgrad of each GEMM backend.

    python -m benchmarks.bench_fp8_linear [--size qwen3_8b] [--tokens 8192] [--backends fake_quant scaled_mm]

Times of the linear layers of one decoder layer, as `FP8Linear` calls them: the input is quantized in each forward, but
not again for k_proj, v_proj and up_proj, which read what the layer before them read; the quantized weight is cached.
dgrad and wgrad are the backward with one gradient wanted, under fp8_backward="fp8" as named and "straight_through" for
fp8_backward="bf16". torchao's own backward computes both gradients whatever is wanted, so its dgrad and wgrad are each
the whole backward, and it quantizes weights in each forward, and the input for every layer. BF16 and FP8 alternate,
and ratios are of neighbours. "decoder_layer" adds up the seven layers; "quantize_weights" is what an optimizer step
costs beside it, once for all micro-batches.

Shape letters: T tokens, N out-features, K in-features.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from trl_fp8.policy.flow.flow import BACKENDS, FP8Flow
from trl_fp8.policy.flow.gemm import HOPPER, require_backend, torchao_linear
from trl_fp8.policy.flow.linear import fp8_linear
from trl_fp8.quantization.formats.spec import ActivationScaling, ScaleFormat

from . import harness, record, shapes


PASSES = ("fprop", "dgrad", "wgrad")
GIVEN_INPUT = ("k_proj", "v_proj", "up_proj")  # Q(x) is there already, see trl_fp8.policy.flow.linear
CALLS = 4  # calls that are timed together, so that a launch does not count


def linears(size: str) -> dict[str, tuple[int, int]]:
    """Name -> (N, K) of the linear layers of a decoder layer."""
    config = shapes.config(size)
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    return attention | {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}


def flows(backend: str, scale_format: ScaleFormat) -> dict[str, FP8Flow]:
    """What is measured of a backend: label -> flow."""
    formats = {"activation": ActivationScaling(scale_format), "backend": backend}
    if backend == "torchao":  # it has fp32 scales and an FP8 backward only
        fp32 = formats | {"activation": ActivationScaling("fp32")}
        return {backend: FP8Flow(backward="fp8", scale_format="fp32", **fp32)}
    straight = FP8Flow(backward="bf16", **formats)
    return {backend: FP8Flow(backward="fp8", **formats), f"{backend}, straight_through": straight}


def passes(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x_TK, weight_NK, dy_TN
) -> dict[str, Callable]:
    """Pass -> a function that runs it once. The graphs of both backward passes are made here."""
    x, weight = x_TK.clone().requires_grad_(), weight_NK.clone().requires_grad_()
    to_x, to_weight = linear(x, weight_NK), linear(x_TK, weight)

    @torch.no_grad()
    def fprop() -> torch.Tensor:
        return linear(x_TK, weight_NK)

    return {
        "fprop": fprop,
        "dgrad": lambda: torch.autograd.grad(to_x, x, dy_TN, retain_graph=True),
        "wgrad": lambda: torch.autograd.grad(to_weight, weight, dy_TN, retain_graph=True),
    }


def linear_of(
    flow: FP8Flow, weight_NK: torch.Tensor, x_TK: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`(x, weight) -> y` under `flow`, Q(W) made once, and Q(x) too if `x_TK` is given."""
    if flow.backend == "torchao":
        return torchao_linear
    codes = flow.quantize_weights([weight_NK])[0]
    input_codes = None if x_TK is None else flow.quantize_tokens(x_TK)
    return lambda x, weight: fp8_linear(x, weight, None, codes, flow, input_codes=input_codes)


def compare(
    shape: tuple[int, int], flow: FP8Flow, tokens: int, repeats: int, given_input: bool
) -> dict[str, dict[str, list[float]]]:
    """Pass -> seconds of one call, "bf16" and "fp8", in pairs; `given_input`: Q(x) is not counted."""
    N, K = shape
    torch.manual_seed(0)
    options = {"device": shapes.DEVICE, "dtype": torch.bfloat16}
    x_TK, dy_TN = torch.randn(tokens, K, **options), torch.randn(tokens, N, **options)
    weight_NK = 0.02 * torch.randn(N, K, **options)
    sides = {
        "bf16": passes(F.linear, x_TK, weight_NK, dy_TN),
        "fp8": passes(linear_of(flow, weight_NK, x_TK if given_input else None), x_TK, weight_NK, dy_TN),
    }
    seconds = {name: {"bf16": [], "fp8": []} for name in PASSES}
    for name in PASSES:
        for repeat in range(repeats + 2):  # two to warm up
            for side, functions in sides.items():
                found = shapes.seconds_of(lambda run=functions[name]: [run() for _ in range(CALLS)]) / CALLS
                if repeat >= 2:
                    seconds[name][side].append(found)
    return seconds


def quantize_weights(wanted: dict[str, tuple[int, int]], repeats: int) -> dict[str, float]:
    """Milliseconds for Q(W) of all layers of a decoder layer."""
    flow = FP8Flow()
    weights = [torch.randn(shape, device=shapes.DEVICE, dtype=torch.bfloat16) for shape in wanted.values()]
    seconds = [
        shapes.seconds_of(lambda: [flow.quantize_weights([weight]) for weight in weights]) for _ in range(repeats + 2)
    ]
    return record.spread([1e3 * found for found in seconds[2:]])


def summarize(shapes_of: dict[str, tuple[int, int]], rows: dict[str, dict], tokens: int) -> dict:
    """Per layer and for the sum of all: milliseconds, TFLOP/s and the speed-up over BF16, pass by pass."""
    found = {name: _figures(row, 2 * tokens * N * K) for name, row in rows.items() for N, K in [shapes_of[name]]}
    if len(rows) == len(shapes_of):
        total = {
            which: {
                side: [sum(values) for values in zip(*(row[which][side] for row in rows.values()), strict=True)]
                for side in ("bf16", "fp8")
            }
            for which in PASSES
        }
        found["decoder_layer"] = _figures(total, sum(2 * tokens * N * K for N, K in shapes_of.values()))
    return found


def _figures(row: dict[str, dict[str, list[float]]], operations: int) -> dict:
    return {
        which: {
            "milliseconds": {side: record.spread([1e3 * s for s in seconds]) for side, seconds in sides.items()},
            "teraflops": {side: operations / median(seconds) / 1e12 for side, seconds in sides.items()},
            "speedup": harness.ratios(sides["bf16"], sides["fp8"]),
        }
        for which, sides in row.items()
    }


def main() -> None:
    parser = harness.parser(__doc__, budget=300, engine=False)
    capability = torch.cuda.get_device_capability() if shapes.DEVICE == "cuda" else None
    runnable = BACKENDS if capability == HOPPER else ("fake_quant",)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=runnable)
    parser.add_argument("--tokens", type=int, default=8192 if capability else 256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--scale-format", choices=["pow2", "fp32"], default="fp32", help="of activations; CUTLASS: fp32"
    )
    options = parser.parse_args()
    for backend in options.backends:
        require_backend(backend, capability)
    run = harness.Run("fp8_linear", options, options.repeats, tokens=options.tokens, backends={})
    run.results["scale_format"] = options.scale_format
    wanted = linears(options.size)
    run.results["quantize_weights_milliseconds"] = quantize_weights(wanted, options.repeats)
    for backend in BACKENDS:
        if backend not in options.backends:
            run.results["not_measured"][backend] = "not chosen, or not for this device"
            continue
        for label, flow in flows(backend, options.scale_format).items():
            measure(run, label, flow, wanted, options)
    run.finish()


def measure(run: harness.Run, label: str, flow: FP8Flow, wanted: dict, options: argparse.Namespace) -> None:
    """All layers under one flow, as long as the budget lasts; the file is written after each."""
    rows: dict[str, dict] = {}
    for name, shape in wanted.items():
        if run.left < 0:
            run.results["not_measured"][f"{label}, {name}"] = "did not fit into the budget"
            continue
        rows[name] = compare(shape, flow, options.tokens, options.repeats, name in GIVEN_INPUT)
        run.results["backends"][label] = summarize(wanted, rows, options.tokens)
        run.save()


if __name__ == "__main__":
    main()
