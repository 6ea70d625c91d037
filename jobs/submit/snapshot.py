"""`program.snapshot`: which code a run keeps, and a conf whose program runs from that copy.

    copy, git   program, workdir, PYTHONPATH ──► <run folder>/code/...
    auto        program, PYTHONPATH ───────────► <run folder>/code/...     workdir stays the user's

Paths of a conf are those that ranks see; in a container, mounts lead from them to files here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from varuna_core.records.files import read_json, read_text, write_atomic, write_json
from varuna_core.records.record import CodeRecord, RunRecord, format_commit
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.references import has_references
from vjob.jobs.conf.schema import OWN, JobConf, Program
from vjob.jobs.errors import InputError
from vjob.jobs.programs.code.modules import find_module
from vjob.jobs.programs.code.packages import find_editable, find_site_folders
from vjob.jobs.programs.code.repository import Git, GitError, show_name
from vjob.jobs.programs.code.state import CodeState, find_excluded, read_state
from vjob.jobs.programs.code.tree import MB, Limits, Tree, copy_tree, list_tree
from vjob.jobs.submit.build_plan import PlanContext, parse_mount

AUTO = Limits(num_files=500, size_mb=20)
"""Limits within which a submit's copy is not noticeable, on a shared file system too."""
MOST = Limits(num_files=20_000, size_mb=500)
AUTO_KINDS = (*OWN, "deepspeed")
"""Users' programs that `auto` may copy; a Megatron-LM checkout is large and rarely edited."""
COPIED_KINDS = (*AUTO_KINDS, "megatron")
CODE = (".py", ".sh", ".bash")
NAMED = 3
"""Files named in a note."""
_PATH = "PYTHONPATH"
SAFE_PATH = 11
"""Python 3.11 has -P, which keeps `python -m` from importing from its current folder first."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The copy of the user's code that a run keeps."""

    state: CodeState = field(default_factory=CodeState)
    kept: str = ""
    """`copy` or `git` if files are copied, else empty."""
    tree: Tree | None = None
    """The files to copy."""
    root: Path = Path()
    """The tree's root in the user's folders, even if an earlier run's copy is copied."""
    seen_root: Path = Path()
    """The tree's root as ranks see it."""
    program: str = ""
    """The program's file or folder, relative to the root."""
    moves_workdir: bool = False
    editable: tuple[str, ...] = ()
    """Folders of the tree that ranks import from, since packages there are installed with -e."""
    note: str = ""
    record: CodeRecord | None = None
    """Code record of the run from which the code is taken; None for the present code."""
    source: RunFolder | None = None
    """The run from which the code is taken."""

    def build_record(self) -> CodeRecord | None:
        """Return the code record; None if there is nothing to record."""
        if self.record is not None:
            return self.record
        found = self.state.build_record()
        if self.tree is None:
            return found if found is None or not self.note else replace(found, note=self.note)
        return replace(
            found or CodeRecord(root=str(self.root)),
            kept=self.kept,
            num_files=len(self.tree.files),
            size_bytes=self.tree.size_bytes,
            note=self.note,
        )

    def write(self, run: RunFolder) -> None:
        """Copy the files into the run folder, with a list of their names."""
        if self.tree is None:
            return
        must_have = self.program if self.program in self.tree.files else ""
        copied = copy_tree(self.tree, run.code, self.seen_root, must_have)
        listed = {
            "root": str(self.root),
            "seen_root": str(self.seen_root),
            "program": self.program,
            "editable": self.editable,
            "files": copied,
            "links": self.tree.links,
        }
        write_json(run.code_files, listed, lasts=False)
        if self.source is not None and self.source.code_diff.exists():
            text = read_text(self.source.code_diff, "replace")
            write_atomic(run.code_diff, text, lasts=False)


