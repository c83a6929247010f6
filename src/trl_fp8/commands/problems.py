"""The dataset of `trl-fp8 train`: loaded, its splits and columns checked, its rows made problems for TRL's rewards."""

from collections.abc import Iterable
from pathlib import Path

import datasets
from datasets.exceptions import DatasetBuildError, DatasetsError
from trl import DatasetMixtureConfig, get_dataset

from .arguments import TaskArguments
from .rewards import OF_MESSAGES, VERIFIED


Split = datasets.Dataset | datasets.IterableDataset


def load_problems(script: TaskArguments, mixture: DatasetMixtureConfig, evaluated: bool) -> list[Split | None]:
    """The splits to train and to evaluate on, with the columns that rewards read; None if nothing is `evaluated`.

    Raises:
        ValueError: There is no such dataset, configuration, split or column; the message says which there are.
        OSError: The dataset is not here and cannot be reached.
    """
    splits = _loaded(script, mixture)
    asked = {"dataset_train_split": script.dataset_train_split}
    if evaluated:
        asked["dataset_test_split"] = script.dataset_test_split
    for flag, split in asked.items():
        if split not in splits:
            raise _unknown(flag, split, script, splits)
    return [_as_problems(splits[split], script) for split in asked.values()] + ([] if evaluated else [None])


def as_problem(row: dict, script: TaskArguments) -> dict:
    """What TRL's rewards expect of a row: messages, and the solution; an answer behind a marker is boxed."""
    made = {}
    if script.prompt_column or script.system_prompt or _reads_messages(script):
        prompt = row[script.prompt_column or "prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = [{"role": "system", "content": script.system_prompt}] if script.system_prompt else []
        made["prompt"] = [*system, *messages]
    if script.solution_column or script.solution_marker:
        solution = row[script.solution_column or "solution"]
        answer = solution.rpartition(script.solution_marker)[2].strip() if script.solution_marker else None
        made["solution"] = solution if answer is None else f"\\boxed{{{answer}}}"
    return made


def _loaded(script: TaskArguments, mixture: DatasetMixtureConfig) -> datasets.DatasetDict:
    try:
        if mixture.datasets:
            return get_dataset(mixture)
        return datasets.load_dataset(
            script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming
        )
    except (ValueError, OSError, DatasetsError) as error:  # no such configuration, not there, not readable
        kind = OSError if isinstance(error, ConnectionError) else ValueError
        reason = error.__cause__ if isinstance(error, DatasetBuildError) else error
        remedy = "Give a folder, or the name of a dataset on the Hub."
        if Path(path := str(script.dataset_name)).is_file():
            remedy = f"Give its folder, or in the YAML file datasets: [{{path: json, data_files: {path}}}]."
        elif isinstance(error, ConnectionError):
            remedy = "Without a network, give a folder with its files."
        elif "BuilderConfig" in str(error) or "onfig name" in str(error):
            remedy = "Set dataset_config to one of them."
        raise kind(f"{_name(script)}: {str(reason).rstrip('.')}. {remedy}") from error


def _as_problems(split: Split, script: TaskArguments) -> Split:
    columns = split.column_names or list(next(iter(split), {}))
    needed = {"prompt_column": script.prompt_column or "prompt"}
    if script.solution_column or script.solution_marker or set(VERIFIED) & set(script.reward_funcs or ()):
        needed["solution_column"] = script.solution_column or "solution"
    for flag, column in needed.items():
        if column not in columns:
            raise _unknown(flag, column, script, columns)
    reshaped = (script.prompt_column, script.system_prompt, script.solution_column, script.solution_marker)
    is_changed = any(reshaped) or _reads_messages(script)
    return split.map(as_problem, fn_kwargs={"script": script}) if is_changed else split


def _reads_messages(script: TaskArguments) -> bool:
    return not set(OF_MESSAGES).isdisjoint(script.reward_funcs or ())


def _name(script: TaskArguments) -> str:
    return f"dataset_name={script.dataset_name!r}" if script.dataset_name else "the mixture of datasets"


def _unknown(flag: str, value: str, script: TaskArguments, known: Iterable[str]) -> ValueError:
    there = ", ".join(map(repr, known))
    return ValueError(f"{flag}={value!r}: {_name(script)} has {there}. Set {flag} to one of them.")
