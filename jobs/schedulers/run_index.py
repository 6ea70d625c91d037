"""Per-user index of runs and jobs, so that JOB works from any folder.

Each run or job is one line of $XDG_STATE_HOME/vjob/runs.jsonl, appended under a lock. The index is
only a shortcut: a run that it lacks is still found by path, and through the links in a log folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from varuna_core.records.files import append_line, lock_file, open_file, read_lines
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError


def folder() -> Path:
    """Return the folder of the index."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local/state")
    return Path(base) / "vjob"


def _file() -> Path:
    return folder() / "runs.jsonl"


def _lock() -> AbstractContextManager[bool]:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    return lock_file(folder() / "lock")


def check_readable() -> None:
    """Raise VjobError if the index exists and cannot be read; a missing index means no runs."""
    try:
        open_file(_file()).close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise VjobError(
            f"the index of your runs, {_file()}, cannot be read: {error.strerror}; set "
            "XDG_STATE_HOME to a folder of your own, or name a run by its folder"
        ) from None


def _entries() -> list[dict[str, Any]]:
    """Return the entries of the index; an entry without a path reserves a job number."""
    entries = [entry for entry in read_lines(_file()) if isinstance(entry, dict)]
    return [one for one in entries if isinstance(one.get("path"), str) or set(one) == {"number"}]


def add_run(run: RunFolder, name: str, sweep: str = "") -> None:
    entry = {"run": run.name, "name": name, "path": str(run.path)}
    with _lock():
        append_line(_file(), {**entry, "sweep": sweep} if sweep else entry)


def add_job(run: RunFolder, job: str) -> None:
    with _lock():
        append_line(_file(), {"job": job, "path": str(run.path)})


def next_local_job() -> str:
    """Return and reserve this user's next local job id: L1, L2, ..."""
    with _lock():
        numbers = [
            int(entry["number"]) for entry in _entries() if isinstance(entry.get("number"), int)
        ]
        number = max(numbers, default=0) + 1
        append_line(_file(), {"number": number})
    return f"L{number}"


def find_job(job: str) -> RunFolder | None:
    return _find("job", job)


def find_run(run: str) -> RunFolder | None:
    return _find("run", run)


def find_latest(name: str | None) -> RunFolder | None:
    """Return the newest run, with this name if one is given; None if there is none."""
    return _find("name", name)


def list_newest() -> Iterator[RunFolder]:
    """Yield every known run whose folder still exists, newest first, checking folders lazily."""
    for path in dict.fromkeys(str(x["path"]) for x in reversed(_entries()) if "run" in x):
        if Path(path).is_dir():
            yield RunFolder(Path(path))


def find_sweep(sweep: str) -> list[RunFolder]:
    """Return the runs of a sweep whose folders still exist, in order of submission."""
    paths = dict.fromkeys(str(x["path"]) for x in _entries() if x.get("sweep") == sweep)
    return [RunFolder(Path(path)) for path in paths if Path(path).is_dir()]


def list_sweeps() -> list[str]:
    """Return the names of all sweeps with a run whose folder still exists, oldest first."""
    names = {
        str(entry["sweep"]): None
        for entry in _entries()
        if entry.get("sweep") and Path(str(entry["path"])).is_dir()
    }
    return list(names)


def list_runs() -> list[RunFolder]:
    """Return every known run whose folder still exists, oldest first."""
    paths = dict.fromkeys(str(entry["path"]) for entry in _entries() if "run" in entry)
    return [RunFolder(Path(path)) for path in paths if Path(path).is_dir()]


def list_removed(name: str | None, than: RunFolder | None = None) -> list[str]:
    """Return the runs whose folders no longer exist, newest first; only those with this name or run
    id, if given.

    With `than`, return only runs that are newer than that run.
    """
    found: list[str] = []
    for entry in reversed(_entries()):
        if "run" not in entry or name not in (None, entry.get("name"), entry["run"]):
            continue
        if than is not None and entry["path"] == str(than.path):
            break
        if not Path(str(entry["path"])).is_dir():
            found.append(str(entry["run"]))
    return found


def find_removed(word: str) -> Path | None:
    """Return the path that the newest run with this name, run id or job id had; None if no entry of
    the index has the word. The folder may be gone."""
    keys = ("run", "name", "job")
    paths = (str(x["path"]) for x in reversed(_entries()) if word in map(x.get, keys))
    return next(map(Path, paths), None)


def list_removed_jobs(run: str) -> frozenset[str]:
    """Return the job ids of a run whose folder no longer exists; a run of the same id in another
    folder is not included."""
    paths = {entry.get("path") for entry in _entries() if entry.get("run") == run}
    gone = {path for path in paths if not Path(str(path)).is_dir()}
    return frozenset(str(x["job"]) for x in _entries() if "job" in x and x.get("path") in gone)


def _find(key: str, value: str | None) -> RunFolder | None:
    for entry in reversed(_entries()):
        if key in entry and value in (None, entry[key]) and Path(str(entry["path"])).is_dir():
            return RunFolder(Path(str(entry["path"])))
    return None