def read_snapshot(run: RunFolder, record: RunRecord, *, moves_workdir: bool) -> Snapshot | None:
    """Return the code that a run kept, for use by another run; None if the run kept none, or the
    copy is gone."""
    listed = read_json(run.code_files)
    if not isinstance(listed, dict) or record.code is None or not run.code.is_dir():
        return None
    try:
        tree = Tree(
            root=run.code,
            files=tuple(listed["files"]),
            links=tuple(listed["links"]),
            size_bytes=record.code.size_bytes,
        )
        return Snapshot(
            kept=record.code.kept,
            tree=tree,
            root=Path(listed["root"]),
            seen_root=Path(listed["seen_root"]),
            program=listed["program"],
            moves_workdir=moves_workdir,
            editable=tuple(listed["editable"]),
            record=record.code,
            source=run,
        )
    except (KeyError, TypeError):
        return None


def find_folder(conf: JobConf, base: Path) -> Path:
    """Return the local folder whose repository is the program's, else the conf's folder."""
    path = find_program(conf, base)
    if path is None or not path.exists():
        return base
    return path if path.is_dir() else path.parent


def find_program(conf: JobConf, base: Path) -> Path | None:
    """Return the local file or folder of the program; None if it is not known to be here.

    For a command, it is the first file of code that a word names.
    """
    program = conf.program
    if program.kind == "module":
        found = find_code(conf, base)
        return found[0] if found is not None else None
    if program.kind == "command":
        words = filter(None, (*program.command, *program.args))
        named = filter(None, (find_word(word, conf, base) for word in words))
        return next(filter(is_code, named), None)
    return find_here(program.path, conf, base) if program.kind in COPIED_KINDS else None


def find_code(conf: JobConf, base: Path) -> tuple[Path, Path] | None:
    """Return the local file of a conf's module, and the folder that it is imported from."""
    entries = ("", *filter(None, conf.env.get(_PATH, "").split(os.pathsep)))
    folders = [find_word(entry, conf, base) for entry in entries]
    with suppress(FileNotFoundError):  # the conf's checks say what is wrong
        return find_module(conf.program.module or "", [*filter(None, folders)])
    return None


def find_word(word: str, conf: JobConf, base: Path) -> Path | None:
    """Return the local path of the file that a word names in the ranks' working directory, or of
    the directory itself for an empty word; None if not known."""
    workdir = conf.container.workdir or conf.workdir or str(base)
    return None if has_references(word) else find_here(os.path.join(workdir, word), conf, base)


def is_code(path: Path) -> bool:
    return path.is_file() and (path.suffix in CODE or os.access(path, os.X_OK))


def take_snapshot(conf: JobConf, base: Path, environ: Mapping[str, str]) -> Snapshot:
    """Choose what is kept, without writing; InputError if a requested copy is not possible."""
    git = Git(environ)
    log_folder = Path(conf.log_folder)
    state = read_state(git, find_folder(conf, base), log_folder)
    asked = conf.program.snapshot
    if conf.program.kind not in COPIED_KINDS or asked == "none":
        return Snapshot(state=state)
    if asked == "auto" and (conf.program.kind not in AUTO_KINDS or state.repository is None):
        return Snapshot(state=state)
    path = find_program(conf, base)
    if path is None or not path.exists():  # it lies in the image
        if asked == "auto":
            return Snapshot(state=state)
        own = conf.program
        named = own.path or own.module or " ".join(own.command)
        raise InputError(
            f"program.snapshot {asked}: program.{own.kind} {named} is not on this machine, or "
            "the container does not see it; use none for a program in the image"
        )
    if asked == "auto" and conf.program.kind == "module":
        problem = _find_import_problem(conf, base, sys.executable)
        if problem:
            return Snapshot(state=state, note=f"not copied: {problem}")
    if asked == "git":
        _require_commit(state)
    root = state.repository.root if state.repository is not None else _choose_root(conf, base, path)
    limits = AUTO if asked == "auto" else MOST
    try:
        tree = list_tree(
            git if state.repository is not None else None,
            root,
            find_excluded(root, log_folder),
            limits,
            untracked=asked != "git",
        )
    except GitError as error:
        return _decline(asked, state, str(error))
    program = find_inside(path, root)
    problem = tree.excess or _find_problem(tree, program, path)
    if problem or program is None:
        return _decline(asked, state, problem)
    found = Snapshot(
        state=state,
        kept="git" if asked == "git" else "copy",
        tree=tree,
        root=root,
        seen_root=map_to_ranks(root, conf),
        program=program,
        moves_workdir=asked != "auto",
    )
    editable = _find_editable(conf, found, sys.executable)
    notes = [_note_arguments(conf, base, found)]
    if editable and conf.setup:
        # They may set PYTHONPATH, and what a plan sets would replace that.
        notes.append("with setup, packages installed with -e are imported from the repository")
        editable = ()
    return replace(found, editable=editable, note="; ".join(filter(None, notes)))


