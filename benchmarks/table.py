"""The table of GPU results, from the files that exist; what is missing is said, and nothing is filled in.

    python -m benchmarks.table [--results benchmarks/results]

Prints Markdown: the goals beside what was measured, then a table per benchmark,
each with its file, hardware and commit.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from testing import record


SIZES = {"qwen3_8b": "Qwen3-8B", "qwen3_1_7b": "Qwen3-1.7B"}
GIB = 2**30


@dataclass(frozen=True)
class Goal:
    """A number to reach: `keys` lead to it in the results of `file`; it is a spread or a plain number."""

    text: str
    file: str
    keys: tuple[str, ...]
    reached: Callable[[float], bool]


EIGHT_B = ("engines", "fp8_linears_kv")
GOALS = (
    Goal(
        "rollout of 16k responses, FP8 linears + KV over BF16: >= 1.45",
        "rollout_qwen3_8b",
        (*EIGHT_B, "tokens_per_second_over_bf16", "16384"),
        lambda x: x >= 1.45,
    ),
    Goal(
        "KV cache tokens over BF16: >= 2.3", "rollout_qwen3_8b", (*EIGHT_B, "kv_tokens_over_bf16"), lambda x: x >= 2.3
    ),
    Goal("sync of 8 B over TRL's BF16 sync: <= 1", "sync_qwen3_8b", ("seconds_over_trl_bf16",), lambda x: x <= 1),
    Goal(
        "calibration, share of a step: <= 0.01",
        "calibration_qwen3_8b",
        ("calibration", "share_of_step", "rollout"),
        lambda x: x <= 0.01,
    ),
    Goal(
        "trainer's FP8 forward over BF16, 8 B linears: >= 1.25",
        "fp8_linear",
        ("backward", "bf16", "decoder_layer", "forward", "speedup"),
        lambda x: x >= 1.25,
    ),
)


def load(folder: Path, name: str) -> dict | None:
    path = folder / f"{name}_gpu.json"
    return json.loads(path.read_text()) if path.exists() else None


def find(record_: dict | None, keys: tuple[str, ...]) -> dict | float | None:
    """What `keys` lead to in a record's results; None where a key is missing."""
    found = record_ and record_["results"]
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


def number(value: dict | float | None, digits: int = 3) -> str:
    """`1.52 (1.49 - 1.60)` of a spread, `1.52` of a number."""
    if value is None:
        return "not measured"
    if isinstance(value, dict):
        middle, low, high = (number(value[key], digits) for key in ("median", "min", "max"))
        return f"{middle} ({low} - {high})"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def header(*cells: str) -> Iterator[str]:
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def source(name: str, of: dict) -> str:
    versions = ", ".join(
        f"{package} {of['versions'][package]}" for package in ("vllm", "torch") if package in of["versions"]
    )
    missing = "".join(f" Not measured: {part} ({why})." for part, why in of["results"].get("not_measured", {}).items())
    return f"{name}_gpu.json: {of['hardware']}, {versions}, commit {of['commit']}, n = {of['n']}.{missing}"


def goals(folder: Path) -> Iterator[str]:
    yield from header("goal", "measured", "")
    for goal in GOALS:
        found = load(folder, goal.file)
        value = find(found, goal.keys)
        if value is None:
            why = f"no {goal.file}_gpu.json" if found is None else f"{goal.file}_gpu.json does not hold it"
            yield row(goal.text, "not measured", why)
            continue
        middle = value["median"] if isinstance(value, dict) else value
        yield row(goal.text, number(value), "reached" if goal.reached(middle) else "**missed**")


def rollout(of: dict) -> Iterator[str]:
    engines = of["results"].get("engines", {})
    lengths = sorted({length for engine in engines.values() for length in engine["lengths"]}, key=int)
    titles = [f"tokens/s, {int(length):,} token responses (sequences)" for length in lengths]
    yield from header("rollouts", "weights, GiB", "KV cache tokens", *titles)
    for name, engine in engines.items():
        title = name if engine.get("auditable", True) else f"{name} (speed only: not audited, no trainer takes it)"
        cells = [title, number(engine["parameter_bytes"] / GIB), number(engine["kv_tokens"])]
        for length in lengths:
            slice_ = engine["lengths"].get(length)
            cells.append(
                f"{number(slice_['tokens_per_second'])} ({slice_['sequences']})" if slice_ else "not measured"
            )
        yield row(*cells)


