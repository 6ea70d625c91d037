"""The `vjob share` command: open a run to a group, except for secrets, and close it again.

Only files with listed names may be shared (records/runfolder.py); all other files stay closed.
Listed files are searched first: a file that contains a secret of this run, or a text with the shape
of a secret, stays closed, too. Files that readers need and that contain secrets are shared as
redacted copies.
"""

from __future__ import annotations

import contextlib
import grp
import html
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from varuna_core.records.files import (
    PRIVATE_FOLDER,
    SHARED_FILE,
    SHARED_FOLDER,
    as_whole,
    list_files,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    write_json,
)
from varuna_core.records.runfolder import (
    RunFolder,
    is_shared_as_copy,
    may_share,
    may_share_folder,
    shared_copy,
)
from varuna_core.records.secrets import (
    LEAST_SECRET,
    REDACTED,
    find_drawn,
    find_secrets,
    is_secret_name,
    is_value_secret,
    redact_arguments,
    withhold,
)
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.find import is_over, view_run
from vjob.jobs.runs.owner import expect_ours
from vjob.jobs.runs.resolved import read_resolved

PIECE_BYTES = 1 << 20
OVERLAP_BYTES = 1 << 13
"""Overlap of the pieces in which a file is read, so that a secret across two pieces is found."""
MOST_READ = 1 << 24
"""Limit of bytes, over all closed files, that are searched for values of secrets."""
DRAWN = "a word that looks random"
LOOKS_SECRET = "something that looks like a secret"
DIGESTS = ("commit", "digest", "image", "checksum", "line", "hash")
"""Keys of plan.json with digests of commits and images, which are not secret."""
MOST_WORDS = 20
"""The most words of a file that `--show-what` prints."""
WHY = "only its owner decides who reads it"


