"""A repository in the Hub's cache, with several commits, as downloads leave it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants
from pytest import MonkeyPatch
from transformers import PreTrainedConfig


NAME = "user/tiny"
COMMITS = ["a" * 40, "b" * 40]  # the second is the main branch

KEEPS_COMMITS = hasattr(
    PreTrainedConfig(), "_commit_hash"
)  # whether transformers notes a model's commit in its config


def write_repository(folders: Sequence[str], cache: Path, monkeypatch: MonkeyPatch) -> None:
    """Let `cache` be the Hub's cache, with a commit of `NAME` for each folder."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    for commit, folder in zip(COMMITS, folders, strict=True):
        shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMITS[-1])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
