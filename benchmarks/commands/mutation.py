"""Changed files of run folders: what every command that reads them makes of it.

    python -m benchmarks.commands.mutation [--rounds 40] [--write]

Real runs of this machine (plain, failed and restarted, split, morphed), each as it ended and as if
it went on. A round changes one to three files of one of them, and calls every command on it:
tests/shelf/commands/mutation.py has the changes and what a command may take. Then every regular
expression of the packages on texts of 1 MB that repeat its parts (tests/patterns.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from tests.patterns import collect, find_slow
from tests.shelf.commands.mutation import CPU_S, MEMORY_BYTES
from tests.shelf.commands.test_mutation import describe, make_runs, run_worker

RESULT = RESULTS / "mutation.md"
PATTERN_BYTES = 1_000_000
PATTERN_S = 8.0
"""Of a processor; what is quadratic takes minutes."""


def render(found: dict[str, Any], rounds: int, num_patterns: int, slow: dict[str, str]) -> str:
    calls = found["calls"]
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(found["codes"].items()))
    rows = [f"| `vjob {name}` | {count} |" for name, count in sorted(calls.items())]
    lines = [
        "# Changed files of run folders, and what commands make of them",
        "",
        f"Made by `python -m benchmarks.commands.mutation --rounds {rounds} --write`: "
        f"{found['rounds']} changed folders,",
        f"{sum(calls.values())} calls. Values of another type, deep nesting, numbers too large, "
        "NaN, missing and doubled keys,",
        "control characters, 1 MB strings and lines, files cut short or gone, in all JSON, JSONL, "
        "logs and traces.",
        "",
        f"- tracebacks, or more than {CPU_S:g} s of a processor, or {MEMORY_BYTES >> 30} GiB of "
        f"addresses: {len(found['defects'])}",
        f"- the most that one call took: {found['most_cpu_s']:.2f} s of a processor; peak of the "
        f"process {found['peak'] / 1024:.0f} MiB",
        f"- exit codes: {codes} (2: the input is refused; 10 and up: verdicts; 130: it would have "
        "gone on waiting)",
        f"- regular expressions on texts of {PATTERN_BYTES // 1000} kB that repeat their parts: "
        f"{num_patterns}; longer than {PATTERN_S:g} s of a processor: {len(slow)}",
        "",
        "| command | calls |",
        "|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        make_runs(Path(name))
        found = run_worker(Path(name), 0, wanted.rounds, 0)
    patterns = collect()
    slow = find_slow(patterns, PATTERN_BYTES, PATTERN_S)
    text = render(found, wanted.rounds, len(patterns), slow)
    print(text)
    for pattern, line in slow.items():
        print(f"{pattern!r}: {line}", file=sys.stderr)
    if found["defects"]:
        print(describe(found["defects"]), file=sys.stderr)
    if wanted.write:
        RESULT.write_text(text)
    return int(bool(found["defects"] or slow))


if __name__ == "__main__":
    sys.exit(main())
