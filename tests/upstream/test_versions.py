"""A library in a version that is not supported is named when the package is first used, with what to install."""

import pytest

import trl_fp8
from trl_fp8.commands.cli import main
from trl_fp8.upstream import private_names


@pytest.fixture
def installed(monkeypatch):
    """What else is installed than there is."""
    found, versions_of = {}, private_names.version
    monkeypatch.setattr(private_names, "version", lambda name: found.get(name) or versions_of(name))
    private_names.require_versions.cache_clear()
    yield found
    private_names.require_versions.cache_clear()


def test_installed_versions_are_supported(installed):
    private_names.require_versions()


@pytest.mark.parametrize(
    "found, named",
    [
        ({"trl": "1.18.0"}, "trl 1.18.0. Install what it was tested with: pip install 'trl<1.17,>=1.16'"),
        ({"trl": "1.15.2", "torchao": "0.19.0"}, "torchao 0.19.0, trl 1.15.2"),
        ({"transformers": "5.10.3"}, "'transformers<5.18,>=5.10.4'"),
    ],
)
def test_another_version_is_refused_with_the_command_that_mends_it(installed, found, named, capsys):
    installed |= found
    with pytest.raises(ImportError) as error:
        trl_fp8.__getattr__("FP8GRPOConfig")
    assert named in str(error.value)
    assert main(["train", "--config", "x.yaml"]) == 2
    assert named in capsys.readouterr().err


def test_without_metadata_nothing_is_checked(installed, monkeypatch):
    def nowhere(name):
        raise private_names.PackageNotFoundError(name)

    monkeypatch.setattr(private_names, "requires", nowhere)
    installed["trl"] = "0.1"
    private_names.require_versions()
