"""The house rules that a machine can see: import directions, what an import pulls in, docs that match the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trl_fp8"
# What a layer may import of ours (itself always); read: cli -> trainer -> {...} -> recipe -> numerics
ALLOWED = {
    "numerics": set(),
    "checkpoint_names": set(),
    "outline": set(),
    "config_outline": {"outline"},
    "experts": {"checkpoint_names", "numerics", "outline"},
    "model_outline": {"checkpoint_names", "experts", "outline"},
    "recipe": {"checkpoint_names", "experts", "model_outline", "numerics", "outline"},
    "servable": {"outline"},
    "plan": {"model_outline", "recipe", "numerics", "outline"},
    "flags": {"recipe", "numerics"},
    "launch": set(),
    "config": {"flags", "launch", "recipe", "numerics"},
    "correction": {"numerics"},
    "policy": {"checkpoint_names", "experts", "model_outline", "recipe", "numerics"},
    "engine": {"checkpoint_names", "experts", "model_outline", "recipe", "numerics", "servable"},
    "run_file": set(),
    "run_log": {"numerics", "run_file"},
    "report": {"numerics", "plan", "run_file"},
    "probe": {"policy"},
    "instruments": {"engine", "policy", "probe", "recipe"},
    "advice": {"outline", "plan", "recipe"},
    "capacity": {"advice", "outline", "plan"},
    "model_card": set(),
    "hub": {"checkpoint_names", "engine", "model_card", "model_outline", "numerics", "plan", "recipe"},
    "run_facts": set(),
    "prompt_checks": set(),
    "whole_checkpoints": set(),
    "saving": {"engine", "hub", "model_card", "policy", "rollout_buffer", "run_facts", "whole_checkpoints"},
    "rollout_buffer": set(),
    "rollout_routes": {"experts", "policy"},
    "sync_metrics": {"engine", "recipe"},
    "trainer": {
        *("config", "correction", "engine", "instruments", "launch", "plan", "policy", "recipe", "numerics"),
        *("prompt_checks", "rollout_routes", "run_facts", "run_log", "saving", "sync_metrics"),
    },
    "commands": {
        *("capacity", "config_outline", "flags", "model_outline", "numerics", "outline", "plan", "recipe"),
        *("config", "engine", "hub", "report", "run_file", "servable", "trainer"),
    },
    "cli": {"commands"},
    "__init__": {"config", "numerics", "recipe", "trainer"},
}
FOREIGN = {  # packages that only some layers may import
    "vllm": {"engine"},
    "trl": {"config", "engine", "instruments", "launch", "probe", "run_facts", "trainer", "commands"},
    "transformers": {"policy", "engine", "hub", "run_log", "saving", "trainer", "whole_checkpoints", "commands"},
}


def imports():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = list(parts[: len(parts) - node.level])
                target = base + (node.module.split(".") if node.module else [])
                for alias in node.names if not target else [None]:
                    yield path, parts[0], "trl_fp8", (target or [alias.name])[0]
            elif isinstance(node, ast.ImportFrom):
                yield path, parts[0], node.module.split(".")[0], (node.module.split(".") + [""])[1]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, parts[0], alias.name.split(".")[0], (alias.name.split(".") + [""])[1]


def test_imports_go_one_way():
    wrong = [
        f"{path.relative_to(ROOT)} imports {package}.{target}"
        for path, layer, package, target in imports()
        if (package == "trl_fp8" and target != layer and target not in ALLOWED[layer])
        or (package in FOREIGN and layer not in FOREIGN[package])
    ]
    assert wrong == []


def test_every_module_says_what_it_is():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_importing_the_package_touches_no_gpu_and_starts_nothing():
    code = (
        "import torch, sys, threading; import trl_fp8; assert not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized(); print(sorted(trl_fp8.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "FP8GRPOTrainer" in done.stdout


def test_configuration_page_is_generated_from_the_flags():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_configuration.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_scripts_declare_their_dependencies():
    for path in (ROOT / "examples").glob("grpo_*.py"):
        header = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", path.read_text())
        assert header and "trl-fp8" in header.group(1), path


def test_quickstart_is_two_lines_away_from_trl():
    lines = (ROOT / "examples" / "quickstart.py").read_text().splitlines()
    assert len(lines) <= 40
    as_trl = [line.replace("from trl_fp8 import", "from trl import").replace("FP8GRPO", "GRPO") for line in lines]
    assert sum(ours != theirs for ours, theirs in zip(lines, as_trl, strict=True)) == 2
    compile("\n".join(as_trl), "quickstart.py", "exec")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_example_yaml_parses(path):
    assert yaml.safe_load(path.read_text())


def test_readme_commands_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"(?m)^(?:\$ )?make (\w[\w-]*)", readme))
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"(?m)^{target}:", makefile) for target in targets)
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", readme):
        assert (ROOT / link).exists(), f"README links to {link}"


def test_no_paths_of_a_developers_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/\w")
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".sh", ""} and path.is_file():
            assert not pattern.search(path.read_text(errors="ignore")), f"{name} holds a path of one machine"
