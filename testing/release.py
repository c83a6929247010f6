"""A release: sdist and wheel in dist/, and what a user would meet in them.

    python -m testing.release    # make release

The wheel is built from the sdist, so that both are whole if it is. Links of the README are relative to the repository;
in what is published they lead to this version there.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory

from trl_fp8 import __version__


ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/trl-fp8/trl-fp8"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
RELATIVE_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")


def main() -> int:
    """Build and check; returns the exit status, 2 where this is no state to release."""
    try:
        require_committed(ROOT)
        require_changelog(ROOT / "CHANGELOG.md")
    except ValueError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build(ROOT, dist)
    with TemporaryDirectory() as folder:
        plan_by(installed(wheel_of(dist), Path(folder, "environment")), Path(folder, "model"))
    print("\n".join(f"built and checked: {path.relative_to(ROOT)}" for path in sorted(dist.iterdir())))
    return 0


def require_committed(root: Path) -> None:
    """Raise `ValueError` unless the working tree is what its last commit says."""
    changed = _output("git", "status", "--porcelain", cwd=root)
    if changed:
        raise ValueError(f"the working tree differs from its last commit; commit or remove these first:\n{changed}")


def require_changelog(path: Path) -> None:
    """Raise `ValueError` unless the changelog begins with the package's version."""
    newest = re.search(r"(?m)^## (\S+)", path.read_text()).group(1)
    if newest != __version__:
        raise ValueError(f"{path.name} begins with {newest}, trl_fp8.__version__ is {__version__}; make them the same")


def build(root: Path, dist: Path) -> None:
    """Build both from the files that git knows or would take, in a copy: nothing is left behind in `root`."""
    listing = _output("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=root)
    with TemporaryDirectory() as folder:
        for name in filter(lambda name: (root / name).is_file(), listing.split("\0")):
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy)
        readme = Path(folder, "README.md")
        readme.write_text(published(readme.read_text()))
        _output(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), folder)


def published(readme: str) -> str:
    """Return `readme` with links that also work outside of the repository."""
    kinds = {"": "blob", "!": "raw"}  # an image is shown, and not the page about it
    return RELATIVE_LINK.sub(
        lambda link: f"{link[1]}[{link[2]}]({REPOSITORY}/{kinds[link[1]]}/v{__version__}/{link[3]})", readme
    )


def wheel_of(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def metadata_of(wheel: Path) -> Message:
    """Return the wheel's metadata; its payload is the description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def files_of(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def installed(wheel: Path, folder: Path) -> Path:
    """Install `wheel` in a new environment beside the libraries of this one, without this checkout. Return its script.

    `RuntimeError` if it does not install, or says another version of itself.
    """
    _output(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = sys.executable, "-m", "pip", "--quiet", "--python", str(folder / "bin" / "python"), "install"
    _output(*pip, "--no-deps", "--no-index", str(wheel))
    # Behind its own packages those of this environment, without the .pth file that leads to this checkout
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = folder / "bin" / "trl-fp8"
    if (printed := _output(str(script), "--version").strip()) != f"trl-fp8 {__version__}":
        raise RuntimeError(f"{wheel.name} says that it is {printed}; expected trl-fp8 {__version__}")
    return script


def plan_by(script: Path, model: Path) -> str:
    """Return the console script's plan for a model of 8 B parameters, whose config is written to `model`."""
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    return _output(str(script), "plan", str(model))


def _output(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
