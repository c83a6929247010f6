"""Checkpoints that were written to their end, told from those whose writing was cut short.

A checkpoint is a folder of several files, written one after another; a process that dies in between leaves a folder
that looks like a checkpoint and lacks, for example, what the KV cache calibration needs to continue. While one is
written, a marker lies beside it.
"""

from pathlib import Path

from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


logger = get_logger(__name__)


def marker(checkpoint: str | Path) -> Path:
    """Beside the folder, so that it is neither uploaded with it nor counted as a checkpoint."""
    checkpoint = Path(checkpoint)
    return checkpoint.with_name(f"_{checkpoint.name}.unfinished")


def checkpoint_to_resume(output_dir: str | Path, asked: str | bool | None) -> str | bool | None:
    """What `resume_from_checkpoint=asked` means: True becomes the last whole checkpoint.

    Raises:
        ValueError: The checkpoint that was asked for was not written to its end.
    """
    if not asked:
        return asked
    found = sorted(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step)
    whole = [checkpoint for checkpoint in found if not marker(checkpoint).exists()]
    instead = f"resume_from_checkpoint={str(whole[-1])!r}" if whole else "start anew: there is no whole one"
    if asked is not True:
        if marker(asked).exists():
            raise ValueError(
                f"resume_from_checkpoint={str(asked)!r} was not written to its end: the run was killed while it was "
                f"saved. Use {instead}."
            )
        return asked
    if skipped := [checkpoint.name for checkpoint in found if checkpoint not in whole]:
        logger.warning(f"{', '.join(skipped)} in {output_dir} were not written to their end and are passed over.")
    return str(whole[-1]) if whole else True  # transformers says that there is none


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
