"""Start and supervise processes; no other module of `jobs` does."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vjob.jobs.errors import VjobError


def locate_entry() -> Path:
    """Return the `__main__.py` of the vjob installation that this module belongs to.

    The file's place relative to this module differs: a wheel has `vjob/jobs`, an editable
    installation maps `vjob.jobs` to a folder beside `vjob`. The package is not imported, since it
    imports this module.
    """
    spec = importlib.util.find_spec("vjob")
    assert spec is not None and spec.origin is not None, "the package vjob has an __init__.py"
    return Path(spec.origin).absolute().with_name("__main__.py")


ENTRY = locate_entry()
"""File that, run by its path, imports this installation of vjob without any environment variable
that ranks could inherit."""
TIMEOUT_S = 60.0
END_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
KEPT_LINES = 50


@dataclass(frozen=True, kw_only=True)
class Result:
    """Exit code and output of a finished command."""

    code: int
    out: str
    err: str


def build_own_command(*words: str) -> list[str]:
    """Build a command that runs vjob itself, or with words `-m MODULE` one of its modules."""
    return [sys.executable, str(ENTRY), *words]


CLEAN = """\
import os, signal, sys
names, *command = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
env = {name: os.environ[name] for name in names.split(",") if name in os.environ}
env.setdefault("PATH", os.defpath)
try:
    os.execvpe(command[0], command, env)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


