"""`vjob container build`: an image file from a recipe, or from a folder that is there.

    cpu.yaml          debootstrap ─► tree ─┐
    --from-folder DIR                tree ─┴► mksquashfs, with varuna_core added ─► FILE.sqsh
    gpu.Dockerfile    podman or docker build ─► enroot import ─► FILE.sqsh

The tree is not written to: varuna_core enters the image as pseudo files of mksquashfs. Refuses
what it cannot do here (no root, no debootstrap, no engine), with what to do instead.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

import varuna_core
from varuna_core.records.formatting import format_size
from vjob.jobs.errors import InputError
from vjob.jobs.images.fetch import Say, Ticker, explain_failure, import_image, land, make_folder
from vjob.jobs.images.image import SUFFIXES
from vjob.jobs.images.store import remove_tree
from vjob.jobs.process import run_shown

LEFT_OUT = ("dev/*", "dev/.*", "proc/*", "sys/*")
"""The runtime mounts its own; device nodes would fail to unpack for ordinary users."""
OF_APT = ("var/cache/apt/*.bin", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*")
ENGINES = ("podman", "docker")
DEBIAN_SITE = "usr/lib/python3/dist-packages"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_METADATA = """\
Metadata-Version: 2.1
Name: varuna-core
Version: {version}
Summary: The training runtime of vjob
Requires-Python: >=3.10
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: vjob {version}
Root-Is-Purelib: true
Tag: py3-none-any
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A cpu.yaml."""

    suite: str
    packages: tuple[str, ...]
    pip: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every kind of build."""

    output: Path
    again: bool = False
    suite: str | None = None
    mirror: str | None = None
    pip: tuple[str, ...] = ()
    scratch: str | None = None
    with_packages: bool = True


def build_recipe(name: str, options: Options, say: Say) -> None:
    """An image from a recipe of ours, or from a Dockerfile or .yaml of the user's."""
    path = find_recipe(name)
    check_output(options)
    if path.suffix == ".yaml":
        recipe = read_recipe(path)
        build_debian(recipe, options, say)
    else:
        build_dockerfile(path, options, say)


def find_recipe(name: str) -> Path:
    """A recipe by name, or by path where that has a slash or names a file here."""
    own = Path(str(files("vjob.containers") / "recipes"))
    if "/" in name or Path(name).is_file():
        if not Path(name).is_file():
            raise InputError(f"{name} is no file; a recipe is a Dockerfile or like {own}/cpu.yaml")
        return Path(name)
    for suffix in (".yaml", ".Dockerfile"):
        path = own / f"{name}{suffix}"
        if path.is_file():
            return path
    names = sorted(path.stem for path in own.iterdir())
    raise InputError(f"there is no recipe {name}; there are {', '.join(names)}, all in {own}")


def read_recipe(path: Path) -> Recipe:
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    known = ("suite", "packages", "pip")
    if not isinstance(value, dict) or "suite" not in value:
        raise InputError(f"{path} is not a recipe like cpu.yaml, with {', '.join(known)}")
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise InputError(f"{path}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return Recipe(
        suite=str(value["suite"]),
        packages=tuple(map(str, value.get("packages") or ())),
        pip=tuple(map(str, value.get("pip") or ())),
    )


def check_output(options: Options) -> None:
    """Before hours of work."""
    name = options.output.name
    suffixes = [suffix for suffix, kind in SUFFIXES.items() if kind.value == "squashfs"]
    if not name.endswith(tuple(suffixes)):
        raise InputError(f"--output {options.output} must end in {', '.join(suffixes)}")
    if options.output.exists() and not options.again:
        raise InputError(f"{options.output} is there already; --again makes it again")
    make_folder(options.output.parent)


def check_tool(program: str, package: str) -> None:
    if shutil.which(program, path=find_path()) is None:
        raise InputError(
            f"{program} is not installed here: apt-get install {package}; or make the image on "
            "another machine and copy the file"
        )


