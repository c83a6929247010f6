"""A worker's end of a transfer, over tensors of a test instead of an engine's: nothing that it gets makes it raise."""

import hashlib
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_fp8.engine.vllm_server import cuda_ipc, weight_patches
from trl_fp8.engine.vllm_server.plugin import FOLDER
from trl_fp8.engine.vllm_server.receiver import Receiver
from trl_fp8.engine.vllm_server.staging import PatchFile, StagingFile, pieces_of
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.sync.pieces import Layout


TENSORS = {"codes": ("float8_e4m3fn", [40, 32]), "norm": ("bfloat16", [70]), "scale": ("float32", [3])}
ODD = [0, -1, 1, 3, 255, 2**31, 2**63, -(2**70), 1.5, "1", None, [], {}, True]  # values of other types, too


class Transfer:
    """A trainer's file, a worker that holds what is in it, and a patch that changes some of it."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.file = StagingFile(self.folder, TENSORS)
        self.old = self._drawn(1)
        self.new = self.old.clone()
        for name, position in (("codes", 5), ("codes", 700), ("codes", 701), ("norm", 3), ("scale", 2)):
            tensor = self.file.tensors[name]
            offset = tensor.data_ptr() - self.file.buffer.data_ptr() + position * tensor.element_size()
            self.new[offset] += 1
        self.held = {name: torch.zeros_like(tensor) for name, tensor in self.file.tensors.items()}
        config = SimpleNamespace(parallel_config=None, model_config=None)
        self.worker = Receiver(None, config, torch.device("cpu"), nn.Module())
        self.worker.layout = Layout(pieces_of(self.held))
        self.worker.init_transfer_engine({"trainer": "a", "table": self.file.table})
        self.version = 0
        self.send_whole()
        self.patch = weight_patches.bring_up_to_date(self.file.buffer, self.new, self.file.table)

    def _drawn(self, seed):
        buffer = torch.zeros_like(self.file.buffer)
        for tensor in self.file.tensors.values():
            start = tensor.data_ptr() - self.file.buffer.data_ptr()
            generator = torch.Generator().manual_seed(seed)
            buffer[start : start + tensor.nbytes] = torch.randint(
                0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator
            )
        return buffer

    def send_whole(self):
        """Bring the worker to the old values."""
        self.file.buffer.copy_(self.old)
        self.version += 1
        state = self.update({"trainer": "a", "version": self.version, "whole": {"file": self.file.path}})
        assert state["version"] == self.version and not state["error"]

    def send_patch(self, body=None, **changes):
        """Send the patch, or another body with its description, and return the worker's state."""
        body = self.patch.body if body is None else body
        file = PatchFile(self.folder, body)
        described = {"file": file.path, "size": len(body), "sha256": self.patch.sha256, "counts": self.patch.counts}
        described |= {"base": self.version} | changes
        try:
            return self.update({"trainer": "a", "version": self.version + 1, "patch": described})
        finally:
            file.remove()

    def update(self, update):
        self.worker.start_weight_update()
        self.worker.receive_weights(update)
        self.worker.finish_weight_update()
        return self.worker.state()

    def holds(self, buffer):
        """Return whether the worker holds the values of a buffer, byte for byte."""
        self.file.buffer.copy_(buffer)
        tensors = self.file.tensors.items()
        return all(torch.equal(self.held[name].view(torch.uint8), each.view(torch.uint8)) for name, each in tensors)


