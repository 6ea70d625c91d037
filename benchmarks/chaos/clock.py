"""Wall clocks of nodes that can be stepped, by a library that agents preload (clock.c)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.cluster.processes import run

SOURCE = Path(__file__).with_name("clock.c")


class Clocks:
    """The clocks of all nodes of a testbed."""

    def __init__(self, folder: Path) -> None:
        self._library, self._steps = folder / "clock.so", folder / "clocks"

    def build(self) -> None:
        """Compile the library; without a compiler clocks cannot be stepped."""
        if compiler := shutil.which("cc"):
            run([compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)])
            self._steps.mkdir()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that an agent needs."""
        if not self._library.exists():
            return {}
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCKS": str(self._steps)}

    def step(self, host: str, seconds: int) -> bool:
        """Add seconds to the node's clock; False if clocks cannot be stepped."""
        if not self._steps.is_dir():
            return False
        path = self._steps / host
        if not path.exists():
            whole = path.with_suffix(".new")
            whole.write_bytes(bytes(8))
            os.rename(whole, path)
        with path.open("r+b", buffering=0) as file:  # readers have it mapped: eight bytes at once
            before = int.from_bytes(file.read(8), "little", signed=True)
            file.seek(0)
            file.write((before + seconds).to_bytes(8, "little", signed=True))
        return True