def _find_import_problem(conf: JobConf, base: Path, python: str) -> str:
    """Return why a module cannot be imported from a copy while ranks stay in their folder."""
    found = find_code(conf, base)
    if found is None or found[1] != find_word("", conf, base):
        return ""  # by PYTHONPATH
    if conf.setup:
        return "setup may set PYTHONPATH; set program.snapshot: copy to run in the copy"
    known = [] if conf.container.image else find_site_folders(choose_python(conf, python))
    versions = [re.search(r"/python3\.(\d+)", str(folder)) for folder in known]
    if not any(match and int(match[1]) >= SAFE_PATH for match in versions):
        return "python -m imports from a copy only since Python 3.11; set program.snapshot: copy"
    return ""


def _find_editable(conf: JobConf, snapshot: Snapshot, python: str) -> tuple[str, ...]:
    container, tree = conf.container, snapshot.tree
    if tree is None or (container.image is not None and container.runtime != "none"):
        return ()
    folders = find_editable(find_site_folders(choose_python(conf, python)))
    inside = (find_inside(folder, snapshot.root) for folder in folders)
    return tuple(name for name in inside if name is not None and tree.has_folder(name))


def choose_python(conf: JobConf, python: str) -> str:
    """Return the bare ranks' interpreter with its folder; `python` runs vjob."""
    chosen = conf.program.python or python
    return chosen if "/" in chosen else shutil.which(chosen) or ""


def _choose_root(conf: JobConf, base: Path, path: Path) -> Path:
    """Return the folder to copy if there is no git repository: the folder of the program's file,
    from which a module is imported, or in which a command runs if the file is below it."""
    found = find_code(conf, base) if conf.program.kind == "module" else None
    folder = found[1] if found is not None else path if path.is_dir() else path.parent
    workdir = find_word("", conf, base) if conf.program.kind == "command" else None
    if workdir is not None and find_inside(path, workdir) is not None:
        folder = workdir
    return Path(os.path.realpath(folder))


def _find_problem(tree: Tree, program: str | None, path: Path) -> str:
    if program is None:
        return f"{path} does not lie in {tree.root}"
    if program not in tree.files and not tree.has_folder(program):
        return f"git ignores {path}, or no commit has it"
    if tree.unreadable:
        names = ", ".join(map(show_name, tree.unreadable[:NAMED]))
        return f"{len(tree.unreadable)} files cannot be read: {names}"
    return ""


def _decline(asked: str, state: CodeState, problem: str) -> Snapshot:
    """Return a snapshot without a copy; raise an error if the conf asks for one."""
    if asked == "auto":
        return Snapshot(state=state, note=f"not copied: {problem}")
    raise InputError(
        f"program.snapshot {asked}: {problem}. Let git ignore what is not code (it is then "
        "linked), or set program.snapshot: none"
    )


