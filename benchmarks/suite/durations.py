"""The tests of `make test` that take over a minute, each with the reason.

    make test | tee LOG                          (or pytest with --durations 60, for all of them)
    python -m benchmarks.suite.durations LOG [--write]

Ends with 1 where one has no reason here: then it is to be made shorter, or its reason written down.
A time is of a machine whose cores several processes share; a test that trains many cases in one
start of its ranks has the time of them all, and the tests after it look at what came out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS

RESULT = RESULTS / "suite.md"
HEADING = "## Processor time by room"
"""Begins the part of the page that `benchmarks.suite.processor` writes."""
LONG_S = 60.0
NUM_LONGEST = 10
"""Are shown where none is long."""

_LINE = re.compile(r"^\s*(\d+\.\d+)s (setup|call|teardown)\s+(\S.*)$", re.MULTILINE)
_END = re.compile(r"^=+ (.*(?:passed|failed).* in [\d.]+s.*?) =+$", re.MULTILINE)

ALL_CASES = "all cases of a world in one start of its ranks"
JOBS = "real jobs on the lab, which wait for Slurm, for walltimes and for each other"
RUNS = "whole runs with their ranks: trained, ended, saved, begun again"
REASONS = {
    "tests/benchmarks/": JOBS,
    "tests/cluster/": JOBS,
    "tests/containers/": "real containers, each runtime and each way to end",
    "tests/examples": RUNS,
    "tests/foreign/": "other people's programs, before and after they are ported",
    "tests/jobs/api/": "a type checker reads the whole package",
    "tests/shelf/commands/": "hypothesis runs commands on files that are cut and changed",
    "tests/jobs/elastic/": RUNS,
    "tests/jobs/programs/": RUNS,
    "tests/jobs/runs/test_second_user": "every command once, as another user of the machine",
    "tests/jobs/submit/": RUNS,
    "tests/recipes/": "programs of frameworks, by vjob and by their own launchers",
    "tests/reports/analysis/": "hypothesis draws whole runs",
    "tests/reports/load/": "real profiles, one of them large",
    "tests/test_quickstart": "a stranger's walk through the README",
    "tests/varuna_core/checkpoint/test_megatron": "imports Megatron-LM, whose models it runs",
    "tests/varuna_core/equality/": "hypothesis draws models and layouts",
    "tests/varuna_core/functions/": RUNS,
    "tests/varuna_core/profiling/": "measures a model on four ranks",
    "tests/varuna_core/programs/": ALL_CASES,
    "tests/varuna_core/records/test_patterns": "each pattern is timed on long lines",
    "tests/varuna_core/runtime/": ALL_CASES,
    "tests/varuna_core/test_foreign": "imports transformers, whose models it trains",
    "tests/varuna_core/test_varuna": ALL_CASES,
    "tests/varuna_core/trace/test_engines": "trains with the engines of others",
}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Of one part of a test."""

    test: str
    part: str
    seconds: float

    @property
    def reason(self) -> str:
        found = [reason for start, reason in REASONS.items() if self.test.startswith(start)]
        return found[0] if found else ""


def read_durations(log: str) -> Iterator[Duration]:
    for seconds, part, test in _LINE.findall(log):
        yield Duration(test=test, part=part, seconds=float(seconds))


def list_long(log: str) -> list[Duration]:
    found = [one for one in read_durations(log) if one.seconds >= LONG_S]
    return sorted(found, key=lambda one: -one.seconds)


def render(log: str) -> str:
    ends = _END.findall(log)
    lines = [
        "# Tests that take over a minute",
        "",
        f"Made by `python -m benchmarks.suite.durations LOG --write` from what a run of the tests "
        f"printed on {os.cpu_count()} cores: {ends[0] if ends else 'it did not end'}. Four "
        "processes share the cores, so a time is more than the test would take alone.",
        "",
    ]
    long = list_long(log)
    if not long:
        lines += [f"None does. The {NUM_LONGEST} longest:", ""]
    lines += ["| test | seconds | why |", "|---|---|---|"]
    longest = sorted(read_durations(log), key=lambda one: -one.seconds)[:NUM_LONGEST]
    for one in long or longest:
        name = one.test.removeprefix("tests/").replace("|", "\\|")
        lines.append(f"| `{name}` ({one.part}) | {one.seconds:.0f} | {one.reason or '**?**'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite.durations")
    parser.add_argument("log", type=Path, help="what pytest printed, with --durations")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    wanted = parser.parse_args()
    log = wanted.log.read_text()
    page = render(log)
    if wanted.write:
        _, heading, kept = RESULT.read_text().partition(HEADING)
        RESULT.write_text("\n".join([page, heading + kept]) if heading else page)
    print(page, end="")
    return int(any(not one.reason for one in list_long(log)))


if __name__ == "__main__":
    sys.exit(main())
