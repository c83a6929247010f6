"""Folder and checksums of an export.

The folder must be empty before an export. Checksums are written last. They are compared before an export is pushed,
and by `trl-fp8 verify`.
"""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryFile


CHECKSUMS = "checksums.json"


def free_folder(folder: str | Path) -> Path:
    """Return the absolute path of `folder`. Raise `ValueError` if it has files, or an export cannot replace it."""
    folder = Path(folder).resolve()
    if writable_parent(folder, "folder") == folder:
        if any(folder.iterdir()):
            raise ValueError(
                f"folder={str(folder)!r} is not empty. An export is written whole or not at all; name a new folder."
            )
        if folder == Path.cwd() or folder.is_mount():
            raise ValueError(
                f"folder={str(folder)!r} is the current folder or a mount point, and an export cannot replace these. "
                "Name a new folder in it."
            )
        writable_parent(folder.parent, "folder")  # an export is written beside the empty folder, and renamed to it
    return folder


def writable_parent(folder: str | Path, flag: str) -> Path:
    """Return `folder` if it exists, else its nearest existing parent.

    Raise `ValueError` if the returned folder cannot be written. The message names `flag`, whose value `folder` is.
    """
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with TemporaryFile(dir=existing):
            return existing
    except OSError as error:
        reason = f"{existing} cannot be written ({error.strerror})"
        raise ValueError(f"{flag}={str(folder)!r}: {reason}. Set {flag} to a folder that can be written.") from error


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file in `folder` to `CHECKSUMS` in the same folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = {str(path.relative_to(folder)): _sha256(path) for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")


def verify_export(folder: str | Path) -> int:
    """Compare every file of an export with its checksum. Return the number of files.

    Raises:
        ValueError: The folder is not an export, its checksums cannot be read, or files are missing, have changed, or
            were added. The message names the files. Hidden files do not count as added.
    """
    folder = Path(folder)
    folder_text = f"folder={str(folder)!r}"
    if not (folder / CHECKSUMS).exists():
        raise ValueError(f"{folder_text} has no {CHECKSUMS}: it was not written by export_fp8, or not completely.")
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
    except ValueError:  # no JSON, or no text
        expected = None
    if not isinstance(expected, dict):
        raise ValueError(f"{folder_text}: its {CHECKSUMS} is damaged. Fetch or export it again.")
    # Links are not followed: in the Hub's cache every file is a link to ../../blobs
    outside = [name for name in expected if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ValueError(f"{folder_text}: {CHECKSUMS} names files outside of the folder: {', '.join(outside)}.")
    # Refuse added files: a loader may use them as weights or code of the model. The Hub's client adds hidden files
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    visible = {str(path) for path in files if not any(part.startswith(".") for part in path.parts)}
    added = sorted(visible - expected.keys() - {CHECKSUMS})
    if added:
        raise ValueError(
            f"{folder_text} holds files that were not exported: {', '.join(added)}. A loader may take them for "
            "the model's. Remove them, or export again."
        )
    broken = []
    for name, digest in expected.items():
        if not (folder / name).exists():
            broken.append(f"{name} (missing)")
        elif _sha256(folder / name) != digest:
            broken.append(f"{name} (changed)")
    if broken:
        raise ValueError(f"{folder_text} is not as it was exported: {', '.join(broken)}. Fetch or export it again.")
    return len(expected)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
