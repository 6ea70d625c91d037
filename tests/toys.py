"""Distributions with plug-ins, as folders to put on PYTHONPATH: a module and a dist-info."""

from __future__ import annotations

import os
from pathlib import Path

from tests import ROOT


def install_toy(
    folder: Path, group: str, entry: str, source: str, *, distribution: str = "toy-dist"
) -> Path:
    """Write a distribution with one entry point, `name = module:attribute`; its folder."""
    module = entry.partition("=")[2].partition(":")[0].strip()
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    with open(info / "entry_points.txt", "a") as handle:
        handle.write(f"[{group}]\n{entry}\n")
    (folder / f"{module}.py").write_text(source)
    return folder


def settle(folder: Path) -> None:
    """Make the folder and its metadata old enough for vjob to remember what they hold."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (1e9, 1e9))


def build_environment(home: Path, *folders: Path) -> dict[str, str]:
    """Variables of a vjob that finds the toys, and keeps what it remembers in `home`."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
    }
