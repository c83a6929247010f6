"""The server of `make demo MODEL=server`: started for one run, it ends with it, also at Ctrl-C, SIGTERM or SIGHUP."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trl_fp8 import FP8GRPOConfig


SECONDS_TO_END = 20


def serve_command(checkpoint: str, args: FP8GRPOConfig, port: int) -> list[str]:
    """Return the words that start the server of a run: its FP8 flags have to be the trainer's."""
    words = [sys.executable, "-m", "trl_fp8.commands.cli", "serve", checkpoint, "--port", str(port)]
    words += ["--kv-cache-dtype", args.kv_cache_dtype, "--max-num-seqs", str(args.per_device_train_batch_size)]
    words += [] if args.fp8_weights else ["--no-fp8-weights"]
    words += ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]  # the trainer may share its GPU
    words += ["--weight-format", args.fp8_weight_format, "--scale-format", args.fp8_scale_format]
    if args.vllm_max_model_length is not None:
        words += ["--max-model-len", str(args.vllm_max_model_length)]
    return words


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Run a command in a process group of its own, and end that group after the block, or when a signal ends it."""
    usual = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)  # without our Ctrl-C
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(SECONDS_TO_END)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        for number, handler in usual.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Raise `SystemExit`, so that blocks end as at Ctrl-C. Without a handler a signal ends Python at once."""
    sys.exit(128 + number)


@contextmanager
def own_server(checkpoint: str, args: FP8GRPOConfig) -> Iterator[None]:
    """Run a server for the block, and let `args` and the environment name it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args.vllm_server_base_url = f"http://127.0.0.1:{port}"
    log = Path(args.output_dir, "server.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="trl_fp8_demo_") as folder:  # noqa: S108, in memory
        os.environ |= {"TRL_FP8_TOKEN": secrets.token_hex(24), "TRL_FP8_TRANSFER": folder}
        print(f"Starting a vLLM server; it writes to {log}", flush=True)
        with running(serve_command(checkpoint, args, port), log):
            yield
