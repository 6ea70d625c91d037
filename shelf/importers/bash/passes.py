"""One pass of bash over a script: the commands that it would start, and other findings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from vjob.jobs.errors import InputError
from vjob.jobs.process import talk
from vjob.shelf.importers.bash.jail import find_tools

ROOM = Path(__file__).parent
BASH = "/bin/bash"
SHARED_MEMORY = "/dev/shm"
"""Folder for temporary files, if it exists: on a busy disk each pass would take longer."""
SECONDS = 10.0
MOST_PROCESSOR_S = 6.0
"""Limit of processor seconds for all passes of one command; an ordinary script takes 0.1 s a
pass."""
MOST_RECORDS = 500
START = (
    'builtin source "$__VJ/prelude"; cd "$__VJ_CWD"; BASH_ARGV0=$1; RANDOM=$__VJ_SEED; shift; '
    'builtin source "$__VJ/script" "$@"'
)
_DECLARED = re.compile(
    r'^declare -(?P<flags>[\w-]+) (?P<name>[A-Za-z_]\w*)=(?:"(?P<value>(?:[^"\\]|\\.)*)"'
    r'|(?P<list>\((?:\[[^\[\]]*\]="(?:[^"\\]|\\.)*" ?)*\))'
    r"|\$'(?P<special>(?:[^'\\]|\\.)*)')$",
    re.MULTILINE | re.DOTALL,
)
_ELEMENT = re.compile(r'\[[^\[\]]*\]="((?:[^"\\]|\\.)*)"', re.DOTALL)
OWN = ("OLDPWD", "PWD", "RANDOM", "PATH")
_REDIRECTION = re.compile(
    r"(?P<sign>&>>?|\d?>>?\|?)[ \t]*(?!&|\(|/dev/|\"?\$\(__vj_file)"
    r"(?P<path>\"[^\"]*\"|'[^']*'|(?:\$\([^()]*\)|[^\s;|&()<>\"'])+)"
)
_FAILURES = (
    ": No such file or directory", ": Permission denied", ": ambiguous redirect",
    ": Read-only file system", ": Is a directory",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Record:
    """A command that the script would have started."""

    words: tuple[str, ...]
    cwd: str
    is_asked: bool
    """True if a pipe or `$(...)` takes its output."""

    ends_script: bool
    """True under `set -e`, where the script ends if the command fails."""

    stdin: str
    frames: tuple[tuple[str, int], ...]
    """Files and lines of the call stack, innermost first."""

    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """The value of a variable when the script ended."""

    value: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Result of one pass of bash over a script."""

    status: int | str
    """Exit status of bash, or `timeout` or `full`."""

    error: str
    """The standard error of bash."""

    records: Sequence[Record] = ()
    notes: Sequence[tuple[str, str, str, int]] = ()
    """Notes as (kind, text, file, line); kinds are source, file, condition, cd, once, loop,
    write."""

    variables: Mapping[str, Variable] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    """Text of the files that the script wrote, by name."""

    layers: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Jail:
    """The running process of `jail`, which executes one pass after another."""

    asked: IO[bytes]
    answers: IO[bytes]
    folder: str
    """Folder with the tools, and with a scratch folder for each pass."""

    spent_s: float = 0.0
    """Processor time of the passes so far."""

    def ask(self, given: Mapping[str, object]) -> Mapping[str, object]:
        if self.spent_s > MOST_PROCESSOR_S:
            raise InputError(
                f"the script was not read to its end: bash used {self.spent_s:.0f} s of "
                "processor time for its commands; give a script that only starts the ranks"
            )
        try:
            self.asked.write(json.dumps(given).encode(errors="replace") + b"\n")
            self.asked.flush()
            answer = self.answers.readline()
        except OSError as error:
            raise InputError(f"the jail of bash ended: {error.strerror}") from None
        said: dict[str, Any] = json.loads(answer) if answer else {"why": "the jail ended by itself"}
        self.spent_s += said.get("processor_s", 0.0)
        return said


