"""Check the parts of a bundle and unpack them, with nothing but Python: the host may have no xz.

    python gpu/unpack.py PARTS SITE

PARTS holds `part-*` and `SHA256SUMS`. SITE appears when everything has been unpacked, and not before: a folder that
holds half of it would look like a bundle to every later stage.
"""

import hashlib
import io
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path


WAITING = 3  # exit code: parts are still to come


class Joined(io.RawIOBase):
    """Files, read one after the other."""

    def __init__(self, paths: list[Path]):
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while self._files:
            if count := self._files[0].readinto(buffer):
                return count
            self._files.pop(0).close()
        return 0


def whole_parts(parts: Path) -> tuple[list[Path], list[str]]:
    """The parts that `SHA256SUMS` names, in order, and what is wrong with those that are not as they were sent."""
    expected = [line.split() for line in (parts / "SHA256SUMS").read_text().splitlines()]
    wrong = []
    for digest, name in expected:
        if not (parts / name).exists():
            wrong.append(f"{name} is not here")
        elif hashlib.sha256((parts / name).read_bytes()).hexdigest() != digest:
            wrong.append(f"{name} is not what was sent: transfer it again")
    return [parts / name for _, name in expected], wrong


def unpack(parts: list[Path], site: Path) -> None:
    """Replace `site` by what `parts` hold. If that fails, `site` is what it was before."""
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{site.name}.", dir=site.parent) as unfinished:
        fresh, old = Path(unfinished) / "fresh", Path(unfinished) / "old"
        with (
            lzma.open(io.BufferedReader(Joined(parts), 2**20)) as stream,
            tarfile.open(fileobj=stream, mode="r|") as packed,
        ):
            packed.extractall(fresh, filter="data")
        if site.exists():
            site.rename(old)
        fresh.rename(site)


def main(parts: str, site: str) -> int:
    paths, wrong = whole_parts(Path(parts))
    if wrong:
        print("waiting: " + "; ".join(wrong))
        return WAITING
    unpack(paths, Path(site))
    print(f"unpacked to {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
