# /// script
# dependencies = [
#     "trl-fp8[report]",
#     "vllm>=0.31,<0.33",
# ]
# ///
"""The same training in BF16, with FP8 linears, and with an FP8 KV cache too, one after another, and a report of all.

    python examples/compare_precisions.py outputs/compare -- \
        accelerate launch examples/grpo_addition.py --config examples/grpo_addition.yaml

What stands behind `--` is run once for each precision, with `--output_dir` and the flags of that precision behind it.
Rewards of single runs differ by chance: repeat it with other seeds (`--seed 2`) before you conclude anything.
"""

import argparse
import subprocess
import sys
from pathlib import Path


# name -> flags. In BF16 too rollouts come from vLLM, so that only the precision differs
PRECISIONS = {
    "bf16": ["--fp8_weights", "false", "--fp8_base", "false", "--kv_cache_dtype", "auto", "--use_vllm", "true"],
    "fp8_linears": ["--kv_cache_dtype", "auto"],
    "fp8_linears_kv": [],
    "fp8_one_forward": ["--fp8_forward", "one_forward"],
}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="each run gets a folder in it, and report/ is the comparison")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8_linears", "fp8_linears_kv"]
    )
    parser.add_argument("command", nargs="+", help="behind --: how the training is started")
    given = parser.parse_args(words)
    runs = [given.folder / name for name in given.precisions]
    for run in runs:
        command = [*given.command, "--output_dir", str(run), *PRECISIONS[run.name]]
        print(f"\n$ {' '.join(command)}\n", flush=True)
        if status := subprocess.run(command).returncode:
            print(f"{run.name} ended with status {status}: nothing is compared.", file=sys.stderr)
            return status
    report = [sys.executable, "-m", "trl_fp8.commands.cli", "report", *map(str, runs)]
    return subprocess.run([*report, "--output", str(given.folder / "report")]).returncode


if __name__ == "__main__":
    sys.exit(main())
