"""Ask git about the folder of a program: commit, branch, changes, and the list of files.

git is run with a deadline and without locks, and a repository that does not answer counts as none:
keeping the code must never hold up a submit. All commands work with git 1.8.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records.secrets import redact_code
from vjob.jobs import process
from vjob.jobs.errors import VjobError

GIT_S = 4.0
"""Time limit in seconds for all git commands of a submit."""
MOST_DIFF_BYTES = 1 << 20
MOST_UNTRACKED = 1000
"""The most untracked names listed in code.diff."""
# What a git hook or alias leaves behind would point git at another repository.
_MISLEADING = frozenset(
    f"GIT_{name}"
    for name in (
        *("DIR", "WORK_TREE", "INDEX_FILE", "PREFIX", "COMMON_DIR", "NAMESPACE"),
        *("OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES", "EXTERNAL_DIFF", "DIFF_OPTS"),
        *("LITERAL_PATHSPECS", "GLOB_PATHSPECS", "NOGLOB_PATHSPECS", "ICASE_PATHSPECS"),
    )
)


class GitError(VjobError):
    """Raised if git is missing, too slow, or refuses the repository; the message says which."""


class Git:
    """Runs git commands, all of them within `limit_s`."""

    def __init__(self, environ: Mapping[str, str], limit_s: float = GIT_S) -> None:
        self._env = {name: value for name, value in environ.items() if name not in _MISLEADING}
        self._env.update(LC_ALL="C", GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0")
        self._end = time.monotonic() + limit_s

    def ask(self, folder: Path, *words: str) -> str:
        """Run git and return its output; bytes that are not UTF-8 are kept (os.fsdecode)."""
        left = max(self._end - time.monotonic(), 0.1)
        command = ["git", "-C", str(folder), *words]
        try:
            done = process.run(command, env=self._env, timeout_s=left, errors="surrogateescape")
        except VjobError as error:
            raise GitError(str(error)) from None
        if done.code != 0:
            raise GitError(_explain(done.err))
        return done.out

    def read_start(self, folder: Path, *words: str, most: int) -> tuple[str, bool]:
        """Return the first bytes of git's output, and True if there was more."""
        left = max(self._end - time.monotonic(), 0.1)
        command = ["git", "-C", str(folder), *words]
        try:
            data, is_whole = process.run_start(command, most, env=self._env, timeout_s=left)
        except VjobError as error:
            raise GitError(str(error)) from None
        return data.decode(errors="replace"), not is_whole


def _explain(text: str) -> str:
    """Return git's own reason, in one line."""
    lines = [line for line in text.splitlines() if line.startswith(("fatal:", "error:"))]
    return " ".join((lines or text.splitlines() or ["git failed"])[0].split())


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A git working tree."""

    root: Path
    commit: str
    """The commit; empty before the first one."""
    branch: str
    """The branch; empty if HEAD is detached."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of a working tree against its commit."""

    tracked: tuple[str, ...] = ()
    """Changed, added and deleted files that git tracks."""
    untracked: tuple[str, ...] = ()
    """Untracked files, and folders with only such files, that git does not ignore."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a working tree by git's rules, relative to its root."""

    files: tuple[str, ...]
    inner: tuple[str, ...] = ()
    """Folders that are repositories of their own: submodules and nested clones."""


def find_repository(git: Git, folder: Path) -> Repository | None:
    """Return the repository that contains a folder; None if there is none."""
    words = ("rev-parse", "--show-toplevel")
    try:
        answer = git.ask(folder, *words, "HEAD", "--abbrev-ref", "HEAD")
    except GitError as error:
        if _has_no_tree(str(error)):
            return None
        if "HEAD" not in str(error):
            raise
        return Repository(
            root=Path(git.ask(folder, *words).removesuffix("\n")), commit="", branch=""
        )
    root, commit, branch = answer.removesuffix("\n").rsplit("\n", 2)
    return Repository(root=Path(root), commit=commit, branch="" if branch == "HEAD" else branch)


def _has_no_tree(message: str) -> bool:
    return "not a git repository" in message or "must be run in a work tree" in message


