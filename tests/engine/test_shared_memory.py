"""Segments of shared memory that ranks of an engine on a CPU leave behind when they are killed."""

import mmap
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from trl_fp8.engine.vllm.cpu.shared_memory import FOLDER, remove_abandoned_memory


RANKS = 7  # more than any engine of the other tests has
RANK = 8  # the second of the second engine
HOLD = (
    "import mmap, os, sys; held = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0); print(flush=True); sys.stdin.read()"
)


@pytest.fixture
def segments():
    """Segments of ranks 0 and 1, as vLLM names them."""
    members = "-".join(str(RANKS + rank) for rank in range(RANKS))
    paths = [FOLDER / f"-tp:0-[{members}]-cpushm_{rank}" for rank in (0, 1)]
    for path in paths:
        path.write_bytes(bytes(4096))
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


@contextmanager
def mapped_elsewhere(path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


def test_a_rank_removes_its_own_segment_that_no_process_uses(segments):
    remove_abandoned_memory(RANK, RANKS)
    assert [path.exists() for path in segments] == [True, False]
    remove_abandoned_memory(RANK, RANKS)


def test_the_segment_of_a_run_that_goes_on_is_an_error_that_names_the_flag(segments):
    with (
        mapped_elsewhere(segments[1]),
        pytest.raises(ValueError, match="size=7 on a CPU: another run"),
    ):
        remove_abandoned_memory(RANK, RANKS)
    assert segments[1].exists()


def test_the_segment_of_an_earlier_engine_of_this_process_stays(segments):
    file = os.open(segments[1], os.O_RDWR)
    with mmap.mmap(file, 4096):
        remove_abandoned_memory(RANK, RANKS)
    os.close(file)
    assert segments[1].exists()
