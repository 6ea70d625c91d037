"""Copies of a training's state in the memory of its nodes: their names, and which are whole.

    /dev/shm/vjob-<uid>/                         0700
      <word>.lock                                held as long as the node's `stay` lives
      <word>/                                    of that `stay`
        varuna_ckpt_40.3.2.partial/              a copy: iteration 40, the second one of attempt 3
          segment-0001.rank-0004.safetensors     as in any checkpoint
          markers/rank-0004.json                 the same
          shares/1-of-2.rank-0004                lands last: what this rank laid is whole

A **share** is what one rank holds of the training, and every rank at the same place of another
replica too; with ZeRO no other rank does. A copy is whole where each of its shares is on some node.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from varuna_core.records.checkpoints import NAME
from varuna_core.records.files import list_names

HOME = "VJOB_MEMORY"
"""The variable that tells a rank its node's folder."""
SHARES = "shares"
_SHARE = re.compile(r"(\d+)-of-(\d+)\.rank-(\d+)")
_HELD = re.compile(r"(varuna_ckpt_(\d+)\.(\d+)\.(\d+)\.partial)/(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Share:
    """One rank's share of a copy."""

    index: int
    count: int
    """Shares that make up the copy."""
    rank: int
    """In the attempt that laid it."""


@dataclass(frozen=True)
class WholeCopy:
    """A copy of which these nodes hold every share between them."""

    name: str
    iteration: int
    holders: Tuple[str, ...]


def name_save(attempt: int, number: int) -> str:
    """The word of a copy, in place of a job's save."""
    return f"{attempt}.{number}"


def find_iteration(copy: str) -> int:
    """By its name; raises ValueError where that is none of ours."""
    match = NAME.fullmatch(copy)
    if match is None:
        raise ValueError(f"{copy!r} is no copy in memory")
    return int(match[1])


def name_share(share: Share) -> str:
    return f"{share.index}-of-{share.count}.rank-{share.rank:04d}"


def list_copies(home: Path) -> List[str]:
    """Names of the copies of which this node holds anything, or began to."""
    found = [name for name in list_names(home) if _is_copy(name)]
    return sorted(found)


def list_shares(home: Path, copy: str) -> List[Share]:
    """Those that were laid to their end."""
    matches = [_SHARE.fullmatch(name) for name in list_names(home / copy / SHARES)]
    found = [Share(int(m[1]), int(m[2]), int(m[3])) for m in matches if m]
    return sorted(found, key=lambda share: (share.index, share.rank))


def list_held(home: Path) -> Tuple[str, ...]:
    """List the shares that a node holds, a word each."""
    words = {
        f"{copy}/{share.index}-of-{share.count}"
        for copy in list_copies(home)
        for share in list_shares(home, copy)
    }
    return tuple(sorted(words))


Held = Mapping[str, Sequence[str]]
"""The words of each node."""


def find_whole(held: Held) -> Optional[WholeCopy]:
    """The newest copy that is whole; of the same iteration that of the later attempt. Pure.

    What is not such a word is passed over.
    """
    copies: Dict[Tuple[int, int, int, str, int], Dict[int, Set[str]]] = {}
    for node, words in held.items():
        for word in words:
            match = _HELD.fullmatch(word)
            if match is not None:
                name, iteration, attempt, number, index, count = match.groups()
                key = (int(iteration), int(attempt), int(number), name, int(count))
                copies.setdefault(key, {}).setdefault(int(index), set()).add(node)
    for key in sorted(copies, reverse=True):
        shares = copies[key]
        if set(shares) == set(range(key[4])):
            return WholeCopy(key[3], key[0], tuple(sorted(set().union(*shares.values()))))
    return None


def pick_holders(held: Held) -> Tuple[str, ...]:
    """Few nodes that hold the newest whole copy between them; none where there is none. Pure.

    Each time the one that adds most to those before it, which is rarely more than is needed.
    """
    whole = find_whole(held)
    if whole is None:
        return ()
    own = {
        node: {word for word in held[node] if word.startswith(whole.name + "/")}
        for node in whole.holders
    }
    missing, picked = set().union(*own.values()), []
    while missing:
        best = max(sorted(own), key=lambda node: len(own[node] & missing))
        picked.append(best)
        missing -= own.pop(best)
    return tuple(picked)


def find_room(home: Path) -> int:
    """Bytes that may still be laid there: what the file system has, and what the memory has."""
    stat = os.statvfs(home)
    room = [stat.f_bavail * stat.f_frsize]
    with open("/proc/meminfo", encoding="ascii") as handle:
        room += [int(line.split()[1]) * 1024 for line in handle if line.startswith("MemAvail")]
    return min(room + _find_limits())


def _find_limits() -> List[int]:
    """Free memory within the job's cgroup, where there is one with a limit (version 2)."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line[3:] for line in lines if line.startswith("0::"))
        group = Path("/sys/fs/cgroup" + path)
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.is_file() and limit.read_text().strip().isdigit():
                used = int((folder / "memory.current").read_text())
                found.append(max(0, int(limit.read_text()) - used))
    except (OSError, StopIteration, ValueError):
        pass
    return found


def _is_copy(name: str) -> bool:
    match = NAME.fullmatch(name)
    return match is not None and match[3] == "partial"
