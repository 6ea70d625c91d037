"""Stacks of the ranks of a node, read with py-spy and printed in parcels for `vjob stacks`.

A parcel is one JSON value in short lines. srun passes a task's output on in pieces of about a
kilobyte, so that long lines of several nodes would end up within each other:

    vjob-parcel <key> <number>/<count> <base64>"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from varuna_core.agent.processes.proc import (
    list_below,
    list_stats,
    read_environment,
    read_stat,
)
from varuna_core.agent.processes.process import run
from varuna_core.agent.setup.site import compute_index, host_name
from varuna_core.records.files import read_json
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import AttemptFolder

PIECE_CHARS = 600
_LINE = re.compile(r"vjob-parcel (\S{1,80}) (\d{1,6})/(\d{1,6}) ([A-Za-z0-9+/=]*)")


def pack(key: str, value: Any) -> Iterator[str]:
    """Serialize a value into lines of text; `key` distinguishes it from others on the channel."""
    data = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    pieces = [data[at : at + PIECE_CHARS] for at in range(0, len(data), PIECE_CHARS)]
    for number, piece in enumerate(pieces, start=1):
        yield f"vjob-parcel {key} {number}/{len(pieces)} {piece}"


class Unpacker:
    """Restores the values that `pack` serialized, in whatever order their lines come."""

    def __init__(self) -> None:
        self._open: Dict[str, Dict[int, str]] = {}

    def add(self, line: str) -> Tuple[bool, Optional[Any]]:
        """Take a line of output; return True if the line is part of a parcel, and the parcel's
        value if this line was the last one missing.

        A damaged parcel is dropped, as if its sender had printed nothing.
        """
        match = _LINE.search(line)
        if match is None:
            return False, None
        key, number, count, piece = match.groups()
        held = self._open.setdefault(key, {})
        held[int(number)] = piece
        if set(held) != set(range(1, int(count) + 1)):
            return True, None
        del self._open[key]
        try:
            data = base64.b64decode("".join(held[at] for at in sorted(held)), validate=True)
            return True, json.loads(zlib.decompress(data))
        except (ValueError, zlib.error):
            return True, None


SPY = "py-spy"
SPY_S = 15.0
"""Time limit in seconds to read the stack of one rank, since py-spy never returns for a process
that hangs in the kernel."""
LAST_S = 3.0
"""Time limit in seconds to read the stack of one rank that is about to be ended; up to three
methods are tried."""
AT_ONCE = 4
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
MISSING = "py-spy is not on this node: `pip install py-spy` into {python}, or put it on the PATH"
REFUSED = ("permission denied", "operation not permitted", "eperm", "eacces")


def dump_nodes(
    plan: Plan,
    attempt: AttemptFolder,
    indices: Optional[Sequence[int]],
    *,
    native: bool,
    spies: Sequence[str],
) -> None:
    """Print a parcel for each rank of the nodes `indices` or, if there are none, of this node."""
    for index in indices or [_choose_own(plan, attempt)]:
        beat = read_json(attempt.beat(index))
        beat = beat if isinstance(beat, dict) else {}
        facts = {"index": index, "node": str(beat.get("host", f"node {index}"))}
        ranks = beat.get("ranks")
        if not isinstance(ranks, dict) or not ranks:
            problem = "no rank runs here" if beat else "its agent has not reported"
            _send(f"{index}", {**facts, "problem": problem})
            continue
        spy = find_spy([*spies, str(Path(plan.python).parent / SPY)])
        if spy is None:
            _send(f"{index}", {**facts, "problem": MISSING.format(python=plan.python)})
            continue
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = {
                pool.submit(dump_rank, spy, held, native): int(rank) for rank, held in ranks.items()
            }
            for job, rank in jobs.items():
                _send(f"{index}.{rank}", {**facts, "rank": rank, **job.result()})
        _send(f"{index}", {**facts, "problem": ""})


def dump_job(
    jobs: Sequence[str], hosts: Sequence[str], *, native: bool, spies: Sequence[str]
) -> None:
    """Print a parcel for each Python process of a Slurm job on this node, in a step beside the
    job's own.

    `jobs` are the ids of the job, `hosts` Slurm's names of all its nodes. Only the topmost Python
    processes of each task count; those without a rank do not count if others of their task have
    one.
    """
    name = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    facts = {"index": hosts.index(name) if name in hosts else 0, "node": name}
    found = find_job_processes(jobs, os.environ.get("SLURM_STEP_ID", ""))
    spy = find_spy(spies)
    if spy is None or not found:
        problem = MISSING.format(python=sys.executable) if found else NO_PYTHON
        _send(name, {**facts, "problem": problem})
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        dumps = [(rank, pid, pool.submit(dump_rank, spy, {"pid": pid}, native))
                 for rank, pid in found]  # fmt: skip
        for rank, pid, dump in dumps:
            _send(f"{name}.{rank}.{pid}", {**facts, "rank": rank, **dump.result()})
    _send(name, {**facts, "problem": ""})


NO_PYTHON = "no Python process of yours that belongs to the job runs here"


def find_job_processes(jobs: Sequence[str], own_step: str) -> List[Tuple[int, int]]:
    """Return rank and pid of the topmost Python processes of these Slurm jobs' local tasks."""
    tasks: Dict[Tuple[str, str], Dict[str, List[int]]] = {}
    stats = list_stats()
    here = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    for pid in stats:
        if not _runs_python(pid):
            continue
        env = read_environment(pid)
        step = env.get("SLURM_STEP_ID", "")
        if env.get("SLURM_JOB_ID") not in jobs or (own_step and step == own_step):
            continue
        if env.get("SLURMD_NODENAME", here) != here:  # another node of this very machine
            continue
        task = tasks.setdefault((step, env.get("SLURM_PROCID", "0")), {})
        task.setdefault(env.get("RANK", ""), []).append(pid)
    found = []
    for (_, number), ranks in tasks.items():
        named = {rank: pids for rank, pids in ranks.items() if rank.isdecimal()}
        for rank, pids in (named or ranks).items():
            below = list_below(pids, stats)
            own = int(rank) if rank.isdecimal() else int(number) if number.isdecimal() else 0
            found += [(own, pid) for pid in pids if pid not in below]
    return sorted(found)


