"""Cache of queries to Slurm's controller: for a while, one answer serves all commands of a user.

    status, logs -f, watch, tend ─► ask ─┬─ a fresh answer is in the cache ──► it, with its time
                                         └─ lock ─► looked again ─► the tool ─► cache

The cache is one file per tool and controller in the folder of the index, readable only by its
owner. It spares the controller and is never a source of truth: if a file cannot be read, locked or
written, is damaged, or holds impossible times (a clock was set), the tool is run directly. Answers
are cached as the tool printed them; the callers parse them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.records.files import (
    lock_file,
    open_file,
    parse_object,
    read_text,
    write_json,
)
from vjob.jobs import process
from vjob.jobs.errors import UncertainError, VjobError
from vjob.jobs.schedulers import run_index as index

BACK_OFF = 20.0
"""Factor for the pause between two queries: a query that took t seconds is not repeated for
BACK_OFF times t, or for LONGEST_GAP_S if that is shorter."""
LONGEST_GAP_S = 60.0
"""Longest pause in seconds that is due to the duration of a query."""
RETRY_S = 5.0
"""Seconds until a failed query is repeated; longer if the query took long to fail."""
WAIT_S = 10.0
"""Seconds to wait for the answer of another command that has just made the same query."""
OLD_S = 120.0
"""Greatest age in seconds of an answer that a command uses after it has waited in vain."""
KEPT_S = 86400.0
MOST_KEPT = 64
LARGEST = 64 * 2**20
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Output of a scheduler's tool, and the time of the query by this machine's clock."""

    text: str = ""
    asked: float = 0.0
    """Time just before the query: later changes may be missing from the text. 0 if there is no
    answer."""
    confirmed: float = 0.0
    """Time just before the last cheaper query that showed no change since `asked`; 0 if there was
    none."""
    took_s: float = 0.0
    failed: float = 0.0
    """Time of the last failed query; 0 if the last query was answered."""
    problem: str = ""

    @property
    def known(self) -> float:
        """Time as of which the text is known to be true."""
        return max(self.asked, self.confirmed)


_memory: dict[str, Answer] = {}
"""Answers to this process, keyed by file and command, in case no file can be written."""

_files: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}
"""Parsed content of each file, with the inode, size and mtime at which it was read, so that
repeated polls parse an answer once."""


def ask(command: Sequence[str], *, floor_s: float, after: float = 0.0) -> Answer:
    """Return the command's answer, at most `floor_s` old and not from before `after`.

    The answer may be older if the controller is slow or another command is making the same query.
    Raise UncertainError if there is no answer.
    """
    found = _find_usable(command, floor_s, after)
    if found is not None:
        return found
    if shutil.which(command[0], path=os.environ.get("PATH", os.defpath)) is None:
        raise UncertainError(f"{command[0]} is not on PATH")
    with _turn(command, floor_s, after) as is_ours:
        found = _find_usable(command, floor_s, after)
        if found is not None:
            return found
        found = peek(command)
        if not is_ours and found is not None and 0 <= time.time() - found.known < OLD_S:
            return found
        return _ask_now(command, found or Answer())


def peek(command: Sequence[str]) -> Answer | None:
    """Return the last cached answer, however old, without a query; None if there is none."""
    file, key = _file(command[0]), _key(command)
    known = [_memory.get(f"{file} {key}"), _parse(_read(file).get(key))]
    found = [answer for answer in known if answer is not None]
    return max(found, key=lambda answer: max(answer.known, answer.failed), default=None)


def confirm(command: Sequence[str], at: float) -> None:
    """Record that the command's last answer was still true at this time."""
    found = peek(command)
    if found is not None:
        _store(command, replace(found, confirmed=at, failed=0.0, problem=""))


def is_fresh(answer: Answer, floor_s: float) -> bool:
    """Return True while the answer is recent enough that the query must not be repeated."""
    age_s = time.time() - answer.known
    gap_s = max(floor_s, min(BACK_OFF * answer.took_s, LONGEST_GAP_S))
    return -floor_s < age_s < gap_s  # from the future: a clock was set back, or another host's


def _find_usable(command: Sequence[str], floor_s: float, after: float) -> Answer | None:
    """Return the cached answer if it is recent enough; None if the tool must be run.

    Raise UncertainError if the same query has failed a moment ago.
    """
    found, now = peek(command), time.time()
    if found is None:
        return None
    if found.asked and (found.known >= after or after > now) and is_fresh(found, floor_s):
        return found
    wait_s = min(floor_s, max(RETRY_S, min(2 * found.took_s, LONGEST_GAP_S)))
    if found.problem and 0 <= now - found.failed < wait_s:
        raise UncertainError(found.problem)
    return None


