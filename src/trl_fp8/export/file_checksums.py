"""The checksums of an export: written last, compared before it is pushed or used."""

import hashlib
import json
from pathlib import Path


CHECKSUMS = "checksums.json"


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
    found = {name: _sha256(folder / name) for name in expected if (folder / name).exists()}
    if broken := [name for name, digest in expected.items() if name not in found or found[name] != digest]:
        raise ValueError(f"{at}: {', '.join(broken)} are not what was exported. Fetch or export them again.")
    return len(expected)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
