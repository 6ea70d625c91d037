"""Dry runs of confs that ask for very much: what they print, and what they take."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

GROUPS = ", ".join(f"{{group: m{n}, count: 50, ranks: 2}}" for n in range(2000))
HOSTS = ",".join(f"n{n:05}" for n in range(30_000))
CONFS = {
    "100,000 nodes": "nodes: [{count: 100000, ranks: 1}]",
    "160,000 ranks on 20,000 nodes": "nodes: [{count: 20000, ranks: 8}]",
    "100,000 machines": "scheduler: machines, machine_list: hosts, nodes: [{count: 100000}]",
    "a list of 30,000 nodes": f"sbatch: {{nodelist: '{HOSTS}'}}, nodes: [{{count: 30000}}]",
    "2,000 groups, one het job": f"nodes: [{GROUPS}]",
    "2,000 groups, a job each": f"hetero: split, nodes: [{GROUPS}]",
    "10^10 ranks": "nodes: [{count: 100000, ranks: 100000}]",
    "300,000 nodes": "nodes: [{count: 300000, ranks: 1}]",
    "5,000 digits": f"nodes: [{{count: {'9' * 5000}}}]",
    "a million years": "nodes: [{count: 1}], walltime_min: 525600000000",
}


def measure(here: Path) -> list[list[object]]:
    """A row for each: exit code, lines, the widest, processor time, memory, its refusal."""
    (here / "hosts").write_text("\n".join(f"node{n:06}" for n in range(100_000)))
    rows = []
    for name, text in CONFS.items():
        where = "" if "scheduler" in text else "scheduler: slurm, "
        limit = "" if "walltime" in text or "machines" in text else "walltime_min: 5, "
        (here / "large.yaml").write_text(
            f"name: t\nprogram: {{script: train.py}}\ncluster: {{{where}{limit}{text}}}\n"
        )
        out = os.open(here / "said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        words = [sys.executable, "-m", "vjob", "submit", "large.yaml", "--dry-run"]
        actions = [(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, out, 2)]
        child = os.posix_spawn(words[0], words, os.environ, file_actions=actions)
        _, status, usage = os.wait4(child, 0)
        os.close(out)
        lines = (here / "said").read_text().splitlines()
        code = os.waitstatus_to_exitcode(status)
        refusal = lines[-1].strip()[:150] if code else ""
        cpu = round(usage.ru_utime + usage.ru_stime, 1)
        widest = max(map(len, lines))
        rows.append([name, code, len(lines), widest, cpu, usage.ru_maxrss >> 10, refusal])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def render(rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [
        "## Dry runs of large confs",
        "",
        "`vjob submit large.yaml --dry-run`: the first and the last of what is long, and how many "
        "are between; a number out of bounds is refused before anything is built.",
        "",
        "| conf | exit code | lines | widest | s of processor | MB | refusal |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [*lines, ""] if rows else []