def _ask_now(command: Sequence[str], before: Answer) -> Answer:
    asked, begun = time.time(), time.monotonic()
    problem, text = "", ""
    try:
        result = process.run(command, env=process.tool_environment(os.environ))
        text = result.out
        # Of a job that the controller has forgotten this is the answer.
        if result.code != 0 and "invalid job id" not in result.err.lower():
            problem = f"{command[0]} failed: {result.err.strip()[:300]}"
    except VjobError as error:
        problem = str(error)
    took_s = time.monotonic() - begun
    if problem:
        _store(command, replace(before, took_s=took_s, failed=time.time(), problem=problem))
        raise UncertainError(problem)
    answer = Answer(text=text, asked=asked, took_s=took_s)
    _store(command, answer)
    return answer


# The cache.


def _key(command: Sequence[str]) -> str:
    return " ".join(command)


def _file(tool: str) -> Path:
    return index.folder() / "scheduler" / f"{os.geteuid()}-{name_controller(tool)}.{tool}.json"


def name_controller(tool: str) -> str:
    """Return a short name of the controller that the tool talks to.

    The name is a hash of the tool's path and of the cluster's name and controllers in its
    slurm.conf, since clusters with equal paths may share a home folder. If the file does not name
    them, this host's name is used.
    """
    path = shutil.which(tool, path=os.environ.get("PATH", os.defpath)) or tool
    conf = os.environ.get("SLURM_CONF", "")
    said = [path, conf, *_read_controllers(Path(conf or "/etc/slurm/slurm.conf"))]
    return hashlib.sha256("\n".join(said).encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _read_controllers(conf: Path) -> list[str]:
    try:
        text = read_text(conf, "replace")
    except (OSError, ValueError):
        return [platform.node()]
    found = re.findall(r"(?im)^\s*(?:ClusterName|SlurmctldHost|ControlMachine)\s*=.*", text)
    return found or [platform.node()]


def _read(file: Path) -> dict[str, Any]:
    """Return all answers in a file; empty if the file is missing, not ours, or damaged."""
    try:
        with open_file(file, follows=False) as handle:
            stat = os.fstat(handle.fileno())
            if stat.st_uid != os.geteuid():
                return {}
            now = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if _files.get(file, (None, {}))[0] != now:
                _files[file] = now, parse_object(handle.read(LARGEST))
            return _files[file][1]
    except OSError:
        return {}


def _parse(value: Any) -> Answer | None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    try:
        found = Answer(**value)
    except TypeError:
        return None
    numbers = (found.asked, found.confirmed, found.took_s, found.failed)
    good = all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in numbers)
    return (
        found if good and isinstance(found.text, str) and isinstance(found.problem, str) else None
    )


def _store(command: Sequence[str], answer: Answer) -> None:
    """Store the answer in the file and in memory, so that a full or read-only disk does no harm."""
    file, key = _file(command[0]), _key(command)
    _memory[f"{file} {key}"] = answer
    kept = {name: found for name, value in _read(file).items() if (found := _parse(value))}
    kept[key] = answer
    last = sorted(kept, key=lambda name: max(kept[name].known, kept[name].failed))[-MOST_KEPT:]
    oldest = time.time() - KEPT_S
    with contextlib.suppress(OSError):
        _make_folder()
        write_json(
            file,
            {n: asdict(kept[n]) for n in last if max(kept[n].known, kept[n].failed) > oldest},
            lasts=False,
        )


def _make_folder() -> None:
    for path in (index.folder(), index.folder() / "scheduler"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _turn(command: Sequence[str], floor_s: float, after: float) -> Iterator[bool]:
    """Hold the lock for a query; yield False if another command holds it too long, or has just
    stored an answer.

    The lock is released when its holder exits. If no lock file can be made, yield True.
    """
    lock = _file(command[0]).with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        yield _wait_turn(stack, lock, lambda: _find_usable(command, floor_s, after) is not None)


def _wait_turn(stack: contextlib.ExitStack, lock: Path, is_there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    try:
        _make_folder()
        while not stack.enter_context(lock_file(lock, waits=False)):
            stack.close()
            if is_there() or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    except OSError:
        pass
    return True
