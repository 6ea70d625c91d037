"""Read the state of a program's working tree for the record of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from varuna_core.records.record import CodeRecord
from vjob.jobs.programs.code.repository import (
    Changes,
    Git,
    GitError,
    Repository,
    find_repository,
    read_changes,
    read_diff,
    render_diff,
)


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """Commit, branch and changes of a working tree, by git."""

    repository: Repository | None = None
    """None if there is no repository, or git does not answer."""
    changes: Changes = field(default_factory=Changes)
    problem: str = ""
    """Why git's answers are incomplete."""

    @cached_property
    def diff(self) -> str:
        """Text of code.diff, rendered once for all runs of this state."""
        return render_state(self, os.environ)

    def build_record(self) -> CodeRecord | None:
        """Return the record of the state; None without a repository."""
        if self.repository is None:
            return None
        return CodeRecord(
            root=str(self.repository.root),
            commit=self.repository.commit,
            branch=self.repository.branch,
            dirty=bool(self.changes.tracked),
            untracked=len(self.changes.untracked),
            note=self.problem,
        )


def read_state(git: Git, folder: Path, log_folder: Path) -> CodeState:
    """Read the state of the repository around a folder; run folders inside count as no changes."""
    repository = None
    try:
        repository = find_repository(git, folder)
        if repository is None:
            return CodeState()
        excluded = find_excluded(repository.root, log_folder)
        changes = read_changes(git, repository.root, excluded)
        return CodeState(repository=repository, changes=changes)
    except GitError as error:
        return CodeState(repository=repository, problem=str(error))


def find_excluded(root: Path, log_folder: Path) -> tuple[str, ...]:
    """Return the folder of runs relative to a tree, if it lies in the tree."""
    inside = os.path.relpath(os.path.realpath(log_folder), os.path.realpath(root))
    return () if inside == os.curdir or inside.startswith(os.pardir) else (inside,)


def render_state(state: CodeState, environ: Mapping[str, str]) -> str:
    """Render code.diff; empty without a repository or a change."""
    repository, changes = state.repository, state.changes
    if repository is None or not (changes.tracked or changes.untracked):
        return ""
    try:
        diff = read_diff(Git(environ), repository) if changes.tracked else ""
    except GitError as error:
        diff = f"# no diff: {error}\n"
    return render_diff(repository, changes, diff)
