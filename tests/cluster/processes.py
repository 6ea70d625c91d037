"""The one module of the lab that runs and ends processes.

A daemon writes its own pid and start time into its pid record before it becomes the daemon, so
there is no moment at which it runs unrecorded. A signal goes through a pidfd after the start time
is checked; it refuses a pid that now belongs to somebody else, and never looks for names.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import PATIENCE
from tests.cluster.shape import LabError

POLL_S = 0.05
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the lab looks for programs: daemons live in sbin, often absent from a user's PATH."""

_LAUNCHER = """
set -eu
start_ticks() { shift 21; echo "$1"; }
read -r stat <"/proc/$$/stat"
record=$1
shift
# shellcheck disable=SC2086  # the fields of stat are to be split
echo "$$ $(start_ticks $stat)" >"$record.new"
mv "$record.new" "$record"
exec "$@"
"""


@dataclass(frozen=True)
class ProcessId:
    """A process that stays the same one even when its pid is used again."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process."""


def read_stat(pid: int) -> tuple[ProcessId, int] | None:
    """A living process and its parent's pid; None when there is none (a zombie is none)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else (ProcessId(pid, int(fields[17])), int(parent))


def is_alive(process: ProcessId) -> bool:
    stat = read_stat(process.pid)
    return stat is not None and stat[0] == process


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Signals that very process; does nothing when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def end(process: ProcessId, *, patience_s: float = 0.0) -> None:
    """TERM, `patience_s` to obey, then KILL to it and its children; returns when all are gone."""
    family = find_descendants({process}) if is_alive(process) else set()
    if patience_s > 0:
        send_signal(process, signal.SIGTERM)
        with contextlib.suppress(LabError):
            wait_for(lambda: not is_alive(process), patience_s, f"end of pid {process.pid}")
    for member in family:
        send_signal(member, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, family)), 10, f"end of pid {process.pid}")


def _read_parents() -> dict[ProcessId, int]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return dict(stat for pid in pids if (stat := read_stat(pid)))


def find_descendants(roots: set[ProcessId]) -> set[ProcessId]:
    """The roots and all living processes that descend from them."""
    parents = _read_parents()
    found = set(roots)
    while True:
        pids = {process.pid for process in found}
        children = {process for process, parent in parents.items() if parent in pids}
        if children <= found:
            return found
        found |= children


def find_in_namespace(namespace: Path) -> set[ProcessId]:
    """Processes inside the network namespace mounted there, and all that descend from them."""
    try:
        wanted = os.stat(namespace)
    except FileNotFoundError:
        return set()
    inside = set()
    for process in _read_parents():
        with contextlib.suppress(OSError):
            have = os.stat(f"/proc/{process.pid}/ns/net")
            if (have.st_dev, have.st_ino) == (wanted.st_dev, wanted.st_ino):
                inside.add(process)
    return find_descendants(inside) if inside else inside


def kill_namespace(namespace: Path) -> None:
    """Kill -9 everything of a node, until nothing is left of it."""

    def none_left() -> bool:
        left = find_in_namespace(namespace)
        for process in left:
            send_signal(process, signal.SIGKILL)
        return not left

    wait_for(none_left, 15, f"end of all processes in {namespace}")


def start_daemon(
    command: Sequence[str], *, record: Path, output: Path, env: Mapping[str, str]
) -> ProcessId:
    """Start a process that outlives us; its pid record is `record`."""
    record.unlink(missing_ok=True)
    launcher = ["setsid", "--fork", "sh", "-c", _LAUNCHER, "launcher", str(record), *command]
    with output.open("ab") as sink:
        subprocess.run(
            launcher,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/", **env},
            cwd="/",
            check=True,
        )
    wait_for(record.exists, 10, f"pid record {record}")
    return read_record(record)


def read_record(record: Path) -> ProcessId:
    pid, start_ticks = record.read_text().split()
    return ProcessId(int(pid), int(start_ticks))


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    text_in: str | None = None,
    timeout_s: float = 60,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run to the end; with `check` a failure becomes a LabError that quotes the command."""
    merged = {**os.environ, **(env or {})}
    merged["PATH"] = f"{merged.get('PATH', '')}:{PATH}".lstrip(":")
    try:
        result = subprocess.run(
            command, input=text_in, env=merged, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)}: no end within {timeout_s} s") from error
    if check and result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        raise LabError(f"{' '.join(command)}: exit code {result.returncode}: {said}")
    return result


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until the condition holds; LabError at the deadline."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {timeout_s * PATIENCE:g} s for: {what}")
        time.sleep(POLL_S)
