"""Builds what a release consists of: sdist, wheel, bill of materials, and their sums.

    python release/build.py SOURCE DIST --epoch SECONDS [--url https://...]

SOURCE is a clean copy of the tree, which is changed; the same copy gives the same bytes. `make
release` calls this with a copy of the last commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

PLACEHOLDER = "https://example.org/vjob"
"""Stands for the repository's address in the files that name it."""
NAMING = ("setup.cfg", "CITATION.cff")
"""Files with the placeholder that matter to a release."""
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
MOST_SEEN = 0o755


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--epoch", type=int, required=True, help="the time of every file")
    parser.add_argument("--url", default="", help="the repository's address")
    parser.add_argument("--no-bill", action="store_true", help="ask no index for dependencies")
    given = parser.parse_args()
    if given.url:
        set_url(given.source, given.url)
    else:
        print(f"The release names {PLACEHOLDER}: give the repository's address by URL=https://...")
    sdist, wheel = build(given.source, given.dist.resolve(), given.epoch)
    made = [sdist, wheel]
    if not given.no_bill:
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
        made.append(write_bill(wheel, sdist.with_name(sdist.name.replace(".tar.gz", ".cdx.json"))))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made]
    (given.dist / "SHA256SUMS").write_text("".join(sums))


def set_url(source: Path, url: str) -> None:
    for name in NAMING:
        path = source / name
        path.write_text(path.read_text().replace(PLACEHOLDER, url.rstrip("/")))


def build(source: Path, dist: Path, epoch: int) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, so that the sdist has to be whole."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}

    def call(what: str, folder: Path) -> Path:
        words = [sys.executable, "-c", BUILD, what, dist]
        done = subprocess.run(
            words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        return dist / done.stdout.split()[-1]

    sdist = call("build_sdist", source)
    repack(sdist, epoch)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as packed:
            packed.extractall(folder, filter="data")
        return sdist, call("build_wheel", next(Path(folder).iterdir()))


def repack(path: Path, epoch: int) -> None:
    """Give a tar.gz one order, one time and no owner; setuptools writes who made it, and when."""
    plain = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=plain, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            member.mode = MOST_SEEN if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed:
        packed.write(plain.getvalue())


def write_bill(wheel: Path, path: Path) -> Path:
    """Write what the wheel brings along, by CycloneDX: that which pip takes today."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
        words = ["environment", "--output-reproducible", "--output-file", str(path), python]
        subprocess.run([sys.executable, "-m", "cyclonedx_py", *words], check=True)
    return path


if __name__ == "__main__":
    main()
