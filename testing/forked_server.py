"""An FP8 vLLM server forked from the test's process, which has imported everything: it is up in 10 s and not in 40.

Fork it before the process starts an engine of its own, whose process groups it would inherit.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import uvloop
from transformers import AutoConfig
from vllm import plugins
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import utils as engine_utils
from vllm.v1.executor import multiproc_executor

import trl_fp8.engine.vllm_server.receiver  # noqa: F401  what workers import
from trl_fp8.engine.vllm_server import plugin
from trl_fp8.engine.vllm_server.client import Control
from trl_fp8.engine.vllm_server.server_process import guarded, server_arguments
from trl_fp8.upstream.vllm import forget_choices, inspect_engine_class

from .processes import fork, free_port


@dataclass
class ForkedServer:
    """A running server, the leader of a process group."""

    model: str
    port: int
    token: str
    folder: str  # of files of trainers
    log: Path
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def control(self, token: str | None = None) -> Control:
        return Control(self.url, timeout=60, token=self.token if token is None else token)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the server and its workers, and wait for their end. Kill what is left after 20 s."""
        for each in (number, signal.SIGKILL):
            try:
                os.killpg(self.pid, each)
            except ProcessLookupError:
                pass
            end = time.monotonic() + 20
            while time.monotonic() < end:
                try:
                    if os.waitpid(self.pid, os.WNOHANG)[0]:
                        break
                except ChildProcessError:
                    break
                time.sleep(0.05)
            else:
                continue
            break
        try:
            os.killpg(self.pid, signal.SIGKILL)  # an engine that outlived its server
        except ProcessLookupError:
            pass


def start(
    model: str,
    folder: Path,
    *,
    wait: float = 3.0,
    port: int | None = None,
    plant: Callable[[], None] = lambda: None,
    **recipe_flags,
) -> ForkedServer:
    """Return a server that is up. `plant` is called in its process before vLLM starts, to break something there."""
    port = port or free_port()
    folder.mkdir(exist_ok=True)
    server = ForkedServer(model, port, "token of a test", str(folder), folder.parent / f"{folder.name}.log", 0)
    words, environment = server_arguments(model, max_num_seqs=8, max_model_len=64, **recipe_flags)
    words = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *words]
    words += ["--distributed-executor-backend", "uni" if recipe_flags.get("tensor_parallel_size", 1) == 1 else "mp"]
    environment |= guarded(server.token, str(folder), wait)
    inspect_engine_class(tuple(AutoConfig.from_pretrained(model).architectures))
    server.pid = fork(partial(_serve, words, environment, plant), server.log)
    end = time.monotonic() + 240
    while True:
        if os.waitpid(server.pid, os.WNOHANG)[0]:
            raise RuntimeError(f"the server died:\n{server.log.read_text()[-4000:]}")
        try:
            server.control().wait_until_up(0)
            return server
        except RuntimeError:
            if time.monotonic() > end:
                server.end(signal.SIGKILL)
                raise RuntimeError(f"the server is not up:\n{server.log.read_text()[-4000:]}") from None
        time.sleep(0.1)


@contextmanager
def running(model: str, folder: Path, **options) -> Iterator[ForkedServer]:
    """Yield the server of `start`, and end it after the block."""
    server = start(model, folder, **options)
    try:
        yield server
    finally:
        server.end()


def _serve(words: list[str], environment: dict[str, str], plant: Callable[[], None]) -> None:
    """Serve until a signal ends the process."""
    os.environ.update(environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    forget_choices()
    plugins.plugins_loaded = True  # loaded without the switch
    plugin.register()
    # vLLM's CPU platform would spawn processes, which import everything again
    multiproc_executor.get_mp_context = engine_utils.get_mp_context = lambda: get_context("fork")
    plant()
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(words)))
