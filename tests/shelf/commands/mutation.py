"""Real run folders with changed files, and every command that reads one, in a process of its own.

A round changes one to three files of a copy of a run, by a seed, and calls commands on it in this
process. A traceback, too much time of a processor or too much memory is a defect. The process may
harm nothing: an audit hook refuses to start or end processes, to connect, and to write outside.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varuna_core.records.machine import start_time

CPU_S = 20.0
"""Of one command on one folder; a hundredth is usual."""
MEMORY_BYTES = 6 << 30
"""Of addresses; numpy and pandas take most of a GB."""
LONG = 1 << 20


# Changes.


def nest(depth: int) -> Any:
    made: Any = 1
    for level in range(depth):
        made = [made] if level % 2 else {"a": made}
    return made


ODD: Sequence[Callable[[], Any]] = (
    lambda: None, lambda: True, lambda: False, lambda: -1, lambda: 0, lambda: 1.5, lambda: 2**31,
    lambda: 2**63, lambda: -(2**70), lambda: 10**400, lambda: 1e308, lambda: -1e308,
    lambda: math.nan, lambda: math.inf, lambda: "", lambda: "x", lambda: "-1", lambda: "9" * 400,
    lambda: "\x00\x1b[31m\x1b]0;t\x07\r\u202e", lambda: "\u65e5\u672c \U0001f600 \ud800",
    lambda: "y" * LONG, lambda: "{{ x }} %s {0} ${y}", lambda: [], lambda: {}, lambda: [[]],
    lambda: [None], lambda: {"": None}, lambda: list(range(2000)), lambda: nest(40),
    lambda: nest(400), lambda: ["z"] * 500, lambda: {"1": {"2": 3}},
)  # fmt: skip


def list_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a value."""
    found = [path]
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:50])
    for key, inside in items:
        found += list_places(inside, (*path, key))
    return found


def change_value(value: Any, draw: random.Random) -> Any:
    """Another value at one place, or one key or element less."""
    path = draw.choice(list_places(value))
    if not path:
        return draw.choice(ODD)()
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    how = draw.random()
    if how < 0.2:
        del parent[path[-1]]
    elif how < 0.25 and isinstance(parent, dict):
        parent[f"{path[-1]}\u00e4"] = parent.pop(path[-1])
    elif how < 0.35 and isinstance(parent[path[-1]], (int, float)):
        parent[path[-1]] = -parent[path[-1]] * draw.choice((1, 1e9, 10**30))
    else:
        parent[path[-1]] = draw.choice(ODD)()
    return value


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def change_json(data: bytes, draw: random.Random) -> bytes:
    how = draw.random()
    if how < 0.06:
        return data[: draw.randrange(len(data) + 1)]
    if how < 0.09:
        return draw.choice((b"", b"\xff\xfe\x00", b"null", b"[" * 100_000, b'{"a":' * 100_000))
    if how < 0.13:  # each key twice, the second time null
        value = json.loads(data)
        if isinstance(value, dict) and value:
            key = draw.choice(list(value))
            return dump(value)[:-1] + b", " + dump(key) + b": " + dump(draw.choice(ODD)()) + b"}"
    return dump(change_value(json.loads(data), draw))


def change_lines(data: bytes, draw: random.Random) -> bytes:
    """Of a file with a JSON value a line."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    how = draw.random()
    if how < 0.1:
        return data[: draw.randrange(len(data) + 1)]
    if how < 0.15:
        lines[at] = lines[at] * 2
    elif how < 0.2:
        lines = lines[:at] + [lines[at]] * 2000 + lines[at:]
    elif how < 0.3:
        draw.shuffle(lines)
    else:
        with contextlib.suppress(ValueError):
            lines[at] = change_json(lines[at], draw)
    return b"\n".join(lines)


def change_text(data: bytes, draw: random.Random) -> bytes:
    """Of a log."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    how = draw.random()
    odd = (b"\xff\xfe\x00\x80", b"\x1b[2J\x1b]0;x\x07\r", b" " * LONG, b"a" * LONG, b"1" * LONG)
    numbers = (b"9" * 400, b"nan", b"inf", b"-1", b"1e999", b"", b"0", b"1e", b"\xd9\xa3")
    if how < 0.1:
        return data[: draw.randrange(len(data) + 1)]
    if how < 0.4:
        lines.insert(at, draw.choice(odd))
    elif how < 0.5:
        lines[at] = lines[at] * 3000
    else:
        made, number = bytearray(), draw.choice(numbers)
        for byte in lines[at]:
            is_digit = chr(byte).isdigit()
            made += number if is_digit and draw.random() < 0.5 else bytes([byte])
        lines[at] = bytes(made)
    return b"\n".join(lines)


