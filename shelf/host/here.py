"""The laptop's side of `vjob --host`: which files go along, and what becomes of the answers.

submit, try, plan, profile           with the conf's working tree
report, compare                      their page comes back
all others                           as they are, in this terminal
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import stat
import sys
import tarfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click

from vjob.jobs import process
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.programs.code.repository import Git, find_repository
from vjob.jobs.programs.code.tree import Limits, list_tree
from vjob.shelf.host.frames import add_file, read_line, write_line

CARRYING = frozenset({"submit", "try", "plan", "profile"})
PAGED = frozenset({"report", "compare"})
COMMAND = "VJOB_HOST_COMMAND"
SSH = "VJOB_SSH"
LOGIN = "VJOB_LOGIN"
"""Variable that gives the remote command the name by which this machine calls it."""
MOST = Limits(num_files=20_000, size_mb=500)
OPTIONS = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "LogLevel=ERROR")
FAILED = 255
NOT_FOUND = 127


def run_there(login: str, words: Sequence[str]) -> int:
    """Run `vjob WORDS` on the login node; return its exit code."""
    if login.startswith("-") or not login:
        raise InputError(f"--host {login}: give a machine as for ssh: LOGIN or user@LOGIN")
    conf = next((word for word in words[1:] if _is_conf(word)), None)
    if words[0] in CARRYING and conf is not None:
        folder, name = send_tree(login, Path(conf).resolve())
        return _hand_over(login, folder, [name if word == conf else word for word in words])
    if words[0] in PAGED:
        page, is_opened, rest = take_page(words)
        if page is not None:
            code = _fetch(login, rest, page)
            shown = page if code == 0 and is_opened else None
            if shown is not None and not webbrowser.open(shown.absolute().as_uri()):
                click.echo("vjob: no browser was found", err=True)
            return code
    return _hand_over(login, ".", words)


def _is_conf(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and Path(word).is_file()


def _build_ssh(login: str, option: str, *words: str) -> list[str]:
    """Return the ssh command that runs `vjob there WORDS`."""
    command = f"{_get_command()} {shlex.join(['there', *words])}"
    script = f"export {LOGIN}={shlex.quote(login)}; {command}"
    ssh = shlex.split(os.environ.get(SSH, "ssh"))
    return [*ssh, option, *OPTIONS, login, f"exec /bin/sh -c {shlex.quote(script)}"]


def _get_command() -> str:
    return os.environ.get(COMMAND, "vjob")


def _hand_over(login: str, folder: str, words: Sequence[str]) -> int:
    """Run the command in this terminal, so that Ctrl-C reaches it as on the login node."""
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    option = "-t" if has_terminal else "-T"
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        code = process.hand_over(_build_ssh(login, option, "--in", folder, "--", *words))
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts and not has_terminal:  # it ended ssh, and what runs there goes on
        return 128 + signal.SIGINT
    if code in (FAILED, NOT_FOUND):
        raise VjobError(_explain(login, code))
    return code


def _explain(login: str, code: int | None) -> str:
    if code == NOT_FOUND:
        return (
            f"{_get_command().split()[0]} was not found on {login}: install vjob there, or set "
            f"the command: export {COMMAND}=/path/to/vjob"
        )
    if code == FAILED:
        return f"no connection to {login}, or it broke; what runs there continues. Try: ssh {login}"
    return f"vjob on {login} exited with {code}; is it as new as this one?"


# Pages.


def take_page(words: Sequence[str]) -> tuple[Path | None, bool, list[str]]:
    """Return the path of the page to write on this machine (None for no page), True if the page is
    to be opened, and the words without the options for these.

    A report makes a page unless another output is asked for; a comparison makes one with -o. An
    export is written on the login node.
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
    others = [word for word in rest[1:] if word.startswith("--")]
    if page is None and rest[0] == "report" and (is_opened or not others):
        job = next((word for word in rest[1:] if not word.startswith("-")), "job")
        page = Path(f"report-{Path(job).name or 'job'}.html")
    return page, is_opened, rest


# The working tree.


def send_tree(login: str, conf: Path) -> tuple[str, str]:
    """Update the copy of a conf's working tree; return the remote folder in which the command runs,
    relative to the home folder, and the conf's name in it."""
    root, files, links = list_files(conf.parent)
    folder = Path.cwd() if Path.cwd().is_relative_to(root) else conf.parent
    name = name_tree(root)
    with process.talk(_build_ssh(login, "-T")) as ssh:
        assert ssh.stdin is not None and ssh.stdout is not None
        is_done = False
        with contextlib.suppress(BrokenPipeError):
            write_line(ssh.stdin, name=name, files=files, links=links)
            answer = read_line(ssh.stdout)
            if answer is not None:
                send_files(login, ssh.stdin, root, files, answer["want"])
                is_done = read_line(ssh.stdout) is not None
    if not is_done:
        raise VjobError(_explain(login, ssh.returncode))
    place = folder.relative_to(root).as_posix()
    return f"vjob/{name}/{place}", os.path.relpath(conf, folder)


def send_files(
    login: str, stdin: IO[bytes], root: Path, files: dict[str, Any], wanted: Sequence[str]
) -> None:
    for name in wanted:
        if name not in files:  # whatever is there, it gets no other file
            raise VjobError(
                f"{login} asked for the file {name!r}, which was not offered; nothing was run"
            )
    with tarfile.open(fileobj=stdin, mode="w|") as tar:
        for name in wanted:
            add_file(tar, name, (root / name).read_bytes())
    stdin.close()


def _fetch(login: str, words: Sequence[str], page: Path) -> int:
    """Run a remote command, and write the page that it makes here."""
    with process.talk(_build_ssh(login, "-T", "--page", page.name, "--", *words)) as ssh:
        assert ssh.stdout is not None
        answer = read_line(ssh.stdout)
        if answer is not None:
            with tarfile.open(fileobj=ssh.stdout, mode="r|") as tar:
                for info in tar:
                    data = tar.extractfile(info)
                    if data is not None and info.name == page.name:
                        _write(page, data.read())
            sys.stdout.write(answer["said"])
            return int(answer["code"])
    raise VjobError(_explain(login, ssh.returncode))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise VjobError(f"{path} cannot be written: {error.strerror}") from None


def name_tree(root: Path) -> str:
    """Return the name of the remote folder for this working tree, the same at each submit."""
    mark = hashlib.sha256(f"{os.uname().nodename}:{root}".encode()).hexdigest()[:8]
    return f"{root.name or 'root'}-{mark}"


def list_files(folder: Path) -> tuple[Path, dict[str, tuple[int, int, str]], dict[str, str]]:
    """Return root, files and links of the working tree around a folder: what git does not ignore
    or, without git, the whole folder."""
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
