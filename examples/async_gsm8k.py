"""Asynchronous GRPO with FP8 rollouts: one GPU trains, another one serves. docs/async.md has both commands.

CUDA_VISIBLE_DEVICES=1 python examples/async_gsm8k.py
"""

import re
from pathlib import Path

from datasets import load_dataset

from trl_fp8 import FP8AsyncGRPOConfig, FP8AsyncGRPOTrainer


MODEL = "Qwen/Qwen3-1.7B"


def right_number(completions: list, answer: list[str], **kwargs) -> list[float]:
    """Return 1.0 where the last number of a completion is that of the answer. TRL's worker pickles this function."""
    rewards = []
    for messages, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d[\d,]*", messages[-1]["content"] or "")
        rewards.append(float(bool(numbers) and numbers[-1].replace(",", "") == right))
    return rewards


def as_conversation(row: dict) -> dict:
    right = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": [{"role": "user", "content": row["question"]}], "answer": right}


if __name__ == "__main__":
    data = load_dataset("openai/gsm8k", "main", split="train").map(as_conversation, remove_columns=["question"])
    args = FP8AsyncGRPOConfig(
        "outputs/async_gsm8k",
        vllm_server_base_url="http://127.0.0.1:8000",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=1024,
        max_staleness=2,
        max_steps=200,
        learning_rate=1e-6,
        save_steps=50,
        report_to="none",
    )
    trainer = FP8AsyncGRPOTrainer(MODEL, right_number, args, data)
    trainer.train(resume_from_checkpoint="auto")
    if not Path("outputs/async_gsm8k/fp8").exists():  # else a finished run was started again
        trainer.save_fp8_model("outputs/async_gsm8k/fp8")
