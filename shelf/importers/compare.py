"""Compare the program's words as a conf starts it with those that bash finds in a user's
scripts."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from enum import Enum
from pathlib import Path
from typing import Any

from varuna_core.records.plan import Plan
from vjob.jobs.errors import InputError
from vjob.shelf.importers.bash.recording import Command, Word, read_script
from vjob.shelf.importers.launchers import split_groups
from vjob.shelf.importers.tree import find_entries

Words = tuple[str, ...]


class Change(Enum):
    """The kind of a difference between a conf's words and a script's."""

    MISSING = "missing"
    ADDED = "added"
    CHANGED = "changed"
    MOVED = "moved"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An option with its values that differs in conf and script, or words without an option."""

    change: Change
    script: Words
    """The script's words; empty if the conf adds some."""
    conf: Words


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two program lines and their differences."""

    place: str
    """The script's file and line, and the program that it starts there."""
    words: int
    """Number of the script's words, the program's name included."""
    open: Words
    """Words that only the job or the user knows; any value in their place counts as equal."""
    differences: tuple[Difference, ...]


def compare_program(
    plan: Plan, path: Path, environ: Mapping[str, str], args: Sequence[str] = ()
) -> Comparison:
    """Compare a plan's program line with that of a script with `args`, or of a folder of scripts.

    If several lines start the program, take the one with the fewest differences. Raise InputError
    if no line does.
    """
    ours = [word.replace("%{percent}{", "%{") for word in _open_shell(plan.command)]
    found: list[Comparison] = []
    others: list[Command] = []
    for entry in find_entries(path):
        for launch in read_script(entry, environ=environ, args=args).walk():
            places = _find_program(ours, launch)
            if places is None:
                others.append(launch)
            else:
                script, conf = launch.program[places[1] + 1 :], ours[places[0] + 1 :]
                found.append(_compare(launch, launch.program[places[1]].text, script, conf))
        if found:
            return min(found, key=lambda one: len(one.differences))
    known = ", ".join(dict.fromkeys(f"{one.where} {' '.join(one.texts[:4])}" for one in others[:3]))
    started = f"; they start {known}" if known else "; they start nothing"
    raise InputError(f"the scripts of {path} do not run {' '.join(ours[:3])}{started}")


def _open_shell(command: Sequence[str]) -> Sequence[str]:
    """Return the words of a command that `init --from` wrapped in a shell to expand variables."""
    if tuple(command[:2]) == ("bash", "-c") and command[2].startswith("exec "):
        return shlex.split(command[2])[1:]
    return command


def _find_program(ours: Sequence[str], launch: Command) -> tuple[int, int] | None:
    """Return the indices of the program's name in both lines; None if they share none."""
    names = [posixpath.basename(word.text) for word in launch.program]
    for place, word in enumerate(ours):
        name = posixpath.basename(word)
        if word.startswith("--"):
            return None  # its options have begun
        if name in names and not re.fullmatch(r"-\w+|python[0-9.]*", name):
            return place, names.index(name)
    return None


def _compare(
    launch: Command, program: str, script: Sequence[Word], conf: Sequence[str]
) -> Comparison:
    return Comparison(
        place=f"{launch.where} {program}",
        words=1 + len(script),
        open=tuple(word.text for word in script if word.is_open),
        differences=tuple(compare_words(script, conf)),
    )


def compare_words(script: Sequence[Word], conf: Sequence[str]) -> list[Difference]:
    """Return the differences by option, in the order of the lines."""
    ours = [tuple(word.text for word in group) for group in split_groups([*map(Word, conf)])]
    known = [_fill(group, ours) for group in split_groups(script)]
    found: list[tuple[Words, Words]] = []
    matcher = SequenceMatcher(None, known, ours, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            found += _pair(known[a:b], ours[c:d])
    return list(_name_changes(found))


def _fill(group: Sequence[Word], ours: Sequence[Words]) -> Words:
    """Return an option's words; if some are unknown, the conf's words that agree with the rest."""
    texts = tuple(word.text for word in group)
    if any(word.is_open for word in group):
        for other in ours:
            pairs = zip(group, other, strict=False)
            if len(other) == len(group) and all(w.is_open or w.text == text for w, text in pairs):
                return other
    return texts


def _pair(theirs: Sequence[Words], ours: Sequence[Words]) -> Iterator[tuple[Words, Words]]:
    """Pair options of the same name; yield each of the others with an empty partner."""
    left = list(ours)
    for words in theirs:
        other = next((one for one in left if _get_option(one) == _get_option(words)), ())
        if other:
            left.remove(other)
        yield words, other
    for words in left:
        yield (), words


def _get_option(words: Words) -> str:
    return words[0].partition("=")[0] if words[0].startswith("-") else ""


def _name_changes(found: Sequence[tuple[Words, Words]]) -> Iterator[Difference]:
    gone = [script for script, conf in found if not conf]
    new = [conf for script, conf in found if not script]
    for script, conf in found:
        if script and conf:
            yield Difference(change=Change.CHANGED, script=script, conf=conf)
        elif script:
            is_there = script in new
            change = Change.MOVED if is_there else Change.MISSING
            yield Difference(change=change, script=script, conf=script if is_there else ())
        elif conf not in gone:
            yield Difference(change=Change.ADDED, script=(), conf=conf)


def render_comparison(found: Comparison, quote: Callable[[Sequence[str]], str]) -> str:
    """Format the comparison for a person."""
    same = "no difference" if not found.differences else f"{len(found.differences)} differences"
    lines = [f"{found.place}, {found.words} words: {same}".replace("1 differences", "1 difference")]
    for one in found.differences:
        shown = quote(one.script or one.conf)
        if one.change is Change.CHANGED:
            shown += f"  ->  {quote(one.conf)}"
        lines.append(f"  {one.change.value:<8} {shown}")
    for word in found.open:
        lines.append(f"  open     {word}: known only to the job or to you")
    return "\n".join(lines)


def describe_comparison(found: Comparison) -> Mapping[str, Any]:
    """Return the comparison as JSON values for scripts."""
    rows = [{**asdict(one), "change": one.change.value} for one in found.differences]
    return {**asdict(found), "differences": rows, "is_equal": not rows}
