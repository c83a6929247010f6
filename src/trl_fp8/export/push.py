"""Upload of an export to the Hub."""

from pathlib import Path

import httpx
from huggingface_hub import CommitInfo, HfApi

from .file_checksums import verify_export


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

    The upload is whole or not at all: files first, then one commit that also removes weights of earlier exports.
    Repeat it after an interruption: files that had arrived are recognized by their hash and not sent again.

    Args:
        folder: The export, compared with its checksums before anything is sent.
        repo_id: The repository as `user/name`, made if it does not exist.
        private: Visibility of a repository that is made.
        token: Token of the Hub. None takes the one that `hf auth login` left.
        revision: Branch to commit to. None is the main branch.
        message: Message of the commit.

    Raises:
        ValueError: `folder` is no whole export.
        OSError: The Hub could not be reached or refused (`huggingface_hub.errors`). The message says what to do.
    """
    verify_export(folder)
    hub = HfApi(token=token)
    try:
        name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        options = {"commit_message": message, "revision": revision, "delete_patterns": "*.safetensors"}
        commit = hub.upload_folder(repo_id=name, folder_path=folder, **options)
    except (OSError, RuntimeError, httpx.HTTPError) as error:  # RuntimeError: the client's, around a broken upload
        raise OSError(
            f"{folder} was not pushed to {repo_id}: {error.__cause__ or error}. Nothing was committed; repeat it with "
            f"'trl-fp8 push {folder} {repo_id}'."
        ) from error
    return commit
