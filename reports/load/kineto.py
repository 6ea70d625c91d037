"""torch.profiler's (Kineto's) JSON files, folded to traces such as a rank writes itself.

    *.pt.trace.json[.gz] ─► intervals by kind ─► steps by ProfilerStep#N ─► <rank>.jsonl

Each step's kernels become stretches of `compute`, `communication` (nccl) and `memcpy`; what none of
them covers is idle. Of a file without GPU events, the operators of the CPU are the `compute`, and
c10d's calls and what gloo does beside them the communication. Kernels count to the step in which
they run, which may be the one after that which launched them. Files are read once, an event at a
time; 20 bytes of each event are held. A file that was cut off is read as far as it goes.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from varuna_core.records.files import open_file, parse_json
from varuna_core.records.logs.trace import COLUMNS, FORMAT
from vjob.reports.load.trace_lines import Column

ENDINGS = (".json", ".json.gz")
MOST_PIECES = 4000
"""The most pieces drawn of a kind and step; of more, neighbours are merged. Sums stay exact."""
_BLOCK = 1 << 20
_LARGEST_EVENT = 1 << 24
_LARGEST_HEAD = 1 << 24
_LONGEST_NAME = 60
_FOREIGN = re.compile(r"[^A-Za-z0-9 ._:/+-]+")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_LINK = re.compile(r"nccl|rccl|gloo:|c10d::", re.IGNORECASE)


@dataclass
class Intervals:
    """Begins and ends of intervals in nanoseconds, and the index of each one's name."""

    begin: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    name: array[int] = field(default_factory=lambda: array("i"))


@dataclass(kw_only=True)
class Profile:
    """The intervals read from one profile."""

    rank: int | None = None
    host: str = ""
    device: str = ""
    base_ns: int = 0
    """The origin of the file's times; 0 if they are counted from 1970."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(number, begin, end) of each step."""
    kinds: dict[str, Intervals] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    has_gpu: bool = False
    trouble: str = ""


def is_profile(path: Path) -> bool:
    """Return True if the file begins like a profile of torch.profiler."""
    try:
        head = next(_read_text(path), "")[:4096]
    except (OSError, zlib.error):
        return False
    return '"schemaVersion"' in head or '"traceEvents"' in head


def read_profile(path: Path) -> Profile:
    """Read a profile without raising on bad content; `trouble` says why reading ended early."""
    found = Profile()
    names: dict[str, int] = {}
    try:
        for event in _read_events(_read_text(path), found):
            _add_event(found, names, event)
    except (OSError, zlib.error) as error:
        found.trouble = f"it ends early: {error}"
    found.names = list(names)
    return found


