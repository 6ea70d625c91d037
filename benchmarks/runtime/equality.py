"""Random models in random layouts beside the plain model: how many are equal, and what is refused.

    python -m benchmarks.runtime.equality [--draws 2000] [--seed 1] [--at-once 2] [--write]
    python -m benchmarks.runtime.equality --defect inputs_in_place    when it is found

Draws of one seed are always the same. What came of each is added to a file of lines (`--kept`), so
that a run that was cut goes on where it was: `--draws` are in all. `--write` makes the page of what
the file holds. A draw that fails is made smaller, and shown as a test writes it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from tests.varuna_core.equality import defects
from tests.varuna_core.equality.draws import draw_specs, list_features
from tests.varuna_core.equality.judge import (
    ALIKE,
    FACTOR,
    MOST_PROBES,
    NUM_PROBES,
)
from tests.varuna_core.equality.plain import COMMON_FLOOR, OWN_FLOOR
from tests.varuna_core.equality.shrink import shrink
from tests.varuna_core.equality.spec import Spec, show
from tests.varuna_core.equality.worlds import HANG_S, Verdict, Worlds

RESULT = RESULTS / "equality.md"
BLOCK = 50
"""Draws that are made, and run, together."""

BOUND = 500
"""Draws in which each known defect must be found."""

PAIRS = ("tensor", "zero 3", "hooks before Varuna", "mean over tokens", "block dropout")
"""Features whose meetings with others are counted."""

AGAINST = (
    *("fp32", "bf16", "fp16", "pipeline", "replicas", "tensor", "zero 3", "offload"),
    *("recompute full", "recompute auto", "several stages a rank", "stages without segments"),
    *("recompute selective", "recompute offload", "tied", "clipping"),
    *("batches of several sizes", "loaded by another layout"),
)

Row = dict[str, Any]


def run_draws(
    worlds: Worlds, seed: int, numbers: Sequence[int]
) -> Iterator[tuple[int, Spec, Verdict]]:
    drawn = [spec for number in numbers for spec in draw_specs(1, seed, number)]
    for place, spec, verdict in worlds.run(drawn):
        yield numbers[place], spec, verdict


def describe(number: int, spec: Spec, verdict: Verdict) -> Row:
    return {
        "draw": number,
        "status": verdict.status,
        "kind": verdict.kind if verdict.message else "",
        "message": verdict.message[:400],
        "ratio": verdict.ratio if verdict.status == "equal" else None,
        "where": verdict.where,
        "precision": spec.precision,
        "features": list_features(spec),
    }


def make_smaller(worlds: Worlds, spec: Spec, verdict: Verdict) -> Spec:
    word = verdict.message.partition(" ")[0]

    def fails(smaller: Spec) -> bool:
        ((_, _, found),) = worlds.run([smaller])
        return found.status == verdict.status and found.message.startswith(word)

    return shrink(spec, fails)


def run(options: argparse.Namespace) -> list[Row]:
    kept = Path(options.kept)
    rows = read_rows(kept, options.seed)
    done = {row["draw"] for row in rows}
    began = time.monotonic()
    with Worlds(options.at_once, options.hang_s) as worlds, kept.open("a") as out:
        missing = [number for number in range(options.draws) if number not in done]
        for first in range(0, len(missing), BLOCK):
            numbers = missing[first : first + BLOCK]
            for number, spec, verdict in list(run_draws(worlds, options.seed, numbers)):
                row = describe(number, spec, verdict)
                if verdict.is_failure:
                    smaller = make_smaller(worlds, spec, verdict) if options.shrink else spec
                    row["spec"] = show(smaller)
                    print(f"draw {number}: {verdict.status}: {verdict.message[:500]}")
                    print(f"    {row['spec']}", flush=True)
                rows.append(row)
                out.write(json.dumps({"seed": options.seed, **row}) + "\n")
                out.flush()
            took = time.monotonic() - began
            print(f"{count_statuses(rows)} in {took:.0f} s", file=sys.stderr, flush=True)
            if options.limit_min and took > options.limit_min * 60:
                break
    return rows


def read_rows(kept: Path, seed: int) -> list[Row]:
    if not kept.exists():
        return []
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    found = {row["draw"]: row for row in rows if row.pop("seed") == seed}
    return list(found.values())


def count_statuses(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    return ", ".join(f"{status} {count}" for status, count in counts.most_common())


# A defect that is put back.


def find_defect(worlds: Worlds, name: str, seed: int) -> tuple[int, int, str]:
    """After how many draws it is found (0: not), of which so many have what shows it, and what was
    said of it. The others are counted, and not run."""
    shown = 0
    for first in range(0, BOUND, BLOCK):
        found: list[tuple[int, str]] = []
        drawn = draw_specs(BLOCK, seed, first)
        able = [at for at, spec in enumerate(drawn) if defects.DEFECTS[name].shows(spec)]
        for at, _, verdict in worlds.run([drawn[number] for number in able], name):
            if verdict.is_failure:
                found.append((able[at], verdict.message))
        found.sort()
        for number, message in found:
            ((_, _, alone),) = worlds.run([drawn[number]])
            if alone.is_failure:  # without the defect, too
                continue
            shown += sum(other <= number for other in able)
            return first + number + 1, shown, message
        shown += len(able)
    return 0, shown, ""


def find_defects(names: Sequence[str], options: argparse.Namespace) -> dict[str, Row]:
    kept = Path(options.kept).with_suffix(".defects")
    known: dict[str, Row] = json.loads(kept.read_text()) if kept.exists() else {}
    with Worlds(options.at_once, options.hang_s) as worlds:
        for name in names:
            draws, shown, message = find_defect(worlds, name, options.seed)
            known[name] = {"draws": draws, "shown": shown, "message": message.partition("\n")[0]}
            said = f"found by draw {draws}: {message[:300]}" if draws else "NOT FOUND"
            print(f"{name}: {said}", flush=True)
            kept.write_text(json.dumps(known))
    return known


# The page.


def write_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


def render(rows: Sequence[Row], found: dict[str, Row], seed: int, note: str) -> str:
    trained = [row for row in rows if row["status"] == "equal"]
    failed = [r for r in rows if r["status"] not in ("equal", "refused", "void")]
    refused = [row for row in rows if row["status"] == "refused"]
    void = sum(row["status"] == "void" for row in rows)
    ratios = []
    for precision in ("fp32", "bf16", "fp16"):
        held = sorted((r["ratio"], r["where"]) for r in trained if r["precision"] == precision)
        if held:
            middle = held[len(held) // 2][0]
            most, where = held[-1]
            shown = f"{middle:.2f}", f"{most:.2f}", f"{FACTOR:g}"
            ratios.append((precision, len(held), *shown, where))
    kinds = Counter(row["kind"] for row in refused)
    share = [(f"{count}", f"{count / len(rows):.2%}", kind) for kind, count in kinds.most_common()]
    features = Counter(name for row in trained for name in row["features"])
    sets = [{*row["features"]} for row in trained]
    meetings = [
        (other, *(sum({one, other} <= held for held in sets) for one in PAIRS)) for other in AGAINST
    ]
    again = [
        (
            defects.DEFECTS[name].what,
            row["draws"] or "not found",
            row["shown"],
            row["message"][:120],
        )
        for name, row in found.items()
        if name in defects.DEFECTS
    ]
    head = ("defect", "found by draw", "of those so far that can show it", "as")
    failures = "\n".join(f"- draw {r['draw']}: {r['message']}\n  `{r['spec']}`" for r in failed)
    return f"""# Random models beside the plain one