@pytest.fixture
def transfer(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return Transfer(tmp_path)


def test_a_patch_arrives_and_its_checksums_are_those_of_the_whole(transfer):
    state = transfer.send_patch()
    assert (state["version"], state["error"], state["differ"]) == (2, "", []) and transfer.holds(transfer.new)
    sums = {name: str(int(digest(tensor))) for name, tensor in transfer.file.tensors.items()}
    assert state["arrived"] == sums


def test_a_worker_opens_its_own_handle_of_the_trainers_gpu(transfer, monkeypatch):
    transfer.worker.parallel_config = SimpleNamespace(rank=1)
    monkeypatch.setattr(cuda_ipc, "gpu_index", {"GPU-a": 2}.get)
    monkeypatch.setattr(
        cuda_ipc, "imported", lambda handle, index: {("second", 2): transfer.new}[handle["name"], index]
    )
    whole = {"cuda_ipc": [{"gpu": "GPU-a", "name": name} for name in ("first", "second", "third")]}
    state = transfer.update({"trainer": "a", "version": 2, "whole": whole})
    assert (state["version"], state["error"], state["differ"]) == (2, "", []) and transfer.holds(transfer.new)
    state = transfer.update({"trainer": "a", "version": 3, "whole": {"cuda_ipc": [{}, {"gpu": "GPU-b"}]}})
    assert state["version"] == -1 and "does not see the trainer's GPU GPU-b" in state["error"]


def test_a_patch_that_arrives_twice_is_written_once(transfer):
    transfer.send_patch()
    transfer.worker.start_weight_update()
    state = transfer.send_patch()  # the same version, on the same base
    assert (state["version"], state["error"]) == (2, "") and transfer.holds(transfer.new)


@pytest.mark.parametrize("base", [0, 2, -1, None])
def test_a_patch_of_another_version_is_refused(transfer, base):
    state = transfer.send_patch(base=base)
    assert f"the patch changes version {base}, and this worker holds version 1" in state["error"]
    assert state["version"] == -1 and transfer.holds(transfer.old)
    assert transfer.send_patch()["error"] == ""  # the policy is still there


def test_a_worker_that_holds_nothing_takes_no_patch(transfer):
    transfer.worker.init_transfer_engine({"trainer": "a", "table": transfer.file.table})
    for base in (1, -1):
        assert "this worker holds version -1" in transfer.send_patch(base=base)["error"]


def test_a_patch_from_another_folder_is_refused(transfer, tmp_path_factory):
    elsewhere = PatchFile(str(tmp_path_factory.mktemp("elsewhere")), transfer.patch.body)
    assert "the only folder that this server reads" in transfer.send_patch(file=elsewhere.path)["error"]
    assert "larger than all that it could change" in transfer.send_patch(size=2**40)["error"]


def spoiled(transfer, draw):
    """Return a body and a description that differ from those of the patch in one way or several."""
    body = bytearray(transfer.patch.body)
    counts = [list(each) for each in transfer.patch.counts]
    changes = {}
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        kind = draw.randrange(7)
        if kind == 0 and body:
            body[draw.randrange(len(body))] = draw.randrange(256)
        elif kind == 1:
            del body[draw.randrange(len(body) + 1) :]
        elif kind == 2:
            body += draw.randbytes(draw.randrange(1, 20))
        elif kind == 3:
            draw.choice(counts)[draw.randrange(3)] = draw.choice(ODD)
        elif kind == 4:
            changes[draw.choice(("size", "sha256", "counts", "base", "file", "other"))] = draw.choice(ODD)
        elif kind == 5:
            changes["file"] = draw.choice(["/etc/hostname", transfer.folder, transfer.folder + "/none", "", "\0"])
        elif counts:
            draw.choice((counts.pop, counts.reverse))()
            if not counts:
                counts.append([1, 0, 0])
    if draw.random() < 0.7:  # else the checksum finds it
        changes = {"sha256": hashlib.sha256(body).hexdigest()} | changes
    return bytes(body), {"counts": counts} | changes


def test_of_1000_spoiled_patches_none_raises_and_those_that_are_refused_change_nothing(transfer):
    draw = random.Random(0)
    reasons = []
    for _ in range(1000):
        body, changes = spoiled(transfer, draw)
        state = transfer.send_patch(body, **changes)
        if state["error"]:
            assert transfer.holds(transfer.old), (changes, state["error"])
            assert state["version"] == -1
            reasons.append(state["error"])
        else:  # values or positions are other ones, inside of the tensors, and so are the checksums
            assert state["version"] == transfer.version + 1 and state["differ"] == []
            arrived = {name: str(int(digest(tensor))) for name, tensor in transfer.held.items()}
            assert state["arrived"] == arrived
            transfer.version += 1
            transfer.send_whole()
    assert 500 < len(reasons) < 1000
    for words in ("checksum", "instead of", "go on to", "end at", "positions, and", "in no tensor", "holds version"):
        assert any(words in reason for reason in reasons), words
