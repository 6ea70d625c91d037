"""List the files of a working tree that a run keeps, and copy them to the run folder.

In a repository, these are the tracked files and, with `untracked`, others that git does not ignore,
including submodules and nested clones. Ignored files (data, checkpoints, environments) are linked,
not copied, so that a program finds them at the usual place. Without git, the program's folder is
copied.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records.files import PRIVATE_FOLDER
from vjob.jobs.errors import VjobError
from vjob.jobs.programs.code.repository import Git, is_inside_any, list_files, list_ignored

MOST_LINKS = 1000
LARGEST_FOLDERS = 3
_SKIPPED = frozenset({".git", "__pycache__"})
_BLOCK_BYTES = 1 << 20
MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what may be copied."""

    num_files: int
    size_mb: int

    def __str__(self) -> str:
        return f"{self.num_files:,} files and {self.size_mb:,} MB"


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Files that a run keeps, by their names relative to `root`."""

    root: Path
    """The folder to copy from."""
    files: tuple[str, ...]
    """Regular files and symbolic links."""
    links: tuple[str, ...] = ()
    """Files and folders that git ignores, to be linked."""
    size_bytes: int = 0
    unreadable: tuple[str, ...] = ()
    excess: str = ""
    """Why the tree is too large to copy, with the largest folders; empty if it is not."""

    def has_folder(self, name: str) -> bool:
        return name == os.curdir or any(file.startswith(f"{name}/") for file in self.files)


def list_tree(
    git: Git | None, root: Path, excluded: Sequence[str], limits: Limits, *, untracked: bool = True
) -> Tree:
    """Return the files of a repository, or of a folder if `git` is None, without `excluded`."""
    links: list[str] = []
    if git is None:
        files = list(_walk(root, excluded, limits.num_files))
    else:
        files = list(_list_known(git, root, excluded, links, untracked=untracked))
    files = _leave_runs_out(files)
    return measure_tree(root, files, _choose_links(links, excluded), limits)


def _list_known(
    git: Git, root: Path, excluded: Sequence[str], links: list[str], *, untracked: bool
) -> Iterator[str]:
    listing = list_files(git, root, untracked=untracked, excluded=excluded)
    yield from (name for name in listing.files if not is_inside_any(name, excluded))
    links += list_ignored(git, root)
    for folder in listing.inner:
        if not (root / folder / ".git").exists():
            continue  # a submodule that is not checked out
        inside: list[str] = []
        names = _list_known(git, root / folder, (), inside, untracked=untracked)
        yield from (f"{folder}/{name}" for name in names)
        links += [f"{folder}/{name}" for name in inside]


def _walk(root: Path, excluded: Sequence[str], most: int) -> Iterator[str]:
    """Yield the files of a folder that are not excluded; stop after about four times `most`."""
    count = 0
    for folder, names, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        own = "" if inside == os.curdir else f"{inside}/"
        linked = [name for name in names if os.path.islink(os.path.join(folder, name))]
        names[:] = sorted(
            name
            for name in set(names) - _SKIPPED - set(linked)
            if not is_inside_any(f"{own}{name}", excluded)
        )
        yield from (f"{own}{name}" for name in [*files, *linked])
        count += len(files)
        if count > 4 * most:
            return


def _leave_runs_out(files: Sequence[str]) -> list[str]:
    """Return the files without the run folders of other confs, which are recognized by their agent
    and record."""
    agents = {os.path.dirname(name) for name in files if name.endswith("/agent.pyz")}
    known = set(files) if agents else set()
    runs = [folder for folder in agents if f"{folder}/record.json" in known]
    return [name for name in files if not is_inside_any(name, runs)] if runs else list(files)


def _choose_links(names: Sequence[str], excluded: Sequence[str]) -> tuple[str, ...]:
    kept = [
        name
        for name in names
        if not name.endswith(".pyc")
        and _SKIPPED.isdisjoint(name.split("/"))
        and not is_inside_any(name, excluded)
    ]
    return tuple(kept[:MOST_LINKS])


def measure_tree(root: Path, files: Sequence[str], links: tuple[str, ...], limits: Limits) -> Tree:
    """Return the existing files with their size, checked against the limits."""
    if len(files) > limits.num_files:
        counts = Counter(map(_name_top, files))
        excess = _explain_excess(root, f"{len(files):,} files", limits, counts, "files")
        return Tree(root=root, files=tuple(files), links=links, excess=excess)
    found, sizes, unreadable = [], Counter[str](), []
    for name in files:
        path = os.path.join(root, name)
        try:
            status = os.lstat(path)
        except OSError:
            continue  # deleted, and not committed yet
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            continue
        found.append(name)
        sizes[_name_top(name)] += status.st_size
        if stat.S_ISREG(status.st_mode) and not os.access(path, os.R_OK):
            unreadable.append(name)
    total = sum(sizes.values())
    excess = ""
    if total > limits.size_mb * MB:
        shares = Counter({name: -(-size // MB) for name, size in sizes.items()})
        excess = _explain_excess(root, f"{total / MB:,.0f} MB", limits, shares, "MB")
    return Tree(
        root=root,
        files=tuple(found),
        links=links,
        size_bytes=total,
        unreadable=tuple(unreadable),
        excess=excess,
    )


def _name_top(name: str) -> str:
    """Return the top folder of a file below the root, or the file itself if it is in none."""
    return name.partition("/")[0]


def _explain_excess(root: Path, what: str, limits: Limits, shares: Counter[str], unit: str) -> str:
    largest = shares.most_common(LARGEST_FOLDERS)
    named = ", ".join(f"{os.fsencode(n).decode(errors='replace')} {c:,} {unit}" for n, c in largest)
    return f"{root} has {what}, but at most {limits} are copied; most of it is in {named}"


def copy_tree(tree: Tree, target: Path, outside: Path, must_have: str) -> list[str]:
    """Copy the files and link what git ignores; return the names of the copies.

    `outside` is the root as ranks see it. A file that vanishes meanwhile was deleted, and is
    skipped; without `must_have` there is nothing to run. Modes and times are kept; folders are
    readable only by their owner.
    """
    made: set[str] = set()
    copied = []
    target.mkdir(mode=PRIVATE_FOLDER)
    for name in tree.files:
        if _copy_file(tree.root, target, name, outside, made):
            copied.append(name)
    if must_have and must_have not in copied:
        raise VjobError(f"{tree.root / must_have} vanished while it was copied; submit again")
    for name in tree.links:
        _make_parent(target, name, made)
        try:
            os.symlink(outside / name, target / name)
        except FileExistsError:  # ignored, but committed
            continue
    return copied


def _copy_file(root: Path, target: Path, name: str, outside: Path, made: set[str]) -> bool:
    """Copy a file; return False if it was deleted meanwhile."""
    source = root / name
    try:
        status = os.lstat(source)
        if stat.S_ISLNK(status.st_mode):
            text = place_link(os.readlink(source), name, root, outside)
            _make_parent(target, name, made)
            os.symlink(text, target / name)
            return True
        file = open(source, "rb", 0)  # noqa: SIM115  # only errors of reading are caught
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise VjobError(
            f"{source} cannot be copied: {error.strerror}; nothing was submitted. Make it "
            "readable, let git ignore it, or run without a copy: program.snapshot: none"
        ) from None
    _make_parent(target, name, made)
    with file, open(target / name, "xb") as copy:
        shutil.copyfileobj(file, copy, min(status.st_size + 1, _BLOCK_BYTES))
        copy.flush()
        os.fchmod(copy.fileno(), stat.S_IMODE(status.st_mode) & 0o777)
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return True


def _make_parent(target: Path, name: str, made: set[str]) -> None:
    parent = os.path.dirname(name)
    if parent not in made:
        os.makedirs(target / parent, mode=PRIVATE_FOLDER, exist_ok=True)
        made.add(parent)


def place_link(text: str, name: str, root: Path, outside: Path) -> str:
    """Return a link's target for the copy: in the copy if it is in the tree, else unchanged."""
    folder = os.path.dirname(name)
    aim = os.path.normpath(os.path.join(root, folder, text))
    inside = os.path.relpath(aim, root)
    if inside == os.pardir or inside.startswith(f"{os.pardir}/"):
        return (
            text if os.path.isabs(text) else os.path.normpath(os.path.join(outside, folder, text))
        )
    return os.path.relpath(inside, folder or os.curdir) if os.path.isabs(text) else text
