"""`trl-fp8 export` and `verify`: a mistake is one line, before a model is loaded."""

import json
import subprocess
import sys

from trl_fp8.export.file_checksums import write_checksums


COMMANDS = """
import json, sys
from trl_fp8.commands.cli import main
print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""


def test_verify_and_refusals_of_export_say_it_in_a_line(tmp_path):
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
    done = subprocess.run([sys.executable, "-c", COMMANDS, json.dumps(words)], capture_output=True, text=True)
    *said, result = done.stdout.splitlines()
    assert json.loads(result) == [0, 2, 2, 2, 2, 2, 2], done.stderr
    assert said == [f"{exported}: 1 files are what was exported"]
    told = ("has no checksums.json", "is not empty", "folder='/proc/new': /proc cannot be written (")
    told += ("there is no such folder", "is empty", "is not a valid JSON file")
    for line, part in zip(done.stderr.splitlines(), told, strict=True):
        assert part in line
    assert not (tmp_path / "new").exists()
