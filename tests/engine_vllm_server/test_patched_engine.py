"""When a server gets a patch and when it gets the whole policy. The server is an object here."""

import os
import re
from contextlib import nullcontext

import pytest
import torch

from testing import tiny_models
from testing.fake_server import Server
from testing.staged_trainer import SomeScales, with_changed_patch
from trl_fp8.engine.vllm_server import staging, transports
from trl_fp8.engine.vllm_server.staged_engine import StagedEngine
from trl_fp8.engine.vllm_server.uploads import Uploads
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.delivery import InPlaceDelivery


class Trainer:
    """A policy that changes a little from sync to sync, and its server."""

    def __init__(self, folder, uploads=None):
        self.policy = tiny_models.build()
        recipe = recipe_for_model(self.policy)
        self.server = Server(self.policy, recipe, uploads)
        self.server.sees = uploads is None
        self.engine = StagedEngine([self.server], self.policy, recipe, str(folder), patience=1)
        carried = SomeScales(self.engine.kv_scales(), 2)
        self.delivery = InPlaceDelivery(self.engine, self.policy, recipe, carried=carried)

    def step(self, size=1e-5):
        """Change each weight by `size` or less."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(torch.empty_like(parameter).uniform_(-size, size))

    def sync(self):
        """Bring the policy to the server, and require that its workers hold it. Return which updates were patches."""
        self.server.updates.clear()
        self.delivery.deliver(lambda: nullcontext(self.policy.named_parameters()))
        self.delivery.verify()
        for worker in self.server.workers:
            for name, tensor in self.engine.layout.held.items():
                assert torch.equal(worker.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
        return ["patch" in update for update in self.server.updates]


@pytest.fixture
def trainer(tmp_path):
    torch.manual_seed(0)
    return Trainer(tmp_path)


def test_the_first_sync_is_whole_and_the_next_ones_are_patches(trainer, tmp_path):
    assert trainer.sync() == [False] and trainer.engine.patch_over_whole == 1
    for _ in range(3):
        trainer.step()
        assert trainer.sync() == [True]
        assert 0 < trainer.engine.patch_over_whole < 0.1
    assert trainer.sync() == [True] and trainer.engine.patch_over_whole == 0  # nothing has changed
    assert len(list(tmp_path.iterdir())) == 1  # no patch is left


def test_large_changes_are_sent_whole(trainer):
    trainer.sync()
    trainer.step(0.1)
    assert trainer.sync() == [False]
    trainer.step()
    assert trainer.sync() == [True]


def test_a_server_that_was_started_again_gets_the_whole_policy(trainer):
    trainer.sync()
    trainer.server.start("b")
    trainer.step()
    assert trainer.sync() == [False]


def test_what_was_found_changed_is_repaired_by_a_whole_policy(trainer):
    trainer.sync()
    trainer.server.workers[1].tensors["model.norm.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="model.norm.weight"):
        trainer.delivery.verify()
    assert trainer.sync() == [False]


def test_what_nobody_found_changed_is_repaired_by_a_second_push(trainer, caplog):
    trainer.sync()
    trainer.server.workers[1].tensors["model.norm.weight"].mul_(2)
    trainer.step()
    assert trainer.sync() == [True, False]
    assert "tensors had changed before a patch came: model.norm.weight" in caplog.text


def test_a_server_at_another_version_gets_the_whole_policy(trainer, caplog):
    trainer.sync()
    trainer.server.workers[1].version = 7
    trainer.step()
    assert trainer.sync() == [True, False]
    assert "the patch changes version 1, and this worker holds version 7" in caplog.text


def test_after_a_failed_audit_the_whole_policy_is_sent(trainer):
    trainer.sync()
    read = trainer.server.workers[1].read

    def lossy(update):
        read(update)
        trainer.server.workers[1].arrived["model.norm.weight"] += 1

    trainer.server.workers[1].read = lossy
    trainer.step()
    with pytest.raises(RuntimeError, match="1 tensors hold other bytes than were sent: model.norm.weight"):
        trainer.sync()
    trainer.server.workers[1].read = read
    assert trainer.sync() == [False]


def test_a_push_that_fails_is_repeated_whole(trainer):
    trainer.sync()
    trainer.step()
    trainer.server.fail = {"update": RuntimeError("http://server/update_weights: 500")}
    assert trainer.sync() == [False]


def test_without_room_for_a_patch_the_whole_policy_is_sent(trainer, tmp_path, monkeypatch, caplog):
    trainer.sync()
    trainer.step()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert trainer.sync() == [False]
    assert "was not written ([Errno 28] No space left on device): all is sent instead" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1


class OnItsWay:
    """Changes the first chunk of each kind, or sends others in its place; `change(kind, offset, size, chunk)`."""

    def __init__(self, server, change):
        self._upload, self._change, self._done = server.upload, change, False
        server.upload = self

    def __call__(self, *chunk):
        chunks = [chunk] if self._done else self._change(*chunk)
        self._done = True
        for each in chunks:
            path = self._upload(*each)
        return path


@pytest.fixture
def far(tmp_path, monkeypatch):
    """Return a trainer whose files the server does not see, so that it uploads them in chunks of 1,000 bytes."""
    monkeypatch.setattr(transports, "MAX_CHUNK_BYTES", 1000)
    torch.manual_seed(0)
    for name in ("trainer", "server"):
        (tmp_path / name).mkdir()
    return Trainer(tmp_path / "trainer", str(tmp_path / "server"))


def test_a_server_that_does_not_see_the_files_gets_them_in_http_bodies(far, tmp_path):
    [link] = far.engine.servers
    assert link.transport.name.startswith("HTTP bodies, because the server does not see")
    assert far.sync() == [False] and far.server.calls.count("upload") > 10
    whole = list((tmp_path / "server").iterdir())
    for _ in range(2):
        far.server.calls.clear()
        far.step()
        assert far.sync() == [True]
        assert "upload" in far.server.calls and far.server.calls.index("upload") < far.server.calls.index("pause")
    far.step(0.1)
    assert far.sync() == [False]  # into the same file
    far.server.uploads.remove("patch")
    assert list((tmp_path / "server").iterdir()) == whole


CHUNKS = {  # what becomes of a chunk on its way, and what the trainer says
    "gap": (lambda kind, at, size, chunk: [(kind, 0, size, b""), (kind, 1, size, chunk)], "does not continue"),
    "reordered": (lambda kind, at, size, chunk: [(kind, at + 7, size, chunk)], "does not continue"),
    "longer": (lambda kind, at, size, chunk: [(kind, at, size, chunk + b"0" * size)], "ends beyond the file's"),
    "truncated": (lambda kind, at, size, chunk: [(kind, at, size, chunk[:-1])], "does not continue|checksum"),
    "tampered": (lambda kind, at, size, chunk: [(kind, at, size, chunk[:-1] + b"~")], "does not have the checksum"),
}


@pytest.mark.parametrize("change, message", CHUNKS.values(), ids=CHUNKS)
def test_whatever_becomes_of_a_chunk_of_a_patch_the_server_is_whole_after_the_sync(change, message, far, caplog):
    far.sync()
    far.step()
    OnItsWay(far.server, change)
    assert far.sync()[-1] is False
    assert re.search(message, caplog.text), caplog.text


def test_a_changed_chunk_of_all_fails_the_audit(far):
    OnItsWay(far.server, lambda kind, at, size, chunk: [(kind, at, size, bytes([chunk[0] ^ 1]) + chunk[1:])])
    with pytest.raises(RuntimeError, match="1 tensors hold other bytes than were sent"):
        far.sync()
    assert far.sync() == [False]


def test_a_server_without_room_for_a_patch_gets_all_in_the_file_that_it_has(far, monkeypatch, caplog):
    far.sync()
    far.step()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert far.sync() == [False]
    assert "was not written" in caplog.text and "all is sent instead" in caplog.text


def flipped(body):
    return body[:-1] + bytes([body[-1] ^ 1])


def older(update):
    return [update | {"patch": update["patch"] | {"base": update["patch"]["base"] - 1}}]


DRILLS = {  # what becomes of an update on its way, and what the trainer says
    "lost": (lambda update: [], "holds versions"),
    "reordered": (older, "the patch changes version 1, and this worker holds version 2"),
    "truncated": (with_changed_patch(lambda body: body[:-1]), r"has \d+ bytes instead of \d+"),
    "longer": (with_changed_patch(lambda body: body + b"\0"), r"has \d+ bytes instead of \d+"),
    "tampered": (with_changed_patch(flipped), "does not have the checksum that the trainer sent"),
}


@pytest.mark.parametrize("change, message", DRILLS.values(), ids=DRILLS)
def test_a_patch_that_does_not_arrive_is_refused_whole_and_the_policy_is_sent(change, message, trainer, caplog):
    trainer.sync()
    trainer.step()
    trainer.sync()
    before = [dict(worker.parts) for worker in trainer.server.workers]
    update_weights = trainer.server.update_weights
    after = []

    def on_its_way(update):
        for each in change(update) if "patch" in update else [update]:
            update_weights(each)
        after.append([dict(worker.parts) for worker in trainer.server.workers])

    trainer.server.update_weights = on_its_way
    trainer.step()
    assert trainer.sync()[-1] is False
    assert after[0] == before  # nothing of the patch was written
    assert re.search(message, caplog.text), caplog.text


@pytest.mark.parametrize(
    "parts, expected",
    [
        ([("a", 32, 2**62), ("b", 32, 2**62 + 5)], -(2**63) + 5),  # modulo 2**64
        ([("a", 32, 3), ("a", 32, 3), ("b", 32, 4), ("b", 32, 4)], 7),  # two workers have each half
        ([("a", 32, 3), ("a", 32, 2), ("b", 32, 4)], None),  # which differ
        ([("a", 32, 3), ("a", 32, 3)], None),  # nobody has the other half
        ([("a", 64, 3), ("b", 0, 0)], 3),  # one worker has zeros instead
    ],
)
def test_checksums_of_parts_are_added_if_they_are_all_of_a_tensor(parts, expected, trainer):
    [server] = trainer.engine.servers
    server.states = [
        {"split": {"x": [part, elements]}, "arrived": {"x": str(checksum)}} for part, elements, checksum in parts
    ]
    assert server._agreed_sum("x", 64) == expected


def test_a_trainer_that_dies_with_a_patch_leaves_it_to_the_next_one(trainer, tmp_path):
    left = staging.PatchFile(str(tmp_path), b"patch")
    assert staging.remove_abandoned(str(tmp_path)) == []  # its trainer lives
    os.close(left.remove.detach()[2][1])  # as its end does
    assert staging.remove_abandoned(str(tmp_path)) == [left.path]


def test_a_change_of_the_way_to_a_server_that_was_started_again_is_said(trainer, caplog):
    trainer.sync()
    trainer.server.start("b")
    assert trainer.sync() == [False] and "Weights travel" not in caplog.text
    trainer.server.start("c")
    trainer.server.sees = False
    trainer.server.uploads = Uploads(os.path.dirname(trainer.engine._file.path))
    assert trainer.sync() == [False]
    assert "Weights travel to http://server by HTTP bodies, because the server does not see" in caplog.text
