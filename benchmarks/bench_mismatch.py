"""Measure the mismatch at each step of the demo with BF16 rollouts, FP8 rollouts and one forward; draw it for README.

python -m benchmarks.bench_mismatch
"""

from pathlib import Path

from testing import record
from trl_fp8.features.run_log.log_file import read_run

from .bench_demo import LEARNING, run_demo
from .pictures import plot_mismatch


ROOT = Path(__file__).parents[1]
METRIC = "sampling/sampling_logp_difference/mean"  # TRL's own, logged also with BF16 rollouts
CORRECTION = ["--vllm_importance_sampling_mode", "token_truncate", "--vllm_importance_sampling_clip_max", "2.0"]


def main() -> None:
    curves = {}
    for policy, flags in LEARNING.items():
        folder = ROOT / "outputs" / "bench_mismatch" / policy
        run_demo(folder, ["--seed", 0, *flags, *CORRECTION])
        curves[policy] = [step[METRIC] for step in read_run(folder).logs if METRIC in step]
        print(f"{policy}: {sum(curves[policy]) / len(curves[policy]):.2g}", flush=True)
    record.write("demo_mismatch", 1, {"seed": 0, "metric": METRIC, "by_step": curves})
    plot_mismatch(curves, ROOT / "docs" / "images" / "mismatch.png")


if __name__ == "__main__":
    main()
