"""Traces made by hand: of a simulated schedule, so that every answer is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from varuna_core.records.logs.trace import COLUMNS, FORMAT
from varuna_core.schedule.actions import Schedule
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs

MS = 1_000_000
ORIGIN = 1_700_000_000 * 1000 * MS
Event = tuple[str, int, int, int, int, int, int, int, str]
"""As COLUMNS."""


def write_rank(
    folder: Path,
    rank: int,
    events: Sequence[Event],
    *,
    stage: int = 0,
    replica: int = 0,
    shift_ns: int = 0,
    host: str = "n0",
    device: str = "A10",
    pause_ns: int = 0,
    **facts: Any,
) -> Path:
    """One rank's file; its clock is `shift_ns` ahead of rank 0's, and it knows that."""
    path = folder / "trace" / f"{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "trace": FORMAT,
        "rank": rank,
        "stages": [stage],
        "replica": replica,
        "host": host,
        "device": device,
        "origin": ORIGIN + shift_ns,
        "columns": COLUMNS,
        **facts,
    }
    lines: list[Any] = [header, {"offset": -shift_ns, "residual": 1000, "at": 0}]
    for step in sorted({event[1] for event in events}):
        own = [event for event in events if event[1] == step]
        lines += own
        sums: dict[str, list[int]] = {}
        for kind, _, _, _, _, wait, work, _, _ in own:
            found = sums.setdefault(kind, [0, 0, 0])
            sums[kind] = [found[0] + 1, found[1] + wait, found[2] + work]
        actions = [event for event in own if event[3] >= 0]
        ends = [event[4] + event[5] + event[6] for event in own]
        line = {"step": step, "begin": own[0][4], "took": max(ends) - own[0][4] + pause_ns}
        if actions:
            line["first"] = min(event[4] for event in actions)
            line["last"] = max(event[4] + event[5] + event[6] for event in actions)
        lines.append({**line, "sums": sums})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


def list_simulated(
    schedule: Schedule, costs: Costs, rank: int, *, step: int, begin_ns: int, unit_ns: int
) -> list[Event]:
    """What the rank does in one step, a cost of 1 being `unit_ns`."""
    timing = simulate(schedule, costs)
    free, events = 0.0, []
    for action, start in zip(schedule.ranks[rank], timing.starts[rank], strict=True):
        cost = costs.by_kind[action.kind][action.stage]
        begin, wait, work = (round(x * unit_ns) for x in (free, start - free, cost))
        place = (action.stage, action.microbatch)
        events.append((action.kind, step, *place, begin_ns + begin, wait, work, 0, ""))
        free = start + cost
    return events


def write_simulated(
    folder: Path,
    schedule: Schedule,
    costs: Costs | Callable[[int, int], Costs],
    *,
    steps: Sequence[int] = (10, 20, 30),
    replicas: int = 1,
    unit_ns: int = MS,
    hosts: Sequence[str] = ("n0",),
    shifts_ns: Sequence[int] = (0,),
    **facts: Any,
) -> None:
    """All ranks; those of a stage are neighbours. `costs` may be of (step, replica).

    Rank r is on host r modulo the hosts, whose clock is ahead by its shift.
    """
    for replica in range(replicas):
        for index in range(schedule.num_ranks):
            rank = index * replicas + replica
            shift = shifts_ns[rank % len(shifts_ns)]
            events, now = [], 0
            for step in steps:
                given = costs(step, replica) if callable(costs) else costs
                length = round(simulate(schedule, given).makespan * unit_ns)
                events += list_simulated(
                    schedule, given, index, step=step, begin_ns=now, unit_ns=unit_ns
                )
                now += length + unit_ns
            write_rank(
                folder,
                rank,
                events,
                stage=schedule.placement.index(index),
                replica=replica,
                host=hosts[rank % len(hosts)],
                shift_ns=shift,
                **facts,
            )


def read_rank_lines(path: Path, rank: int) -> list[str]:
    """The lines of one rank in the file of its node."""
    now, found = None, []
    for line in filter(None, path.read_text().splitlines()):
        if line.startswith('{"rank"'):
            now = json.loads(line)["rank"]
        elif now == rank:
            found.append(line)
    return found
