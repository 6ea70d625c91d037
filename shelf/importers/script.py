"""Collect commands, job blocks and variables from bash's recordings of scripts.

`collect` combines the recordings of one or several scripts into a `ShellConf`. A command is a
program with all words before it, or only the words before a `bash -c` or a script of the folder.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from vjob.shelf.importers.bash.passes import Variable
from vjob.shelf.importers.bash.recording import Command, Recording
from vjob.shelf.importers.bash.wrappers import locate_program

KEPT = ("apptainer", "singularity", "timeout", "nice", "ionice", "stdbuf", "sudo")
"""Wrappers that no key of the conf replaces: a command with one of them is kept word for word."""


@dataclass(kw_only=True)
class JobBlock:
    """The #SBATCH lines of one job script, or of one component of a het job, and its GRES."""

    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    gres: str | None = None
    is_het: bool = False
    """True for a component of a het job after the first."""
    file: str = ""


@dataclass(kw_only=True)
class ShellConf:
    """Everything that bash found in one or several scripts."""

    folder: str
    variables: dict[str, Variable] = field(default_factory=dict)
    blocks: list[JobBlock] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    setup: list[Command] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """Sentences on #SBATCH options that a later line gives another value."""


def collect(recordings: Sequence[Recording], folder: str) -> ShellConf:
    found = ShellConf(folder=folder)
    for top in recordings:
        for recording in _walk_recordings(top):
            found.recordings.append(recording)
            _add_blocks(recording, found)
            found.variables = {**recording.variables, **found.variables}
            found.setup += recording.setup
        found.commands += _walk(top)
    return found


def _walk_recordings(recording: Recording) -> Iterator[Recording]:
    """Yield the recording of a script and of the scripts that it starts. Leave out those inside a
    command that the conf takes over as it is, since the run executes them."""
    yield recording
    for one in recording.launches:
        if one.inner is not None and not _is_whole(one):
            yield from _walk_recordings(one.inner)


def _is_whole(command: Command) -> bool:
    before = command.texts[: locate_program(command.texts)]
    return any(posixpath.basename(text) in KEPT for text in before)


def _walk(recording: Recording, *, is_step: bool = False) -> Iterator[Command]:
    """Yield the commands that a script starts. If a command starts another script of the folder, or
    passes a text to a shell, yield the words that precede that script or shell, then the commands
    inside it."""
    for one in (part for whole in recording.launches for part in _split_components(whole)):
        before = one.words[: locate_program(one.texts)]
        is_own = is_step or any(posixpath.basename(word.text) == "srun" for word in before)
        inner = []
        if one.inner is not None and not _is_whole(one):
            inner = list(_walk(one.inner, is_step=is_own))
        if before or not inner:
            yield replace(one, words=before if inner else one.words, is_step=is_own)
        yield from inner


def _split_components(command: Command) -> Iterator[Command]:
    """Yield a command for each component of a het job for which srun names one: `srun A : B`."""
    texts = command.texts
    if posixpath.basename(texts[0]) != "srun" or ":" not in texts:
        yield command
        return
    start = 1
    for end in (*(at for at, text in enumerate(texts) if text == ":"), len(texts)):
        yield replace(command, words=(command.words[0], *command.words[start:end]), inner=None)
        start = end + 1


def _add_blocks(recording: Recording, found: ShellConf) -> None:
    """Add the options by component; those of sbatch's command come last and override the file's."""
    blocks: dict[int, JobBlock] = {}
    for option in recording.options:
        block = blocks.setdefault(
            option.component, JobBlock(is_het=option.component > 0, file=recording.file)
        )
        before = block.options.get(option.name)
        if before is not None and before[0] != option.value:
            found.replaced.append(
                f"{recording.file}:{before[1]}: --{option.name}={before[0]} is not used: "
                f"{option.file}:{option.line} says {option.value}"
            )
        block.options[option.name] = (option.value, option.line)
    gres = recording.variables.get("GRES")
    if gres is not None and gres.value and blocks:
        blocks[min(blocks)].gres = gres.value
    found.blocks += blocks.values()
