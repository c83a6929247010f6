"""A whole GRPO step with TRL's trainer and ours: BF16 rollouts, FP8 rollouts, and FP8 rollouts with an FP8 forward.

    python -m benchmarks.bench_step [--size qwen3_8b] [--completions 32] [--length 1024]
                                    [--precisions bf16 fp8_linears_kv]

bf16             every FP8 flag off, which on a GPU is TRL's own engine and sync
fp8_linears_kv   FP8 linears and FP8 KV cache, the defaults
fp8_flow         the same, and fp8_forward="full": the trainer runs the engine's forward

Steps are those of the trainer: sync, generation, old log-probs, rewards, backward, optimizer. Prompts are random,
every completion has the full length, rewards are random. After two steps each measured one is taken apart by the
methods that the trainer calls: "sync", "generate" (without a sync) and the rest, which is training. Seconds are
between idle devices. `fp8_linears_kv` says what share of a step calibration takes (`fp8/calibration_seconds`; what
observation adds to the old-log-prob pass is in bench_calibration.py), and the comparison of the engine's weights with
the last sync's before each generation ("verify", a part of "generate").

A policy of 8 B with its gradients and Adam's moments does not fit on one GPU of 80 GB beside an engine, in FP32 (122
GiB) or in BF16 (61 GiB, in which it is trained; others are in FP32). There it takes `--lora RANK`: adapters are
trained, and merged at each sync. A size that cannot fit is refused before anything starts.
"""

import argparse
import random
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from testing import record

from . import harness, shapes


ORDER = ("bf16", "fp8_linears_kv", "fp8_flow")
WARM_UP = 2
STATES = 4  # numbers for each weight that is trained: itself, its gradient, Adam's two moments
PRECISIONS = {
    "bf16": {**shapes.PRECISIONS["bf16"], "use_vllm": True},
    "fp8_linears_kv": {},
    "fp8_flow": {"fp8_forward": "full"},
}


def random_reward(completions: list[str], **kwargs) -> list[float]:
    return [random.random() for _ in completions]


def policy_dtype(size: str) -> torch.dtype:
    return torch.bfloat16 if size == "qwen3_8b" else torch.float32


def require_memory(options: argparse.Namespace, device_bytes: int) -> None:
    """Raise `ValueError` if the policy's training states and the engine's share are more than the device has."""
    with torch.device("meta"):
        parameters = shapes.numel(AutoModelForCausalLM.from_config(shapes.config(options.size)))
    states = parameters * policy_dtype(options.size).itemsize * (1 if options.lora else STATES)
    needed = states + options.utilization * device_bytes
    if needed > device_bytes:
        raise ValueError(
            f"--size {options.size} with --lora {options.lora}, --utilization {options.utilization}: training states "
            f"of {states / 2**30:.0f} GiB and the engine's share need {needed / 2**30:.0f} GiB, and the GPU has "
            f"{device_bytes / 2**30:.0f} GiB. Set --lora 32 or --size qwen3_1_7b."
        )


class Meter(TrainerCallback):
    """Emits a row for each step after the warm-up."""

    def __init__(self, watch: shapes.Stopwatch, run: harness.Run):
        self.watch, self.run, self.trainer = watch, run, None

    def on_step_begin(self, args, state, control, **kwargs):
        shapes.synchronize()
        self.watch.clear()
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        shapes.synchronize()
        seconds = time.perf_counter() - self.began
        sync, generate = self.watch.seconds["sync"], self.watch.seconds["generate"]
        row = {"step": seconds, "sync": sync, "generate": generate, "training": seconds - sync - generate}
        last = getattr(self.trainer.vllm_generation, "last_sync", None)
        if last is not None and last.carried:
            row["calibration"] = last.prepare_seconds
        if "verify" in self.watch.seconds:
            row["verify"] = self.watch.seconds["verify"]
        if state.global_step > WARM_UP:
            harness.emit(row)
        if self.run.left < 1.5 * seconds and state.global_step < args.max_steps:
            harness.skip(f"steps after {state.global_step}")
            control.should_training_stop = True
        return control