def find_path() -> str:
    """debootstrap and mksquashfs may lie in folders that only root's PATH has."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def build_debian(recipe: Recipe, options: Options, say: Say) -> None:
    """debootstrap, pip and mksquashfs, in a folder that is gone afterwards."""
    if os.geteuid() != 0:
        raise InputError(
            "debootstrap needs root: run this with sudo, or on a machine where you are root and "
            "copy the file; or give a root folder that you have with --from-folder DIR"
        )
    check_tool("debootstrap", "debootstrap")
    check_tool("mksquashfs", "squashfs-tools")
    suite = options.suite or recipe.suite
    with make_scratch(options.scratch) as folder:
        tree = folder / "root"
        say(f"debootstrap {suite} into {tree}")
        words = build_debootstrap(suite, recipe.packages, tree, options.mirror)
        env = {**os.environ, "PATH": find_path()}
        result = run_shown(words, say, env=env, tick=Ticker(tree, say).tick)
        if result.code != 0:
            raise explain_failure("debootstrap", result, "debootstrap")
        install_pip(tree, (*recipe.pip, *options.pip), say)
        squash(tree, options, say, left_out=(*LEFT_OUT, *OF_APT))


def build_debootstrap(
    suite: str, packages: tuple[str, ...], tree: Path, mirror: str | None
) -> list[str]:
    """In a mount namespace of its own: what it mounts in the tree is gone when it ends, also by a
    signal, so that nothing is ever removed through a mount."""
    words = ["unshare", "--mount", "--propagation", "private", "--", "debootstrap"]
    words.append("--variant=minbase")
    if packages:
        words.append(f"--include={','.join(packages)}")
    return [*words, suite, str(tree), *([mirror] if mirror else [])]


def install_pip(tree: Path, requirements: tuple[str, ...], say: Say) -> None:
    """Wheels for the image's python3, by this machine's pip, its index and its certificates."""
    if not requirements:
        return
    site, version = find_site(tree)
    words = [sys.executable, "-m", "pip", "install", "--target", str(tree / site)]
    words += ["--python-version", version, "--only-binary=:all:", "--no-compile"]
    say(f"pip install {' '.join(requirements)} for python {version}")
    result = run_shown([*words, *requirements], say)
    if result.code != 0:
        raise explain_failure("pip", result, "pip")


def build_folder(folder: Path, options: Options, say: Say) -> None:
    """An image of a root folder as it is."""
    check_output(options)
    check_tool("mksquashfs", "squashfs-tools")
    if not (folder / "bin/sh").exists() and not (folder / "usr/bin/sh").exists():
        raise InputError(f"{folder} has no bin/sh: is it the root folder of a system?")
    squash(folder, options, say, left_out=LEFT_OUT)


def squash(tree: Path, options: Options, say: Say, *, left_out: tuple[str, ...]) -> None:
    """mksquashfs under a temporary name, then the rename."""
    target = options.output
    begun = time.monotonic()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with make_scratch(options.scratch) as folder:
        words = ["mksquashfs", str(tree), str(part), "-all-root", "-noappend", "-no-progress"]
        words += ["-comp", "gzip"]  # what every unsquashfs reads; RHEL 8's knows no zstd
        if options.with_packages:
            site, _ = find_site(tree)
            pseudo = folder / "pseudo"
            pseudo.write_text(render_pseudo(tree, site, unpack_wheel(folder)))
            words += ["-pf", str(pseudo)]
            left_out = (*left_out, f"{site}/varuna_core", f"{site}/varuna_core-*")
        words += ["-wildcards", "-e", *left_out]
        say(f"mksquashfs {tree}")
        try:
            env = {**os.environ, "PATH": find_path()}
            result = run_shown(words, lambda line: None, env=env, tick=Ticker(part, say).tick)
            if result.code != 0:
                raise explain_failure("mksquashfs", result, "enroot")
            land(part, target)
        finally:
            part.unlink(missing_ok=True)
    size = format_size(target.stat().st_size)
    say(f"{target}: {size} in {time.monotonic() - begun:.0f} s")


def unpack_wheel(folder: Path) -> Path:
    """varuna_core as pip would install it."""
    place = folder / "wheel"
    with zipfile.ZipFile(write_wheel(folder)) as archive:
        archive.extractall(place)
    return place


def render_pseudo(tree: Path, site: str, place: Path) -> str:
    """mksquashfs' definitions of every file below `place`, as if it lay in the tree's `site`."""
    lines = []
    for depth in range(1, len(Path(site).parts) + 1):
        folder = str(Path(*Path(site).parts[:depth]))
        if not (tree / folder).is_dir():
            lines.append(f"{folder} d 755 0 0")
    for path in sorted(place.rglob("*")):
        name = f"{site}/{path.relative_to(place)}"
        if path.is_dir():
            lines.append(f"{name} d 755 0 0")
        else:
            lines.append(f"{name} f 644 0 0 cat {shlex.quote(str(path))}")
    return "".join(f"{line}\n" for line in lines)


def find_site(tree: Path) -> tuple[str, str]:
    """Folder for packages and version of the python3 that comes first on a usual PATH."""
    for prefix in ("usr/local", "opt/conda", "usr"):
        names = [path.name for path in (tree / prefix / "bin").glob("python3.*")]
        versions = [match[1] for name in names if (match := re.fullmatch(r"python(3\.\d+)", name))]
        for version in sorted(versions, key=lambda text: int(text[2:]), reverse=True):
            library = tree / prefix / "lib" / f"python{version}"
            if not library.is_dir():
                continue
            site = library / "site.py"
            # Debian's own python looks in dist-packages, for all its minor versions.
            if prefix == "usr" and site.is_file() and "dist-packages" in site.read_text():
                return DEBIAN_SITE, version
            return f"{prefix}/lib/python{version}/site-packages", version
    raise InputError(
        f"{tree} has no python3 in usr/local, opt/conda or usr: ranks need one; with "
        "--without-packages the image is made all the same, without varuna_core"
    )


@contextmanager
def make_scratch(scratch: str | None) -> Iterator[Path]:
    """A folder on this machine's disk, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="vjob-build-", dir=scratch or "/var/tmp"))
    try:
        yield folder
    finally:
        remove_tree(folder)


