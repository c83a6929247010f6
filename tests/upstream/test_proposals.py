"""The patches that docs/upstream/README.md proposes apply to the installed libraries, and bring a test each."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[2] / "docs" / "upstream"
PATCHES = sorted(FOLDER.glob("*.patch"))


def git(folder: Path, *words: object) -> str:
    done = subprocess.run(["git", *map(str, words)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_proposed_patch_applies_to_the_installed_library(patch, tmp_path):
    text = patch.read_text()
    subject, _, motivation = text.partition("\n\n")
    assert subject.startswith("Subject: ") and "\n" not in subject
    assert 1 <= motivation.partition("\n---")[0].count(". ") + 1 <= 3  # sentences
    files = [line.split("\t")[2] for line in git(tmp_path, "apply", "--numstat", patch).splitlines()]
    tests = [file for file in files if file.startswith("tests/")]
    assert len(tests) == 1 and len(files) > 1
    for file in set(files) - set(tests):
        library, _, rest = file.partition("/")
        copy = tmp_path / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((Path(find_spec(library).origin).parent / rest).read_bytes())
    git(tmp_path, "apply", patch)
    for file in files:
        compile((tmp_path / file).read_text(), file, "exec")


def test_the_page_names_each_patch():
    page = (FOLDER / "README.md").read_text()
    assert PATCHES and all(f"({patch.name})" in page for patch in PATCHES)
