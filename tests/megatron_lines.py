"""Lines of Megatron-LM as its timers print them, and readers of the lines of its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from re import Match

_SAVING = re.compile(r"\bsaving checkpoint at iteration +(\d{1,18}) to (\S.*)")
_SAVED = re.compile(r"\bsuccessfully saved checkpoint from iteration +(\d{1,18}) to (\S.*)")
_SAVE_ENDING = re.compile(r" in \S+ format$| \[ t [^\[\]]*\]$")
"""What newer versions write behind the folder."""
_EVALUATION = re.compile(r"\bEvaluating on (\d{1,18}) samples")


def _join(times: Iterable[float]) -> str:
    return " ".join(map(repr, times))


def format_timers(
    timers: Mapping[str, Mapping[int, float]],
    calls: Mapping[tuple[str, int], tuple[Sequence[float], Sequence[float]]] | None = None,
) -> str:
    """`--timing-log-option all`: ms of each rank; `calls` adds the seed's starts and ends."""
    lines = ["times across ranks (ms):"]
    for name, ranks in timers.items():
        lines.append(f"  {name}:")
        for rank, value in ranks.items():
            lines.append(f"     rank {rank:2d}: {value:.2f}")
            if calls and (name, rank) in calls:
                starts, ends = calls[name, rank]
                lines.append(f" {name} start time lst:  {_join(starts)}")
                lines.append(f" {name} end time lst:  {_join(ends)}")
    return "\n".join(lines)


def format_timers_minmax(timers: Mapping[str, tuple[float, float]]) -> str:
    """`--timing-log-option minmax`."""
    lines = ["(min, max) time across ranks (ms):"]
    lines += [
        f"    {(name + ' ').ljust(48, '.')}: ({a:.2f}, {b:.2f})" for name, (a, b) in timers.items()
    ]
    return "\n".join(lines)


def format_timers_max(timers: Mapping[str, float]) -> str:
    """`--timing-log-option max`."""
    lines = ["max time across ranks (ms):"]
    lines += [f"    {(name + ' ').ljust(48, '.')}: {most:.2f}" for name, most in timers.items()]
    return "\n".join(lines)


def parse_saving(line: str) -> tuple[int, str] | None:
    """The step and the folder."""
    return _parse_save(_SAVING.search(line))


def parse_saved(line: str) -> tuple[int, str] | None:
    return _parse_save(_SAVED.search(line))


def _parse_save(match: Match[str] | None) -> tuple[int, str] | None:
    if match is None:
        return None
    return int(match.group(1)), _SAVE_ENDING.sub("", match.group(2).rstrip())


def parse_evaluation(line: str) -> int | None:
    """The number of samples."""
    match = _EVALUATION.search(line)
    return None if match is None else int(match.group(1))
