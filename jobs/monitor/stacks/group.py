"""Group the stacks of ranks by place, the group with the fewest ranks first.

In a hang, most ranks wait at the same place; the few ranks elsewhere are the suspects. Pure;
collect.py asks the nodes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from varuna_core.records.formatting import join_numbers
from varuna_core.records.logs.tail import clean

STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waits for a disk", "Z": "ended"}
"""Process states that by themselves explain a hang."""
MAIN = "MainThread"
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
"""Address that stands for a native function without a name; it depends on where the library was
loaded."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call of a stack."""

    function: str
    file: str
    line: int

    @property
    def place(self) -> tuple[str, str]:
        """Key by which two frames are equal. It has no line numbers, which differ within a loop,
        and no addresses."""
        return ADDRESS.sub("0x", self.function), self.file


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread and its frames, the innermost first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Stack of one rank; without threads, `problem` says why."""

    rank: int
    node: str
    state: str = ""
    """The kernel's letter for the process."""
    threads: tuple[Thread, ...] = ()
    """The threads, the main thread first."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Ranks with equal stacks."""

    stacks: tuple[RankStack, ...]

    @property
    def ranks(self) -> list[int]:
        return [stack.rank for stack in self.stacks]

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(stack.node for stack in self.stacks))


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """All answers of one collection of a job's stacks."""

    run: str
    world: int
    groups: tuple[StackGroup, ...]
    failed: tuple[RankStack, ...]
    """Ranks whose stacks could not be read."""
    silent: Mapping[str, str]
    """Nodes without an answer, and why."""
    hang: str = ""
    """A sentence about the hang that the agents found: the collective, and the ranks that missed
    it."""
    queues: tuple[str, ...] = ()
    """Bytes that ranks had not read when they were found to hang, one line for each pair."""

    def as_json(self) -> dict[str, Any]:
        groups = [
            {
                "ranks": group.ranks,
                "nodes": group.nodes,
                "stacks": [asdict(stack) for stack in group.stacks],
            }
            for group in self.groups
        ]
        failed = [
            {"rank": one.rank, "node": one.node, "state": one.state, "problem": one.problem}
            for one in self.failed
        ]
        return {
            "format": 1,
            "run": self.run,
            "world": self.world,
            "groups": groups,
            "failed": failed,
            "silent_nodes": dict(self.silent),
            "hang": self.hang,
            "queues": list(self.queues),
        }


def parse_rank(value: Mapping[str, Any]) -> RankStack:
    """Parse the agent's answer for a rank; `threads` is the output of `py-spy dump --json`."""
    rank, node = int(value["rank"]), str(value.get("node", ""))
    items = [item for item in value.get("threads") or () if isinstance(item, dict)]
    threads = [thread for thread in map(_parse_thread, sorted(items, key=_order)) if thread.frames]
    problem = str(value.get("problem", ""))
    if not threads and not problem:
        problem = "py-spy saw no Python in the process"
    return RankStack(
        rank=rank,
        node=node,
        state=str(value.get("state", "")),
        threads=tuple(threads),
        problem=problem,
    )


def _parse_thread(value: Mapping[str, Any]) -> Thread:
    frames = tuple(
        Frame(
            function=clean(str(item.get("name", "?"))),
            file=clean(str(item.get("filename") or item.get("short_filename") or "?")),
            line=item["line"] if isinstance(item.get("line"), int) else 0,
        )
        for item in value.get("frames") or ()
        if isinstance(item, dict)
    )
    return Thread(name=clean(str(value.get("thread_name") or "a thread")), frames=frames)


def _order(value: Mapping[str, Any]) -> tuple[bool, int]:
    """Return the sort key of a thread: the main thread first, then the oldest, since in a fork the
    main thread may have another name."""
    number = value.get("os_thread_id")
    return value.get("thread_name") != MAIN, number if isinstance(number, int) else sys.maxsize