def read_changes(git: Git, root: Path, excluded: Sequence[str] = ()) -> Changes:
    """Return the changes of a working tree, except in the folders `excluded`."""
    words = ("status", "--porcelain", "-z", "--untracked-files=normal")
    return parse_status(git.ask(root, *words, "--ignore-submodules=untracked"), excluded)


def parse_status(text: str, excluded: Sequence[str] = ()) -> Changes:
    """Parse the output of `git status --porcelain -z`."""
    tracked, untracked = [], []
    words = iter(text.split("\0"))
    for word in words:
        if not word:
            continue
        state, name = word[:2], word[3:]
        if "R" in state or "C" in state:
            next(words, None)  # the name that it had
        if state == "??":
            if not is_inside_any(name.rstrip("/"), excluded):
                untracked.append(name)
        elif state != "!!":
            tracked.append(name)
    return Changes(tracked=tuple(tracked), untracked=tuple(untracked))


def is_inside_any(name: str, folders: Iterable[str]) -> bool:
    """Return True for a name that is, or lies in, one of the folders, all with the same root."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def list_files(git: Git, root: Path, *, untracked: bool, excluded: Sequence[str] = ()) -> Listing:
    """Return tracked files and, with `untracked`, other files that git does not ignore."""
    words = ["ls-files", "-z", "-t", "-s", "-c"]
    if untracked:
        words += ["-o", "--exclude-standard"]
        words += [f"--exclude=/{escape_pattern(folder)}/" for folder in excluded]
    return parse_listing(git.ask(root, *words))


def parse_listing(text: str) -> Listing:
    """Parse the output of `git ls-files -z -t -s -c -o`."""
    files: dict[str, None] = {}
    inner: dict[str, None] = {}
    for word in text.split("\0"):
        tag, _, rest = word.partition(" ")
        if not rest:
            continue
        if tag == "?":
            name, mode = rest, ""
        else:
            facts, _, name = rest.partition("\t")
            mode = facts.split(" ")[0]
        if mode == "160000" or name.endswith("/"):
            inner[name.rstrip("/")] = None
        else:
            files[name] = None  # once, though a merge has it in several stages
    return Listing(files=tuple(files), inner=tuple(inner))


def escape_pattern(name: str) -> str:
    """Escape a path to an ignore pattern that matches only this path."""
    return "".join(f"\\{char}" if char in "\\*?[ !#" else char for char in name)


def list_ignored(git: Git, root: Path) -> tuple[str, ...]:
    """List what git ignores: files, and folders that it ignores as a whole, without a final /."""
    words = ("ls-files", "-z", "-o", "-i", "--exclude-standard", "--directory")
    return tuple(name.rstrip("/") for name in git.ask(root, *words).split("\0") if name)


def read_diff(git: Git, repository: Repository, most: int = MOST_DIFF_BYTES) -> str:
    """Return tracked changes as a patch without secrets; a long one is cut, with a note."""
    if not repository.commit:
        return ""
    words = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--")
    text, is_cut = git.read_start(repository.root, *words, most=most)
    if is_cut:
        text = (
            f"{text[: text.rfind(chr(10)) + 1]}# cut here: the diff is longer than {most:,} bytes\n"
        )
    return redact_code(text)


def render_diff(repository: Repository, changes: Changes, diff: str) -> str:
    """Render code.diff: folder, commit and branch, names of untracked files, and the patch."""
    branch = f" on {repository.branch}" if repository.branch else ""
    lines = [f"# {os.fsencode(repository.root).decode(errors='replace')}"]
    lines.append(f"# against {repository.commit or 'nothing'}{branch}; secrets are hidden")
    lines += [f"# untracked: {name}" for name in map(show_name, changes.untracked[:MOST_UNTRACKED])]
    more = len(changes.untracked) - MOST_UNTRACKED
    lines += [f"# and {more:,} more untracked"] if more > 0 else []
    return "\n".join(lines) + "\n" + diff


def show_name(name: str) -> str:
    """Return a file name on one line, in printable characters."""
    shown = os.fsencode(name).decode(errors="replace")
    return shown if shown.isprintable() else repr(shown)
