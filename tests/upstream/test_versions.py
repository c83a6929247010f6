"""The check at the first import: tested versions, versions that cannot work, and a vLLM that nobody knows."""

import ast
import re
import tomllib
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trl_fp8
from trl_fp8.commands.cli import main
from trl_fp8.recipe.families import families_with
from trl_fp8.upstream import private_names, versions
from trl_fp8.upstream.versions import VERSIONS


ROOT = Path(__file__).parents[2]
VLLM = Path(find_spec("vllm").origin).parent
NEWEST = [*VERSIONS][-1]
ENGINE, _ = versions._engine()


@pytest.fixture
def installed(monkeypatch):
    """Versions by library that are found instead of the installed ones."""
    found, versions_of = {}, versions.version
    monkeypatch.setattr(versions, "version", lambda name: found.get(name) or versions_of(name))
    versions.require_versions.cache_clear()
    yield found
    versions.require_versions.cache_clear()


@pytest.fixture
def package(tmp_path):
    """The folders of the installed vLLM that have private names, as links."""
    root = tmp_path / "vllm"
    for target in private_names.targets():
        folder = VLLM
        for part in ("", *target.split(".")[1:]):
            folder = folder / part
            if folder.is_dir() and not (root / folder.relative_to(VLLM) / "__init__.py").exists():
                (root / folder.relative_to(VLLM)).mkdir(parents=True, exist_ok=True)
                for file in folder.glob("*.py"):
                    (root / file.relative_to(VLLM)).symlink_to(file)
    return root


def test_the_installed_versions_are_supported_without_a_warning(installed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.require_versions()


@pytest.mark.parametrize(
    "found, named",
    [
        ({"trl": "1.18.0"}, "trl 1.18.0. Install what it was tested with: pip install 'trl<1.17,>=1.16'"),
        ({"trl": "1.15.2", "torchao": "0.19.0"}, "torchao 0.19.0, trl 1.15.2"),
        ({"transformers": "5.10.3"}, "'transformers<5.20,>=5.10.4'"),
        ({ENGINE: "0.30.2"}, f"{ENGINE} 0.30.2. Install what it was tested with: pip install '{ENGINE}=={NEWEST}.*'"),
    ],
)
def test_a_version_that_cannot_work_is_refused_with_the_command_that_mends_it(installed, found, named, capsys):
    installed |= found
    with pytest.raises(ImportError) as error:
        trl_fp8.__getattr__("FP8GRPOConfig")
    assert named in str(error.value)
    assert main(["train", "--config", "x.yaml"]) == 2
    assert named in capsys.readouterr().err


def test_an_unknown_newer_vllm_is_one_warning_that_says_what_was_checked(installed):
    installed[ENGINE] = "1.7.0"
    with pytest.warns(UserWarning) as caught:
        versions.require_versions()
        versions.require_versions()
    (text,) = [str(each.message) for each in caught if "trl-fp8 was tested" in str(each.message)]
    assert f"{', '.join(VERSIONS)}, and {ENGINE} 1.7.0 is newer" in text
    assert re.search(r"all \d\d private names", text) and f"'{ENGINE}=={NEWEST}.*'" in text


def test_a_patch_release_of_a_tested_version_is_no_news(installed):
    installed[ENGINE] = f"{NEWEST}.7"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.require_versions()
    versions.installed_vllm.cache_clear()
    assert versions.installed_vllm() is VERSIONS[NEWEST]
    versions.installed_vllm.cache_clear()


@pytest.mark.parametrize(
    "module, before, after, named",
    [
        ("v1/attention/selector.py", "_cached_get_attn_backend", "_get_backend", "selector._cached_get_attn_backend"),
        ("model_executor/models/commandr.py", "def layer_norm_func(", "def layer_norm(", "layer_norm_func"),
        (
            "model_executor/layers/fused_moe/router/cpu_router.py",
            "    renormalize: bool",
            "    normalize: bool",
            "cpu_router._softmax_topk(router_logits, top_k, renormalize)",
        ),
        ("model_executor/layers/attention/attention.py", "_v_scale_cpu", "_v_scale_host", "Attention._v_scale_cpu"),
    ],
)
def test_a_name_or_a_parameter_that_vllm_no_longer_has_is_refused_by_name(
    module, before, after, named, package, installed, monkeypatch
):
    assert private_names.missing(package) == []
    for file in (package / module).parent.glob("*.py"):  # a package may use it elsewhere
        text = file.read_text()
        file.unlink()
        file.write_text(re.sub(rf"{re.escape(before)}\b" if before[-1].isalnum() else re.escape(before), after, text))
    installed[ENGINE] = "1.7.0"
    spec = find_spec("vllm")
    monkeypatch.setattr(spec, "origin", str(package / "__init__.py"))
    monkeypatch.setattr(versions, "find_spec", lambda name: spec)
    with pytest.raises(ImportError) as error:
        versions.require_versions()
    assert f"{ENGINE} 1.7.0 lacks private names" in str(error.value) and named in str(error.value)
    assert f"pip install '{ENGINE}=={NEWEST}.*'" in str(error.value)


def test_without_metadata_and_without_vllm_nothing_is_checked(installed, monkeypatch):
    def nowhere(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", nowhere)
    monkeypatch.setattr(versions, "version", nowhere)
    versions.require_versions()


def test_the_table_the_package_and_make_name_the_same_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cpu", "cuda"):
        specifier = Requirement(extras[extra][-1]).specifier
        assert all(f"{series}.0" in specifier for series in VERSIONS)
        assert "0.30.9" not in specifier and (extra == "cuda" or "0.33.0" not in specifier)
    assert f"\nVLLM := {next(iter(VERSIONS))}\n" in (ROOT / "Makefile").read_text()


def test_a_version_changes_the_rows_of_model_types_that_it_dropped():
    oldest, newest = (families_with(vllm) for vllm in (next(iter(VERSIONS.values())), VERSIONS[NEWEST]))
    changed = {kind for kind, family in oldest.items() if newest[kind] != family}
    assert changed == VERSIONS[NEWEST].by_transformers
    assert oldest["glm"].followed and newest["glm"].by_transformers and not newest["glm"].followed


def test_no_message_names_a_version_of_vllm():
    """Docstrings say what was read; what users see names the version that is installed."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(file.read_text())
        documented = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        docstrings = {id(node.value) for node in documented}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in docstrings and re.search(r"\b0\.3[0-9]\b", text) and file.name != "versions.py":
                found.append((file.name, text))
    assert found == []
