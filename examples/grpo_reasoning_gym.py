# /// script
# dependencies = [
#     "trl-fp8",
#     "reasoning-gym",
#     "vllm>=0.31,<0.33",
# ]
# ///
"""GRPO with FP8 rollouts on puzzles that reasoning-gym makes and checks itself: no dataset to download.

    accelerate launch --config_file examples/accelerate_configs/ddp.yaml examples/grpo_reasoning_gym.py \
        --model_name_or_path Qwen/Qwen3-1.7B --tasks chain_sum number_sorting --output_dir outputs/puzzles

A task's own verifier scores answers between 0 and 1, also partly right ones. Any flag of `FP8GRPOConfig` can follow.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from trl_fp8.upstream.quiet import quiet


if __name__ == "__main__":
    quiet()  # before torch is imported

import reasoning_gym
import torch
from datasets import Dataset
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from trl import ModelConfig, TrlParser, get_peft_config

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


@dataclass
class PuzzleArguments:
    tasks: list[str] = field(
        default_factory=lambda: ["chain_sum"],
        metadata={"help": "Names of reasoning-gym tasks; puzzles are drawn from all of them alike."},
    )
    puzzles: int = field(default=2000, metadata={"help": "Number of puzzles of each task."})
    puzzle_seed: int = field(default=0, metadata={"help": "Seed of the puzzles."})


def puzzles(tasks: list[str], size: int, seed: int) -> Dataset:
    """Columns: prompt (messages), task, entry (the puzzle as JSON, for its verifier)."""
    rows = []
    for task in tasks:
        for entry in reasoning_gym.create_dataset(task, size=size, seed=seed):
            system, problem = SYSTEM_PROMPTS["simple"], entry["question"]
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": problem}]
            rows.append({"prompt": prompt, "task": task, "entry": json.dumps(entry)})
    return Dataset.from_list(rows).shuffle(seed=seed)


def verified(tasks: list[str]) -> Callable:
    """Reward: the task's own verifier on what stands between <answer> and </answer>, 0 if nothing does."""
    scorers = {task: reasoning_gym.get_score_answer_fn(task) for task in tasks}

    def puzzle_reward(completions: list, task: list[str], entry: list[str], **kwargs) -> list[float]:
        answers = [extract_answer(completion[0]["content"]) for completion in completions]
        return [
            0.0 if answer is None else float(scorers[name](answer, json.loads(puzzle)))
            for answer, name, puzzle in zip(answers, task, entry, strict=True)
        ]

    return puzzle_reward


def main(script: PuzzleArguments, args: FP8GRPOConfig, model: ModelConfig) -> None:
    # Dataset
    dataset = puzzles(script.tasks, script.puzzles, script.puzzle_seed)

    # Training
    loading = dict(revision=model.model_revision, dtype=model.dtype, attn_implementation=model.attn_implementation)
    args.model_init_kwargs = loading | (args.model_init_kwargs or {})
    trainer = FP8GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=verified(script.tasks),
        args=args,
        train_dataset=dataset,
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

    # Policy in high precision, and as the engine served it
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub()
        trainer.push_fp8_to_hub()


if __name__ == "__main__":
    parser = TrlParser((PuzzleArguments, FP8GRPOConfig, ModelConfig))
    if not torch.cuda.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)  # many CPUs emulate BF16
    main(*parser.parse_args_and_config())
