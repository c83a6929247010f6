"""GRPO with FP8 rollouts, from a run config and flags: TRL's script with this package's config and trainer.

    accelerate launch -m trl_fp8.scripts.grpo --config FILE [--FLAG VALUE ...]

`trl-fp8 train` starts this script on each process. The script checks that model, dataset, columns and rewards exist,
and the trainer checks everything else.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

from trl_fp8.run.interrupt import ended_by_ctrl_c
from trl_fp8.upstream.quiet import quiet

from .rewards import MESSAGE_REWARDS, require_rewards, reward_functions


def main() -> None:
    """Train in this process. The exit status is 2 after a user's mistake (one line on stderr), 130 after Ctrl-C."""
    quiet()
    trainers = []  # the trainer, as soon as there is one
    is_first_rank = os.environ.get("RANK", "0") == "0"
    with ended_by_ctrl_c(lambda: _stopped(trainers) if is_first_rank else ""):
        from .arguments import Parser  # imports torch, so only inside `ended_by_ctrl_c`

        try:
            script, args, model, mixture = Parser().read(sys.argv[1:]).configs()
            require_task(script, model, mixture)
            trainer = make_trainer(script, args, model, mixture)
        except (ValueError, OSError) as error:
            # All ranks find the same mistake, so one rank per machine reports it. But a single rank may get an OSError
            reports = isinstance(error, OSError) or os.environ.get("LOCAL_RANK", "0") == "0"
            sys.exit(refuse(error) if reports else 2)
        from trl_fp8.run.full_disk import FullDisk

        trainers.append(trainer)
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            trainer.save_model()
        except FullDisk as error:
            sys.exit(refuse(error))
        trainer.accelerator.print(f"Model saved to {args.output_dir}")
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=script.dataset_name)


def refuse(error: Exception) -> int:
    """Write the message of a user's mistake to stderr, as one line. Return the exit status."""
    sys.stderr.write(f"trl-fp8: {' '.join(str(error).split())}\n")
    return 2


def require_task(script: Any, model: Any, mixture: Any) -> None:
    """Raise `ValueError` for a run without model, dataset or rewards, or if one of them does not exist.

    Loads no dataset, and imports no module of a reward.
    """
    from trl_fp8.run.locations import require_dataset, require_model

    if not model.model_name_or_path:
        raise ValueError(
            "model_name_or_path is not set. Give a model, as in --model_name_or_path Qwen/Qwen3-4B, or a run config, "
            "as in --config examples/configs/qwen3_4b_1xh200.yaml."
        )
    dataset = script.dataset_name
    if bool(dataset) == bool(mixture.datasets):
        which = f"dataset_name={dataset!r} and datasets are both set" if dataset else "dataset_name is not set"
        raise ValueError(f"{which}. Give one of them, as in --dataset_name trl-lib/DeepMath-103K.")
    require_rewards(script)
    require_model(model.model_name_or_path, "model_name_or_path", model.model_revision)
    if dataset:
        require_dataset(dataset, "dataset_name")


