"""The folder of an export: free before it, its checksums written last and compared before it is pushed or used."""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryFile


CHECKSUMS = "checksums.json"


def free_folder(folder: str | Path) -> Path:
    """Return `folder`, which does not exist or is empty. Raise `ValueError` if it holds files or cannot be written."""
    folder = Path(folder)
    there = writable_parent(folder, "folder")
    if there == folder.absolute() and any(there.iterdir()):
        raise ValueError(
            f"folder={str(folder)!r} is not empty. An export is written whole or not at all; name a new folder."
        )
    return folder


def writable_parent(folder: str | Path, flag: str) -> Path:
    """Return `folder` or its nearest parent that exists. Raise `ValueError` if it cannot be written."""
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with TemporaryFile(dir=there):
            return there
    except OSError as error:
        reason = f"{there} cannot be written ({error.strerror})"
        raise ValueError(f"{flag}={str(folder)!r}: {reason}. Set {flag} to a folder that can be.") from error


def write_checksums(folder: Path) -> None:
    """Record the SHA-256 of every file in `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = {str(path.relative_to(folder)): _sha256(path) for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")


def verify_export(folder: str | Path) -> int:
    """Compare every file of an export with its checksum; returns their number.

    Raises:
        ValueError: Files are missing or differ, or there are others beside them (hidden ones do not count); the
            message names them. Or the folder is no export.
    """
    folder = Path(folder)
    at = f"folder={str(folder)!r}"
    if not (folder / CHECKSUMS).exists():
        raise ValueError(f"{at} has no {CHECKSUMS}: it was not written by export_fp8, or not completely.")
    expected = json.loads((folder / CHECKSUMS).read_text())
    if outside := [name for name in expected if not (folder / name).resolve().is_relative_to(folder.resolve())]:
        raise ValueError(f"{at}: {CHECKSUMS} names files outside of the folder: {', '.join(outside)}.")
    # a loader would take weights or code that lie beside the export; what a Hub client leaves behind is hidden
    there = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    visible = {str(path) for path in there if not any(part.startswith(".") for part in path.parts)}
    if added := sorted(visible - expected.keys() - {CHECKSUMS}):
        raise ValueError(
            f"{at} holds files that were not exported: {', '.join(added)}. A loader may take them for the model's. "
            "Remove them, or export again."
        )
    broken = []
    for name, digest in expected.items():
        if not (folder / name).exists():
            broken.append(f"{name} (missing)")
        elif _sha256(folder / name) != digest:
            broken.append(f"{name} (changed)")
    if broken:
        raise ValueError(f"{at} is not as it was exported: {', '.join(broken)}. Fetch or export it again.")
    return len(expected)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
