"""Upload of an export to the Hub."""

from pathlib import Path
from shlex import join

import httpx
from huggingface_hub import CommitInfo, HfApi

from .file_checksums import verify_export


# Patterns of weight files that an earlier upload left, and that a loader could take for the new export's: shards, and
# the single file that `save_pretrained` writes for a small model
WEIGHTS = ["model.safetensors", "model-?????-of-?????.safetensors"]


def push_export(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Upload FP8 checkpoint",
) -> CommitInfo:
    """Upload an export and return the commit, whose `commit_url` is its page.

    An upload is complete or changes nothing: files are sent first, and then one commit adds them and removes other
    files that match `WEIGHTS`, such as an earlier export's. A call after an interruption sends only what did not
    arrive.

    Args:
        folder: The export, compared with its checksums before anything is sent.
        repo_id: The repository as `user/name`, created if it does not exist.
        private: Whether a created repository is private. None: public, unless its organization has another default.
        token: Token of the Hub. None: the token that `hf auth login` stored.
        revision: Branch to commit to, created if it does not exist. None is the main branch.
        message: Message of the commit.

    Raises:
        ValueError: `folder` is not a complete, unchanged export.
        OSError: The Hub could not be reached or refused (`huggingface_hub.errors`). The message says what to do.
    """
    verify_export(folder)
    hub = HfApi(token=token)
    try:
        name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):  # a pull request is no branch
            hub.create_branch(name, branch=revision, exist_ok=True)
        options = {"commit_message": message, "revision": revision, "delete_patterns": WEIGHTS}
        commit = hub.upload_folder(repo_id=name, folder_path=folder, **options)
    except (OSError, RuntimeError, httpx.HTTPError) as error:  # RuntimeError: a broken upload
        words = ["trl-fp8", "push", str(folder), repo_id]
        if private:
            words.append("--private")
        if revision:
            words += ["--revision", revision]
        raise OSError(
            f"{folder} was not pushed to {repo_id}: {error.__cause__ or error}. Nothing was committed; repeat it with "
            f"'{join(words)}'."
        ) from error
    return commit