def sync(of: dict) -> Iterator[str]:
    names = [name for name in ("fp8_linears_kv", "trl_bf16") if name in of["results"]]
    yield from header("sync", "seconds", "GB/s", "peak memory, GiB", "parts, seconds")
    for name in names:
        found = of["results"][name]
        parts = ", ".join(f"{part} {number(value['median'])}" for part, value in found.get("parts", {}).items())
        peak = {key: value / GIB for key, value in found["peak_bytes"].items()} if "peak_bytes" in found else None
        yield row(name, number(found["seconds"]), number(found["gigabytes_per_second"]), number(peak), parts)
    yield row("copy on the device", "", number(of["results"]["copy_gigabytes_per_second"]), "", "")


def calibration(of: dict) -> Iterator[str]:
    yield from header("source of scales", "added, seconds", "share of the step")
    for name in ("rollout", "policy"):
        cells = (number(find(of, ("calibration", key, name))) for key in ("added_seconds", "share_of_step"))
        yield row(name, *cells)


def fp8_linear(of: dict) -> Iterator[str]:
    yield from header("fp8_backward, speed-up over BF16", "forward", "forward and backward")
    for name in of["results"]["backward"]:
        keys = ("backward", name, "decoder_layer")
        yield row(name, *(number(find(of, (*keys, which, "speedup"))) for which in ("forward", "forward_backward")))


def step(of: dict) -> Iterator[str]:
    yield from header("step", "seconds", "sync", "generate", "training", "speed-up over BF16")
    for name, found in of["results"].get("precisions", {}).items():
        seconds = (number(found[part]) for part in ("step", "sync", "generate", "training"))
        speedup = number(found["speedup_over_bf16"]["step"]) if "speedup_over_bf16" in found else ""
        yield row(name, *seconds, speedup)


def depth(of: dict) -> Iterator[str]:
    yield from header("weights", "layers", "policy", "mismatch (range over seeds)", "largest", "engine against itself")
    for found in of["results"]["rows"]:
        spread = f"({brief(found['mismatch']['min'])} - {brief(found['mismatch']['max'])})"
        mean = brief(found["mismatch_mean"]) + (f" {spread}" if found["largest"] else "")
        largest, itself = brief(found["largest"]), brief(found["prefill_decode"]["largest"])
        yield row(found["weights"], str(found["layers"]), found["policy"], mean, largest, itself)


def lora(of: dict) -> Iterator[str]:
    results = of["results"]
    yield from header("LoRA on a shared FP8 base, over merged adapters", "ratio")
    yield row(
        "memory, merged base in BF16 (FP32)",
        f"{number(find(of, ('memory_ratio',)))} ({number(find(of, ('memory_ratio_float32',)))})",
    )
    yield row("a sync", number(find(of, ("cells", "sync", "ratio"))))
    for weights, shared in results["mismatch_shared"].items():
        yield row(f"mismatch, {weights} weights", number(shared / results["mismatch_merged"][weights]))
    yield row('mismatch itself with fp8_forward="full"', number(find(of, ("mismatch_full",))))


def brief(value: float) -> str:
    return f"{value:#.2g}" if value else "0"


# name of the result file -> title, table, what makes it
OF_SIZES = {
    "rollout": ("Rollouts", rollout),
    "sync": ("Weight sync", sync),
    "calibration": ("KV cache calibration", calibration),
    "step": ("GRPO step", step),
}
SECTIONS = {
    f"{name}_{size}": (f"{title}, {SIZES[size]} shapes", table, f"bench_{name} --size {size}")
    for name, (title, table) in OF_SIZES.items()
    for size in (SIZES if name == "step" else ("qwen3_8b",))
} | {
    "fp8_linear": (
        "Linear layers of one decoder layer, Qwen3-8B shapes",
        fp8_linear,
        "bench_fp8_linear --size qwen3_8b",
    ),
    "depth": ("Mismatch over depth", depth, "measure_depth"),
    "lora": ("LoRA", lora, "bench_lora"),
}


def render(folder: Path) -> Iterator[str]:
    yield from goals(folder)
    missing = []
    for name, (title, table, command) in SECTIONS.items():
        of = load(folder, name)
        if of is None:
            missing.append(f"{name}_gpu.json (python -m benchmarks.{command})")
            continue
        yield from ("", f"### {title}", "", *table(of), "", source(name, of))
    if missing:
        yield from ("", "Not measured yet:", "", *(f"- {item}" for item in missing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    print("\n".join(render(parser.parse_args().results)))


if __name__ == "__main__":
    main()
