"""`trl-fp8 export` and `verify`: a mistake is one line, before a model is loaded."""

from pathlib import Path

import pytest

from trl_fp8.commands.cli import main
from trl_fp8.export import file_checksums
from trl_fp8.export.file_checksums import write_checksums


def test_verify_and_refusals_of_export_say_it_in_a_line(tmp_path, capsys):
    exported, model, empty = tmp_path / "exported", tmp_path / "model", tmp_path / "empty"
    for folder in (exported, model, empty):
        folder.mkdir()
    (exported / "config.json").write_text("{}")
    (model / "config.json").write_text('{"model_type":')
    write_checksums(exported)
    free = str(tmp_path / "new")
    words = [
        ["verify", str(exported)],
        ["verify", str(model)],
        ["export", str(exported), str(exported)],
        ["export", str(model), "/proc/new"],  # not even by root
        *(["export", str(unknown), free] for unknown in (tmp_path / "missing", empty, model)),
    ]
    assert [main(line) for line in words] == [0, 2, 2, 2, 2, 2, 2]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"{exported}: 1 files are what was exported"]
    told = ("has no checksums.json", "is not empty", "folder='/proc/new': /proc cannot be written (")
    told += ("there is no such folder", "is empty", "is not a valid JSON file")
    for line, part in zip(printed.err.splitlines(), told, strict=True):
        assert part in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b'{"config.json": "', b"", b"\xff\xfe", b"[]"])
def test_checksums_that_cannot_be_read_are_named(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file_checksums.CHECKSUMS).write_bytes(content)
    for words in (["verify", str(tmp_path)], ["push", str(tmp_path), "user/model"]):
        assert main(words) == 2
        said = f"trl-fp8: folder={str(tmp_path)!r}: its checksums.json is damaged. Fetch or export it again.\n"
        assert capsys.readouterr().err == said


def test_a_snapshot_in_the_hubs_cache_is_verified_through_its_links(tmp_path, capsys):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    blobs.mkdir()
    (blobs / "config.json").write_text("{}")
    write_checksums(blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    assert main(["verify", str(snapshot)]) == 0
    (blobs / "config.json").write_text("changed")
    assert main(["verify", str(snapshot)]) == 2
    assert "config.json (changed)" in capsys.readouterr().err


@pytest.mark.parametrize("obstacle", ["current folder", "mount point", "parent"])
def test_an_empty_folder_that_an_export_cannot_replace_is_refused_at_the_start(
    obstacle, tmp_path, monkeypatch, capsys
):
    empty, temporary_file = tmp_path / "empty", file_checksums.TemporaryFile
    empty.mkdir()

    def refuse_parent(dir):
        if Path(dir) == tmp_path:
            raise PermissionError(13, "Permission denied")
        return temporary_file(dir=dir)

    target, said = str(empty), "is the current folder or a mount point"
    if obstacle == "current folder":
        monkeypatch.chdir(empty)
        target = "."
    elif obstacle == "mount point":
        monkeypatch.setattr(Path, "is_mount", lambda path: path == empty)
    else:
        monkeypatch.setattr(file_checksums, "TemporaryFile", refuse_parent)
        said = f"{tmp_path} cannot be written (Permission denied)"
    assert main(["export", str(tmp_path / "no model"), target]) == 2
    assert said in capsys.readouterr().err
