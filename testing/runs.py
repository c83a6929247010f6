"""Short training runs on tiny checkpoints, what is noted of them, and the end of their engines."""

from contextlib import contextmanager

from datasets import Dataset

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer

from . import engines


# FP8 moves log-probs of these random models by less than 0.3 on average (tests/trainer/test_trainer.py), and k3 is
# about half of the square. Tokens scored under another policy are off by whole nats.
SMALL_K3 = 0.3**2 / 2
SHORT = dict(
    use_cpu=True,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=8,
    max_steps=3,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    gradient_checkpointing=False,
    seed=3,
)


def dataset(rows: int = 32) -> Dataset:
    return Dataset.from_list([{"prompt": f"{10 + 7 * row % 89}+{10 + 3 * row % 79}="} for row in range(rows)])


def reward_digits(completions, **kwargs):
    """Return the share of digits: dense enough that groups of a random model have different rewards."""
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def arguments(folder, config=FP8GRPOConfig, **flags):
    of_fp8 = {"vllm_max_model_length": 64, "explain_mismatch_steps": 0}
    defaults = SHORT | (of_fp8 if config is FP8GRPOConfig else {})
    return config(str(folder), **(defaults | flags))


@contextmanager
def training(model, args, trainer=FP8GRPOTrainer, **options):
    """Yield a trainer over the tiny task, and shut its engine down at the end, so that the next one can start."""
    defaults = {"reward_funcs": reward_digits, "train_dataset": options.pop("train", dataset())}
    merged = defaults | options
    runner = trainer(model=model, args=args, **{name: value for name, value in merged.items() if value is not None})
    try:
        yield runner
    finally:
        if args.use_vllm:
            engines.shutdown(runner.vllm_generation.llm)


def rows(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def trajectory(trainer):
    """Return the logged rows of each step, without times."""
    return [{n: v for n, v in row.items() if "seconds" not in n and n != "step_time"} for row in rows(trainer)]


def column(trainer, key):
    return [row[key] for row in trainer.state.log_history if key in row]


def recorded(owner, name, note):
    """Call `note(result, *args, **kwargs)` after each `owner.name`. Return the list of its results."""
    original, notes = getattr(owner, name), []

    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        notes.append(note(result, *args, **kwargs))
        return result

    setattr(owner, name, call)
    return notes


def generate_calls(trainer):
    """Record token ids of prompts (one list per completion) and of completions, for each call of the engine."""
    return recorded(trainer.vllm_generation, "generate", lambda out, prompts, *_, **__: (prompts, out[1]))
