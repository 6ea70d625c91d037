"""Logs of programs that train nothing."""

from __future__ import annotations

from benchmarks.formats.log import Log
from benchmarks.formats.model import no_training


@no_training
def tar(log: Log) -> None:
    """tar with checkpoints."""
    for record in range(1000, 40001, 1000):
        log.err(f"tar: Read checkpoint {record}")
        log.wait(1.0)
