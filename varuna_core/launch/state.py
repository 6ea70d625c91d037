"""launch.json: who launched a run and with what, for --kill and --resume from any terminal."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from varuna_core.launch.errors import InputError
from varuna_core.records.exits import read_outcome
from varuna_core.records.files import list_names, read_json, write_json
from varuna_core.records.machine import identify_machine, start_time
from varuna_core.records.runfolder import RunFolder

STATE_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The last launch of a run."""

    pid: int
    pid_start: str | None
    machine: str
    """Of the launcher, since its last start."""
    attempt: int
    time: float
    arguments: dict[str, Any]
    """Of the command line, by name; --resume takes those that it is not given."""

    @property
    def host(self) -> str:
        return self.machine.partition(" ")[0]

    @property
    def is_alive(self) -> bool | None:
        """True if the launcher runs; None where only its own machine knows."""
        if self.machine != identify_machine():
            return None if self.host != identify_machine().partition(" ")[0] else False
        return self.pid_start is not None and start_time(self.pid) == self.pid_start


def write_launch(run: RunFolder, attempt: int, arguments: dict[str, Any]) -> None:
    launch = Launch(
        pid=os.getpid(),
        pid_start=start_time(os.getpid()),
        machine=identify_machine(),
        attempt=attempt,
        time=time.time(),
        arguments=arguments,
    )
    write_json(run.launch, dict(asdict(launch), format=STATE_FORMAT))


def read_launch(run: RunFolder) -> Launch | None:
    """None where the file is missing, torn, or of another version."""
    value = read_json(run.launch)
    if not isinstance(value, dict) or value.pop("format", None) != STATE_FORMAT:
        return None
    try:
        return Launch(**value)
    except TypeError:
        return None


def find_run(folder: Path, named: str | None, *, live: bool) -> tuple[RunFolder, Launch]:
    """The run that is named, else the newest below `folder`; `live` ones are those not over."""
    if named is not None:
        path = Path(named)
        run = RunFolder(path if path.is_dir() else folder / named)
        launch = read_launch(run)
        if launch is None:
            raise InputError(f"--run {named}: no run of the launcher is there, nor in {folder}")
        return run, launch
    runs = [RunFolder(folder / name) for name in list_names(folder)]
    known = [(run, launch) for run in runs if (launch := read_launch(run)) is not None]
    if live:
        known = [(run, launch) for run, launch in known if not is_over(run, launch)]
        if len(known) > 1:
            names = ", ".join(sorted(run.name for run, _ in known))
            raise InputError(f"several runs are live in {folder}: name one with --run: {names}")
    if not known:
        what = "no run is live" if live else "no run of the launcher is"
        raise InputError(f"{what} in {folder}; --log_folder or --run says where to look")
    return max(known, key=lambda item: item[1].time)


def is_over(run: RunFolder, launch: Launch) -> bool:
    """True if its last attempt was judged, or never came to start."""
    if read_outcome(run.attempt(launch.attempt)) is not None:
        return True
    return not run.attempt(launch.attempt).path.is_dir() and launch.is_alive is False
