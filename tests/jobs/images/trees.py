"""Images as trees of small files, laid out as those that people have."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

VERSION = """\
from typing import Optional

__version__ = '{torch}'
debug = False
cuda: Optional[str] = {cuda}
git_version = '{torch}'
hip: Optional[str] = None
"""
UBUNTU = 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 20.04.6 LTS"\n'
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'


def make_tree(root: Path, files: Mapping[str, str], links: Mapping[str, str] = {}) -> Path:
    """A path that ends in a slash is a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if name.endswith("/") else path.write_text(text)
    for name, target in links.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    return root


def list_site(site: str, torch: str, cuda: str | None, *packages: str) -> dict[str, str]:
    """A folder of packages, each with its module."""
    shown = "None" if cuda is None else f"'{cuda}'"
    found = {f"{site}/torch/version.py": VERSION.format(torch=torch, cuda=shown)}
    for name in (f"torch-{torch}", *packages):
        found[f"{site}/{name}.dist-info/METADATA"] = "Metadata-Version: 2.1\n"
        found[f"{site}/{name.rpartition('-')[0]}/"] = ""
    return found


def make_nvidia(root: Path) -> Path:
    """nvcr.io/nvidia/pytorch:23.04-py3: Ubuntu's python3.8, packages of /usr/local, compat."""
    site = "usr/local/lib/python3.8/dist-packages"
    packages = ("apex-0.1", "numpy-1.22.2", "transformer_engine-0.7.0")
    kernels = "cpython-38-x86_64-linux-gnu.so"
    files = {
        "usr/lib/os-release": UBUNTU,
        "usr/bin/dash": "",
        "usr/bin/bash": "",
        "usr/bin/gcc": "",
        "usr/bin/python3.8": "",
        "usr/lib/python3/dist-packages/six-1.14.0.egg-info": "",
        "usr/lib/x86_64-linux-gnu/libnccl.so.2.17.1": "",
        "usr/local/cuda-12.1/version.json": json.dumps({"cuda": {"version": "12.1.0"}}),
        "usr/local/cuda-12.1/compat/lib.real/libcuda.so.530.30.02": "",
        "usr/local/cuda-12.1/bin/nsys": "",
        "etc/environment": "PATH=/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/bin:/bin\n"
        "NVIDIA_PYTORCH_VERSION=23.04\n",
        "workspace/": "",
        **list_site(site, "2.1.0a0+fe05266", "12.1", *packages),
        f"{site}/amp_C.{kernels}": "",
        f"{site}/fused_weight_gradient_mlp_cuda.{kernels}": "",
    }
    links = {
        "bin": "usr/bin",
        "lib": "usr/lib",
        "usr/bin/sh": "dash",
        "usr/bin/python3": "python3.8",
        "etc/os-release": "../usr/lib/os-release",
        "usr/local/cuda": "/etc/alternatives/cuda",
        "etc/alternatives/cuda": "/usr/local/cuda-12.1",
        "usr/lib/x86_64-linux-gnu/libnccl.so.2": "libnccl.so.2.17.1",
    }
    return make_tree(root, files, links)


def make_conda(root: Path, *, sets_path: bool = True) -> Path:
    """pytorch/pytorch: conda below /opt, torch with NCCL within."""
    site = "opt/conda/lib/python3.11/site-packages"
    path = "PATH=/opt/conda/bin:/usr/bin:/bin\n" if sets_path else ""
    files = {
        "etc/os-release": UBUNTU,
        "bin/sh": "",
        "opt/conda/bin/python3.11": "",
        "etc/environment": path,
        **list_site(site, "2.9.1", "12.8", "numpy-2.3.5", "deepspeed-0.18.2"),
    }
    return make_tree(root, files, {"opt/conda/bin/python3": "python3.11"})


def make_debian(root: Path, *, with_system: bool = False) -> Path:
    """Debian 12 with a venv of wheels, as its ENV PATH names it."""
    site = "opt/venv/lib/python3.11/site-packages"
    system = "true" if with_system else "false"
    wheels = ("numpy-2.3.5", "nvidia_nccl_cu12-2.27.5", "apex-0.9.10.dev0", "megatron_core-0.14.0")
    files = {
        "usr/lib/os-release": DEBIAN,
        "usr/bin/dash": "",
        "usr/bin/python3.11": "",
        "usr/lib/python3/dist-packages/wandb-0.19.1.dist-info/METADATA": "",
        "opt/venv/pyvenv.cfg": f"home = /usr/bin\ninclude-system-site-packages = {system}\n",
        "etc/environment": "PATH=/opt/venv/bin:/usr/bin:/bin\nHF_TOKEN=hush\n",
        **list_site(site, "2.13.0+cpu", None, *wheels),
    }
    links = {
        "bin": "usr/bin",
        "usr/bin/sh": "dash",
        "usr/bin/python3": "python3.11",
        "opt/venv/bin/python3": "python",
        "opt/venv/bin/python": "/usr/bin/python3",
        "opt/venv/lib64": "lib",
        "etc/os-release": "../usr/lib/os-release",
    }
    return make_tree(root, files, links)


def make_bare(root: Path) -> Path:
    return make_tree(root, {"etc/os-release": DEBIAN, "bin/sh": ""})


def squash(root: Path) -> Path:
    """The same as a file beside it."""
    file = root.with_suffix(".sqsh")
    words = ["mksquashfs", str(root), str(file), "-noappend", "-all-root", "-no-progress"]
    subprocess.run(words, check=True, capture_output=True)
    return file