@contextlib.contextmanager
def open_jail() -> Iterator[Jail]:
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="vjob-read-", dir=place) as folder,
        talk([sys.executable, "-I", "-S", str(ROOM / "jail.py")]) as child,
    ):
        Path(folder, "bin").mkdir()
        for tool, found in find_tools().items():
            Path(folder, "bin", tool).symlink_to(found)
        assert child.stdin is not None
        assert child.stdout is not None
        yield Jail(asked=child.stdin, answers=child.stdout, folder=folder)


def run_pass(
    jail: Jail,
    text: str,
    *,
    name: str,
    folder: str,
    args: Sequence[str],
    env: Mapping[str, str],
    without: Sequence[str] = (),
    seconds: float = SECONDS,
) -> Pass:
    """Let bash read `text` like the file `name` in `folder`; raise InputError without a jail."""
    with tempfile.TemporaryDirectory(prefix="pass-", dir=jail.folder) as scratch:
        for inner in ("rec", "out", "tmp", "root"):
            Path(scratch, inner).mkdir()
        Path(scratch, "bin").symlink_to(f"{jail.folder}/bin")
        shutil.copy(ROOM / "prelude.bash", f"{scratch}/prelude")
        own = re.sub(r"\$\{BASH_SOURCE(\[0\]|\[@\])?\}|\$BASH_SOURCE\b", "${0}", text)
        Path(scratch, "script").write_text(own, encoding="utf-8", errors="surrogateescape")
        given = {
            "argv": [BASH, "--noprofile", "--norc", "-c", START, "bash", f"{folder}/{name}", *args],
            "env": {
                **env,
                "PATH": f"{scratch}/bin",
                "PWD": folder,
                "TMPDIR": f"{scratch}/tmp",
                "LC_ALL": "C.UTF-8",
                "__VJ": scratch,
                "__VJ_FOLDER": folder,
            },
            "cwd": folder,
            "scratch": scratch,
            "readable": [folder, f"{jail.folder}/bin"],
            "seconds": seconds,
            "without": list(without),
        }
        said = jail.ask(given)
        if said.get("status") in (None, "no jail"):
            why = said.get("why")
            raise InputError(
                f"{name} is not read: this machine has no jail for it ({why}). A jail needs kernel "
                "5.13 or later, or user namespaces; with --trust it runs without a jail: the "
                "programs that it names are stubs, but what bash does by itself takes effect"
            )
        return _collect(Path(scratch), said, name, folder)


def _collect(scratch: Path, said: Mapping[str, object], name: str, folder: str) -> Pass:
    own = {f"{scratch}/script": f"{folder}/{name}"}

    def place(path: str) -> str:
        return own.get(path, path)

    records = []
    for path in sorted(scratch.joinpath("rec").iterdir())[:MOST_RECORDS]:
        if not path.is_file() or path.is_symlink():
            continue
        record = _parse_record(path.read_bytes().decode(errors="replace").split("\0"), str(scratch))
        if record is not None:
            frames = tuple((place(file), line) for file, line in record[1])
            records.append(Record(frames=frames, **record[0]))  # type: ignore[arg-type]
    notes = _read(scratch / "notes").split("\0")[:-1]
    error = _read(scratch / "stderr").replace(f"{scratch}/script", name)
    variables = {}
    parts = _read(scratch / "variables").split("\0")
    lines = dict(entry.split("\n", 1) for entry in parts[1:] if entry.count("\n") >= 2)
    for found in _DECLARED.finditer(parts[0]):
        if (
            found["name"] in lines
            and not found["name"].startswith("__vj")
            and found["name"] not in OWN
        ):
            file, _, line = lines[found["name"]].rpartition("\n")
            variables[found["name"]] = Variable(
                value=_hide(_unquote(found), str(scratch)),
                file=Path(place(file)).name,
                line=int(line) if line.isdecimal() else 0,
            )
    status = said["status"]
    return Pass(
        status=status if isinstance(status, int) else str(status),
        error=error,
        records=records,
        notes=[(a, b, place(c), int(d) if d.isdecimal() else 0)
               for a, b, c, d in zip(*(iter(notes),) * 4, strict=False)],
        variables=variables,
        written={path.name: _read(path) for path in scratch.joinpath("out").iterdir()},
        layers=tuple(map(str, said.get("layers") or ())),  # type: ignore[call-overload]
    )  # fmt: skip