def _send(key: str, value: Dict[str, Any]) -> None:
    for line in pack(key, value):
        print(line, flush=True)


def _choose_own(plan: Plan, attempt: AttemptFolder) -> int:
    """Return the index of this node: that of the agent whose heartbeat has this host's name or,
    without one, the position in Slurm's order of nodes, which is right since this step runs on the
    agents' nodes."""
    guess: int = compute_index(plan, None, os.environ)
    for index in (guess, *range(plan.num_nodes)):
        beat = read_json(attempt.beat(index))
        name = host_name(plan, index, os.environ, os.uname().nodename)
        if isinstance(beat, dict) and beat.get("host") == name:
            return int(index)
    return guess


def find_spy(candidates: Sequence[str]) -> Optional[str]:
    """Return the first py-spy that exists, else the one on the PATH."""
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    return shutil.which(SPY)


def dump_rank(
    spy: str, held: Mapping[str, Any], native: bool, timeout_s: float = SPY_S
) -> Dict[str, Any]:
    """Ask py-spy for the stacks of a rank: `threads`, or `problem` in words."""
    stat = read_stat(int(held["pid"]))
    if stat is None:
        return {"pid": int(held["pid"]), "state": "", "problem": "it has ended"}
    pid = _choose_python(int(held["pid"]))
    now = read_stat(pid) or stat
    found: Dict[str, Any] = {"pid": pid, "state": now.state}
    base = [spy, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    # Who is stopped, or hangs in the kernel, does not answer a tracer: then its memory is read as
    # it is. The same where another debugger has it already.
    calm = [*base, "--nonblocking"]
    deep = [[*base, "--native"]] if native else []
    tries = [calm] if now.state in "TtD" else [*deep, base, calm]
    said = ""
    for argv in tries:
        result = run(argv, timeout_s=timeout_s)
        if result.code == 0:
            try:
                return {**found, "threads": json.loads(result.out)}
            except ValueError:
                said = said or "py-spy's output is not JSON"
        elif result.code is None:
            said = said or f"py-spy did not answer within {timeout_s:g} s"
        else:
            said = said or shorten_error(result.err or result.out)
    return {**found, "problem": said + explain_refusal(said)}


def dump_ranks(plan: Plan, ranks: Mapping[int, int]) -> Dict[int, Dict[str, Any]]:
    """Return stacks with native frames, by rank, of ranks that are about to be ended."""
    spy = find_spy([str(Path(plan.python).parent / SPY)])
    if spy is None:
        raise FileNotFoundError(MISSING.format(python=plan.python))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {rank: pool.submit(dump_rank, spy, {"pid": pid}, True, LAST_S)
                for rank, pid in ranks.items()}  # fmt: skip
        return {rank: job.result() for rank, job in jobs.items()}


def _choose_python(pid: int) -> int:
    """Return the rank's process, or the first Python below it if a shell started it."""
    stats = list_stats()
    below = sorted(list_below([pid], stats), key=lambda one: (stats[one].started, one))
    return next((one for one in (pid, *below) if _runs_python(one)), pid)


def _runs_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def shorten_error(text: str) -> str:
    """Shorten py-spy's error to the error and its first cause."""
    told: List[str] = []
    for line in text.partition("Stack backtrace")[0].splitlines():
        words = line.strip()
        if words and not words.startswith("Caused by"):
            told.append(words.partition(": ")[2] or words)
    return ": ".join(told) or "py-spy failed without a message"


def explain_refusal(said: str) -> str:
    """Return advice if the kernel does not let py-spy read the process, else an empty text."""
    if not any(word in said.lower() for word in REFUSED):
        return ""
    try:
        scope = YAMA.read_text().strip()
    except OSError:
        scope = "0"
    if scope == "0":
        return "; the process belongs to another user, or its container hides it: try as root"
    return (
        f"; kernel.yama.ptrace_scope is {scope} on this node: its administrator can allow "
        "py-spy with sysctl kernel.yama.ptrace_scope=0"
    )
