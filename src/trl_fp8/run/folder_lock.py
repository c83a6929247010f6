"""The lock on a run's folder: two runs at once would overwrite each other's checkpoints and mix their logs.

It is a POSIX record lock: it belongs to a process and ends with it, however the process ends. No child inherits it,
and trainers of one process, which train one after another, share it.
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

FILE = "_run.lock"  # push_to_hub leaves out files whose names begin like this
_locked: dict[Path, TextIO] = {}  # a process loses its lock when it closes any handle of the file


def lock_folder(folder: str | Path, accelerator: Accelerator) -> None:
    """Lock a run's folder, which is made if it does not exist, for the main process. Collective.

    Raises:
        ValueError: On every rank, if another process has locked it; the message names that process.
    """
    path = Path(folder).resolve() / FILE
    other = None
    if accelerator.is_main_process and path not in _locked:
        path.parent.mkdir(parents=True, exist_ok=True)
        other = _lock(path)
    if other := broadcast_object_list([other])[0]:
        raise ValueError(
            f"output_dir={str(folder)!r}: another run writes there ({other}), and both would overwrite each other's "
            "checkpoints. Wait for its end, stop it, or set another output_dir."
        )


def unlock_folder(folder: str | Path) -> None:
    """Let other processes run in a folder."""
    if file := _locked.pop(Path(folder).resolve() / FILE, None):
        file.close()


def _lock(path: Path) -> str | None:
    """Lock a file; return what its owner wrote into it if it is another process's."""
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read() or "it has just started"
    except OSError as error:
        logger.warning(f"{path.parent} cannot be locked ({error.strerror}): start no second run in it.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    _locked[path] = file
    return None