def build_dockerfile(path: Path, options: Options, say: Say) -> None:
    """podman or docker builds, enroot imports."""
    engine = next((name for name in ENGINES if shutil.which(name)), None)
    if engine is None or shutil.which("enroot") is None:
        missing = "podman or docker" if engine is None else "enroot"
        raise InputError(
            f"{path.name} is a Dockerfile, and {missing} is not on PATH here: build it where "
            "podman or docker and enroot are, and copy the file"
        )
    tag = f"vjob-{path.name.removesuffix('.Dockerfile').lower()}:{varuna_core.__version__}"
    tag = f"localhost/{tag}" if engine == "podman" else tag
    with make_scratch(options.scratch) as folder:
        shutil.copyfile(path, folder / "Dockerfile")
        write_wheel(folder)
        say(f"{engine} build of {path.name}")
        words = [engine, "build", "--tag", tag, "--file", str(folder / "Dockerfile"), str(folder)]
        result = run_shown(words, say, tick=Ticker(options.output, say).tick)
        if result.code != 0:
            raise explain_failure(f"{engine} build", result, engine)
    scheme = "podman" if engine == "podman" else "dockerd"
    import_image(f"{scheme}://{tag}", options.output, say, again=True)
    say(f"{engine} keeps {tag} for the next build; `{engine} image rm {tag}` frees its disk")


def write_wheel(folder: Path) -> Path:
    """Pack varuna_core into a wheel, for an image whose ranks import it without the rest of vjob.

    Made from the package that runs now, for an installed vjob has no source tree to build from; the
    same sources give the same bytes.
    """
    files = render_wheel(collect_files(), varuna_core.__version__)
    path = folder / f"varuna_core-{varuna_core.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return path


def collect_files() -> dict[str, bytes]:
    """Files of varuna_core: name in the wheel to content."""
    root = Path(varuna_core.__file__).parent
    return {
        f"varuna_core/{path.relative_to(root)}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def render_wheel(files: dict[str, bytes], version: str) -> dict[str, bytes]:
    """The files with what makes them a wheel (PEP 427)."""
    info = f"varuna_core-{version}.dist-info"
    found = {
        **files,
        f"{info}/METADATA": _METADATA.format(version=version).encode(),
        f"{info}/WHEEL": _WHEEL.format(version=version).encode(),
    }
    record = f"{info}/RECORD"
    rows = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in found.items()]
    return {**found, record: ("\n".join([*rows, f"{record},,"]) + "\n").encode()}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
