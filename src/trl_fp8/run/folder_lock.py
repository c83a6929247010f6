"""The lock on a run's folder: two runs at once would overwrite each other's checkpoints and mix their logs.

The lock is a POSIX record lock. Such a lock belongs to a process and ends with the process, even if that is killed.
Children do not inherit it. The trainers of one process, which train one after another, share the lock.
"""

import fcntl
import os
import socket
from pathlib import Path
from time import strftime
from typing import TextIO

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list


logger = get_logger(__name__)

FILE = "_run.lock"  # push_to_hub leaves out files whose names begin with "_"
_locked: dict[Path, TextIO] = {}  # kept open: a process loses its lock when it closes any handle of the file


def lock_folder(folder: str | Path, accelerator: Accelerator) -> None:
    """Lock a run's folder for the main process, and create the folder if it does not exist. Collective.

    Raises:
        ValueError: On every rank, if another process has locked the folder; the message names that process.
        OSError: On every rank, if the main process cannot write to the folder.
    """
    path = Path(folder).resolve() / FILE
    owner = None  # description of another process that has locked the folder
    error = None
    if accelerator.is_main_process and path not in _locked:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            owner = _lock(path)
        except OSError as raised:  # raised only after the broadcast below, because the other ranks wait there
            error = raised
    [owner, error] = broadcast_object_list([owner, error])
    if error is not None:
        raise error
    if owner:
        raise ValueError(
            f"output_dir={str(folder)!r}: another run writes there ({owner}), and both would overwrite each other's "
            "checkpoints. Wait for its end, stop it, or set another output_dir."
        )


def unlock_folder(folder: str | Path) -> None:
    """Let other processes run in a folder. Without a lock this does nothing."""
    file = _locked.pop(Path(folder).resolve() / FILE, None)
    if file is not None:
        file.close()


def _lock(path: Path) -> str | None:
    """Lock a file. If another process has locked it, return the description that the other process wrote into it."""
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read() or "it has just started"
    except OSError as error:
        # A file system without locks: go on unlocked, but write the description, for a user who looks into the file
        logger.warning(f"{path.parent} cannot be locked ({error.strerror}): start no second run in it.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    _locked[path] = file
    return None
