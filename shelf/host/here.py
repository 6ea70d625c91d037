"""The laptop's side of `vjob --host`: which files go along, and what becomes of the answers.

submit, try, plan, profile           with the conf's working tree
report, compare                      their page comes back, and so does a picture
all others                           as they are, in this terminal
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from vjob.jobs import process
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.programs.code.repository import Git, find_repository
from vjob.jobs.programs.code.tree import Limits, list_tree
from vjob.shelf.host.frames import read_frame, write_frame

CARRYING = frozenset({"submit", "try", "plan", "profile"})
PAGED = frozenset({"report", "compare"})
COMMAND = "VJOB_HOST_COMMAND"
SSH = "VJOB_SSH"
LOGIN = "VJOB_LOGIN"
"""Tells the command there what this machine calls it."""
MOST = Limits(num_files=20_000, size_mb=500)
WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Before each further connection, once one has worked."""
OPTIONS = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "LogLevel=ERROR")
FAILED = 255
NOT_FOUND = 127


@dataclass(kw_only=True)
class Talk:
    """A command there, over as many connections as it takes."""

    login: str
    said: dict[str, Any]
    """The request."""
    root: Path
    page: Path | None = None
    picture: Path | None = None
    """Where the files go that come back."""
    has_begun: bool = False
    """Somebody there has answered."""
    has_started: bool = False
    """All files are there."""
    interrupts: int = 0
    code: int | None = None
    places: dict[str, int] = field(default_factory=lambda: {"out": 0, "err": 0})


def run_there(login: str, words: Sequence[str]) -> int:
    """Run `vjob WORDS` on the login node; its exit code."""
    if login.startswith("-") or not login:
        raise InputError(f"--host {login}: name a machine as for ssh: LOGIN or user@LOGIN")
    name = words[0]
    conf = next((word for word in words[1:] if _is_conf(word)), None)
    if name in CARRYING:
        return _converse(_prepare(login, words, conf))
    if name in PAGED:
        picture, others = take_picture(words)
        page, is_opened, rest = take_page(others, is_usual=picture is None)
        if page is not None or picture is not None:
            code = _converse(_prepare(login, rest, None, page, picture))
            if (
                code == 0
                and page is not None
                and is_opened
                and not webbrowser.open(page.absolute().as_uri())
            ):
                click.echo("vjob: no browser was found", err=True)
            return code
    return _hand_over(login, words)