def make_trainer(script: Any, args: Any, model: Any, mixture: Any) -> Any:
    """Return the trainer of a run, whose engine has started."""
    from trl import get_peft_config, get_quantization_config

    from trl_fp8.trainer import FP8GRPOTrainer

    rewards = reward_functions(script, args.max_completion_length)
    training, evaluation = load_problems(script, mixture, has_evaluation=args.eval_strategy != "no")
    model_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": args.trust_remote_code,
    }
    if model.dtype is not None:
        model_kwargs["dtype"] = model.dtype
    args.model_init_kwargs = model_kwargs | (args.model_init_kwargs or {})
    return FP8GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=training,
        eval_dataset=evaluation,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def load_problems(script: Any, mixture: Any, has_evaluation: bool) -> list[Any]:
    """Return two splits, for training and for evaluation; the second is None without evaluation.

    Raises:
        ValueError: There is no such dataset, configuration, split or column. The message lists those that exist.
        OSError: The dataset is out of reach.
    """
    import datasets
    from datasets.exceptions import DatasetBuildError, DatasetsError
    from trl import get_dataset

    source = f"dataset_name={script.dataset_name!r}" if script.dataset_name else "the mixture of datasets"
    try:
        if mixture.datasets:
            splits = get_dataset(mixture)
        else:
            options = {"name": script.dataset_config, "streaming": script.dataset_streaming}
            splits = datasets.load_dataset(script.dataset_name, **options)
    except (ValueError, OSError, DatasetsError) as error:  # no such configuration, or not readable
        with_config = f" with dataset_config={script.dataset_config!r}" if script.dataset_config else ""
        reason = error.__cause__ if isinstance(error, DatasetBuildError) else error
        error_type = OSError if isinstance(error, ConnectionError) else ValueError
        raise error_type(f"{source}{with_config}: {reason}") from error
    flags = ["dataset_train_split"]
    if has_evaluation:
        flags.append("dataset_test_split")
    for flag in flags:
        _require(getattr(script, flag), flag, source, splits)
    problems = [as_problems(splits[getattr(script, flag)], script, source) for flag in flags]
    return problems if has_evaluation else [*problems, None]


def as_problems(split: Any, script: Any, source: str = "the dataset") -> Any:
    """Return a split with the columns `prompt` and `solution`, made as the flags of `TaskArguments` say.

    Raises `ValueError` if `split` lacks a column from which `prompt` or `solution` is made.
    """
    prompt_column = script.prompt_column or "prompt"
    solution_column = script.solution_column or "solution"
    makes_messages = script.system_prompt or set(MESSAGE_REWARDS).intersection(script.reward_funcs or ())
    makes_prompt = script.prompt_column or makes_messages
    makes_solution = script.solution_column or script.solution_marker
    columns = split.column_names or list(next(iter(split), {}))  # a streamed split may not know its columns
    if makes_prompt:
        _require(prompt_column, "prompt_column", source, columns)
    if makes_solution:
        _require(solution_column, "solution_column", source, columns)

    def as_problem(row: dict) -> dict:
        problem = {}
        if makes_prompt:
            prompt = row[prompt_column]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            system = [{"role": "system", "content": script.system_prompt}] if script.system_prompt else []
            problem["prompt"] = [*system, *messages]
        if makes_solution:
            solution = row[solution_column]
            if script.solution_marker:
                _, _, answer = solution.rpartition(script.solution_marker)
                solution = f"\\boxed{{{answer.strip()}}}"
            problem["solution"] = solution
        return problem

    return split.map(as_problem) if makes_prompt or makes_solution else split


def _require(name: str, flag: str, source: str, known: Iterable[str]) -> None:
    """Raise `ValueError` if the value `name` of `flag` is not a known name of a split or column."""
    if name not in known:
        raise ValueError(f"{flag}={name!r}: {source} has {', '.join(map(repr, known))}. Set {flag} to one of them.")


def _stopped(trainers: list) -> str:
    """Return a text that says where Ctrl-C stopped a run, and how to go on. `trainers` comes from `main`."""
    if not trainers:
        return "stopped before the first step"
    from trl_fp8.run.checkpoints import RESUME_LAST, checkpoint_to_resume

    (trainer,) = trainers
    args = trainer.args
    step = f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}"
    checkpoint = trainer.last_checkpoint
    if checkpoint is None:
        return f"{step}; this run has no checkpoint yet, so the same command starts from the beginning"
    last = checkpoint_to_resume(args.output_dir, "auto")  # an earlier run's, if that run had more steps
    # Where the same command would begin. This folder may be gone: save_total_limit deletes old checkpoints
    start = args.resume_from_checkpoint
    if str(start).lower() in RESUME_LAST:
        start = last
    flag = ""
    if str(start) != checkpoint:
        flag = f" and --resume_from_checkpoint {'auto' if last == checkpoint else checkpoint}"
    return f"{step}; go on with the same command{flag}, from {checkpoint}"


if __name__ == "__main__":
    main()
