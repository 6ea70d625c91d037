"""The parts of a conf, from what bash recorded of scripts: commands, job blocks, variables.

`collect` turns the recordings of one or several scripts into a `ShellConf`. A command is what
stands before a `bash -c` or a script of the folder, or a program with all that stands before it.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vjob.shelf.importers.bash.recording import Launch, Recording, Word
from vjob.shelf.importers.bash.wrappers import locate_program

KEPT = ("apptainer", "singularity", "timeout", "nice", "ionice", "stdbuf", "sudo")
"""Wrappers that no key of a conf stands for: with them a command is kept word for word."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One `NAME=value`; the value is None where it is not known before the job."""

    name: str
    value: str | None
    raw: str
    line: int
    exported: bool
    file: str = ""
    shell: str = ""
    """The value as a shell in the job makes it."""
    is_added: bool = False
    """True for the text of an option or a file, not of the script itself."""


@dataclass(kw_only=True)
class JobBlock:
    """The #SBATCH lines of one job script, or of one component of a het job, and its GRES."""

    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    gres: str | None = None
    is_het: bool = False
    """A component of a het job, after its first."""
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line as bash would start it."""

    words: tuple[Word, ...]
    line: int
    file: str
    cwd: str = ""
    env: tuple[Assignment, ...] = ()
    """Variables that the script exported before the command, or set for it alone."""
    only: str = ""
    is_step: bool = False
    """Started by srun."""

    @property
    def raw(self) -> str:
        """The word as a person writes it: quoted if it is empty or has blanks."""
        texts = (word.text for word in self.words)
        return " ".join(
            shlex.quote(one) if not one or re.search(r"\s", one) else one for one in texts
        )

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(kw_only=True)
class ShellConf:
    """Everything that bash found in one or several scripts."""

    folder: str
    variables: dict[str, Assignment] = field(default_factory=dict)
    blocks: list[JobBlock] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    setup: list[Command] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)


def collect(recordings: Sequence[Recording], folder: str) -> ShellConf:
    found = ShellConf(folder=folder)
    for top in recordings:
        for recording in top.walk_recordings():
            found.recordings.append(recording)
            _add_blocks(recording, found)
            for name, one in recording.variables.items():
                found.variables.setdefault(
                    name,
                    Assignment(name=name, value=one.value, raw=one.value, line=one.line,
                               exported=one.is_exported, file=one.file),
                )  # fmt: skip
            for launch in recording.setup:
                found.setup.append(_make_command(launch, launch.words))
        for launch, words, is_step in _walk(top):
            found.commands.append(_make_command(launch, words, is_step=is_step))
    return found


def _walk(
    recording: Recording, *, is_step: bool = False
) -> Iterator[tuple[Launch, tuple[Word, ...], bool]]:
    """Launches; of one that runs a text or a script of the folder, first what stands before. With
    each, whether srun starts it."""
    for launch in recording.launches:
        before = launch.words[: locate_program(launch.texts)]
        is_own = is_step or any(posixpath.basename(word.text) == "srun" for word in before)
        is_whole = any(posixpath.basename(word.text) in KEPT for word in before)
        inner = []
        if launch.inner is not None and not is_whole:
            inner = list(_walk(launch.inner, is_step=is_own))
        if not inner:
            yield launch, launch.words, is_own
            continue
        if before:
            yield launch, before, is_own
        yield from inner


def _make_command(launch: Launch, words: tuple[Word, ...], *, is_step: bool = False) -> Command:
    env = tuple(
        Assignment(name=name, value=None if word.is_open else word.text, raw=word.text,
                   line=launch.line, exported=True, file=launch.file, shell=word.shell)
        for name, word in launch.env.items()
    )  # fmt: skip
    return Command(words=words, line=launch.line, file=launch.file, cwd=launch.cwd, env=env,
                   only=launch.only, is_step=is_step)  # fmt: skip


def _add_blocks(recording: Recording, found: ShellConf) -> None:
    """Options by component; those of the sbatch command, which come last, win over the file's."""
    blocks: dict[int, JobBlock] = {}
    for option in recording.options:
        block = blocks.setdefault(
            option.component, JobBlock(is_het=option.component > 0, file=recording.file)
        )
        block.options[option.name] = (option.value, option.line)
    gres = recording.variables.get("GRES")
    if gres is not None and gres.value and blocks:
        blocks[min(blocks)].gres = gres.value
    found.blocks += blocks.values()


def index_env(command: Command) -> Mapping[str, Assignment]:
    return {one.name: one for one in command.env}
