"""`AveragedModel`: writes the model that averages all policies so far into checkpoints.

    sync_ref_model=True           the reference model of GRPO, RLOO and GMPO
    teacher_model_kind="ema"      the teacher of SDFT and SDPO, if it is a model of its own (without adapters)

TRL 1.16 leaves this model out of checkpoints: a run that TRL resumes averages anew, from the initial model.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trl_fp8.sync.shards import local_part

from .feature import Feature


logger = get_logger(__name__)
FILE = "averaged_{}.pt"  # in a checkpoint; {}: the rank, or 0 for a model that is not sharded


def has_average(args: Any) -> bool:
    """Return whether a config makes TRL average policies."""
    return getattr(args, "sync_ref_model", False) or getattr(args, "teacher_model_kind", None) == "ema"


class AveragedModel(Feature):
    """Writes the weights of the averaged model to each checkpoint, and reads them in a resumed run."""

    def save(self, folder: str) -> None:
        model = self._model()
        if model is None:
            return
        accelerator = self.trainer.accelerator
        is_on_each_node = self.trainer.args.save_on_each_node  # each node has checkpoints of its own
        is_writer = accelerator.is_local_main_process if is_on_each_node else accelerator.is_main_process
        parts = self._parts(model)
        if is_sharded(model):
            torch.save(parts, Path(folder, FILE.format(accelerator.process_index)))
        elif is_writer:
            torch.save(parts, Path(folder, FILE.format(0)))

    def load(self, folder: str) -> None:
        """Read the weights. Warn if the checkpoint has none, as one of TRL or of an earlier version. Collective.

        Raises:
            ValueError: The checkpoint has weights of another model or for some ranks alone, or divided among another
                number of ranks. All ranks raise.
        """
        model = self._model()
        if model is None:
            return
        parts = self._parts(model)
        rank = self.trainer.accelerator.process_index if is_sharded(model) else 0
        path = Path(folder, FILE.format(rank))
        saved = {}
        if path.exists():
            # With mmap the ranks of a host share the pages of the file in memory
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        shapes = {name: part.shape for name, part in parts.items()}
        saved_shapes = {name: part.shape for name, part in saved.items()}
        # Whether a rank has a file, and whether the file is of another model
        findings = gather_object([(path.exists(), path.exists() and saved_shapes != shapes)])
        found = [exists for exists, _ in findings]
        if any(is_other for _, is_other in findings) or any(found) != all(found):
            raise ValueError(
                f"resume_from_checkpoint={str(folder)!r}: {path.name} has the weights of another model, or of another "
                "number of processes, or some ranks do not see their file. Take model and number of processes of the "
                "run that saved it, and a folder that all machines share."
            )
        if not any(found):
            logger.warning(
                f"resume_from_checkpoint={str(folder)!r} has no {path.name}: the model that is an average of the "
                "policies (sync_ref_model=True or teacher_model_kind='ema') begins anew, as training did."
            )
            return
        with torch.no_grad():
            for name, part in parts.items():
                part.copy_(saved[name])

    def _model(self) -> nn.Module | None:
        """Return the averaged model; None if the average is one of the policy's adapters, or if nobody needs it."""
        trainer = self.trainer
        if getattr(trainer.args, "sync_ref_model", False):
            return trainer.ref_model
        return None if trainer.teacher_model is trainer.model else trainer.teacher_model

    def _parts(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's part of each weight."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 may have left weights unsharded after a forward
        unwrapped = self.trainer.accelerator.unwrap_model(model)
        return {name: local_part(parameter) for name, parameter in unwrapped.named_parameters()}


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 or ZeRO-3 divides the weights among ranks."""
    return any(isinstance(each, DTensor) or hasattr(each, "ds_tensor") for each in model.parameters())
