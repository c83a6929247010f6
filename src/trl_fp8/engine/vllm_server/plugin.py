"""The entry point `vllm.general_plugins`, which vLLM calls in every process of every server.

Without `TRL_FP8_SERVER=1`, which `trl-fp8 serve` sets, it does nothing: a stock server stays stock.
"""

import os
from functools import cache
from importlib import import_module


SWITCH = "TRL_FP8_SERVER"
BACKEND = "trl_fp8"  # name of `Receiver` in vLLM's --weight-transfer-config
FOLDER = "TRL_FP8_TRANSFER"  # the only folder from which a server reads files of trainers
DEFAULT_FOLDER = "/dev/shm"  # noqa: S108, its files are created exclusively, and their owner is checked
TOKEN = "TRL_FP8_TOKEN"  # noqa: S105, a variable's name: the token for endpoints that change state
TRAINER = "X-TRL-FP8-Trainer"  # header of a trainer's calls: a random number that identifies the trainer
SCALES = "TRL_FP8_SCALES"  # scale format of FP8 weights for which the server checked its kernels
EXTENSION = "TRL_FP8_EXTENSION"  # module whose `register()` changes what the server's processes run
UPLOAD = "/fp8_upload"  # endpoint to which a trainer sends files that the workers cannot see
WAIT = "TRL_FP8_WAIT"  # seconds that a request waits for the end of an update


def register() -> None:
    """Register the receiver of weights, and on CPU the reference kernels, if this process belongs to an FP8 server."""
    if os.environ.get(SWITCH) == "1":
        _register_once()


@cache  # vLLM may call a plugin more than once, and refuses a second registration
def _register_once() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    WeightTransferEngineFactory.register_engine(BACKEND, "trl_fp8.engine.vllm_server.receiver", "Receiver")
    if current_platform.is_cpu():
        from trl_fp8.engine.vllm.platform import Cpu

        Cpu().register_kernels()
    extension = os.environ.get(EXTENSION)
    if extension:
        import_module(extension).register()
