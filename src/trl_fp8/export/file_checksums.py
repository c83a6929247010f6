"""Folder and checksums of an export.

The folder must be empty before an export. Checksums are written last, and compared before an export is pushed or used.
"""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryFile


CHECKSUMS = "checksums.json"


def free_folder(folder: str | Path) -> Path:
    """Return `folder` as a `Path`. Raise `ValueError` if it has files, or cannot be written."""
    folder = Path(folder)
    existing = writable_parent(folder, "folder")
    if existing == folder.absolute() and any(existing.iterdir()):
        raise ValueError(
            f"folder={str(folder)!r} is not empty. An export is written whole or not at all; name a new folder."
        )
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
        ValueError: The folder is not an export. Or files are missing, have changed, or were added; the message names
            them. Hidden files do not count as added.
    """
    folder = Path(folder)
    folder_text = f"folder={str(folder)!r}"
    if not (folder / CHECKSUMS).exists():
        raise ValueError(f"{folder_text} has no {CHECKSUMS}: it was not written by export_fp8, or not completely.")
    expected = json.loads((folder / CHECKSUMS).read_text())
    outside = [name for name in expected if not (folder / name).resolve().is_relative_to(folder.resolve())]
    if outside:
        raise ValueError(f"{folder_text}: {CHECKSUMS} names files outside of the folder: {', '.join(outside)}.")
    # A loader may use added files as weights or code of the model. Hidden files are those of a Hub client
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