@dataclass(frozen=True, kw_only=True)
class WithheldFile:
    """A file that stays closed because it contains a secret."""

    file: str
    line: int
    """First line with a secret."""
    lines: int
    """Number of lines with secrets."""
    what: str
    words: tuple[WithheldWord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WithheldWord:
    """A withheld word, described without showing it."""

    line: int
    what: str
    hint: str
    """First letters and length: enough to find the word in the file."""


@dataclass(kw_only=True)
class Sharing:
    """Files of a run that a group may read, and those that it may not."""

    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    """Closed files that are shared as redacted copies."""
    private: list[str] = field(default_factory=list)
    """Private files, and private folders as a whole."""
    held: list[WithheldFile] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """How a run is shared."""

    run: RunFolder
    group: str
    is_over: bool
    sharing: Sharing
    hidden_by: tuple[str, ...]
    """Folders above the run that the group may not traverse."""

    def as_json(self) -> dict[str, Any]:
        sharing = self.sharing
        copies = [str(shared_copy(Path(name))) for name in sharing.copies]
        return {
            "run": self.run.name,
            "folder": str(self.run.path),
            "group": self.group,
            "shared": sorted([*sharing.files, *copies]),
            "private": sorted([*sharing.private, *sharing.copies]),
            "held": [asdict(held) for held in sharing.held],
            "hidden_by": list(self.hidden_by),
        }


def share_run(run: RunFolder, group: str, *, is_preview: bool, anyway: bool) -> Shared:
    """Open the run to a group; with `anyway`, also the files in which secrets were found."""
    expect_ours(run, WHY)
    number = find_group(group)
    ended = is_over(view_run(run))
    with _explain(run):
        secrets = Secrets(run)
        sharing = collect_shareable(run, secrets, anyway=anyway)
        if not is_preview:
            _apply(run, sharing, number, secrets)
        hidden_by = _open_parents(run, number, is_preview=is_preview)
    return Shared(run=run, group=group, is_over=ended, sharing=sharing, hidden_by=tuple(hidden_by))


def close_run(run: RunFolder) -> int:
    """Make the run private to its owner; return the number of remaining files."""
    expect_ours(run, WHY)
    with _explain(run):
        os.chmod(run.path, PRIVATE_FOLDER)
        count = 0
        for folder, names, files in os.walk(run.path):
            for name in names:
                _close(Path(folder, name))
            for name in files:
                path = Path(folder, name)
                if path.name.endswith(".shared.json"):
                    path.unlink()
                else:
                    _close(path)
                    count += 1
        above = run.path.parent
        others = (other for other in list_files(above) if other.is_dir() and not other.is_symlink())
        mode = stat.S_IMODE(above.stat().st_mode)
        if mode == 0o710 and not any(other.stat().st_mode & 0o077 for other in others):
            os.chmod(above, PRIVATE_FOLDER)
    return count


def find_group(name: str) -> int:
    """Return the id of one of the user's groups; InputError lists those groups."""
    mine = {os.getegid(), *os.getgroups()}
    try:
        number = grp.getgrnam(name).gr_gid
    except KeyError:
        found = as_whole(name)
        number = found if found is not None and found < 10**9 else -1
    if number >= 0 and (number in mine or os.geteuid() == 0):
        return number
    known = []
    for one in sorted(mine):
        with contextlib.suppress(KeyError):
            known.append(grp.getgrgid(one).gr_name)
    what = "you are not a member" if number >= 0 else "there is no such group"
    raise InputError(f"--group {name}: {what}; your groups are {', '.join(known) or 'unnamed'}")


# What may be shared.


def collect_shareable(run: RunFolder, secrets: Secrets, *, anyway: bool) -> Sharing:
    """Sort the run's files into shared, private and withheld ones, without changing any."""
    sharing = Sharing()
    for name, is_folder in _list_entries(run.path):
        if is_folder:
            (sharing.folders if may_share_folder(name) else sharing.private).append(name)
        elif is_shared_as_copy(name):
            sharing.copies.append(name)
        elif name.endswith(".shared.json"):
            pass
        elif not may_share(name):
            sharing.private.append(name)
        else:
            held = None if anyway else secrets.find_in(run.path / name, name)
            if held is None:
                sharing.files.append(name)
            else:
                sharing.held.append(held)
    return sharing


def is_written(name: str) -> bool:
    """Return True for a file written by people, where each word is checked for randomness.

    A log has too many harmless random-looking words for that.
    """
    return name in ("conf.yaml", "resolved.yaml", "code.diff", "packages.txt")


def _list_entries(top: Path, below: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (path in the run folder, True for a folder), without the content of private folders."""
    with os.scandir(top / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{below}{entry.name}"
        if entry.is_symlink():
            continue
        is_folder = entry.is_dir()
        yield name, is_folder
        if is_folder and may_share_folder(name):
            yield from _list_entries(top, f"{name}/")


class Secrets:
    """The values of a run's secrets, collected from its closed files."""

    def __init__(self, run: RunFolder) -> None:
        self._names: dict[str, str] = {}
        """Name of each secret value; empty if not known."""
        self._folders = find_known_folders(run)
        passed, left = _read_passed(run), MOST_READ
        for name, is_folder in _list_entries(run.path):
            if is_folder or may_share(name) or not name.endswith((".json", ".sh")):
                continue
            with contextlib.suppress(OSError), open_file(run.path / name, follows=False) as handle:
                data = handle.read(left)
                left -= len(data)
                value = parse_json(data) if name.endswith(".json") else None
                if value is None:
                    value = data.replace(b"\0", b"").decode(errors="replace")
                self._collect(value, "", passed)

    def _collect(self, value: object, name: str, passed: frozenset[str]) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self._collect(inner, str(key), passed)
        elif isinstance(value, list):
            for flag, item in zip(["", *value], value, strict=False):
                is_flag = isinstance(flag, str) and flag.startswith("-")
                self._collect(item, flag if is_flag else name, passed)
        elif isinstance(value, str) and value:
            is_known = is_secret_name(name) or name in passed
            if is_known and is_value_secret(name, value):
                self._names[value] = name
            for found in find_secrets(value):
                if len(found) >= LEAST_SECRET:
                    self._names.setdefault(found, "")

    def find_in(self, path: Path, name: str) -> WithheldFile | None:
        """Search a file for these values, and for texts with the shape of a secret."""
        lines: dict[int, WithheldWord] = {}
        is_drawn = is_written(name)
        for text, first in _read_pieces(path):
            found = dict.fromkeys(find_drawn(text, self._folders) if is_drawn else (), DRAWN)
            found.update(dict.fromkeys(find_secrets(text, in_output=True), LOOKS_SECRET))
            for value, of in self._names.items():
                for spelled in {value, json.dumps(value)[1:-1], html.escape(value)}:
                    if spelled in text:
                        found[spelled] = f"the value of {of}" if of else LOOKS_SECRET
            for hit, what in found.items():
                at = text.find(hit)
                while at >= 0:
                    line = first + text.count("\n", 0, at)
                    hint = f"{hit[:2]}... ({len(hit)} characters)"
                    lines.setdefault(line, WithheldWord(line=line, what=what, hint=hint))
                    at = text.find(hit, at + len(hit) or 1)
        if not lines:
            return None
        words = tuple(lines[line] for line in sorted(lines))
        return WithheldFile(
            file=name, line=words[0].line, lines=len(words), what=words[0].what, words=words
        )

    def hide(self, path: Path) -> Any:
        """Return the parsed file with secrets redacted, None if it is too large.

        All values of an environment are redacted. Of files in `state`, which have the address where
        ranks meet, only times are kept: whoever reaches that port may talk to the ranks.
        """
        try:
            value = parse_json(read_bytes(path, MOST_READ))
        except OSError:
            value = None
        if path.parent.name == "state":
            return {key: value[key] for key in ("time", "opened") if key in (value or {})}
        return self._hide(value, "")

    def _hide(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            if name in ("env", "defaults"):
                return dict.fromkeys(value, REDACTED)
            return {key: self._hide(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list):
            if name in ("args", "command") and all(isinstance(item, str) for item in value):
                value = redact_arguments(value)
            flags = ["", *value][: len(value)]
            return [
                self._hide(item, flag if isinstance(flag, str) and flag.startswith("-") else name)
                for flag, item in zip(flags, value, strict=True)
            ]
        if not isinstance(value, str):
            return value
        if is_secret_name(name) and is_value_secret(name, value):
            return REDACTED
        for secret in sorted({*self._names, *find_secrets(value)}, key=len, reverse=True):
            value = value.replace(secret, REDACTED)
        return value if name in DIGESTS else withhold(value, self._folders)


def find_known_folders(run: RunFolder) -> frozenset[str]:
    """Return the folder names in the paths of record.json, which are shown to others: that file is
    shared as it is."""
    record = read_json(run.record)
    values = record.values() if isinstance(record, dict) else ()
    paths = [str(run.path), *(value for value in values if isinstance(value, str))]
    parts = (part for path in paths if path.startswith("/") for part in path.split("/"))
    return frozenset(part for part in parts if len(part) >= LEAST_SECRET)


def _read_passed(run: RunFolder) -> frozenset[str]:
    """Return the names of the variables that the conf's `pass_env` passes to the ranks."""
    passed = read_resolved(run).get("pass_env")
    return frozenset(map(str, passed)) if isinstance(passed, list) else frozenset()


def _read_pieces(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the text of a file in overlapping pieces, each with the number of its first line."""
    with open_file(path, follows=False) as handle:
        number, rest = 1, b""
        while data := handle.read(PIECE_BYTES):
            piece = rest + data
            yield piece.decode(errors="replace"), number
            rest = piece[-OVERLAP_BYTES:]
            number += piece.count(b"\n") - rest.count(b"\n")


# Modes.


def _apply(run: RunFolder, sharing: Sharing, group: int, secrets: Secrets) -> None:
    """Set the modes: private files first, then shared ones, each folder after its content."""
    for name in (*sharing.private, *sharing.copies, *(held.file for held in sharing.held)):
        _close(run.path / name)
    for name in sharing.copies:
        copy = shared_copy(run.path / name)
        found = os.stat(run.path / name)
        write_json(copy, secrets.hide(run.path / name))
        os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))  # when the attempt began
        _set(copy, group, SHARED_FILE)
    for name in sharing.files:
        _set(run.path / name, group, SHARED_FILE)
    for name in reversed(["", *sharing.folders]):
        _set(run.path / name, group, SHARED_FOLDER)


def _close(path: Path) -> None:
    _set(path, None, None)


def _set(path: Path, group: int | None, mode: int | None) -> None:
    """Give a file or folder to a group with this mode, or make it private to its owner.

    Missing files and those of other users are left unchanged.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() and os.geteuid() != 0:
                return
            if group is not None and found.st_gid != group:
                os.fchown(fd, -1, group)
            os.fchmod(fd, stat.S_IMODE(found.st_mode) & 0o700 if mode is None else mode)
        finally:
            os.close(fd)


def _open_parents(run: RunFolder, group: int, *, is_preview: bool) -> list[str]:
    """Let the group traverse a private log folder; return the folders that still hide the run.

    The group cannot list the names in the log folder.
    """
    above = run.path.parent
    found = above.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077 and not is_preview:
        os.chown(above, -1, group)
        os.chmod(above, 0o710)
    hiding = []
    for folder in reversed(run.path.parents):
        found = folder.stat()
        bit = stat.S_IXGRP if found.st_gid == group else stat.S_IXOTH
        is_opened = is_preview and folder == above and not found.st_mode & 0o077
        if not found.st_mode & bit and not is_opened:
            hiding.append(str(folder))
    return hiding


@contextlib.contextmanager
def _explain(run: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VjobError(
            f"{error.filename or run.path}: {error.strerror}; files that were not shared before "
            "stay private"
        ) from None


def render_what(shared: Shared) -> str:
    """List every file that would be shared, and every word for which a file is withheld."""
    said = shared.as_json()
    lines = [f"{len(said['shared'])} files are shared:"]
    lines += [f"  {name}" for name in said["shared"]]
    lines += [f"{len(said['private'])} stay private:", *(f"  {name}" for name in said["private"])]
    for held in shared.sharing.held:
        lines.append(f"{held.file} is held back because of {held.lines} of its lines:")
        for word in held.words[:MOST_WORDS]:
            lines.append(f"  line {word.line}: {word.what}, {word.hint}")
        if held.lines > MOST_WORDS:
            lines.append(f"  ... and {held.lines - MOST_WORDS} more lines")
    lines.append("nothing was changed; with --anyway the held files would be shared as they are")
    return "\n".join(lines)


def render_shared(shared: Shared, *, is_preview: bool) -> str:
    """Render what the group sees, what it does not see, and what remains to be done."""
    sharing, run = shared.sharing, shared.run
    count = len(sharing.files) + len(sharing.copies)
    does = "would be shared" if is_preview else "is shared"
    lines = [f"{run.name} {does} with group {shared.group}: {count} files"]
    private = [*sharing.private, *sharing.copies]
    lines.append(f"kept back: {', '.join(sorted(private))}")
    for held in sharing.held:
        more = f", and {held.lines - 1} more lines" if held.lines > 1 else ""
        lines.append(f"kept back: {held.file}: line {held.line} holds {held.what}{more}")
    if sharing.held:
        lines.append("check these lines; with --anyway the files are shared as they are")
    for folder in shared.hidden_by:
        lines.append(
            f"still hidden by {folder}: chmod o+x {folder}, or setfacl -m g:{shared.group}:x "
            f"{folder}"
        )
    if not shared.is_over:
        lines.append("the run goes on: later attempts' files stay private until you share it again")
    if not is_preview:
        lines.append(f"to look at the run: vjob status {run.path}")
    return "\n".join(lines)
