"""Whether a run can write what it will write, asked before it starts: its first checkpoint may be hours away."""

import shutil
from math import prod
from pathlib import Path
from tempfile import TemporaryFile

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import TrainingArguments

from trl_fp8.recipe.names import full_shape


ADAM = ("adamw_torch", "adamw_torch_fused")  # they keep two moments of each trained weight, in its dtype


def checkpoint_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the weights in a checkpoint of `model`, which are adapters alone if it has any; and of trained ones."""
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return trained, trained
    return sum(_bytes(parameter) for parameter in model.parameters()), trained


def _bytes(parameter: nn.Parameter) -> int:
    """Of a whole parameter, also where DeepSpeed's ZeRO-3 left an empty tensor in its place."""
    return prod(full_shape(parameter)) * parameter.element_size()


def require_output(args: TrainingArguments, weights: float, trained: float) -> None:
    """Look at the disk under `output_dir`. It makes no folder.

    Args:
        args: Of the run.
        weights: Bytes of the weights in a checkpoint: the policy's, or its adapters'.
        trained: Bytes of those that are trained. An optimizer that is not Adam counts as nothing.

    Raises:
        ValueError: It cannot be written, or has no room for one checkpoint.
    """
    folder = Path(args.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with TemporaryFile(dir=there):
            disk = shutil.disk_usage(there)
    except OSError as error:
        raise ValueError(
            f"output_dir={args.output_dir!r}: {there} cannot be written ({error.strerror}). Set output_dir to a "
            "folder that can be."
        ) from error
    saves = str(args.save_strategy.value) != "no"
    optimizer = 2 * trained if saves and not args.save_only_model and args.optim in ADAM else 0
    if disk.total and disk.free < weights + optimizer:  # a file system that does not count says 0
        parts = f"weights {_gib(weights)}" + (f", optimizer {_gib(optimizer)}" if optimizer else "")
        without = ", or leave the optimizer out with save_only_model=True (no run resumes from that)"
        raise ValueError(
            f"output_dir={args.output_dir!r}: its disk has {_gib(disk.free)} left, and "
            f"{'a checkpoint' if saves else 'the model'} takes {_gib(weights + optimizer)} ({parts}). Make room, set "
            f"output_dir to a larger disk{without if optimizer else ''}."
        )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
