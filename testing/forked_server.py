"""An FP8 vLLM server forked from the test's process, which has imported everything: it is up in 10 s and not in 40.

Fork it before the process starts an engine of its own, whose process groups it would inherit.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
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
from trl_fp8.engine.vllm_server.server_process import guard_environment, server_arguments
from trl_fp8.upstream.vllm import forget_choices, import_engine_class

from . import processes
from .processes import free_port


TOKEN = "token of a test"  # noqa: S105
STACKS = signal.SIGUSR2  # processes of a server answer it by their stacks


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
        """Return a client, by default with the server's token."""
        return Control(self.url, timeout=240, token=self.token if token is None else token)

    def wait_until_up(self) -> None:
        """Wait until the server answers. `RuntimeError` with its log if it dies, or does not in 240 s."""
        end = time.monotonic() + 240
        while True:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                raise RuntimeError(f"the server died:\n{self.log.read_text()[-4000:]}")
            try:
                self.control().wait_until_up(0)
                return
            except RuntimeError:
                if time.monotonic() > end:
                    self.end(signal.SIGKILL)
                    raise RuntimeError(f"the server is not up:\n{self.log.read_text()[-4000:]}") from None
            time.sleep(0.1)

    def log_probs(self, tokens: list[int]) -> list[float]:
        """Return log-probs of a sequence's tokens but the first, as the server computes them now."""
        request = {"model": self.model, "prompt": [tokens], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        request["skip_reading_prefix_cache"] = True
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=request, timeout=240)
        except httpx.TimeoutException as error:
            raise RuntimeError(f"no answer in 240 s, where the server stands:\n{self.stacks()}") from error
        answer.raise_for_status()
        [choice] = answer.json()["choices"]
        pairs = zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
        return [row[str(token)]["logprob"] for row, token in pairs]

    def stacks(self) -> str:
        """Return the end of the log, after all threads of the server's processes have written their stacks there."""
        os.killpg(self.pid, STACKS)
        time.sleep(2)
        return self.log.read_text()[-60_000:]

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
        end = time.monotonic() + 20
        while time.monotonic() < end:  # the engine has the server's socket, too, until it is gone
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", self.port))
                    return
                except OSError:
                    time.sleep(0.05)


def start(
    model: str,
    folder: Path,
    *,
    wait: float = 60.0,
    port: int | None = None,
    plant: Callable[[], None] = lambda: None,
    loads: bool = False,
    max_num_seqs: int = 8,
    **recipe_flags,
) -> ForkedServer:
    """Return a server that is up. `plant` is called in its process before vLLM starts, to break something there.

    With `loads` it loads the weights of a checkpoint in FP8 by itself, and has no guard.
    """
    words, environment = _command(model, max_num_seqs, **recipe_flags)
    if loads:
        words[words.index("--load-format") + 1] = "auto"
        for flag in ("--middleware", "--hf-overrides"):
            if flag in words:
                del words[words.index(flag) : words.index(flag) + 2]

    def planted() -> None:
        plugin.register()
        plant()

    return fork(model, folder, words, environment | guard_environment(TOKEN, str(folder), wait), planted, port)


def spare(server: ForkedServer, go: Path, *, wait: float = 60.0, **recipe_flags) -> int:
    """Fork a process that serves in the place of `server` as soon as the file `go` exists. Return its id.

    What starts a server changes how this process computes, by bits. So a test that trains in it forks before.
    """
    words, environment = _command(server.model, 8, **recipe_flags)

    parent = os.getpid()

    def planted() -> None:
        while not go.exists():
            if os.getppid() != parent:  # nobody will
                sys.exit(0)
            time.sleep(0.05)
        plugin.register()

    environment |= guard_environment(TOKEN, server.folder, wait)
    return _forked(server.model, Path(server.folder), words, environment, planted, server.port).pid


def _command(model: str, max_num_seqs: int, **recipe_flags) -> tuple[list[str], dict[str, str]]:
    words, environment = server_arguments(model, max_num_seqs=max_num_seqs, max_model_len=64, **recipe_flags)
    backend = "uni" if recipe_flags.get("tensor_parallel_size", 1) == 1 else "mp"
    return [*words, "--distributed-executor-backend", backend], environment


def fork(
    model: str,
    folder: Path,
    words: list[str],
    environment: dict[str, str],
    plant: Callable[[], None] = lambda: None,
    port: int | None = None,
) -> ForkedServer:
    """Return a server of vLLM's own that is up, with `words` as its command line and no plugin but by `plant`."""
    server = _forked(model, folder, words, environment, plant, port)
    server.wait_until_up()
    return server


def _forked(
    model: str,
    folder: Path,
    words: list[str],
    environment: dict[str, str],
    plant: Callable[[], None],
    port: int | None,
) -> ForkedServer:
    """Return a server that starts."""
    port = port or free_port()
    folder.mkdir(exist_ok=True)
    server = ForkedServer(model, port, TOKEN, str(folder), folder.parent / f"{folder.name}.log", 0)
    words = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *words]
    import_engine_class(tuple(AutoConfig.from_pretrained(model).architectures))
    server.pid = processes.fork(partial(_serve, words, environment, plant), server.log)
    return server


@contextmanager
def running(model: str, folder: Path, start: Callable[..., ForkedServer] = start, **options) -> Iterator[ForkedServer]:
    """Yield the server of `start`, and end it after the block."""
    server = start(model, folder, **options)
    try:
        yield server
    finally:
        server.end()


def _serve(words: list[str], environment: dict[str, str], plant: Callable[[], None]) -> None:
    """Serve until a signal ends the process."""
    faulthandler.register(STACKS, all_threads=True)  # and of the processes that are forked below
    os.environ.update(environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    forget_choices()
    plugins.plugins_loaded = True  # loaded without the switch
    # vLLM's CPU platform would spawn processes, which import everything again
    multiproc_executor.get_mp_context = engine_utils.get_mp_context = lambda: get_context("fork")
    plant()
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(words)))