def group_stacks(stacks: Iterable[RankStack], *, whole: bool = False) -> list[StackGroup]:
    """Group ranks with equal stacks, the smallest group first; compare the main threads, or with
    `whole` all threads."""
    found: dict[Any, list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        threads = stack.threads if whole else stack.threads[:1]
        key = tuple(tuple(frame.place for frame in thread.frames) for thread in threads)
        # A stopped process is where it was by chance.
        found.setdefault((key, STATES.get(stack.state, "")), []).append(stack)
    groups = [StackGroup(stacks=tuple(held)) for held in found.values()]
    return sorted(groups, key=lambda group: (len(group.stacks), group.stacks[0].rank))


def render_stacks(found: Stacks, *, whole: bool = False) -> str:
    """Render stacks as text, the suspects first."""
    num_seen = sum(len(group.stacks) for group in found.groups)
    many = len(found.groups) != 1
    lines = [found.hang] if found.hang else []
    lines += [*found.queues] if found.hang else []
    if found.groups:
        lines += [
            f"{num_seen} of {found.world} ranks, {len(found.groups)} different "
            f"stack{'s' if many else ''}{', the fewest ranks first' if many else ''}"
        ]
    else:
        lines.append(f"no stack of the {found.world} ranks could be read")
    for group in found.groups:
        lines += ["", *_render_group(group, whole=whole)]
    if found.failed or found.silent:
        lines.append("")
    for problem, held in _by_problem(found.failed).items():
        state = f" ({STATES[held[0].state]})" if held[0].state in STATES else ""
        lines.append(f"not seen: {_spell_ranks(held)}{state}: {problem}")
    lines += [f"no answer: {node}: {why}" for node, why in found.silent.items()]
    return "\n".join(lines)


def _render_group(group: StackGroup, *, whole: bool) -> list[str]:
    first = group.stacks[0]
    state = f", {STATES[first.state]}" if first.state in STATES else ""
    lines = [f"{_spell_ranks(group.stacks)}{state}"]
    for number, thread in enumerate(first.threads if whole else first.threads[:1]):
        indent = "  "
        if whole:
            lines.append(f"  {thread.name}")
            indent = "    "
        for depth, frame in enumerate(thread.frames):
            where = _spell_lines(group, number) if depth == 0 else str(frame.line or "")
            place = ":".join(filter(None, (shorten_path(frame.file), where)))
            lines.append(f"{indent}{frame.function} ({place})")
    return lines


def _spell_ranks(stacks: Sequence[RankStack]) -> str:
    nodes = list(dict.fromkeys(stack.node for stack in stacks))
    shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    word = "rank" if len(stacks) == 1 else "ranks"
    return f"{word} {join_numbers(stack.rank for stack in stacks)} on {shown}"


def _spell_lines(group: StackGroup, thread: int) -> str:
    """Format the line numbers of the innermost frame: `33`, `33 (3), 35 (0-2)` if ranks differ."""
    held: dict[int, list[int]] = {}
    for stack in group.stacks:
        held.setdefault(stack.threads[thread].frames[0].line, []).append(stack.rank)
    if len(held) == 1:
        return str(next(iter(held)) or "")
    counted = sorted(held.items(), key=lambda item: (len(item[1]), item[0]))
    return ", ".join(f"{line} ({join_numbers(ranks)})" for line, ranks in counted)


def shorten_path(path: str) -> str:
    """Return the last two parts of a path; for an installed package, its path in site-packages."""
    _, mark, rest = path.rpartition("/site-packages/")
    return rest if mark else "/".join(path.split("/")[-2:])


def _by_problem(stacks: Sequence[RankStack]) -> dict[str, list[RankStack]]:
    counted = Counter(stack.problem for stack in stacks)
    return {
        problem: [stack for stack in stacks if stack.problem == problem]
        for problem, _ in sorted(counted.items(), key=lambda item: item[1])
    }
