"""The trainer's linear layers under one forward against BF16: what calling the engine's FP8 kernel gains.

    python -m benchmarks.bench_fp8_linear [--size qwen3_8b] [--tokens 8192] [--backward bf16 fp8]

A policy of one decoder layer of the published size, and an engine that holds its codes. Timed are the policy's own
modules, as its forward calls them: q, k, v and gate, up are one call of the engine each; the input is quantized by its
kernel. The other side is `F.linear` of the same BF16 weights. `forward` is without gradients, `forward_backward` with
those of input and weights, under each fp8_backward. BF16 and FP8 alternate, and ratios are of neighbours;
"decoder_layer" adds up the four calls. No optimizer step costs anything beside it: the codes are those of the sync.

Shape letters: T tokens, N out-features, K in-features.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from testing import record
from testing.tokenizer import tokenizer

from . import harness, shapes


NAME = "fp8_linear"
# Policy layers that get the same input -> their parent
CALLS = {
    ("q_proj", "k_proj", "v_proj"): "self_attn",
    ("o_proj",): "self_attn",
    ("gate_proj", "up_proj"): "mlp",
    ("down_proj",): "mlp",
}
PASSES = ("forward", "forward_backward")
IN_A_ROW = 4  # calls that are timed together, so that a launch does not count
Sides = dict[str, list[float]]  # "bf16" and "fp8" -> seconds, in pairs


def main() -> None:
    parser = harness.parser(__doc__, budget=300, engine=False)
    parser.add_argument("--tokens", type=int, default=8192 if shapes.DEVICE == "cuda" else 256)
    parser.add_argument("--backward", nargs="+", choices=["bf16", "fp8"], default=["bf16", "fp8"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--engine-kwargs", type=shapes.kwargs_from, default={}, help="of vllm.LLM, as a JSON object")
    options = parser.parse_args()
    run = harness.Run(NAME, options, options.repeats, tokens=options.tokens, backward={})
    run.name = NAME  # the size stands in the file
    with started(options) as generation:
        run.results["kernels"] = dict(generation.numerics.kernels)
        for backward in options.backward:
            measure(run, generation, backward, options)
    run.finish()


@contextmanager
def started(options: argparse.Namespace) -> Iterator:
    """A synced engine and a BF16 policy of one layer."""
    from testing import engines
    from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart

    config = shapes.config(options.size)
    config.num_hidden_layers, config.layer_types, config.vocab_size = 1, config.layer_types[:1], 512
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        tokenizer(max_length=64).save_pretrained(folder)
        options_of = {"engine_kwargs": options.engine_kwargs, "kv_cache_dtype": "auto"}
        generation = engines.start(folder, parts=[SharedKernelsPart()], **options_of)
        generation.model.to(torch.bfloat16)
        generation.sync_weights()
        yield generation
        engines.shutdown(generation.llm)


def measure(run: harness.Run, generation, backward: str, options: argparse.Namespace) -> None:
    """All calls of a decoder layer, as long as the budget lasts; the file is written after each."""
    from testing.rollouts import follow

    forward = follow(generation, precision=backward)
    [decoder] = generation.model.get_decoder().layers
    rows: dict[str, dict[str, Sides]] = {}
    operations: dict[str, int] = {}
    for names, parent in CALLS.items():
        layers = [decoder.get_submodule(f"{parent}.{name}") for name in names]
        name = " ".join(names)
        if run.left < 0:
            run.results["not_measured"][f"fp8_backward={backward}, {name}"] = "did not fit into the budget"
            continue
        rows[name] = compare(layers, options.tokens, options.repeats)
        operations[name] = 2 * options.tokens * sum(layer.weight.numel() for layer in layers)
        run.results["backward"][backward] = summarize(rows, operations)
        run.save()
    forward.remove()


def compare(layers: list[nn.Linear], tokens: int, repeats: int) -> dict[str, Sides]:
    """Pass -> seconds of one call of all `layers`."""
    options = {"device": shapes.DEVICE, "dtype": torch.bfloat16}
    x_TK = torch.randn(tokens, layers[0].in_features, **options)
    dys = [torch.randn(tokens, layer.out_features, **options) for layer in layers]
    weights = [layer.weight for layer in layers]
    sides = {
        "bf16": passes([lambda x, w=weight: F.linear(x, w) for weight in weights], x_TK, weights, dys),
        "fp8": passes(layers, x_TK, weights, dys),
    }
    seconds: dict[str, Sides] = {name: {"bf16": [], "fp8": []} for name in PASSES}
    for name in PASSES:
        for repeat in range(repeats + 2):  # two to warm up
            for side, functions in sides.items():
                found = shapes.seconds_of(lambda run=functions[name]: [run() for _ in range(IN_A_ROW)]) / IN_A_ROW
                if repeat >= 2:
                    seconds[name][side].append(found)
    return seconds


def passes(linears: list[Callable], x_TK: torch.Tensor, weights: list[nn.Parameter], dys: list) -> dict[str, Callable]:
    """Pass -> a function that runs it once."""
    x = x_TK.clone().requires_grad_()

    @torch.no_grad()
    def forward() -> None:
        for linear in linears:
            linear(x_TK)

    def forward_backward() -> None:
        torch.autograd.grad([linear(x) for linear in linears], [x, *weights], dys)

    return {"forward": forward, "forward_backward": forward_backward}


def summarize(rows: dict[str, dict[str, Sides]], operations: dict[str, int]) -> dict:
    """Per call and, once all are there, for their sum: milliseconds, TFLOP/s and the speed-up over BF16."""
    found = {name: _figures(row, operations[name]) for name, row in rows.items()}
    if len(rows) == len(CALLS):
        total = {
            which: {
                side: [sum(values) for values in zip(*(row[which][side] for row in rows.values()), strict=True)]
                for side in ("bf16", "fp8")
            }
            for which in PASSES
        }
        found["decoder_layer"] = _figures(total, sum(operations.values()))
    return found


def _figures(row: dict[str, Sides], forward_operations: int) -> dict:
    operations = {"forward": forward_operations, "forward_backward": 3 * forward_operations}
    return {
        which: {
            "milliseconds": {side: record.spread([1e3 * s for s in seconds]) for side, seconds in sides.items()},
            "teraflops": {side: operations[which] / median(seconds) / 1e12 for side, seconds in sides.items()},
            "speedup": harness.ratios(sides["bf16"], sides["fp8"]),
        }
        for which, sides in row.items()
    }


if __name__ == "__main__":
    main()
