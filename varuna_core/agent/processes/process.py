"""Processes of the agent: short commands, ranks, and what ranks leave behind.

This is the only module of the agent that starts processes. Arguments and variables are encoded as
UTF-8 whatever the node's locale is, and undecodable bytes are passed on unchanged.

A process that has left its rank's session may outlive the rank. The agent, as the subreaper, adopts
such processes and ends them once all its ranks have ended, so that no forgotten server holds a GPU,
a port or memory of the next job on this node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Callable, Mapping, NamedTuple, NoReturn, Sequence

from varuna_core.agent.processes.proc import ContainerProcesses, list_below, list_stats

# Loaded here and not in the child: between fork and exec nothing may be imported.
_PRCTL: Callable[..., int] | None = None
with contextlib.suppress(ImportError, OSError, AttributeError):  # a stripped python3, not Linux
    import ctypes

    _PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER, _ANY = 0x59616D61, -1
_POLL_S = 0.2


class CommandResult(NamedTuple):
    """Result of a short command."""

    code: int | None
    """Exit code; None if the command was killed at its deadline or because the agent must stop."""
    out: str
    err: str


def own_environment() -> dict[str, str]:
    return {_decode(name): _decode(value) for name, value in os.environb.items()}


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> CommandResult:
    """Run a command until it ends, its deadline passes or `stopping()` is true."""
    try:
        child = subprocess.Popen(
            [_encode(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else _encode_environment(env),
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(127, "", f"{argv[0]}: {error.strerror}")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            out, err = child.communicate(timeout=_POLL_S)
            return CommandResult(child.returncode, _decode(out), _decode(err))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline or stopping():
                break
    _signal_group(child.pid, signal.SIGKILL)
    try:
        out, err = child.communicate(timeout=2)
    except subprocess.TimeoutExpired:  # it hangs in the kernel: a dead mount
        out, err = b"", b"it did not even end on SIGKILL"
    return CommandResult(None, _decode(out), _decode(err))


class RankProcess:
    """A running rank, in a session and process group of its own, with its output in two pipes.

    If `inside` is given, the child process is a container runtime's client and `inside` has the
    rank's own processes.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], inside: ContainerProcesses | None = None
    ) -> None:
        self._child, self._inside = child, inside
        self.pid = child.pid
        self.stdout = -1 if child.stdout is None else child.stdout.fileno()
        self.stderr = -1 if child.stderr is None else child.stderr.fileno()

    def poll(self) -> int | None:
        """Return the exit code once the rank has ended, and kill the rest of its process group."""
        if self._child.returncode is None:
            # Not reaped yet, so that the group's number cannot belong to somebody else.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            self.signal_group(signal.SIGKILL)
        code = self._child.wait()
        return code if self._inside is None else _as_of_rank(code)

    def tell(self, text: str) -> bool:
        """Write a line to the rank's input and close the input; return True if that succeeded."""
        if self.poll() is not None or self._child.stdin is None:
            return False
        with contextlib.suppress(OSError), self._child.stdin as pipe:
            view = memoryview(_encode(text + "\n"))
            while view:
                view = view[pipe.write(view) :]
            return True
        return False

    def close(self) -> None:
        """Close the pipes of a rank that was killed, and reap it."""
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()
        self._child.wait()

    def find_main(self) -> int | None:
        """Find the pid of the rank's own process, not of a container runtime's client."""
        return self.pid if self._inside is None else self._inside.find_main()

    def find_strangers(self) -> list[int]:
        """Return the rank's processes in a container, which may not be our descendants."""
        return [] if self._inside is None else self._inside.find_all()

    def signal(self, number: int) -> None:
        """Send a signal to the rank's main process only, as Slurm does to a task."""
        if self._child.returncode is None:
            _signal_all([self.find_main()], number)

    def catches(self, number: int) -> bool:
        """Return True if /proc shows that the rank has a handler for this signal."""
        pid = self.find_main()
        try:
            with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
                words = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
        except OSError:
            return False
        return bool(words) and bool(int(words[0], 16) >> (number - 1) & 1)

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank's process group; SIGKILL goes to all of its processes in a
        container."""
        if self._child.returncode is not None:
            return
        if self._inside is None:
            _signal_group(self.pid, number)
        elif number == signal.SIGKILL:
            _signal_all(self._inside.find_all(), number)
            _signal_group(self.pid, number)
        elif not _signal_all(self._inside.find_group(), number):
            # Not there yet, or of another user: the client alone, which would pass it on twice.
            _signal_all([self.pid], number)


def find_program(name: str, path: str | None) -> str | None:
    """Find the path of a program on PATH, as a shell would."""
    return shutil.which(name, path=path)


def set_process_option(option: int, value: int) -> bool:
    """Call Linux's prctl; return False if it fails or does not exist."""
    return _PRCTL is not None and _PRCTL(option, value) == 0


