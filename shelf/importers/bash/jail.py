"""The jail for reading a script: a process that runs bash where it cannot do harm.

Run as `python -I -S jail.py`. Each line of standard input is a JSON object: `argv`, `env`, `cwd`,
`scratch` (the only writable folder), `readable` (folders that may be read), `seconds` and `without`
(layers to disable). Each is answered by an object with `status` (bash's exit status, or the reason
why bash was ended), `processor_s` (processor time of its processes) and `layers` (those in force).

    files    Landlock (Linux 5.13); without it a root of its own with read-only mounts
    calls    seccomp: no socket, kill, ptrace, mount, keys, io_uring
    spaces   namespaces of users, processes, network and IPC

Files must be protected by Landlock or by the root, and everything else by `calls` or `spaces`;
otherwise nothing runs and `status` is `no jail`. The layer `trust` replaces all of them: bash runs
as the user would run it, except for the recording functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
FILTERS = tuple(
    "awk basename bc cat cut dirname egrep expr fold gawk grep head mawk nl paste readlink "  # noqa: SIM905
    "realpath rev sed seq sort tac tail tee tr uniq wc".split()
)
"""Programs that only turn text into text; besides bash, only these may be started."""
CALLS = {
    "x86_64": (0xC000003E, (41, 53, 42, 49, 62, 200, 234, 101, 165, 166, 155, 161, 272, 308, 321,
                            425, 424, 310, 311, 248, 249, 250)),
    "aarch64": (0xC00000B7, (198, 199, 203, 200, 129, 130, 131, 117, 40, 39, 41, 51, 97, 268, 280,
                             425, 424, 270, 271, 217, 218, 219)),
}  # fmt: skip
"""Audit number of the machine and the forbidden system calls: socket, socketpair, connect, bind,
kill, tkill, tgkill, ptrace, mount, umount, pivot_root, chroot, unshare, setns, bpf, io_uring_setup,
pidfd_send_signal, process_vm_*, keys."""
NEW = {"user": 0x10000000, "mount": 0x00020000, "ipc": 0x08000000, "pid": 0x20000000,
       "net": 0x40000000}  # fmt: skip
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
LIMITS = (("CPU", 2), ("NPROC", 64), ("FSIZE", 1 << 20), ("NOFILE", 256), ("AS", 1 << 30),
          ("CORE", 0))  # fmt: skip
MOST_BYTES, MOST_FILES = 16 << 20, 2000
"""Limits for the scratch folder: total bytes of its files, and their number."""
_TOOLS: dict[str, str] = {}
CHECK_S = 0.05
"""Seconds between two checks of the scratch folder's size."""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")


class NoLayerError(Exception):
    """Raised if the kernel does not support a layer of the jail."""


def check(value: int, what: str) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise NoLayerError(f"{what}: {os.strerror(number)}")
    return value


def has_landlock() -> bool:
    return bool(LIBC.syscall(444, None, 0, 1) >= 1)


