"""`python -m benchmarks.chaos --seed 7 --faults 5`: applies one schedule of faults to a run.

    --testbed local   real processes on this machine; `lab` is the real Slurm of tests/cluster
    --fresh           ends a lab that is up: one that was not started for this has no disk to fill
    --replay FILE     the faults of a report again; --without 2 4 leaves some out, to find the least
    --report FILE     where the report goes; without it one is written if a problem was found

Exit code 0: everything held. 1: something did not; the report and the run's folder are kept.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.chaos.experiment import read_faults, run_experiment
from benchmarks.chaos.faults import draw_faults
from benchmarks.chaos.lab_testbed import LabTestbed
from benchmarks.chaos.testbed import Testbed
from tests.cluster.lifecycle import stop_lab

PATIENCE_S = 150.0


def main(words: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background has INT ignored
        signal.signal(number, signal.default_int_handler)
    options = build_parser().parse_args(words)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{options.seed}-", dir=options.folder))
    testbed = open_testbed(options.testbed, folder, is_fresh=options.fresh)
    if options.replay:
        faults = read_faults(options.replay)
        faults = tuple(f for i, f in enumerate(faults) if i not in options.without)
    else:
        faults = draw_faults(options.seed, options.faults, options.kinds or testbed.kinds)
    for index, fault in enumerate(faults):
        print(f"{index}: {fault}", flush=True)
    is_good = False
    try:
        testbed.open()
        report = run_experiment(testbed, options.seed, faults, options.testbed, options.patience)
        is_good = not report.problems
        path = options.report or (None if is_good else folder.with_suffix(".json"))
        if path is not None:
            report.write(path)
            print(f"report: {path}")
        for text in report.problems:
            print(f"problem: {text}", file=sys.stderr)
        print(
            f"seed {options.seed} on {options.testbed}: {report.verdict}, {report.seconds} s, "
            f"{report.attempts} attempts, {len(report.morphs)} morphs, "
            f"{len(report.problems)} problems"
        )
    finally:
        testbed.close(keep=not is_good)
        if is_good:
            shutil.rmtree(folder)
    return 0 if is_good else 1


def open_testbed(name: str, folder: Path, *, is_fresh: bool) -> Testbed:
    if name == "lab":
        if is_fresh:
            stop_lab()
        return LabTestbed(folder)
    return Testbed(folder)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=5, metavar="COUNT")
    parser.add_argument("--testbed", choices=("local", "lab"), default="local")
    parser.add_argument("--fresh", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="draw from these alone")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--without", type=int, nargs="+", default=[], metavar="NUMBER")
    parser.add_argument("--report", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, help="where the run's folder is made")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
