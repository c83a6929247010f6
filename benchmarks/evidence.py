"""Derive the numbers of docs/evidence.md once more from the raw tables, and fail where a result file says another.

    python -m benchmarks.evidence

| result file | raw table |
|---|---|
| anatomy_cpu.json, rows of `precisions` | anatomy_logps_cpu.npz: a log-ratio for each token |
| gradient_cpu.json | gradient_products_cpu.npz: inner products of gradients, by pairs of prompts |
| claims_cpu.json | benchmarks/claims/runs_cpu.jsonl.gz: every generation of every run |

`make evidence` runs it and writes the pages. Seconds, but for the bootstraps of the claims, which take a minute.
"""

import json
import math
from collections.abc import Iterator

import numpy as np

from testing import record

from . import bench_anatomy, bench_gradient
from .claims import verdicts
from .claims.runs import Runs


RELATIVE = 1e-6  # numpy sums in another order on another host
ABSOLUTE = 1e-9


def main() -> None:
    wrong = [*anatomy(), *gradient(), *claims()]
    if wrong:
        raise SystemExit("not what the raw tables say:\n" + "\n".join(wrong))


def anatomy() -> Iterator[str]:
    """Yield the path of each number that does not follow from the committed log-ratios."""
    log_ratios = bench_anatomy.read_log_ratios(record.RESULTS)
    for name, row in stored("anatomy")["precisions"].items():
        again = bench_anatomy.of_log_ratios(log_ratios[name], log_ratios["entropy"])
        yield from differences(again, row, f"anatomy {name}")


def gradient() -> Iterator[str]:
    """Yield the path of each number that does not follow from the committed inner products."""
    products = dict(np.load(bench_gradient.product_file(record.RESULTS)))
    for policy, found in stored("gradient").items():
        for dose, facts in found["doses"].items():
            for correction, row in facts["corrections"].items():
                again = bench_gradient.compared(products, policy, dose, correction)
                yield from differences(again, row, f"gradient {policy} {dose} {correction}")


def claims() -> Iterator[str]:
    """Yield the path of each number that does not follow from the committed runs."""
    yield from differences(verdicts.results(Runs.read()), stored("claims"), "claims")


def stored(name: str) -> dict:
    return json.loads((record.RESULTS / f"{name}_cpu.json").read_text())["results"]


def differences(again: object, written: object, path: str) -> Iterator[str]:
    """Yield the path of each leaf of `again` that `written` lacks or says otherwise."""
    if isinstance(again, dict):
        for key, value in again.items():
            if not isinstance(written, dict) or key not in written:
                yield f"{path} {key}: missing"
            else:
                yield from differences(value, written[key], f"{path} {key}")
    elif isinstance(again, list | tuple):
        if not isinstance(written, list) or len(again) != len(written):
            yield f"{path}: another number of entries"
        else:
            for index, (value, other) in enumerate(zip(again, written, strict=True)):
                yield from differences(value, other, f"{path} {index}")
    elif not same(again, written):
        yield f"{path}: {again!r} follows from the raw table, {written!r} is written"


def same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return one == other


if __name__ == "__main__":
    main()
