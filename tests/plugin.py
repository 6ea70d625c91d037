"""vjob as a plugin of submitit, for a process that has only the checkout."""

from __future__ import annotations

import configparser
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.core import plugins

from tests import ROOT


def write_metadata(folder: Path) -> None:
    """Entry points as an installed vjob has them; `folder` is then to be on sys.path."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    points = setup["options.entry_points"]
    info = folder / "vjob-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vjob\nVersion: 0\n")
    sections = (f"[{group}]{lines}\n" for group, lines in points.items())
    (info / "entry_points.txt").write_text("\n".join(sections))


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """In the block submitit finds vjob in this process, and in those that it starts."""
    write_metadata(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT))))
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Let submitit look for plugins anew."""
    for cached in (plugins._get_plugins, plugins.get_executors, plugins.get_job_environments):
        cached.cache_clear()