def list_targets(run: Path) -> list[Path]:
    """What a command may read, relative to the folder."""
    return sorted(
        path.relative_to(run)
        for path in run.rglob("*")
        if path.is_file() and path.suffix not in (".pyz", ".sh", ".yaml", ".html")
    )


def change_file(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.05:
        path.unlink()
        return
    data = path.read_bytes()
    change = change_text
    if path.suffix == ".json":
        change = change_json
    elif path.suffix == ".jsonl":
        change = change_lines
    with contextlib.suppress(ValueError):  # it is not what its name says: a lock
        path.write_bytes(change(data, draw))


# Commands.

COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status", "RUN", "--once"),
    "status --json": ("status", "RUN", "--json", "--all"),
    "status of all": ("status",),
    "list": ("list",),
    "list --sweep": ("list", "--sweep", "sweep", "--json"),
    "logs": ("logs", "RUN"),
    "logs --errors": ("logs", "RUN", "--errors"),
    "logs --raw": ("logs", "RUN", "--raw", "--rank", "1"),
    "logs -n": ("logs", "RUN", "-n", "3", "--attempt", "0"),
    "report --text": ("report", "RUN", "--text"),
    "report": ("report", "RUN", "-o", "report.html"),
    "report --export csv": ("report", "RUN", "--export", "csv", "-o", "tables"),
    "report --export parquet": ("report", "RUN", "--export", "parquet", "-o", "tables"),
    "report --export perfetto": ("report", "RUN", "--export", "perfetto", "-o", "trace.json"),
    "compare": ("compare", "RUN", "OTHER"),
    "stacks": ("stacks", "RUN", "--wait", "1"),
    "shell": ("shell", "RUN", "--", "true"),
    "watch": ("watch", "RUN", "--quiet", "--json"),
    "tend": ("tend", "RUN"),
    "grow": ("grow", "RUN", "--count", "1"),
    "shrink": ("shrink", "RUN", "--count", "1"),
    "guard": ("guard", "RUN", "pause"),
    "cancel": ("cancel", "RUN", "--wait", "1"),
    "cancel --now": ("cancel", "RUN", "--now"),
    "prune": ("prune", "FOLDER", "--days", "0", "--checkpoints"),
    "share": ("share", "RUN", "--group", "root", "--dry-run"),
    "submit --like": ("submit", "--like", "RUN", "--dry-run"),
}
EXPORTS = tuple(name for name in COMMANDS if name.startswith("report --export"))
SLOW = ("report", *EXPORTS, "compare", "submit --like")
"""Those that take longer are called more seldom."""
WRITING = ("guard", "cancel", "cancel --now", "shrink", "grow", "tend", "watch")


@dataclass
class Defect:
    """A round that did harm: `seed` and `kind` bring it back."""

    kind: str
    seed: int
    command: str
    changed: list[str]
    error: str


@dataclass
class Tally:
    rounds: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    most_cpu_s: float = 0.0
    defects: list[Defect] = field(default_factory=list)


class TooLong(BaseException):
    """A command took more of the processor than it may."""


