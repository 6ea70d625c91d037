"""Python of an image and what it can import, CUDA and NCCL, read off names and small files.

    python3 on PATH ─► links ─► usr/bin/python3.8 ─► folders that it imports from
                                                      │
         torch/version.py, NAME-VERSION.dist-info ◄───┘    usr/local/cuda/version.json, libnccl.so.*

Nothing is started: an image of another processor is read as well. What a package's own code
decides when it is imported is not seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vjob.jobs.images.contents import Contents

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where an image sets none."""
OFF_PATH = ("/opt/conda/bin", "/opt/venv/bin", "/venv/bin", "/usr/local/bin", "/usr/bin")
CUDA_FILES = ("/usr/local/cuda/version.json", "/usr/local/cuda/version.txt")
COMPAT = ("/usr/local/cuda*/compat/libcuda.so.*", "/usr/local/cuda*/compat/*/libcuda.so.*")
NCCL = (
    "/usr/lib/*/libnccl.so.*",
    "/usr/lib64/libnccl.so.*",
    "/usr/local/lib/libnccl.so.*",
    "/usr/local/cuda/lib64/libnccl.so.*",
    "/opt/conda/lib/libnccl.so.*",
)
_INFO = re.compile(r"(.+?)-([^-]+)(?:-py3\.\d+)?\.(?:dist|egg)-info")
_TORCH = re.compile(r"^(__version__|cuda|hip)\b[^=]*= *'([^']*)'", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Software:
    """What an image holds; empty is what it does not."""

    python: str = ""
    """The interpreter, by the path that it is started with."""
    python_version: str = ""
    """Such as 3.8."""
    sites: tuple[str, ...] = ()
    """Folders that it imports packages from, the first found first."""
    torch: str = ""
    torch_cuda: str = ""
    """CUDA that torch was built for."""
    torch_rocm: str = ""
    cuda: str = ""
    """The toolkit."""
    cuda_compat: str = ""
    """Driver whose libraries the image brings for older drivers."""
    nccl: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Version of each installed package by its name in small letters with `-`."""


def find_software(
    contents: Contents, environment: Mapping[str, str], python: str = "python3"
) -> Software:
    """Look at everything; `environment` is that of the ranks, as far as it is known."""
    interpreter = find_program(contents, environment, python)
    version = find_version(contents, interpreter) if interpreter else ""
    sites: tuple[str, ...] = ()
    if version:
        own = [folder for folder in environment.get("PYTHONPATH", "").split(":") if folder]
        sites = (*own, *find_sites(contents, interpreter, version))
    packages = find_packages(contents, sites)
    torch = find_torch(contents, sites)
    return Software(
        python=interpreter,
        python_version=version,
        sites=sites,
        torch=torch.get("__version__", "") or packages.get("torch", ""),
        torch_cuda=torch.get("cuda", ""),
        torch_rocm=torch.get("hip", ""),
        cuda=find_cuda(contents),
        cuda_compat=find_newest(contents, COMPAT),
        nccl=find_nccl(contents, packages),
        packages=packages,
    )


def find_program(contents: Contents, environment: Mapping[str, str], name: str) -> str:
    """The first of this name on the image's PATH, or the path itself; empty where it is not."""
    if "/" in name:
        return name if contents.exists(name) else ""
    folders = environment.get("PATH", PATH).split(":")
    paths = (f"{folder.rstrip('/')}/{name}" for folder in folders if folder.startswith("/"))
    return next((path for path in paths if contents.exists(path)), "")


def find_version(contents: Contents, python: str) -> str:
    """Minor version, by the name that links lead to, else by the interpreter's library."""
    real = f"/{contents.resolve(python)}"
    match = re.search(r"/python(3\.\d+)$", real)
    if match is not None:
        return match[1]
    prefix = real.rpartition("/")[0].rpartition("/")[0]
    found = [path.rpartition("python")[2] for path in contents.find(f"{prefix}/lib/python3.*")]
    return found[0] if len(found) == 1 else ""


def find_sites(contents: Contents, python: str, version: str) -> tuple[str, ...]:
    """Folders of packages, as site.py of CPython, Debian and Fedora have them."""
    prefix = python.rpartition("/")[0].rpartition("/")[0]
    settings = contents.read(f"{prefix}/pyvenv.cfg")
    if not settings:
        real = f"/{contents.resolve(python)}"
        return _find_base_sites(contents, real.rpartition("/")[0], version)
    sites = _keep(contents, [f"{prefix}/{lib}/python{version}/site-packages" for lib in _LIBS])
    home = re.search(r"^home *= *(\S+)", settings, re.MULTILINE)
    with_system = re.search(r"^include-system-site-packages *= *true", settings, re.M | re.I)
    if home is None or with_system is None:
        return sites
    return (*sites, *_find_base_sites(contents, home[1], version))


_LIBS = ("lib", "lib64")


def _find_base_sites(contents: Contents, bin_folder: str, version: str) -> tuple[str, ...]:
    prefix = bin_folder.rstrip("/").rpartition("/")[0]
    shared = f"{prefix}/lib/python3/dist-packages"
    if contents.exists(shared):  # Debian's own
        own = f"{prefix}/local/lib/python{version}/dist-packages"
        return _keep(contents, [own, shared, f"{prefix}/lib/python{version}/dist-packages"])
    places = [f"{prefix}{local}/{lib}" for local in ("/local", "") for lib in _LIBS]
    return _keep(contents, [f"{place}/python{version}/site-packages" for place in places])


def _keep(contents: Contents, paths: list[str]) -> tuple[str, ...]:
    """Those that are there, once each: lib64 may be a link to lib."""
    found = {real: path for path in reversed(paths) if (real := contents.resolve(path))}
    return tuple(path for path in paths if path in found.values())


def find_packages(contents: Contents, sites: tuple[str, ...]) -> dict[str, str]:
    """Version by name of what pip, conda and Debian have installed."""
    found: dict[str, str] = {}
    for site in sites:
        for name in contents.list_names(site):
            if match := _INFO.fullmatch(name):
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    return found


def has_module(contents: Contents, software: Software, name: str) -> bool:
    """True where the image's Python would find a top-level module outside its own library."""
    for site in software.sites:
        names = contents.list_names(site)
        if name in names or f"{name}.py" in names:
            return True
        if any(each.startswith(f"{name}.") and each.endswith(".so") for each in names):
            return True
    return False


def find_torch(contents: Contents, sites: tuple[str, ...]) -> dict[str, str]:
    """`__version__`, `cuda` and `hip` of torch/version.py; without what is None there."""
    for site in sites:
        if text := contents.read(f"{site}/torch/version.py"):
            return {match[1]: match[2] for match in _TORCH.finditer(text)}
    return {}


def find_cuda(contents: Contents) -> str:
    """Version of the toolkit."""
    as_json, as_text = map(contents.read, CUDA_FILES)
    try:
        return str(json.loads(as_json)["cuda"]["version"])
    except (ValueError, KeyError, TypeError):
        match = re.search(r"CUDA Version (\S+)", as_text)
        return match[1] if match else ""


def find_nccl(contents: Contents, packages: Mapping[str, str]) -> str:
    """The wheel that torch's wheels load, else the library of the system."""
    wheels = [packages[name] for name in sorted(packages) if name.startswith("nvidia-nccl-cu")]
    return wheels[-1] if wheels else find_newest(contents, NCCL)


def find_newest(contents: Contents, patterns: tuple[str, ...]) -> str:
    """The newest version that a library's name ends with; empty where only a short one is there."""
    found = []
    for pattern in patterns:
        for path in contents.find(pattern):
            version = path.rpartition(".so.")[2]
            if re.fullmatch(r"\d+(\.\d+)+", version):
                found.append(version)
    return max(found, key=parse_version, default="")


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers: 2.1.0a0+fe05266 is 2, 1, 0."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