def _read_text(path: Path) -> Iterator[str]:
    """Yield the decompressed text in pieces, up to the cut if the file was cut off."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with open_file(path) as handle:
        is_packed = handle.read(2) == b"\x1f\x8b"
        handle.seek(0)
        unpack = zlib.decompressobj(31)
        while piece := handle.read(_BLOCK):
            if not is_packed:
                yield decoder.decode(piece)
                continue
            while piece:
                if unpack.eof:  # a file of several parts
                    unpack = zlib.decompressobj(31)
                yield decoder.decode(unpack.decompress(piece, _BLOCK))
                piece = unpack.unconsumed_tail or unpack.unused_data


def _read_events(pieces: Iterator[str], found: Profile) -> Iterator[dict[str, Any]]:
    """Yield the events one by one, and store what precedes them in `found`."""
    text = ""
    while (at := text.find('"traceEvents"')) < 0:
        piece = next(pieces, None)
        if piece is None or len(text) > _LARGEST_HEAD:
            found.trouble = "no traceEvents"
            return
        text += piece
    _read_head(found, text[:at])
    at = text.find("[", at) + 1
    decode = json.JSONDecoder().raw_decode
    while True:
        begin = text.find("{", at)
        stop = text.find("]", at)
        if stop >= 0 and (begin < 0 or stop < begin):
            return
        event: Any = None
        if begin >= 0:
            try:
                event, at = decode(text, begin)
            except (ValueError, RecursionError):
                at = begin
        if isinstance(event, dict):
            yield event
            continue
        piece = next(pieces, None)
        text, at = text[at:] + (piece or ""), 0
        if piece is None or len(text) > _LARGEST_EVENT:
            found.trouble = "it ends early: the last event is torn"
            return


def _read_head(found: Profile, text: str) -> None:
    head = parse_json(text.rstrip().rstrip(",") + "}")
    if not isinstance(head, dict):
        return
    ranks, devices = head.get("distributedInfo"), head.get("deviceProperties")
    rank = ranks.get("rank") if isinstance(ranks, dict) else None
    found.rank = rank if type(rank) is int and rank >= 0 else None
    found.host = _FOREIGN.sub("_", str(head.get("host_name") or ""))[:200]
    base = head.get("baseTimeNanoseconds")
    found.base_ns = base if type(base) is int and 0 <= base < 2**61 else 0
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        found.device = _FOREIGN.sub("_", str(devices[0].get("name") or ""))[:80]


def _add_event(found: Profile, names: dict[str, int], event: dict[str, Any]) -> None:
    facts = event.get("args")
    if event.get("ph") != "X" or (isinstance(facts, dict) and facts.get("finished") is False):
        return  # torch makes up the end of an unfinished event
    name, category = str(event.get("name", "")), str(event.get("cat", "")).lower()
    try:
        begin = round(float(event["ts"]) * 1e3)
        end = begin + max(0, round(float(event.get("dur", 0)) * 1e3))
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    if not 0 <= end < 2**61:
        return
    step = _STEP.match(name)
    if step is not None:
        if category == "user_annotation":
            found.steps.append((int(step[1][:9]), begin, end))
        return
    kind = _find_kind(category, name)
    if kind is None:
        return
    found.has_gpu = found.has_gpu or kind in ("kernel", "gpu link", "memcpy")
    held = found.kinds.setdefault(kind, Intervals())
    held.begin.append(begin)
    held.end.append(end)
    held.name.append(names.setdefault(_shorten(name), len(names)))


def _find_kind(category: str, name: str) -> str | None:
    is_link = _LINK.search(name) is not None
    if category == "kernel":
        return "gpu link" if is_link else "kernel"
    if category in ("gpu_memcpy", "gpu_memset"):
        return "memcpy"
    if category == "cpu_op":
        return "call" if is_link else "operator"
    if category == "user_annotation":
        if is_link:
            return "link"
        if name.startswith("Optimizer.step#"):
            return "optimizer"
        return "data" if name.startswith("enumerate(DataLoader)") else None
    return None


def _shorten(name: str) -> str:
    """Return a kernel's name without its arguments: `ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    return _FOREIGN.sub("_", name.removeprefix("void ").partition("(")[0])[:_LONGEST_NAME]


# Steps.


def fold(profile: Profile, rank: int) -> Iterator[str]:
    """Yield the lines of a rank's trace with the profile's steps."""
    steps = sorted(profile.steps)
    kinds = _choose_kinds(profile)
    if not steps:  # prof.step() was not called: everything counts as one step
        known = [spans for spans, _ in kinds.values() if len(spans)]
        if not known:
            return
        steps = [(0, min(int(own[0, 0]) for own in known), max(int(own[-1, 1]) for own in known))]
    origin = profile.base_ns + steps[0][1]
    yield _write({
        "trace": FORMAT, "rank": rank, "stages": [0], "replica": rank, "host": profile.host,
        "device": profile.device, "origin": origin, "columns": COLUMNS,
    })  # fmt: skip
    for number, begin, end in steps:
        sums: dict[str, list[int]] = {}
        ends: list[int] = []
        busy: list[Column] = []
        for kind, (spans, longest) in kinds.items():
            first = int(np.searchsorted(spans[:, 1], begin, side="right")) if len(spans) else 0
            last = int(np.searchsorted(spans[:, 0], end)) if len(spans) else 0
            if first >= last:
                continue
            own = np.clip(spans[first:last], begin, end)
            sums[kind] = [len(own), 0, int((own[:, 1] - own[:, 0]).sum())]
            if kind == "compute":
                ends = [int(own[0, 0]), int(own[-1, 1])]
            if kind != "data" or not profile.has_gpu:
                busy.append(own)
            for start, wait, work, name in _list_pieces(own, longest[first:last]):
                times = (start - steps[0][1], wait, work, 0)
                yield _write([kind, number, 0, -1, *times, profile.names[name]])
        line: dict[str, Any] = {"step": number, "begin": begin - steps[0][1], "took": end - begin}
        if busy:
            united, _ = _join(*_sort(np.concatenate(busy)))
            sums["idle"] = [1, 0, end - begin - int((united[:, 1] - united[:, 0]).sum())]
        if ends:
            line["first"], line["last"] = (time - steps[0][1] for time in ends)
        yield _write({**line, "sums": sums})