Made by `python -m benchmarks.runtime.equality --draws {len(rows)} --seed {seed} --write`. torch
{torch.__version__}, Python {platform.python_version()}, {platform.machine()}, ranks as processes
over gloo. Hypothesis draws a small model (blocks, cuts, what it returns), a layout and a training
of three steps; half of the draws save after the second, and another layout, often of other size,
takes the third. {note}

**{len(trained)} draws trained, differences: {len(failed)}**; {len(refused)} were refused
({len(refused) / len(rows):.1%}), {void} were void (the plain model itself overflows).
{failures}

## The rule
Truth is the plain model in one process in fp64, on whole batches (on the micro-batches, where the
model depends on them: batch norm, dropout, a branch). For each tensor (losses, norms, gradients of
the first step, weights and buffers at the end) the error of ours is at most {FACTOR:g} times the
plain model's own in the same precision, by Euclidean norms. To that own error a floor is added of
{OWN_FLOOR:g} units in the last place of the tensor's norm, for gradients {COMMON_FLOOR:g} of one of
the norm of them all. Where one training of the plain model is exceeded, the largest error of
{NUM_PROBES} counts, {NUM_PROBES - 1} of them from weights that differ in the last place and with
gradients that differ by their floor; where that is exceeded, of {MOST_PROBES}: a tensor is then
called different wrongly with a chance of at most one in {MOST_PROBES + 1}. In half precision that
is wide: where ours and the plain model on the same micro-batches round the same things in the same
order (no shared layers, ties, weights used twice in a micro-batch, means over tokens), gradients of
the first step, of n micro-batches, are also within n + {ALIKE} units in the last place of fp32 of
the sum of their norms: what their weights, the sum and the clipping round. Whole numbers, overflows
and the copies of a weight on several ranks are equal; losses and norms are the same on all ranks to
the bit; groups have the stated time limit; the gathered state dict is what ranks have, and the loss
in eval mode that of the plain model.

{write_table(("precision", "draws", "half of them up to", "greatest ratio", "bound", "of"), ratios)}

## Refused
By `Varuna(...)` or `set_optimizer`, before the first step, in a message that names something and a
remedy (one that does not, one that comes later, a hang and a crash count as differences).

{write_table(("draws", "share", "message"), share)}

## Known defects, put back
Each was in the runtime once; the old behaviour is patched into the ranks, and draws are run until
one fails ({BOUND} at most).

{write_table(head, again) if again else "None was put back for this page."}

## Covered
Draws that trained and have

{write_table(("feature", "draws"), [(n, features[n]) for n in sorted(features)])}

Draws that have both:

{write_table(("", *PAIRS), meetings)}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="trainings at a time")
    parser.add_argument("--kept", default=str(Path(tempfile.gettempdir()) / "equality.jsonl"))
    parser.add_argument("--limit-min", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--hang-s", type=float, default=HANG_S, help="limit of a training")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    parser.add_argument("--defect", action="append", default=[], help="a name, or all")
    parser.add_argument("--show", type=int, help="print one draw and what comes of it")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--note", default="", help="a sentence for the page")
    options = parser.parse_args()
    if options.show is not None:
        (spec,) = draw_specs(1, options.seed, options.show)
        print(show(spec))
        with Worlds(at_once=1) as worlds:
            for _, _, verdict in worlds.run([spec]):
                print(replace(verdict, trace=""), verdict.trace, sep="\n")
        return
    names = list(defects.DEFECTS) if options.defect == ["all"] else options.defect
    if names:
        find_defects(names, options)
        return
    rows = run(options)
    found = find_defects([], options)
    text = render(rows, found, options.seed, options.note)
    print(text)
    if options.write:
        RESULT.write_text(text)
    failed = [row for row in rows if row["status"] not in ("equal", "refused", "void")]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
