# /// script
# dependencies = [
#     "trl-fp8[report]",
#     "vllm>=0.31,<0.33",
# ]
# ///
"""GRPO with FP8 weights and an FP8 KV cache on two-digit addition, from pretraining to report, without any download.

    python examples/grpo_addition.py --config examples/grpo_addition.yaml

makes a 0.4 M parameter policy (once, cached), trains it on problems that it never saw, prints what came of it, and
writes to `output_dir`:

    summary.json    accuracy on held-out problems before and after, mismatch, sync time, what was FP8
    report.png      reward, mismatch, completion length and sync time over the steps
    model and checkpoint files as TRL writes them, in high precision

With `grpo_addition_server.yaml` a vLLM server generates, which the script starts and ends.
With `grpo_addition_moe.yaml` the policy is a mixture of experts of 1.0 M parameters, of which a token uses 0.4 M; with
`grpo_addition_lora.yaml` only adapters are trained.

Any flag of `FP8GRPOConfig` can follow, e.g. `--kv_cache_dtype auto`; `--compare` trains with BF16 rollouts, too;
`--verbose` prints the whole plan, everything that was measured, and what other libraries have to say.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from trl_fp8.upstream.quiet import quiet


if __name__ == "__main__":
    print("Importing torch, TRL and vLLM (at the first start this takes a minute)", flush=True)
    if "--verbose" not in sys.argv:
        quiet()

import torch
from addition_task import (
    ARCHITECTURES,
    PretrainRecipe,
    cached_checkpoint,
    exact_answer,
    held_out_accuracy,
    policy_sampler,
    reinforcement_dataset,
)
from compare_precisions import PRECISIONS
from demo_report import Reference, demo_table, headline, plot_training, stored_reference
from demo_server import own_server
from peft import LoraConfig
from trl import TrlParser

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer, FP8ProgressCallback, __version__


@dataclass
class ScriptArguments:
    eval_samples: int = field(
        default=4, metadata={"help": "Completions per held-out problem, before and after training."}
    )
    arch: str = field(default="qwen3", metadata={"help": f"Architecture of the policy: {' or '.join(ARCHITECTURES)}."})
    pretrain_seed: int = field(default=0, metadata={"help": "Seed of the policy's pretraining."})
    lora_r: int = field(default=0, metadata={"help": "Rank of adapters, trained on all linears instead of weights."})
    lora_alpha: int = field(default=16, metadata={"help": "The adapters' scaling, times their rank."})
    compare: bool = field(default=False, metadata={"help": "Train with BF16 rollouts, too, in output_dir/bf16."})
    verbose: bool = field(default=False, metadata={"help": "Print the whole plan and everything that was measured."})


def over_steps(statistic: Callable[[list[float]], float], rows: list[dict], key: str) -> float | None:
    """None if no step logged it."""
    values = [row[key] for row in rows if key in row]
    return statistic(values) if values else None


def summarize(trainer: FP8GRPOTrainer, start: float, end: float, seconds: float) -> dict:
    rows = [row for row in trainer.state.log_history if "reward" in row]
    plan, engine = trainer.plan, getattr(trainer, "vllm_generation", None)
    return {
        "reward_start": start,
        "reward_end": end,
        "mismatch_mean": over_steps(mean, rows, "sampling/sampling_logp_difference/mean"),
        "fp8_linears": len(trainer.recipe.fp8_modules) if trainer.recipe else 0,
        "fp8_experts": len(trainer.recipe.fp8_experts) if trainer.recipe else 0,
        "kv_cache_dtype": trainer.args.kv_cache_dtype,
        "sync_seconds_median": over_steps(median, rows, "fp8/sync_seconds"),
        "sync_bytes_median": over_steps(median, rows, "fp8/sync_bytes"),
        "fp8_forward": trainer.args.fp8_forward,
        "simulate_kv_cache": trainer.args.simulate_kv_cache,
        "kv_calibration": trainer.args.kv_calibration,
        "kv_saturation_max": max((row.get("fp8/kv_saturation_fraction", 0.0) for row in rows), default=None),
        "kv_margin_end": rows[-1].get("fp8/kv_margin") if rows else None,
        "calibration_seconds_median": over_steps(median, rows, "fp8/calibration_seconds"),
        "step_seconds_median": over_steps(median, rows, "step_time"),
        "router_replay": trainer.args.router_replay,
        "router_disagreement": over_steps(mean, rows, "router/disagreement"),
        "router_own_disagreement": over_steps(mean, rows, "router/own_disagreement"),
        "audit_failures": getattr(engine, "audit_failures", 0),
        "fp8_share": plan.fp8_share if plan else 0.0,
        "weight_bytes_bf16": plan.bytes_before if plan else None,
        "weight_bytes_engine": plan.bytes_after if plan else None,
        "kv_bytes_per_token_bf16": plan.cache.token_bytes(fp8=False) if plan else None,
        "kv_bytes_per_token_engine": plan.cache.token_bytes(fp8=True) if plan else None,
        "kernels": dict(engine.numerics.kernels) if trainer.recipe else {},
        "rewards": [row["reward"] for row in rows],
        "steps": trainer.state.global_step,
        "training_seconds": seconds,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"trl-fp8": __version__}
        | {name: version(name) for name in ("trl", "torch", "torchao", "transformers")},
    }


def adapters(script: ScriptArguments) -> LoraConfig | None:
    """On all linears but the output head; None where weights are trained."""
    if not script.lora_r:
        return None
    return LoraConfig(
        r=script.lora_r, lora_alpha=script.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def main(script: ScriptArguments, args: FP8GRPOConfig) -> None:
    # Policy
    checkpoint = str(cached_checkpoint(PretrainRecipe.of(script.arch, seed=script.pretrain_seed)))
    needs_server = args.vllm_mode == "server" and args.vllm_server_base_url is None
    with own_server(checkpoint, args) if needs_server else nullcontext():
        train(checkpoint, script, args)


def train(checkpoint: str, script: ScriptArguments, args: FP8GRPOConfig) -> None:
    bf16 = trained_in_bf16(args.output_dir) if script.compare else None

    # Training
    trainer = FP8GRPOTrainer(
        model=checkpoint,
        reward_funcs=exact_answer,
        args=args,
        train_dataset=reinforcement_dataset(),
        callbacks=[FP8ProgressCallback()],
        peft_config=adapters(script),
    )
    if script.verbose and trainer.plan:
        trainer.accelerator.print(trainer.plan.table(), flush=True)

    def evaluate() -> float:
        generate = policy_sampler(trainer.model, trainer.processing_class, seed=1)
        return held_out_accuracy(generate, samples=script.eval_samples)

    start = evaluate()
    trainer.accelerator.print(f"Accuracy on held-out problems before training: {start:.3f}", flush=True)
    began = time.perf_counter()
    trainer.train()
    summary = summarize(trainer, start, evaluate(), time.perf_counter() - began)

    # Report
    trainer.save_model()
    folder = Path(args.output_dir)
    if trainer.accelerator.is_main_process:
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        plot_training(
            trainer.state.log_history,
            folder / "report.png",
            title="GRPO with FP8 rollouts: addition",
            held_out={0: summary["reward_start"], summary["steps"]: summary["reward_end"]},
        )
        if script.verbose:
            print(demo_table({key: value for key, value in summary.items() if key != "rewards"}))
        if not script.lora_r:  # stored runs trained all weights
            bf16 = bf16 or stored_reference(start, args.max_steps)
        print(f"\n{headline(summary, bf16, folder)}")


def trained_in_bf16(output_dir: str) -> Reference:
    """The same training with BF16 rollouts, in a process of its own."""
    print("First with BF16 rollouts, to compare", flush=True)
    folder = Path(output_dir, "bf16")
    words = ["--output_dir", str(folder), *PRECISIONS["bf16"], "--compare", "false"]  # win over the same before them
    words += ["--vllm_mode", "colocate"]  # a server that takes weights from TRL's own trainer needs a GPU
    subprocess.run([sys.executable, *sys.argv, *words], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    return Reference(summary["reward_end"], summary["mismatch_mean"], "run before")


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, FP8GRPOConfig))
    if not (on_gpu := torch.cuda.is_available()):
        # vLLM would compile two functions of its sampler: 20 seconds at the first start, to save some milliseconds
        torch.compiler.set_stance("force_eager")
    # Many CPUs have no BF16 units and emulate it 50 times slower than FP32; the engine's FP8 and BF16 are unaffected
    parser.set_defaults(use_cpu=not on_gpu, bf16=on_gpu)
    main(*parser.parse_args_and_config())
