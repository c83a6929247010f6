"""Where an export goes. It is asked before a model is loaded, too, and so imports no torch."""

from pathlib import Path


def free_folder(folder: str | Path) -> Path:
    """`folder`, which does not exist or is empty; `ValueError` if it holds files."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"folder={str(folder)!r} is not empty. An export is written whole or not at all; name a new folder."
        )
    return folder