def _is_conf(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and Path(word).is_file()


# One command in this terminal.


def _build_ssh(login: str, *options: str) -> list[str]:
    return [*shlex.split(os.environ.get(SSH, "ssh")), *options, *OPTIONS, login]


def _get_command() -> str:
    return os.environ.get(COMMAND, "vjob")


def _hand_over(login: str, words: Sequence[str]) -> int:
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    setting = f"export {LOGIN}={shlex.quote(login)}; "
    script = f"{setting}{_get_command()} {shlex.join(words)}"
    command = _build_ssh(login, "-t" if has_terminal else "-T")
    code = process.hand_over([*command, f"exec /bin/sh -c {shlex.quote(script)}"])
    if code in (FAILED, NOT_FOUND):
        raise VjobError(_explain(login, code))
    return code


def _explain(login: str, code: int) -> str:
    if code == NOT_FOUND:
        return (
            f"{login} finds no {_get_command().split()[0]}: install vjob there, or say how to run "
            f"it: export {COMMAND}=/path/to/vjob"
        )
    if code == FAILED:
        return f"no connection to {login}, or it broke; what runs there goes on. Try: ssh {login}"
    return f"the vjob of {login} ended with {code}; is it as new as this one?"


# Pages.


def take_picture(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The picture to write here, and the words without it; without its name it is refused there."""
    picture, rest = None, []
    left = iter(words)
    for word in left:
        name = next(left, "") if word == "--png" else word.partition("=")[2]
        if name and word.partition("=")[0] == "--png":
            picture = Path(name)
        else:
            rest.append(word)
    return picture, rest


def take_page(
    words: Sequence[str], *, is_usual: bool = True
) -> tuple[Path | None, bool, list[str]]:
    """The page to write here, whether to open it, and the words without both.

    A report is a page unless something else is asked for (not `is_usual`: a picture); a comparison
    is one with -o. An export is written there.
    """
    if any(word.startswith("--export") for word in words):
        return None, False, list(words)
    page, is_opened, rest = None, False, []
    left = iter(words)
    for word in left:
        if word in ("-o", "--output"):
            page = Path(next(left, ""))
        elif word.startswith("--output="):
            page = Path(word.partition("=")[2])
        elif word.startswith("-o") and not word.startswith("--"):
            page = Path(word[2:])
        elif word == "--open":
            is_opened = True
        else:
            rest.append(word)
    others = [word for word in rest[1:] if word.startswith("--") and word != "--cdn"]
    if page is None and rest[0] == "report" and (is_opened or (is_usual and not others)):
        job = next((word for word in rest[1:] if not word.startswith("-")), "job")
        page = Path(f"report-{Path(job).name or 'job'}.html")
    return page, is_opened, rest


# A command with files.


def _prepare(
    login: str,
    words: Sequence[str],
    conf: str | None,
    page: Path | None = None,
    picture: Path | None = None,
) -> Talk:
    said: dict[str, Any] = {
        "key": uuid.uuid4().hex,
        "words": list(words),
        "name": "",
        "folder": ".",
        "files": {},
        "links": {},
        "page": "" if page is None else str(page),
        "picture": "" if picture is None else str(picture),
        "columns": shutil.get_terminal_size().columns if sys.stdout.isatty() else 0,
    }
    root = Path.cwd()
    if conf is not None:
        root, said["files"], said["links"] = list_files(Path(conf).resolve().parent)
        folder = Path.cwd() if Path.cwd().is_relative_to(root) else Path(conf).resolve().parent
        there = os.path.relpath(Path(conf).resolve(), folder)
        said["words"] = [there if word == conf else word for word in words]
        said["folder"] = folder.relative_to(root).as_posix()
        said["name"] = name_tree(root)
    return Talk(login=login, said=said, root=root, page=page, picture=picture)


def name_tree(root: Path) -> str:
    """Of the folder there: the same for each submit of this working tree, unlike any other's."""
    mark = hashlib.sha256(f"{os.uname().nodename}:{root}".encode()).hexdigest()[:8]
    return f"{root.name or 'root'}-{mark}"


def list_files(folder: Path) -> tuple[Path, dict[str, tuple[int, int, str]], dict[str, str]]:
    """Root, files and links of the working tree around a folder: what git does not ignore, or
    without git all of the folder."""
    git: Git | None = Git(os.environ)
    repository = find_repository(git, folder) if git is not None else None
    root, git = (folder, None) if repository is None else (repository.root.resolve(), git)
    tree = list_tree(git, root, (), MOST)
    if tree.excess:
        raise InputError(f"{root} is too large to copy: {tree.excess}")
    if tree.unreadable:
        raise InputError(f"{root / tree.unreadable[0]} cannot be read; nothing was sent")
    files: dict[str, tuple[int, int, str]] = {}
    links: dict[str, str] = {}
    for name in tree.files:
        path = root / name
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            if not target.startswith("/"):
                links[name] = target
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files[name] = (status.st_size, status.st_mode & 0o777, digest)
    return root, files, links


def _converse(talk: Talk) -> int:
    for wait_s in (*WAITS_S, None):
        code = _connect(talk)
        if talk.code is not None:
            return talk.code
        if talk.interrupts > 1:
            return 130
        if not talk.has_begun or wait_s is None:
            raise VjobError(_explain(talk.login, code))
        click.echo(f"vjob: the connection to {talk.login} broke; connecting again", err=True)
        time.sleep(wait_s)
    raise AssertionError("unreachable")


def _connect(talk: Talk) -> int:
    """One connection; ssh's exit code."""
    script = f"{_get_command()} there"
    command = _build_ssh(talk.login, "-T")
    with process.talk([*command, f"exec /bin/sh -c {shlex.quote(script)}"]) as ssh:
        assert ssh.stdin is not None and ssh.stdout is not None
        with _pass_interrupts_on(talk, ssh):
            with suppress(BrokenPipeError):  # that of our own output is no broken connection
                write_frame(ssh.stdin, **(talk.said | talk.places))
            while frame := read_frame(ssh.stdout):
                if not _take(talk, ssh.stdin, *frame):
                    break
    return ssh.returncode


@contextmanager
def _pass_interrupts_on(talk: Talk, ssh: subprocess.Popen[bytes]) -> Iterator[None]:
    """The first Ctrl-C is the command's there; the second one ends the connection."""

    def hear(*_: object) -> None:
        talk.interrupts += 1
        if talk.interrupts == 1 and talk.has_started and ssh.stdin is not None:
            with suppress(OSError):
                write_frame(ssh.stdin, signal="INT")
        else:
            talk.interrupts = 2
            ssh.kill()

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _take(talk: Talk, stdin: Any, head: dict[str, Any], data: bytes) -> bool:
    """False once nothing more comes."""
    talk.has_begun = True
    if "want" in head:
        for name in head["want"]:
            if name not in talk.said["files"]:  # whatever is there, it gets no other file
                raise VjobError(
                    f"{talk.login} asks for {name!r}, which was not offered; nothing ran"
                )
            with suppress(BrokenPipeError):
                write_frame(stdin, (talk.root / name).read_bytes(), file=name)
    elif "started" in head:
        talk.has_started = True
    elif "to" in head:
        stream = sys.stdout if head["to"] == "out" else sys.stderr
        stream.buffer.write(data)
        stream.flush()
        talk.places[head["to"]] = head["place"]
    elif "page" in head and talk.page is not None:
        _write(talk.page, data)
    elif "picture" in head and talk.picture is not None:
        _write(talk.picture, data)
    elif "lost" in head:
        raise VjobError(f"the command on {talk.login} ended without a word; was it rebooted?")
    elif "code" in head:
        talk.code = int(head["code"])
        return False
    return True


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise VjobError(f"{path} cannot be written: {error.strerror}") from None