def _require_commit(state: CodeState) -> None:
    if state.repository is None:
        why = state.problem or "the program lies in no git repository"
        raise InputError(f"program.snapshot git: {why}; use copy, or none")
    if state.problem or not state.repository.commit:
        raise InputError(f"program.snapshot git: {state.problem or 'there is no commit yet'}")
    changed = state.changes.tracked
    if changed:
        names = ", ".join(map(show_name, changed[:NAMED]))
        more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
        raise InputError(
            f"program.snapshot git: {state.repository.root} is not as it was committed: {names}"
            f"{more} changed; commit or stash them, or use program.snapshot: copy"
        )


def _note_arguments(conf: JobConf, base: Path, snapshot: Snapshot) -> str:
    """Describe arguments that name files of the copy although ranks read the user's own files."""
    if snapshot.moves_workdir or snapshot.tree is None:
        return ""
    files = set(snapshot.tree.files)
    workdir = Path(conf.container.workdir or conf.workdir or base)
    named = []
    for word in (*conf.program.command, *conf.program.args):
        here = find_word(word, conf, base)
        if conf.program.kind == "command" and here is not None and is_code(here):
            continue
        here = find_here(str(workdir / word.rpartition("=")[2]), conf, base)
        inside = find_inside(here, snapshot.root) if here is not None else None
        if inside in files:
            named.append(word)
    if not named:
        return ""
    return f"{', '.join(named[:NAMED])} is read from {workdir}; set snapshot: copy to copy it too"


# Paths as ranks see them, and as they are here.


def find_here(path: str | None, conf: JobConf, base: Path) -> Path | None:
    """Return the local path of a file whose path is given as ranks see it; None if the file is
    inside the image."""
    if path is None:
        return None
    container = conf.container
    if container.image is None or container.runtime == "none":
        return Path(path)
    for mount in map(parse_mount, reversed(container.mounts)):
        if Path(path).is_relative_to(mount.target):
            return Path(mount.source) / Path(path).relative_to(mount.target)
    workdir = Path(conf.workdir or base)
    is_seen = container.workdir is None and Path(path).is_relative_to(workdir)
    return Path(path) if is_seen else None


def map_to_ranks(root: Path, conf: JobConf) -> Path:
    """Return a local folder as ranks see it: through the mount that holds it, or unchanged."""
    container = conf.container
    if container.image is None or container.runtime == "none" or container.workdir is None:
        return root
    for mount in map(parse_mount, reversed(container.mounts)):
        source = Path(os.path.realpath(mount.source))
        if root.is_relative_to(source):
            return Path(mount.target) / root.relative_to(source)
    return root


def find_inside(path: Path, root: Path) -> str | None:
    """Return the path relative to a tree, resolving links; None outside of the tree."""
    absolute = os.path.abspath(path)
    folder, name = os.path.split(absolute)
    for one in (os.path.join(os.path.realpath(folder), name), os.path.realpath(absolute)):
        inside = os.path.relpath(one, os.path.realpath(root))
        if inside != os.pardir and not inside.startswith(f"{os.pardir}/"):
            return inside
    return None


# A conf that runs from the copy.


def relocate(
    conf: JobConf, here: PlanContext, snapshot: Snapshot, code: Path
) -> tuple[JobConf, PlanContext]:
    """Return the conf and its plan context with the program and its imports in the copy."""
    if snapshot.tree is None:
        return conf, here
    base = Path(here.base)
    moved = _Moved(conf, base, snapshot, code)
    workdir = conf.container.workdir or conf.workdir or str(base)
    lead = ""
    if conf.program.module is not None and not snapshot.moves_workdir:
        lead = moved.find_lead(conf.program.module, workdir)
    adds = _PATH not in conf.pass_env
    changed = replace(
        conf,
        program=moved.map_program(),
        env=moved.map_env(conf.env, workdir, adds=adds, lead=lead if adds else ""),
        cluster=replace(
            conf.cluster,
            nodes=tuple(
                replace(group, env=moved.map_env(group.env, workdir))
                for group in conf.cluster.nodes
            ),
        ),
    )
    found, checkout = here.found, here.found.checkout
    if checkout is not None:
        script = moved.map_path(checkout.script)
        found = replace(found, checkout=replace(checkout, script=script))
    found = replace(found, is_led=bool(lead))
    mounts = () if conf.container.workdir else (conf.workdir or str(base), str(snapshot.root))
    passed = moved.map_env(here.environ, workdir, lead="" if adds else lead)
    here = replace(here, environ=passed, found=found, mounts=mounts)
    if not snapshot.moves_workdir:
        return changed, here
    if conf.container.image is not None and conf.container.workdir:
        inside = moved.map_path(workdir)
        return replace(changed, container=replace(conf.container, workdir=inside)), here
    return replace(changed, workdir=moved.map_path(workdir)), here


