"""What a launcher started, checked before an engine is: ranks that know of each other, sharded in a supported way."""

import os

from accelerate import Accelerator
from trl.distributed import DistributedBackend


def check_launch(accelerator: Accelerator, tensor_parallel_size: int = 1) -> None:
    """Refuse launches that would train something else than they seem to.

    Args:
        accelerator: Of the trainer.
        tensor_parallel_size: `vllm_tensor_parallel_size`.

    Raises:
        ValueError: Several processes were started but each of them is alone, they cannot be divided among engines, or
            FSDP1 was chosen.
    """
    started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if started > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"the launcher started WORLD_SIZE={started} processes, but accelerate formed no group of them, because it "
            "found no accelerator: each would train a policy of its own and write to the same output_dir. On CPU set "
            "use_cpu=True (or ACCELERATE_USE_CPU=true in the environment)."
        )
    if accelerator.num_processes % tensor_parallel_size:
        raise ValueError(
            f"vllm_tensor_parallel_size={tensor_parallel_size} with {accelerator.num_processes} processes: each "
            f"engine runs on that many training processes. Launch a multiple of {tensor_parallel_size} (accelerate "
            f"launch --num_processes {tensor_parallel_size}), or set vllm_tensor_parallel_size=1."
        )
    if DistributedBackend(accelerator).fsdp_version == 1:
        raise ValueError(fsdp1_message("fsdp_version: 1 in the accelerate configuration", "fsdp_version: 2"))


def fsdp1_message(given: str, remedy: str) -> str:
    """Why FSDP1 is refused, for the flag or launcher setting `given` and its `remedy`."""
    return (
        f"{given} selects FSDP1, under which TRL 1.16 leaves embeddings, final norm and output head out of the weight "
        f"sync, so the engine would sample from a wrong policy. Use FSDP2: {remedy}."
    )
