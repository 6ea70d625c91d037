"""The lab's paths and its record of everything it makes on this machine, written beforehand.

`down` and a second process know the lab from here alone. The record refuses guesses: a bridge,
mount or process that is not written down is not the lab's, whatever its name.

    /var/lib/vjob-lab/            not /run: Debian mounts it noexec, and slurmd runs scripts there
        record.json               shape, what was made, phase (starting | up)
        pids/NAME                 "PID START" of each daemon, written by the daemon itself
        netns/NODE                the network namespace of a node, as a mount
        etc/                      slurm.conf, gres.conf, slurmdbd.conf, cgroup.conf, hosts; with
                                  VJOB_LAB_PYXIS plugstack.conf, and tools/ beside it
        log/                      the logs of all daemons
        dev/nvidia0 ...           fake GPUs
        local/                    inside a node: a folder of that node alone (its /scratch)
        shared/                   with files over a network: a folder that nodes mount
        nodes/NODE/               spool, pid file and the node's local folder
        controller/, munge/, database/
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.shape import Group, LabError

VERSION = 1
_LOCK = "/run/vjob-lab.{name}.lock"
_held_here: set[str] = set()


@dataclass(frozen=True)
class LabPaths:
    """Every file of the lab."""

    folder: Path = Path("/var/lib/vjob-lab")

    @property
    def record(self) -> Path:
        return self.folder / "record.json"

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def plugstack_conf(self) -> Path:
        return self.folder / "etc" / "plugstack.conf"

    @property
    def tools(self) -> Path:
        """Programs that nodes find before the machine's; absent where there are none."""
        return self.folder / "tools"

    @property
    def hosts(self) -> Path:
        return self.folder / "etc" / "hosts"

    @property
    def local(self) -> Path:
        return self.folder / "local"

    @property
    def shared(self) -> Path:
        """A folder that nodes mount over their links, where the lab has files over a network."""
        return self.folder / "shared"

    @property
    def mount_script(self) -> Path:
        """Run by each node before its slurmd; absent where nodes share this machine's files."""
        return self.folder / "etc" / "mount-shared"

    @property
    def controller_state(self) -> Path:
        return self.folder / "controller"

    @property
    def database(self) -> Path:
        return self.folder / "database"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def munge_key(self) -> Path:
        return self.folder / "munge" / "key"

    def pid_record(self, name: str) -> Path:
        return self.folder / "pids" / name

    def output(self, name: str) -> Path:
        """Stdout and stderr of a daemon; Slurm's own logs, with times, are NAME.log."""
        return self.folder / "log" / f"{name}.out"

    def namespace(self, node: str) -> Path:
        return self.folder / "netns" / node

    def node(self, node: str) -> Path:
        return self.folder / "nodes" / node

    def device(self, number: int) -> Path:
        return self.folder / "dev" / f"nvidia{number}"


@dataclass(kw_only=True)
class LabRecord:
    """The lab as the machine should know it."""

    boot_id: str
    """The boot that the pids, links and mounts belong to."""
    subnet: str
    groups: list[dict[str, Any]]
    accounting: bool
    accounting_hidden: bool = False
    """True inside `without_accounting`: the daemon runs but slurm.conf has no accounting."""
    phase: str = "starting"
    links: list[str] = field(default_factory=list)
    """Bridge and veth names that the lab makes in the machine's own network."""
    controller_stopped: bool = False
    """True when a test has stopped slurmctld on purpose."""

    def build_groups(self) -> tuple[Group, ...]:
        return tuple(Group(**group) for group in self.groups)


def read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def load_record(paths: LabPaths) -> LabRecord | None:
    """The record; None when there is no lab. Refuses a folder that is not a lab's."""
    try:
        data = json.loads(paths.record.read_text())
    except FileNotFoundError:
        if paths.folder.exists() and any(paths.folder.iterdir()):
            raise LabError(
                f"{paths.folder} exists, is not empty and has no record.json: not made by this "
                "lab, so not touched; look at it and move it away"
            ) from None
        return None
    except json.JSONDecodeError as error:
        raise LabError(f"{paths.record} is not readable ({error}); not touched") from error
    version = data.pop("version")
    if version != VERSION:
        raise LabError(f"{paths.record} has version {version}, this code writes {VERSION}")
    return LabRecord(**data)


def save_record(paths: LabPaths, record: LabRecord) -> None:
    paths.folder.mkdir(mode=0o755, exist_ok=True)
    temporary = paths.record.with_suffix(".new")
    with temporary.open("w") as sink:
        json.dump({"version": VERSION, **asdict(record)}, sink, indent=1)
        sink.flush()
        os.fsync(sink.fileno())
    os.replace(temporary, paths.record)


@contextlib.contextmanager
def hold_lock(name: str, *, timeout_s: float) -> Iterator[None]:
    """One process at a time; the lock ends with the process, however that ends."""
    if name in _held_here:
        raise LabError(f"this process holds the lab's {name} lock already; it would wait for ever")
    path = _LOCK.format(name=name)
    deadline = time.monotonic() + timeout_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us removes the file: a lock on that one guards nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise LabError(
                    f"another process holds the lab ({path}) for more than {timeout_s:g} s"
                ) from None
            time.sleep(0.1)
        os.close(descriptor)
    _held_here.add(name)
    try:
        yield
    finally:
        _held_here.remove(name)
        os.unlink(path)
        os.close(descriptor)