class _Moved:
    """Maps paths of the tree to those of its copy."""

    def __init__(self, conf: JobConf, base: Path, snapshot: Snapshot, code: Path) -> None:
        assert snapshot.tree is not None
        self.conf, self.base, self.snapshot, self.code = conf, base, snapshot, code
        self.tree = snapshot.tree

    def map_path(self, path: str) -> str:
        """Return the path in the copy; one that the copy lacks stays unchanged."""
        here = find_here(path, self.conf, self.base)
        inside = find_inside(here, self.snapshot.root) if here is not None else None
        if inside is None or not (inside in self.tree.files or self.tree.has_folder(inside)):
            return path
        return str(self.code) if inside == os.curdir else str(self.code / inside)

    def map_program(self) -> Program:
        """Return the program with its file, or the files in a command's words, in the copy."""
        program = self.conf.program
        if program.kind == "command":
            command, args = (tuple(map(self.map_word, w)) for w in (program.command, program.args))
            return replace(program, command=command, args=args)
        path = str(self.code / self.snapshot.program)
        return program if program.kind == "module" else replace(program, path=path)

    def map_word(self, word: str) -> str:
        """Return a word of a command, with a file of code replaced by its copy."""
        here = find_word(word, self.conf, self.base)
        inside = find_inside(here, self.snapshot.root) if here is not None else None
        if inside is None or inside not in self.tree.files or not is_code(self.tree.root / inside):
            return word
        return str(self.code / inside).replace("${", "$${")

    def find_lead(self, module: str, workdir: str) -> str:
        """Return the copy of the ranks' working directory, which is to come first on PYTHONPATH, if
        `module` is imported from that directory; else an empty text."""
        here = find_here(workdir, self.conf, self.base)
        inside = find_inside(here, self.snapshot.root) if here is not None else None
        folders = [self.tree.root / inside] if inside is not None else []
        return self.map_path(workdir) if find_module(module, folders) else ""

    def map_env(
        self, env: Mapping[str, str], workdir: str, *, adds: bool = False, lead: str = ""
    ) -> dict[str, str]:
        """Return the environment with PYTHONPATH pointing into the copy of the code.

        `lead` comes first, then the entries, then packages installed from the code in editable
        mode. Without entries, these packages are added only if `adds` is true.
        """
        entries = env.get(_PATH, "").split(os.pathsep) if env.get(_PATH) else []
        mapped = [lead] if lead else []
        for entry in entries:
            absolute = os.path.join(workdir, entry)
            moved = self.map_path(absolute)
            mapped.append(entry if moved == absolute else moved)
        if entries or adds:
            mapped += [str(self.code / folder) for folder in self.snapshot.editable]
        return {**env, _PATH: os.pathsep.join(dict.fromkeys(mapped))} if mapped else dict(env)


def describe(code: CodeRecord | None) -> str:
    """Describe in a line what a run keeps; empty if it keeps nothing."""
    if code is None:
        return ""
    size = f"{code.size_bytes / MB:.1f} MB" if code.size_bytes >= MB / 10 else "under 0.1 MB"
    words = []
    if code.kept:
        words.append(f"a copy of {code.num_files:,} files of {code.root}, {size}")
    elif code.note:
        return code.note
    commit = format_commit(code)
    words += [commit] if commit and code.kept else []
    return "; ".join([*words, code.note] if code.note else words)