def make_trainer(options: argparse.Namespace, folder: str, meter: Meter, output: str):
    """The trainer of this part's precision, its engine started from dummy weights: the first step syncs."""
    import trl.generation.vllm_generation as trl_generation
    from datasets import Dataset
    from vllm import LLM

    from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
    from trl_fp8.upstream.patches import substituted

    on_gpu = shapes.DEVICE == "cuda"
    flags = PRECISIONS[options.part]
    own_engine = options.part != "bf16" or not on_gpu
    args = FP8GRPOConfig(
        output,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.completions // options.micro_batch,
        num_generations=options.group,
        max_completion_length=options.length,
        generation_kwargs={"ignore_eos": True},
        vllm_max_model_length=options.prompt + options.length,
        vllm_gpu_memory_utilization=options.utilization,
        vllm_engine_kwargs=(options.engine_kwargs or None) if own_engine else None,
        learning_rate=1e-6,
        max_steps=WARM_UP + options.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **flags,
    )
    letters = shapes.random_tokens("tiny", 4 * options.completions, options.prompt) % 26
    prompts = ["".join(chr(ord("a") + letter) for letter in row) for row in letters.tolist()]
    dummy = {"load_format": "dummy", "dtype": "bfloat16"} | options.engine_kwargs  # ours sets both itself
    with substituted(trl_generation, "LLM", lambda **kwargs: LLM(**(kwargs | dummy))):
        return FP8GRPOTrainer(
            shapes.policy(folder, policy_dtype(options.size)),
            random_reward,
            args,
            Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[meter],
            peft_config=adapters(options.lora) if options.lora else None,
        )


def adapters(rank: int):
    """LoRA on every linear layer of the decoder."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def measure(options: argparse.Namespace) -> None:
    run = harness.Run("step", options)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as output:
        watch = shapes.Stopwatch()
        meter = Meter(watch, run)
        trainer = make_trainer(options, shapes.write_folder(options.size, folder), meter, output)
        meter.trainer = trainer
        watch.time(trainer.vllm_generation, "sync_weights", "sync")
        watch.time(trainer.vllm_generation, "generate", "generate")
        if trainer.recipe is not None:
            watch.time(trainer.vllm_generation.delivery, "verify", "verify")
        trainer.train()


def summarize(rows: dict[str, list[dict]]) -> dict:
    """Spreads per precision, and each one's step over BF16's, step by step."""
    found = {}
    for name, steps in rows.items():
        found[name] = {part: record.spread([step[part] for step in steps]) for part in steps[0]}
        for part in ("calibration", "verify"):
            if part in steps[0]:
                found[name][f"{part}_share_of_step"] = record.spread([step[part] / step["step"] for step in steps])
        if name != "bf16" and "bf16" in rows:
            pairs = list(zip(rows["bf16"], steps, strict=False))
            found[name]["speedup_over_bf16"] = {
                part: record.spread([bf16[part] / ours[part] for bf16, ours in pairs])
                for part in ("step", "sync", "generate", "training")
            }
    return found


def main() -> None:
    parser = harness.parser(__doc__, budget=460)
    on_gpu = shapes.DEVICE == "cuda"
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=ORDER)
    parser.add_argument("--completions", type=int, default=32 if on_gpu else 8, help="of a step")
    parser.add_argument("--group", type=int, default=8 if on_gpu else 4, help="completions of a prompt")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256 if on_gpu else 16, help="prompt tokens")
    parser.add_argument("--length", type=int, default=1024 if on_gpu else 16, help="completion tokens")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per precision")
    parser.add_argument("--utilization", type=float, default=0.3, help="the engine's share of the GPU")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters; 0: all weights")
    options = parser.parse_args()
    if options.part:
        return measure(options)
    if on_gpu:
        require_memory(options, torch.cuda.get_device_properties(0).total_memory)
    sizes = {"completions": options.completions, "length": options.length, "lora": options.lora}
    run = harness.Run("step", options, options.steps, **sizes)
    rows: dict[str, list[dict]] = {}
    for index, name in enumerate(options.precisions):
        for row in run.rows(name, len(options.precisions) - index):
            rows.setdefault(name, []).append(row)
            run.results["precisions"] = summarize(rows)
    run.finish()


if __name__ == "__main__":
    main()
