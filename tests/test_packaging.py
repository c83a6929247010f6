"""What is installed from a wheel or an sdist, and what it says of itself."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import trl_fp8
from testing import published


ROOT = Path(__file__).parents[1]
MODULES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the wheel and the sdist of a copy, so that nothing is left behind in the repository."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return dist


def test_the_wheel_holds_every_module_and_what_they_read(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = message_from_string(
            archive.read(next(name for name in held if name.endswith("/METADATA"))).decode()
        )
        archive.extractall(tmp_path)
    assert MODULES | {"trl_fp8/py.typed", "trl_fp8/report/report.css"} <= held
    assert {name.partition("/")[0] for name in held} == {"trl_fp8", f"trl_fp8-{trl_fp8.__version__}.dist-info"}
    assert metadata["Version"] == trl_fp8.__version__ and metadata["License-Expression"] == "Apache-2.0"
    required = metadata.get_all("Requires-Dist")
    assert {"cuda", "cpu", "report"} <= set(metadata.get_all("Provides-Extra"))
    assert any(line.startswith("vllm==0.31.*") and 'extra == "cuda"' in line for line in required)
    published.qwen3_8b().save_pretrained(tmp_path / "model")
    code = "import sys, trl_fp8; from trl_fp8.cli import main; print(trl_fp8.__file__); main(['plan', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(str(tmp_path)) and "84.8% of parameters fp8" in done.stdout, done.stderr


def test_what_is_imported_is_declared():
    """By the dependencies; by an extra: an engine, pictures; peft and triton,
    where somebody has installed them to be used.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *project["optional-dependencies"]["cuda"],
        *project["optional-dependencies"]["report"],
    ]
    declared = {re.match(r"[\w-]+", line)[0] for line in lines} - {"pyyaml"} | {"yaml"}
    imported = set()
    for module in MODULES:
        for node in ast.walk(ast.parse((ROOT / "src" / module).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    assert imported - sys.stdlib_module_names - declared == {"peft", "triton", "trl_fp8"}
    assert declared <= imported


def test_the_sdist_can_be_built_from(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{module}" for module in MODULES} | {"pyproject.toml", "README.md", "LICENSE"} <= held


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text[text.index("\n## ") :].startswith(f"\n## {trl_fp8.__version__}")


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_parse_and_install_what_the_project_pins(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["jobs"] and workflow["permissions"] == {"contents": "read"}
    pins = (ROOT / "pyproject.toml").read_text()
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            for word in step.get("run", "").split():
                assert "==" not in word or f'"{word}"' in pins, f"{path.name} installs {word}"