def _read(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(1 << 20).decode(errors="replace")


def _parse_record(
    parts: list[str], scratch: str
) -> tuple[dict[str, object], list[tuple[str, int]]] | None:
    """Return the fields of a record except its frames, and the frames; None if it is truncated."""
    try:
        count = int(parts[0])
        at = count + 6
        words, (cwd, asked, flags, stdin, num_frames) = parts[1 : count + 1], parts[count + 1 : at]
        places = parts[at : at + 2 * (int(num_frames) - 1)]
        exported = parts[at + len(places)]
    except (ValueError, IndexError):
        return None
    frames = [
        (file, int(line))
        for file, line in zip(places[::2], places[1::2], strict=False)
        if file not in (f"{scratch}/prelude", "environment", "main", "") and line.isdecimal()
    ]
    env = {found["name"]: _hide(_unquote(found), scratch) for found in _DECLARED.finditer(exported)}
    if "__VJ_PATH" in env:
        env["PATH"] = env["__VJ_PATH"]
    env = {name: value for name, value in env.items() if not name.startswith("__VJ")}
    words = [_hide(word, scratch) for word in words]
    cwd = _hide(cwd, scratch)
    state = {"is_asked": asked != "0", "ends_script": "e" in flags, "stdin": stdin}
    return {"words": tuple(words), "cwd": cwd, **state, "env": env}, frames


def _hide(text: str, scratch: str) -> str:
    """Return a text with the names of the jail's folders as the script knows them."""
    return text.replace(f"{scratch}/bin", "$PATH").replace(f"{scratch}/tmp", "@ENV:TMPDIR@")


def _unquote(found: re.Match[str]) -> str:
    """Return the value in a `declare -p` line; for an array its values separated by blanks."""
    if found["special"] is not None:
        return found["special"].encode().decode("unicode_escape", errors="replace")
    if found["list"] is not None:
        return " ".join(map(_unescape, _ELEMENT.findall(found["list"])))
    return _unescape(found["value"])


def _unescape(text: str) -> str:
    return re.sub(r'\\(["$`\\])', r"\1", text)


def find_failed(text: str, error: str) -> frozenset[int]:
    """Return the indices of lines whose redirection failed, as files may not be written.

    The line with the redirection may be another line of the same command than bash names.
    """
    lines = text.split("\n")
    found: set[int] = set()
    said = "\n".join(line for line in error.splitlines() if line.endswith(_FAILURES))
    for failed in {int(number) for number in re.findall(r"^.*?line (\d+): ", said, re.MULTILINE)}:
        near = [*range(failed - 1, min(failed + 60, len(lines))), *range(failed - 2, -1, -1)[:60]]
        changed = (at for at in near if at < len(lines) and _redirect(lines[at]) != lines[at])
        found.update(islice(changed, 1))
    return frozenset(found)


def repair(text: str, places: Collection[int]) -> str:
    """Return the text with the redirections in these lines sent to files in the scratch folder."""
    lines = text.split("\n")
    return "\n".join(_redirect(line) if at in places else line for at, line in enumerate(lines))


def _redirect(line: str) -> str:
    if line.lstrip().startswith("#"):
        return line
    return _REDIRECTION.sub(lambda m: f'{m["sign"]}"$(__vj_file {m["path"]})"', line)