def build_clean_command(command: Sequence[str], names: Collection[str]) -> list[str]:
    """Wrap a command so that it gets only these variables of our environment and no input, and
    ignores Ctrl-C.

    The wrapper is for processes that other programs start for vjob. Variables are passed by name,
    since every user of the machine can read command lines and `env -i NAME=VALUE` would expose
    tokens.
    """
    return [sys.executable, "-I", "-S", "-c", CLEAN, ",".join(names), *command]


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    errors: str = "replace",
) -> Result:
    """Run a command to its end; raise VjobError if it cannot start or does not end in time.

    `errors` is how output that is not UTF-8 is decoded, as in `bytes.decode`.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=None if env is None else dict(env),
            check=False,
        )
    except FileNotFoundError:
        raise VjobError(f"{command[0]} is not on PATH") from None
    except OSError as error:
        raise VjobError(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise VjobError(f"{command[0]} did not answer within {timeout_s:.0f} s") from None
    return Result(
        code=done.returncode,
        out=done.stdout.decode(errors=errors),
        err=done.stderr.decode(errors="replace"),
    )


def run_start(
    command: Sequence[str], most: int, *, env: Mapping[str, str], timeout_s: float
) -> tuple[bytes, bool]:
    """Return the first bytes of a command's output, and True if they are the whole output.

    The command is killed once it has printed more, or when the time is over. Raise VjobError if the
    command fails by itself.
    """
    deadline = time.monotonic() + timeout_s
    child = _start(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(env),
    )
    assert child.stdout is not None
    data, is_whole = b"", False
    try:
        while len(data) <= most and (left := deadline - time.monotonic()) > 0:
            if not select.select([child.stdout], [], [], left)[0]:
                break
            part = os.read(child.stdout.fileno(), 1 << 16)
            if not part:
                is_whole = True
                break
            data += part
        if is_whole:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(deadline - time.monotonic(), 0))
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()
    if is_whole and child.returncode != 0:
        raise VjobError(f"{command[0]} ended with {child.returncode}")
    return data[:most], is_whole


def run_fed(
    command: Sequence[str], data: bytes, *, env: Mapping[str, str], timeout_s: float
) -> Result:
    """Run a command to its end, with `data` as input; on a timeout, end its process group."""
    child = _start(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
    )
    try:
        out, err = child.communicate(data, timeout=timeout_s)
    except BaseException as error:
        _end_group(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what nobody read is lost
                    pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise VjobError(f"{command[0]} did not end within {timeout_s:.0f} s") from None
        raise
    return Result(
        code=child.returncode,
        out=out.decode(errors="replace"),
        err=err.decode(errors="replace"),
    )


@contextlib.contextmanager
def talk(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with pipes for its input and output. The process keeps our terminal, so that
    it can ask for a password, and ignores Ctrl-C, which is left to us."""
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_ignore_interrupts
        )
    except OSError as error:
        raise VjobError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        yield child
    finally:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what nobody read is lost
                    pipe.close()
        try:
            child.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def hand_over(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> int:
    """Run a command that takes over our terminal until it ends; return its exit code."""
    try:
        child = subprocess.Popen(command, env=env)
    except OSError as error:
        raise VjobError(f"{command[0]} cannot be started: {error.strerror}") from None
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # it had the same one, and ends as it sees fit


def run_shown(
    command: Sequence[str],
    say: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Result:
    """Run a long command to its end, passing on its lines as they are printed; call `tick` every
    second.

    The command has no terminal, so it cannot ask for a password, and ends with this process: at
    Ctrl-C its whole process group gets SIGTERM, and later SIGKILL if necessary.
    """
    child = _start(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if env is None else dict(env),
    )
    assert child.stdout is not None
    lines: list[str] = []
    try:
        for line in _read_lines(child.stdout.fileno(), tick):
            lines.append(line)
            say(line)
        code = child.wait()
    except BaseException:
        _end_group(child)
        raise
    finally:
        child.stdout.close()  # not before: who cleans up may have a last word
    return Result(code=code, out="\n".join(lines[-KEPT_LINES:]), err="")


def run_together(
    commands: Sequence[Sequence[str]],
    say: Callable[[int, str], None],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    scripts: Mapping[int, str] | None = None,
) -> list[int | None]:
    """Run commands concurrently; pass their lines to `say` as they are printed, with the number of
    the command.

    `scripts` are short texts for the standard input of some commands. Return the exit codes, None
    for a command that was ended because it took too long. The commands end with this process, as in
    `run_shown`.
    """
    children: list[subprocess.Popen[bytes]] = []
    rests: dict[int, tuple[int, bytes]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for number, command in enumerate(commands):
            script = (scripts or {}).get(number)
            child = _start(
                command,
                stdin=subprocess.DEVNULL if script is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
            )
            children.append(child)
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
                    pipe.write((script or "").encode())
            assert child.stdout is not None
            rests[child.stdout.fileno()] = (number, b"")
        while rests and (left := deadline - time.monotonic()) > 0:
            for fd in select.select(list(rests), [], [], left)[0]:
                number, rest = rests[fd]
                data = os.read(fd, 1 << 16)
                *whole, rest = (rest + data).split(b"\n")
                for line in whole if data else [rest]:
                    say(number, line.decode(errors="replace"))
                rests[fd] = (number, rest)
                if not data:
                    del rests[fd]
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(deadline - time.monotonic(), 0))
        return [child.poll() for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                _end_group(child)
            if child.stdout is not None:
                child.stdout.close()


def _read_lines(fd: int, tick: Callable[[], None]) -> Iterator[str]:
    """Yield lines to the end of the output; of a progress bar, which overwrites itself, only the
    last state."""
    rest = b""
    while True:
        ready, _, _ = select.select([fd], [], [], 1.0)
        if not ready:
            tick()
            continue
        data = os.read(fd, 1 << 16)
        *whole, rest = (rest + data).split(b"\n")
        for line in whole if data else [rest]:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()
            if shown:
                yield shown
        if not data:
            return


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Send a process group SIGTERM, give it time to clean up, then send SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
            while time.monotonic() < deadline:
                child.poll()  # a zombie would count as alive
                os.killpg(child.pid, 0)
                time.sleep(0.05)


def start(command: Sequence[str], *, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that shares our output and gets SIGTERM if this process
    dies."""
    return _start(command, stdin=subprocess.DEVNULL, env=dict(env))


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that gets SIGTERM if this process dies; raise VjobError
    if it cannot start."""
    try:
        return subprocess.Popen(
            command, start_new_session=True, preexec_fn=_ask_for_term, **options
        )
    except OSError as error:
        raise VjobError(f"{command[0]} cannot be started: {error.strerror}") from None


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _ask_for_term() -> None:
    """Request SIGTERM at the parent's death; runs in the child between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def tool_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for scheduler commands, without variables such as SQUEUE_PARTITION
    that would filter out jobs."""
    filters = ("SQUEUE_", "SACCT_", "SCANCEL_", "SBATCH_", "SLURM_")
    keep = ("SLURM_CONF", "SLURM_JWT")
    return {k: v for k, v in environ.items() if k in keep or not k.startswith(filters)}