def restrict_files(readable: list[str], executable: list[str], writable: list[str]) -> None:
    """Allow reading, executing and writing only below these paths, with Landlock."""
    abi = check(LIBC.syscall(444, None, 0, 1), "Landlock")
    handled = (1 << {1: 13, 2: 14}.get(abi, 15)) - 1
    handled |= 1 << 15 if abi >= 5 else 0
    attribute = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attribute = attribute[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = check(LIBC.syscall(444, attribute, len(attribute), 0), "landlock_create_ruleset")
    read, execute = 0b1100, 0b101
    of_file = 0b111 | 1 << 14 | 1 << 15
    for paths, rights in ((readable, read), (executable, execute), (writable, handled & ~1)):
        for path in paths:
            if not os.path.exists(path):
                continue
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & of_file
            rule = struct.pack("=Qi", allowed & handled, place)
            check(LIBC.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.syscall(446, rules, 0), "landlock_restrict_self")


def restrict_calls() -> None:
    """Make the calls in CALLS fail with EPERM, with seccomp; calls of another architecture kill the
    process."""
    machine = os.uname().machine
    if machine not in CALLS:
        raise NoLayerError(f"seccomp: no list of system calls for {machine}")
    audit, numbers = CALLS[machine]
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    for number in numbers:
        steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1)]
    if audit == CALLS["x86_64"][0]:  # the x32 numbers of the same machine
        steps += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, 0x80000000)]
    steps.append((0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def unshare(*names: str) -> None:
    """Create namespaces in which the user keeps the same user and group id."""
    user, group = os.getuid(), os.getgid()
    check(LIBC.unshare(sum(NEW[name] for name in names)), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                       ("gid_map", f"{group} {group} 1")):  # fmt: skip
        Path("/proc/self", name).write_text(text)


def mount(source: str, target: str, kind: str | None, flags: int, what: str = "") -> None:
    text = [None if word is None else word.encode() for word in (source, target, kind)]
    check(LIBC.mount(*text, flags, what.encode() or None), f"mount {target}")


def build_root(root: str, readable: list[str], scratch: str) -> None:
    """Change the root to a new one: these and system folders read-only, scratch writable."""
    mount("none", "/", None, RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEV, "size=1m")
    for path in (*SYSTEM, *readable, "/dev/null", scratch):
        target = root + path
        if not os.path.exists(path):
            continue
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        mount(path, target, None, BIND | RECURSIVE)
        if path not in (scratch, "/dev/null"):
            mount("none", target, None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV)
    os.makedirs(f"{root}/dev", exist_ok=True)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.makedirs(f"{root}/proc", exist_ok=True)
    mount("proc", f"{root}/proc", "proc", NO_SUID | NO_DEV)
    mount("none", root, None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV)
    os.chroot(root)


def fork_inside() -> None:
    """Continue in a child as process 1 of the new namespace; the parent waits and exits with its
    status."""
    child = os.fork()
    if child:
        os.closerange(3, 1024)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    LIBC.prctl(1, int(signal.SIGKILL), 0, 0, 0)


def enter(given: dict[str, Any]) -> list[str]:
    """Put this process into the jail; return the layers in force; NoLayerError if it is no jail."""
    without, scratch = set(given["without"]), given["scratch"]
    layers: list[str] = []
    use_root = "landlock" in without or not has_landlock()
    names = ["user", "pid", "ipc", "net", *(["mount"] if use_root else [])]
    if "spaces" not in without:
        try:
            unshare(*names)
            layers.append("spaces")
        except (NoLayerError, OSError):
            pass
    if "spaces" in layers:
        fork_inside()
    loaders = [os.path.realpath(path) for path in
               ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")]  # fmt: skip
    for name, limit in LIMITS:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if not use_root:
        readable = [*given["readable"], *SYSTEM, "/dev/fd", "/proc/self/fd"]
        bash = os.path.realpath(given["argv"][0])
        restrict_files(readable, [bash, *find_tools().values(), *loaders], [scratch, "/dev/null"])
        layers.append("landlock")
    elif "spaces" in layers and "root" not in without:
        build_root(f"{scratch}/root", given["readable"], scratch)
        layers.append("root")
    else:
        raise NoLayerError("neither Landlock nor a mount namespace")
    if "calls" not in without:
        try:
            restrict_calls()
            layers.append("calls")
        except NoLayerError:
            pass
    if not {"calls", "spaces"} & set(layers):
        raise NoLayerError("neither seccomp nor namespaces")
    return layers


def start(given: dict[str, Any], tell: int) -> None:
    """Enter the jail in the child, then execute bash; write layers or failure to `tell`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    scratch = given["scratch"]
    streams = [
        os.open("/dev/null", os.O_RDWR),
        os.open("/dev/null", os.O_WRONLY),
        os.open(f"{scratch}/stderr", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600),
    ]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    try:
        layers = ["trust"] if "jail" in given["without"] else enter(given)
        os.chdir(given["cwd"])
        os.write(tell, json.dumps({"layers": layers}).encode())
    except (NoLayerError, OSError) as error:
        os.write(tell, json.dumps({"status": "no jail", "why": str(error)}).encode())
        os._exit(1)
    os.closerange(3, 1024)
    os.execve(given["argv"][0], given["argv"], given["env"])


def find_tools() -> dict[str, str]:
    """Return the real paths of those programs of FILTERS that exist on this machine, by name."""
    if not _TOOLS:
        for name in FILTERS:
            for folder in ("/usr/bin", "/bin"):
                if os.path.exists(found := f"{folder}/{name}"):
                    _TOOLS.setdefault(name, os.path.realpath(found))
    return _TOOLS


def is_full(scratch: str) -> bool:
    total = count = 0
    folders = [scratch]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_symlink():
                    total += entry.stat(follow_symlinks=False).st_size
    return total > MOST_BYTES or count > MOST_FILES


def end_children() -> None:
    """Kill and reap all descendants: each round makes us the parent of the last round's orphans."""
    for _ in range(200):
        mine = []
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return  # the usual case, without a look at all processes of the machine
        for name in os.listdir("/proc"):
            try:
                text = Path("/proc", name, "stat").read_text() if name.isdecimal() else ""
            except OSError:
                continue
            if text and text.rpartition(")")[2].split()[1] == str(os.getpid()):
                mine.append(int(name))
        if not mine:
            return
        for pid in mine:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Run bash in the jail to its end, and leave none of its processes behind."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            start(given, writing)
        finally:
            os._exit(127)
    os.close(writing)
    deadline = time.monotonic() + given["seconds"]
    status: int | str | None = None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline:
            status = "timeout"
        elif is_full(given["scratch"]):
            status = "full"
        else:
            signal.sigtimedwait([signal.SIGCHLD], CHECK_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    end_children()
    said = os.read(reading, 1 << 16)
    os.close(reading)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"status": status, "processor_s": spent, **(json.loads(said) if said else {})}


def main() -> None:
    LIBC.prctl(36, 1, 0, 0, 0)  # orphans come to us, so that `set -m` hides none
    LIBC.prctl(1, int(signal.SIGKILL), 0, 0, 0)
    find_tools()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # `run` waits for it
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
