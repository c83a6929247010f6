"""The config's seed decides what is sampled, whatever else draws random numbers."""

import random

import numpy as np
import pytest
import torch

from testing.runs import arguments, dataset, generate_calls, reward_digits, training


pytestmark = pytest.mark.engine
PROMPT = dataset(1)


def sampled(checkpoint, folder, seed, reward=reward_digits, **options):
    """The completions of two training steps on one prompt, and what the generators give once the engine runs."""
    evaluation = {"per_device_eval_batch_size": 4, "num_generations_eval": 4, "eval_steps": 1}
    flags = {"max_steps": 2, "seed": seed, "num_generations": 8} | evaluation | options
    args = arguments(folder, learning_rate=0.0, **flags)
    with training(checkpoint("qwen3"), args, reward_funcs=reward, train=PROMPT, eval_dataset=PROMPT) as trainer:
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        calls = generate_calls(trainer)
        trainer.train()
    return [completions for _, completions in calls if len(completions) == 8], drawn


def drawing(completions, **kwargs):
    """A reward that draws from the global generators."""
    torch.rand(3), np.random.rand(3)
    return reward_digits(completions)


def test_seeds_on_one_prompt_differ_and_one_repeats_beside_rewards_that_draw_and_evaluations(checkpoint, tmp_path):
    first, drawn = sampled(checkpoint, tmp_path, 1)
    other, drawn_by_other = sampled(checkpoint, tmp_path, 2)
    again, drawn_again = sampled(checkpoint, tmp_path, 1, drawing, eval_strategy="steps")
    assert len(first) == 2 and first == again  # 8 completions of each step; an evaluation asks for 4
    completions = [tuple(ids) for step in first + other for ids in step]
    assert len(set(completions)) == 32  # nor do steps repeat each other, with weights that do not move
    # dropout and rewards of TRL's own follow the seed as well
    assert drawn == drawn_again and not set(drawn) & set(drawn_by_other)
