"""What untrusted checkpoints, folders and logs can and cannot do."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trl_fp8 import FP8GRPOConfig
from trl_fp8.export.file_checksums import CHECKSUMS, verify_export
from trl_fp8.run.facts import _changed_flags


PACKAGE = Path(__file__).parents[2] / "src" / "trl_fp8"
SOURCES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def calls(name: str):
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                yield path, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def test_nothing_is_unpickled():
    assert all(given.get("weights_only") == "True" for _, given in calls("torch.load"))
    assert list(calls("torch.load"))  # the rule has something to rule
    imported = {
        alias.name
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def test_code_of_a_checkpoint_is_run_only_if_the_user_says_so():
    assert FP8GRPOConfig("out", use_cpu=True, bf16=False).trust_remote_code is False
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) != "True", path


def test_bandits_rules_find_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "S", "--ignore", "S101,S110", PACKAGE],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_file_names_of_an_export_cannot_leave_its_folder(name, tmp_path):
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / CHECKSUMS).write_text(json.dumps({name: "0" * 64}))
    with pytest.raises(ValueError, match=rf"names files outside of the folder: {re.escape(name)}"):
        verify_export(folder)


def test_tokens_are_not_logged():
    args = FP8GRPOConfig("out", use_cpu=True, bf16=False, hub_token="hf_secret")
    assert "hf_secret" not in json.dumps(_changed_flags(args), default=str)
