"""A policy's way by broadcasts, between threads instead of a trainer and workers."""

import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
import torch
from vllm.distributed.device_communicators import pynccl_wrapper

from trl_fp8.engine.vllm_server import broadcast
from trl_fp8.engine.vllm_server.broadcast import broadcasting, received
from trl_fp8.engine.vllm_server.client import ServerGone
from trl_fp8.engine.vllm_server.staging import arranged, buckets, views
from trl_fp8.engine.vllm_server.transports import Broadcast, Folder


TENSORS = {"codes": ("float8_e4m3fn", [40, 32]), "more": ("uint8", [100]), "norm": ("bfloat16", [70])}
TENSORS |= {"empty": ("bfloat16", [0]), "scale": ("float32", [3, 1]), "last": ("float32", [])}
CPU = torch.device("cpu")


class Policy:
    """Staged tensors, and two workers that receive them."""

    def __init__(self):
        self.table, size = arranged(TENSORS)
        self.staged = torch.randint(0, 256, (size,), dtype=torch.uint8)

    def transfer(self, *workers):
        """Broadcast to workers, each a function of its rank and the arguments of `received`. Return their answers."""
        with broadcasting(self.staged, self.table, "127.0.0.1", len(workers)) as where:
            with ThreadPoolExecutor(len(workers)) as executor:
                futures = [executor.submit(work, rank, where) for rank, work in enumerate(workers, 1)]
        return [future.exception() or future.result() for future in futures]

    def take(self, rank, where):
        """Return all tensors that arrive."""
        return {name: each.clone() for name, each in received(self.table, CPU, rank, **where)}

    def stop(self, rank, where):
        """Fail at the second tensor."""
        with closing(received(self.table, CPU, rank, **where)) as tensors:
            for name, _ in tensors:
                if name == "more":
                    raise ValueError("planted")

    def require(self, found):
        for name, tensor in views(self.staged, self.table).items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.fixture
def policy():
    return Policy()


def missing():
    raise OSError("no libnccl")


def sends():
    return [thread for thread in threading.enumerate() if thread.name.endswith("(send)")]


@pytest.mark.parametrize("most_bytes, parts", [(2**20, 1), (1500, 2), (200, 4), (1, 6), (0, 6)])
def test_each_worker_gets_every_tensor_whatever_the_size_of_a_bucket(most_bytes, parts, policy, monkeypatch):
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", most_bytes)
    found = buckets(policy.table, most_bytes)
    assert len(found) == parts and [name for _, _, tensors in found for name in tensors] == list(policy.table)
    assert all(end - start <= most_bytes or len(tensors) == 1 for start, end, tensors in found)
    for found in policy.transfer(policy.take, policy.take):
        policy.require(found)


def test_a_worker_that_fails_takes_what_is_left_and_the_other_one_gets_everything(policy, monkeypatch):
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 1)
    for _ in range(2):
        found, failed = policy.transfer(policy.take, policy.stop)
        policy.require(found)
        assert str(failed) == "planted"
    assert not sends()


def test_a_worker_that_cannot_begin_says_so_to_all(policy, monkeypatch):
    start = time.monotonic()

    def without_room(rank, where):
        return list(received(policy.table | {"big": ["uint8", [2**60], 0]}, CPU, rank, **where))

    failures = []
    with pytest.raises(RuntimeError, match="trainer's end of a broadcast failed: rank 2 of 3 .*DefaultCPUAllocator"):
        failures += policy.transfer(policy.take, without_room)

    assert time.monotonic() - start < 20 and not sends()


@pytest.mark.parametrize("disabled, reason", [("1", "VLLM_DISABLE_PYNCCL switches"), ("0", "no libnccl")])
def test_a_worker_without_nccl_says_so_before_others_wait_in_its_start(disabled, reason, policy, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", disabled)
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", missing)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 1 of 2 takes no part in a broadcast: .*{reason}"):
        policy.transfer(lambda rank, where: policy.take(rank, where | {"nccl": True}))
    assert time.monotonic() - start < 20


def test_an_error_in_the_update_ends_the_thread_that_waits_for_workers(policy):
    with pytest.raises(ValueError, match="409"), broadcasting(policy.staged, policy.table, "127.0.0.1", 2):
        assert len(sends()) == 1
        raise ValueError("409")
    end = time.monotonic() + 20
    while sends() and time.monotonic() < end:
        time.sleep(0.01)
    assert not sends()


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(policy, monkeypatch):
    monkeypatch.setattr(broadcast, "SECONDS", 0.5)
    message = "failed: to wait for the other ranks of a broadcast .start. took longer than 0.5 seconds"
    failures = []
    with pytest.raises(RuntimeError, match=message):
        with broadcasting(policy.staged, policy.table, "127.0.0.1", 2) as where:
            with ThreadPoolExecutor(1) as executor:
                failures.append(executor.submit(policy.take, 1, where).exception())
    assert "took longer than 0.5 seconds. If it stays so, set vllm_server_transport='auto'" in str(failures[0])


def test_a_worker_that_does_not_reach_the_trainer_names_the_address(policy, monkeypatch):
    monkeypatch.setattr(broadcast, "SECONDS", 0.5)
    where = {"host": "127.0.0.1", "port": 9, "ranks": 2, "most_bytes": 1, "nccl": False}
    with pytest.raises(RuntimeError, match="does not reach the trainer at 127.0.0.1, port 9 .*Open such"):
        policy.take(1, where)


def test_no_rank_closes_the_group_before_all_have_everything(policy, monkeypatch):
    """NCCL may still carry bytes to one worker when others have them all."""
    closed = []
    close = broadcast.GlooGroup.close

    def noted(group):
        closed.append(time.monotonic())
        close(group)

    def slowly(rank, where):
        found = {}
        for name, tensor in received(policy.table, CPU, rank, **where):
            found[name] = tensor.clone()
            time.sleep(0.1)
        return found, time.monotonic()

    monkeypatch.setattr(broadcast.GlooGroup, "close", noted)
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**20)
    _, (found, end) = policy.transfer(policy.take, slowly)
    policy.require(found)
    assert len(closed) == 3 and min(closed) > end - 0.1


def test_a_server_that_is_lost_right_before_a_broadcast_is_a_lost_server(policy, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    transport = Broadcast(url, 1, Folder(str(tmp_path)))
    with pytest.raises(ServerGone, match=f"the server at {url} does not answer: ConnectionRefused"):
        with transport.whole(None, policy.staged):
            pass


def test_ranks_connect_by_the_address_that_reaches_the_trainer_whatever_the_hosts_name_is(policy, monkeypatch):
    addresses = []
    create = broadcast.ProcessGroupGloo.create_device

    def noted(hostname):
        addresses.append(hostname)
        return create(hostname=hostname)

    monkeypatch.setattr(broadcast.ProcessGroupGloo, "create_device", noted)
    policy.require(*policy.transfer(policy.take))
    assert addresses == ["127.0.0.1"] * 2


def test_a_broadcast_that_failed_leaves_no_port_open(policy, monkeypatch):
    monkeypatch.setattr(broadcast, "SECONDS", 0.2)
    gc.disable()
    try:
        with suppress(RuntimeError), broadcasting(policy.staged, policy.table, "127.0.0.1", 1) as where:
            while sends():
                time.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", where["port"]), timeout=5)
    finally:
        gc.enable()
