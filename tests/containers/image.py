"""A small real image, made from this machine: a shell, a python3 and the libraries they need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = "/usr/bin/python3"
TOOLS = ("sh", "bash", "cat", "env", "id", "ls", "mkdir", "setsid", "sleep", "touch")
LEFT_OUT = ("test", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__", "config-3*")


def make_folder(folder: Path) -> None:
    """An unpacked image with variables of its own."""
    for name in ("bin", "dev", "etc", "home", "proc", "run", "sys", "tmp", "usr/bin", "var"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)  # runc takes the mode of what is mounted there from it
    programs = [shutil.which(tool) for tool in TOOLS]
    for program in (PYTHON, *filter(None, programs)):
        _copy(Path(program).resolve(), folder)
        for library in _list_libraries(program):
            _copy(Path(library), folder)
        place = folder / "usr/bin" / Path(program).name
        if not place.exists():
            place.symlink_to(Path(program).resolve())
    shutil.copy2(Path(shutil.which("sh") or "/bin/sh").resolve(), folder / "bin/sh")
    text = _ask(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))")
    library = Path(text.strip())
    shutil.copytree(
        library, folder / str(library)[1:], ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True
    )
    for module in (library / "lib-dynload").glob("*.so"):
        for needed in _list_libraries(str(module)):
            _copy(Path(needed), folder)
    (folder / "etc/environment").write_text(
        'FROM_IMAGE="made of dough"\nNOTE=of the image\nPATH=/usr/bin:/bin\n'
    )


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .sqsh file of a real root folder, made once; the folder `root` lies beside it."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("needs mksquashfs: apt-get install squashfs-tools")
    return make_squashfs(tmp_path_factory.mktemp("image"))


def make_squashfs(folder: Path) -> Path:
    """The same as a .sqsh file."""
    make_folder(folder / "root")
    image = folder / "small image.sqsh"
    words = ("-all-root", "-comp", "gzip", "-no-progress")
    _ask("mksquashfs", str(folder / "root"), str(image), *words)
    return image


def _copy(path: Path, folder: Path) -> None:
    target = folder / str(path)[1:]
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def _list_libraries(program: str) -> list[str]:
    found = re.findall(r"(/\S+) \(0x", _ask("ldd", program))
    return [path for path in found if Path(path).exists()]


def _ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