def refuse_harm(root: Path) -> None:
    """For good: nothing is started or ended, and nothing written outside of `root`."""
    inside = (str(root), "/dev/null")
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    refused = ("os.killpg", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system",
               "os.fork", "os.forkpty", "socket.connect", "os.chown")  # fmt: skip
    moves = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
             "os.truncate", "os.chmod", "shutil.rmtree")  # fmt: skip

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event in refused:
            raise PermissionError(13, f"a test of files does not call {event}")
        names: tuple[Any, ...] = ()
        if event == "open" and isinstance(given[2], int) and given[2] & writes:
            names = given[:1]
        elif event in moves:
            names = given[:2]
        for name in names:
            if isinstance(name, (str, bytes, os.PathLike)):
                path = os.path.abspath(os.fsdecode(name))
                if not path.startswith(inside):
                    raise PermissionError(13, f"a test of files does not write {path}")

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid(), f"kill({pid}, {number})"

    os.kill = kill  # which would end this process
    sys.addaudithook(hear)


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Waits return at once; after some the user has seen enough."""
    count = 0

    def pass_by() -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise KeyboardInterrupt

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None:  # for a thread that starts
            return bool(kept[1](event))
        pass_by()
        return event.is_set()

    kept = time.sleep, threading.Event.wait
    time.sleep = lambda seconds: pass_by()  # type: ignore[assignment]
    threading.Event.wait = wait  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep, threading.Event.wait = kept  # type: ignore[method-assign]


def call(words: Sequence[str]) -> tuple[int, str]:
    """Exit code of a command, and the traceback where it ended with one."""
    from click.testing import CliRunner

    from vjob.shelf.commands.cli import cli

    def stop(number: int, frame: Any) -> None:
        raise TooLong(f"more than {CPU_S:g} s of a processor")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        with never_waiting():
            done = CliRunner().invoke(cli, list(words))
    except BaseException:
        return 99, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    error = done.exception
    if error is None or isinstance(error, SystemExit):
        return done.exit_code, "Traceback" * ("Traceback (most" in done.stderr)
    assert done.exc_info is not None
    return 99, "".join(traceback.format_exception(*done.exc_info))


def run_round(folder: Path, kind: str, seed: int, tally: Tally, per_round: int | None) -> None:
    """Change a copy of the run, and call commands on it; all of them without `per_round`."""
    draw = random.Random(f"{kind} {seed}")
    place = folder / "work" / kind
    shutil.rmtree(place.parent, ignore_errors=True)
    place.parent.mkdir()
    shutil.copytree(folder / "runs" / kind, place, symlinks=True)
    if kind.endswith("-going"):
        pretend_running(place, folder / "index-now")
    targets = list_targets(place)
    changed = [draw.choice(targets) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    for path in dict.fromkeys(changed):
        change_file(place / path, draw)
    if draw.random() < 0.1:
        index = folder / "index-now"
        index.write_bytes(change_lines(index.read_bytes(), draw))
    shutil.copy(folder / "index-now", folder / "state/vjob/runs.jsonl")
    tally.rounds += 1
    reading = [name for name in COMMANDS if name not in WRITING]
    chosen = [*reading, *WRITING]
    if per_round is not None:
        quick = [name for name in COMMANDS if name not in SLOW]
        chosen = draw.sample(quick, per_round)
        if draw.random() < 0.04:
            chosen.append(draw.choice(SLOW))
    words = {"RUN": str(place), "OTHER": str(folder / "runs" / kind), "FOLDER": str(place.parent)}
    for name in chosen:
        command = [words.get(word, word) for word in COMMANDS[name]]
        before = time.process_time()
        code, error = call(command)
        tally.most_cpu_s = max(tally.most_cpu_s, time.process_time() - before)
        tally.calls[name] += 1
        tally.codes[code] += 1
        if error:
            names = [str(path) for path in changed]
            tally.defects.append(Defect(kind, seed, " ".join(COMMANDS[name]), names, error))


def pretend_running(place: Path, index: Path) -> None:
    """Its local jobs are this process."""
    for path in place.glob("local*.json"):
        state = json.loads(path.read_text())
        state.update(state="RUNNING", pid=os.getpid(), pid_start=start_time(os.getpid()))
        path.write_text(json.dumps(state))
        with index.open("a") as handle:
            handle.write(json.dumps({"job": state["job"], "path": str(place)}) + "\n")


def run_rounds(folder: Path, seeds: range, per_round: int | None) -> Tally:
    tally = Tally()
    kinds = sorted(path.name for path in (folder / "runs").iterdir())
    index = folder / "state/vjob/runs.jsonl"
    kept = index.read_bytes()
    for seed in seeds:
        for kind in kinds:
            (folder / "index-now").write_bytes(kept)
            run_round(folder, kind, seed, tally, per_round)
    index.write_bytes(kept)
    return tally


def main() -> None:
    """`mutation.py FOLDER FIRST END COUNT`: rounds of these seeds; the tally as JSON."""
    folder, first, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    count = int(sys.argv[4]) or None
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    os.environ["HOME"] = os.environ["TMPDIR"] = str(folder)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Loaded now: later nothing may be compiled or written elsewhere.
    sys.dont_write_bytecode = True
    refuse_harm(folder)
    tally = run_rounds(folder, range(first, end), count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps({**vars(tally), "defects": [vars(one) for one in tally.defects], "peak": peak})
    )


if __name__ == "__main__":
    main()