def start_rank(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    inside: ContainerProcesses | None = None,
    *,
    waits: bool = False,
    log: int | None = None,
    errors: int | None = None,
    passed: Sequence[int] = (),
) -> RankProcess:
    """Start a rank; call it from the main thread, as the rank dies with the thread that did.

    With `waits` the rank's standard input is a pipe from this process. With `log`, for processes
    that are not ranks, standard output goes to this descriptor and standard error to ours; `errors`
    is another descriptor for standard error. The descriptors in `passed` stay open in the child.
    Raise OSError if the rank cannot start.
    """
    agent = os.getpid()

    def die_with_agent() -> None:
        if _PRCTL is not None:
            _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            # Where only ancestors may look into a process (kernel.yama.ptrace_scope=1), others of
            # the same user may look into ranks all the same: `vjob stacks` does. It outlives exec.
            _PRCTL(_PR_SET_PTRACER, _ANY)
            if os.getppid() != agent:  # the agent died before prctl did its work
                os._exit(128 + signal.SIGKILL)

    return RankProcess(
        subprocess.Popen(
            [_encode(word) for word in argv],
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=subprocess.PIPE if log is None else log,
            stderr=(subprocess.PIPE if log is None else None) if errors is None else errors,
            pass_fds=passed,
            bufsize=0,
            env=_encode_environment(env),
            cwd=_encode(cwd),
            start_new_session=True,
            preexec_fn=die_with_agent,
        ),
        inside,
    )


def become(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    """Replace this process by the command, which inherits the terminal."""
    os.chdir(_encode(cwd))
    words = [_encode(word) for word in argv]
    os.execvpe(words[0], words, _encode_environment(env))


def start_agent(words: Sequence[str], *, waits: bool = False) -> subprocess.Popen[bytes]:
    """Start another command of the agent's program, with our output; it dies with this process.

    With `waits` its standard input is a pipe from this process.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        if _PRCTL is not None:
            _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

    argv = [sys.executable, *words]
    stdin = subprocess.PIPE if waits else subprocess.DEVNULL
    return subprocess.Popen(argv, stdin=stdin, preexec_fn=die_with_parent)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(OSError):  # gone already, or its members changed their user
        os.killpg(group, number)


def _signal_all(pids: Sequence[int | None], number: int) -> bool:
    """Send a signal to these processes; return True if at least one could be signalled."""
    reached = False
    for pid in pids:
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                reached = True
    return reached


def _as_of_rank(code: int) -> int:
    """Convert the exit code of a container's client, which is 128 + N after signal N, to that of
    Popen, which is -N."""
    try:
        return -signal.Signals(code - 128) if code > 128 else code
    except ValueError:
        return code


def _encode_environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    return {_encode(name): _encode(value) for name, value in env.items()}


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


_PR_SET_CHILD_SUBREAPER = 36
_SPARED = ("catatonit", "podman pause")
"""Processes that podman leaves behind when it first starts on a node: they keep the user namespace
open that the user's other containers share."""
_LEFTOVERS_PATIENCE_S = 5.0
_LEFTOVERS_POLL_S = 0.05


def adopt_orphans() -> bool:
    """Make this process the subreaper of its descendants; return True on success."""
    return set_process_option(_PR_SET_CHILD_SUBREAPER, 1)


def end_leftovers(patience_s: float, tidy_s: float = 0, *, spared: int | None = None) -> list[str]:
    """End every process below this one except `spared`: SIGTERM, then SIGKILL after `patience_s`.

    Return their pids and names, except of processes that end by themselves within `tidy_s`. No
    child that this process still needs may be running.
    """
    deadline = time.monotonic() + tidy_s
    while (found := _find_living(spared)) and time.monotonic() < deadline:
        time.sleep(_LEFTOVERS_POLL_S)
    if not found:
        return []
    _signal_all(list(found), signal.SIGTERM)
    deadline = time.monotonic() + min(patience_s, _LEFTOVERS_PATIENCE_S)
    while _find_living(spared) and time.monotonic() < deadline:
        time.sleep(_LEFTOVERS_POLL_S)
    deadline = time.monotonic() + _LEFTOVERS_PATIENCE_S
    while (rest := _find_living(spared)) and time.monotonic() < deadline:
        _signal_all(list(rest), signal.SIGKILL)
        time.sleep(_LEFTOVERS_POLL_S)
    return [f"{pid} ({name})" for pid, name in sorted(found.items())]


def _find_living(spared: int | None) -> dict[int, str]:
    """Reap ended children, and return the processes below this one: name by pid."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    living = {pid: stat for pid, stat in list_stats().items() if stat.is_alive}
    names = {pid: living[pid].name for pid in list_below([os.getpid()], living)}
    return {pid: name for pid, name in names.items() if name not in _SPARED and pid != spared}
