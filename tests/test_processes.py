"""Processes that tests fork."""

import os
import sys

from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from testing.processes import fork


def test_a_fork_of_a_process_that_has_compiled_can_compile(tmp_path, monkeypatch):
    """Otherwise a server with two workers waits forever for its first compilation: only vLLM's embeddings of several
    workers are compiled, and only where no earlier run has left their code on the disk.
    """
    monkeypatch.setattr(config, "compile_threads", 2)  # vLLM sets 1 in some processes, which then have no pool
    assert AsyncCompile.pool().submit(int).result() == 0

    def compile_something():
        sys.exit(AsyncCompile.pool().submit(int, "7").result(timeout=30))

    _, status = os.waitpid(fork(compile_something, tmp_path / "log"), 0)
    assert os.waitstatus_to_exitcode(status) == 7, (tmp_path / "log").read_text()
