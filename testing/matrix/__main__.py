"""Run the matrix, or some families of it, and write what docs/models.md is made from.

python -m testing.matrix [FAMILY ...] [--workers N]

Each family has a process of its own, and after each its row in benchmarks/results/models_cpu.json is written, with the
commit that ran. Without names all of them run whose row is of another commit, or failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from testing.processes import alone, free_port

from .torchvision import FOLDER, declare_operators


LIMIT = 600  # seconds of a family
RESULT = "RESULT "
WITH_TORCHVISION = (
    "gemma3",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_vl",
)


def one(name: str) -> None:
    """Print the row of a family.

    Its operators are declared before anything imports transformers, which imports torchvision where it finds it.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if name in WITH_TORCHVISION:
        declare_operators()
    from .families import FAMILIES
    from .row import row

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # late: others look for one, too
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(RESULT + json.dumps(row(FAMILIES[name], Path(folder))) + "\n")


def in_a_process(name: str) -> dict:
    """Return the row of a family, or its failure."""
    start = time.perf_counter()
    command, environment = [sys.executable, "-m", "testing.matrix", "--one", name], alone()
    if name in WITH_TORCHVISION:
        environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(FOLDER)])
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
        lines = ran.stdout.splitlines()
        rows = [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]
        found = rows[0] if rows else {"failed": ran.stderr[-4000:]}
    except subprocess.TimeoutExpired:
        found = {"failed": f"was not done after {LIMIT} s"}
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{name:20} {seconds:5.0f} s  {found.get('failed') or found}\n")
    sys.stdout.flush()
    return found | {"seconds": round(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return 0
    from testing import record

    from .families import FAMILIES

    if unknown := set(options.families) - FAMILIES.keys():
        parser.error(f"unknown families {sorted(unknown)}; known are {', '.join(FAMILIES)}")
    path = record.path("models")
    rows = json.loads(path.read_text())["results"] if path.exists() else {}
    commit = record.commit()
    done = [name for name, row in rows.items() if row["commit"] == commit and "failed" not in row]
    names = options.families or [name for name in FAMILIES if name not in done]
    with ThreadPoolExecutor(options.workers) as pool:
        runs = {pool.submit(in_a_process, name): name for name in names}
        for run in as_completed(runs):
            rows[runs[run]] = run.result() | {"commit": commit}
            in_order = {name: rows[name] for name in FAMILIES if name in rows}
            record.write("models", len(in_order), in_order)
    return int(any("failed" in found for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
