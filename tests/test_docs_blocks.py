"""README and quickstart as a newcomer would type them: every shell block that a CPU can run, in order, in one folder.

A block that is not run as it stands says why in its title. What is checked instead is written beside that title here.
"""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import HfApi
from transformers import AutoConfig, PreTrainedConfig

from testing import published
from testing.processes import alone
from trl_fp8.commands.cli import main


ROOT = Path(__file__).parents[1]
PAGES = "README.md", "docs/quickstart.md"
FENCE = re.compile(r"(?ms)^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$")
# Words that a shell block begins its lines with
PROGRAMS = "make", "pip", "trl-fp8", "python", "accelerate", "git", "source", "cd"
TITLES = {
    "install": "it makes an environment; test_structure.py compares it with pyproject.toml",
    "minutes": "make is asked what it would run; console/test_demo.py runs the demo, and these tests are the other",
    "after the demo": "its last line is run for the folder of another run",
    "on a GPU": "the files that it names are there",
    "with a network": "the plan is made of the same config.json, and says what the page quotes",
}


class Block(NamedTuple):
    page: str
    title: str
    text: str
    quoted: str  # of the output, where the page shows it in the next block

    @property
    def commands(self) -> list[str]:
        """Its lines, continued ones joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(words) for line in lines if (words := shlex.split(line, comments=True))]


def fences(page: str) -> list[tuple[str, str, str]]:
    """(language, title, text) of each fenced block of a page."""
    return FENCE.findall((ROOT / page).read_text())


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        of_page = fences(page)
        for (language, title, text), (next_language, _, quoted) in zip(
            of_page, [*of_page[1:], ("", "", "")], strict=True
        ):
            if language == "bash":
                found.append(Block(page, title, text, quoted if next_language == "text" else ""))
    return found


@pytest.fixture
def folder(tmp_path):
    """The repository without what earlier runs left there, and with the environment of these tests."""
    for path in ROOT.iterdir():
        if path.name not in {"outputs", ".git"} and not path.name.startswith(".venv"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def run(command: str, folder: Path) -> None:
    """Run one line in `folder`, which is the current one: `trl-fp8` in this process, which has imported what takes its
    processes ten seconds each, and everything else in a shell.
    """
    program, *words = shlex.split(command)
    if program == "trl-fp8":
        assert main(words) == 0, command
    else:
        run_in_shell(command, folder)


def run_in_shell(text: str, folder: Path) -> None:
    """Let a shell in `folder` run `text`; an `AssertionError` with all that it said if any line fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=alone() | {"PATH": path, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-6000:]}"


@pytest.mark.engine
def test_blocks_run_as_they_are_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    titled = {title: [block for block in blocks() if block.title == title] for title in ("", *TITLES)}
    run_in_shell("trl-fp8 verify --help", folder)  # the console script is there
    for command in (command for block in titled[""] for command in block.commands):
        run(command, folder)
    ran = {command for block in titled[""] for command in block.commands}
    assert {block.commands[-1].replace("/demo", "/quickstart") for block in titled["after the demo"]} <= ran
    for command in (command for block in titled["minutes"] for command in block.commands):
        run(f"{command} --dry-run", folder)


def test_plans_say_what_the_pages_quote(tmp_path, monkeypatch, capsys):
    """Without a network: of the same config.json."""
    published.qwen3_8b().save_pretrained(tmp_path)
    as_published = AutoConfig.from_pretrained(tmp_path)
    as_published.name_or_path = "Qwen/Qwen3-8B"
    held = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(HfApi, "repo_exists", lambda self, name, **options: True)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda model, **options: (dict(held), {}))
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda model, **options: copy.deepcopy(as_published))
    planned = [block for block in blocks() if block.title == "with a network"]
    for command, quoted in ((command, block.quoted) for block in planned for command in block.commands):
        program, *words = shlex.split(command)
        assert (program, words[:2]) == ("trl-fp8", ["plan", "Qwen/Qwen3-8B"])
        assert main(words) == 0
        said = capsys.readouterr().out.splitlines()
        assert [line for line in quoted.splitlines() if line not in said] == []


def test_commands_for_gpus_name_files_that_are_there():
    named = [
        word for block in blocks() if block.title == "on a GPU" for word in shlex.split(block.text) if "/" in word
    ]
    assert len(named) > 1 and all((ROOT / name).is_file() for name in named)


def test_every_title_is_a_reason_that_is_known_and_used():
    assert {block.title for block in blocks()} == TITLES.keys() | {""}


def test_no_command_hides_in_a_block_of_another_kind():
    for page in PAGES:
        for language, _, text in fences(page):
            if language in ("", "text", "console", "sh", "shell"):
                assert not [line for line in text.splitlines() if line.partition(" ")[0] in PROGRAMS], page
