"""`trl-fp8 export` and `verify`: a mistake is one line, before a model is loaded."""

from trl_fp8.commands.cli import main
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
