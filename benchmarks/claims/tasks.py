"""What is learned: a pretrained policy, prompts, a reward, and how good a policy is on problems it never saw."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples import addition_task
from examples.addition_task import PretrainRecipe, cached_checkpoint, exact_answer, held_out_accuracy, policy_sampler

from . import automaton
from .policy import HELD_OUT, PROMPT, REINFORCEMENT, cached_policy, probability_right


ROWS = 2000  # of the automaton's dataset: more than any run asks for
HELD_OUT_TRACES = 128
HELD_OUT_SAMPLES = 2  # of each of the 405 held-out additions

Evaluate = Callable[[PreTrainedModel, PreTrainedTokenizerFast], float]


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        checkpoint: Makes the policy to start from, if it is not cached, and returns its folder.
        dataset: Prompts, with the column `answer`.
        evaluate: Held-out accuracy at temperature 1: of the automaton the exact chance, without sampling; of the
            addition that of 810 samples, the same seed each time.
    """

    checkpoint: Callable[[], Path]
    dataset: Callable[[], Dataset]
    reward: Callable[..., list[float]]
    evaluate: Evaluate
    max_completion_length: int
    max_model_length: int


def _addition(recipe: PretrainRecipe) -> Task:
    def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
        return held_out_accuracy(policy_sampler(model, tokenizer, seed=1), samples=HELD_OUT_SAMPLES)

    return Task(
        partial(cached_checkpoint, recipe, progress=False),
        addition_task.reinforcement_dataset,
        exact_answer,
        evaluate,
        addition_task.MAX_COMPLETION_TOKENS,
        64,
    )


def _traces() -> Dataset:
    asked = list(islice(automaton.problems(REINFORCEMENT), ROWS))
    return Dataset.from_dict({"prompt": [p.prompt for p in asked], "answer": [p.trace() for p in asked]})


def _evaluate_traces(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    return probability_right(model, tokenizer, list(islice(automaton.problems(HELD_OUT), HELD_OUT_TRACES)))


TASKS = {
    "addition": _addition(PretrainRecipe(layers=8, learning_rate=4e-3)),
    "addition_moe": _addition(PretrainRecipe.moe(layers=8, learning_rate=3e-3, experts=6)),
    "automaton": Task(
        cached_policy,
        _traces,
        automaton.right_trace,
        _evaluate_traces,
        automaton.MAX_COMPLETION_TOKENS,
        PROMPT + automaton.MAX_COMPLETION_TOKENS + 1,
    ),
}