def _write(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _choose_kinds(profile: Profile) -> dict[str, tuple[Column, Column]]:
    """Choose the kinds of events that stand for actions. For each action's name, return begins and
    ends of its stretches in order, and the name of the longest event in each stretch."""
    united = {kind: _unite([held]) for kind, held in profile.kinds.items()}
    links = [profile.kinds[kind] for kind in ("call", "link") if kind in profile.kinds]
    if links:
        united["link"] = _unite(links)
    if profile.has_gpu:
        names = {"kernel": "compute", "gpu link": "communication", "memcpy": "memcpy"}
    else:
        names = {"operator": "compute", "link": "communication", "optimizer": "optimizer"}
        if "operator" in united:  # each moment of the main thread counts once
            spans, longest = united["operator"]
            for other in ("call", "optimizer", "data"):
                if other in united:
                    spans, longest = _subtract(spans, longest, united[other][0])
            united["operator"] = spans, longest
    names["data"] = "data"
    return {name: united[kind] for kind, name in names.items() if kind in united}


def _unite(held: Sequence[Intervals]) -> tuple[Column, Column]:
    begin = np.concatenate([np.array(one.begin, dtype=np.int64) for one in held])
    end = np.concatenate([np.array(one.end, dtype=np.int64) for one in held])
    name = np.concatenate([np.array(one.name, dtype=np.int64) for one in held])
    return _join(*_sort(np.column_stack([begin, end]), name))


def _sort(spans: Column, name: Column | None = None) -> tuple[Column, Column]:
    rows = np.lexsort((-spans[:, 1], spans[:, 0]))
    return spans[rows], (np.zeros(len(rows), dtype=np.int64) if name is None else name[rows])


def _join(spans: Column, name: Column) -> tuple[Column, Column]:
    """Merge adjacent sorted intervals; the result has the name of its longest part."""
    reach = np.maximum.accumulate(spans[:, 1])
    starts = np.flatnonzero(np.append(True, spans[1:, 0] > reach[:-1]))
    lasts = np.append(starts[1:], len(spans)) - 1
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(spans))))
    order = np.lexsort((spans[:, 0] - spans[:, 1], group))
    return np.column_stack([spans[starts, 0], reach[lasts]]), name[order[starts]]


def _subtract(spans: Column, name: Column, other: Column) -> tuple[Column, Column]:
    """Return the parts of `spans` outside `other`; both are sorted and free of overlaps."""
    cuts = np.unique(np.concatenate([spans.ravel(), other.ravel()]))
    pieces = np.column_stack([cuts[:-1], cuts[1:]])
    own = np.searchsorted(spans[:, 0], pieces[:, 0], side="right") - 1
    theirs = np.searchsorted(other[:, 0], pieces[:, 0], side="right") - 1
    keeps = (own >= 0) & (pieces[:, 0] < spans[own, 1])
    keeps &= ~((theirs >= 0) & (pieces[:, 0] < other[theirs, 1]))
    if not keeps.any():
        return spans[:0], name[:0]
    return pieces[keeps], name[own[keeps]]


def _list_pieces(spans: Column, name: Column) -> Iterator[tuple[int, int, int, int]]:
    """Yield (begin, wait, work, name) for each piece to draw. If there are too many, neighbours are
    merged, and the gaps between them count as wait."""
    stride = -(-len(spans) // MOST_PIECES)
    starts = np.arange(0, len(spans), stride)
    lasts = np.append(starts[1:], len(spans)) - 1
    work = np.add.reduceat(spans[:, 1] - spans[:, 0], starts)
    begin, end = spans[starts, 0], spans[lasts, 1]
    columns = (begin, end - begin - work, work, name[starts])
    yield from zip(*(column.tolist() for column in columns), strict=True)


def fold_files(
    paths: Sequence[Path], taken: set[int], folder: Path
) -> tuple[list[Path], dict[str, str]]:
    """Write the profiles of an attempt as traces, `folder/<rank>.jsonl`; several files of one rank
    are written one after another.

    Ranks in `taken` have a trace of their own with every step, and are skipped. Return the written
    files and, by profile, what could not be read.
    """
    skipped: dict[str, str] = {}
    written: list[Path] = []
    used = set(taken)
    for path in sorted(paths):
        profile = read_profile(path)
        rank = profile.rank
        if rank is None:
            rank = next(number for number in range(1 << 20) if number not in used)
        if rank in taken:
            skipped[path.name] = f"rank {rank} wrote a trace of its own"
            continue
        used.add(rank)
        if profile.trouble:
            skipped[path.name] = profile.trouble
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{rank}.jsonl"
        with open(target, "a", encoding="utf-8") as handle:
            handle.writelines(fold(profile, rank))
        if target not in written:
            written.append(target)
    return written, skipped
