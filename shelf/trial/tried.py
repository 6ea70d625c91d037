"""What of a conf was tried, for one line of `vjob submit`: not tried since train.py changed.

    tried/<conf>.json beside the run index    good:       as of the last healthy try
                                              submitted:  as of the last submit, and its run
                                              hinted:     as of the last hint

A conf that was never tried has no file, costs a submit one look, and is never hinted at. One that
has is hinted at once for each change; not where a run of the same conf and code has ended well. The
hashes leave out what decides where a run goes and how long it is, not whether it starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from varuna_core.records import record as records
from varuna_core.records.files import PRIVATE_FOLDER, read_json, write_json
from varuna_core.records.record import CodeRecord, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.schema import Cluster, JobConf, Morph, Notify
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.runs.find import view_run
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.job import JobState
from vjob.jobs.submit.snapshot import Snapshot, find_here

MOST_BYTES = 2**20
"""Of a program that is hashed; a larger one counts by its size and time."""
PARTS = ("conf", "program", "code")

Prints = Mapping[str, str]
"""A hash for each of `PARTS`."""


def note_try(resolved: Resolved, snapshot: Snapshot, *, is_healthy: bool) -> None:
    """Remember the end of a try; a state that cannot be written is none."""
    path = _name_file(resolved)
    code = snapshot.build_record()
    prints = find_prints(resolved, code, snapshot.state.diff)
    state = _read(path)
    with suppress(OSError):
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_json(path, {**state, "good": prints if is_healthy else None}, lasts=False)


def take_hint(resolved: Resolved, run: RunFolder, code: CodeRecord | None) -> str:
    """What `vjob submit` says of a conf whose last healthy try was of something else; mostly
    nothing. Remembers the submit."""
    path = _name_file(resolved)
    state = _read(path)
    if not state:
        return ""
    prints = find_prints(resolved, code, _read_diff(run))
    text = ""
    if prints != state.get("hinted"):
        text = _find_hint(resolved, state, prints)
    state["submitted"] = {"run": str(run.path), "prints": prints}
    state["hinted"] = prints if text else state.get("hinted")
    with suppress(OSError):
        write_json(path, state, lasts=False)
    return text


def _find_hint(resolved: Resolved, state: Mapping[str, Any], prints: Prints) -> str:
    good, last = state.get("good"), state.get("submitted")
    if good == prints:
        return ""
    if isinstance(last, dict) and last.get("prints") == prints and _ended_well(last.get("run")):
        return ""
    if not isinstance(good, dict):
        return f"its last try found something: vjob try {resolved.path.name}"
    changed = next((part for part in PARTS if good.get(part) != prints[part]), "conf")
    name = Path(resolved.conf.program.path or "").name if changed == "program" else f"the {changed}"
    return f"not tried since {name} changed: vjob try {resolved.path.name}"


def _ended_well(run: object) -> bool:
    folder = RunFolder(Path(str(run)))
    record = read_record(folder)
    if record is not None and record.state == records.SUBMITTED:
        record = view_run(folder, warn=False).record  # nobody has looked since
    return record is not None and record.verdict == JobState.COMPLETED.value


def find_prints(resolved: Resolved, code: CodeRecord | None, diff: str) -> dict[str, str]:
    """Hashes of what decides whether a run starts."""
    conf = resolved.conf
    program = find_here(conf.program.path, conf, resolved.path.parent)
    # The lines on branch and untracked files are no code.
    change = "".join(line for line in diff.splitlines(True) if not line.startswith("# "))
    commit = code.commit if code is not None else ""
    return {
        "conf": _hash(repr(keep_telling(conf)).encode()),
        "program": _hash(b"" if program is None else _read_program(program)),
        "code": _hash(f"{commit}\n{change}".encode()),
    }


def keep_telling(conf: JobConf) -> JobConf:
    """Without where it runs, for how long, and who hears of it."""
    train = conf.train
    own = replace(train.checkpoint, every=0, keep=1)
    return replace(
        conf,
        name="",
        cluster=Cluster(),
        morph=Morph(),
        notify=Notify(),
        prices={},
        log_folder="",
        train=replace(train, steps=1, seed=0, log_every=1, checkpoint=own),
    )


def _read_program(path: Path) -> bytes:
    """Its content, or, of a large file or a folder, what changes with it."""
    with suppress(OSError):
        stat = path.stat()
        if path.is_file() and stat.st_size <= MOST_BYTES:
            return path.read_bytes()
        return f"{stat.st_size} {stat.st_mtime_ns}".encode()
    return b""


def _read_diff(run: RunFolder) -> str:
    with suppress(OSError):
        return run.code_diff.read_text(encoding="utf-8", errors="replace")
    return ""


def _name_file(resolved: Resolved) -> Path:
    return index.folder() / "tried" / f"{_hash(str(resolved.path).encode())[:16]}.json"


def _read(path: Path) -> dict[str, Any]:
    state = read_json(path)
    return state if isinstance(state, dict) else {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
