"""Chaos as statistics: a table fault x phase, with hits counted by what happened.

    python -m benchmarks.chaos.statistics --runs 10 --write
    python -m benchmarks.chaos.statistics --testbed lab --runs 2 --write
    python -m benchmarks.chaos.statistics --testbed script --faults 12 --write
    python -m benchmarks.chaos.statistics --aim "restart controller@morph" --lasts 600 --testbed lab
    python -m benchmarks.chaos.statistics --replay local-7

Each run draws faults for the cells that have the fewest hits, brings the run into the phase (a node
that leaves for a morph, a warning for a requeue, ...), holds it there (staging.py), and applies the
fault. A hit counts by what happened: of a fault that lasts, in the phase that the run's own records
say once it took effect, whatever was aimed at (for a save: if one went on while it lasted); of a
blow, where they say the phase before it, and after it the same one or the one that it brings.
The testbeds `script` and `lab-script` run a script without torch, which starts in no time.
Runs are added to a table file as they end, so that cells add up; several may run at once.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.chaos.experiment import ACTIONS, OVER
from benchmarks.chaos.fault_actions import NO_TARGET
from benchmarks.chaos.faults import ANYWHERE, LASTS_S, ON_SLURM, Fault
from benchmarks.chaos.history import ALIKE, check_history, read_losses
from benchmarks.chaos.invariants import Monitor
from benchmarks.chaos.phases import (
    GROWING_S,
    JOIN,
    MORPH,
    PHASES,
    QUEUE,
    REQUEUED,
    SAVE,
    START,
    TRAINING,
    PhaseReader,
    explain_impossible,
    list_cells,
)
from benchmarks.chaos.phases import OVER as END
from benchmarks.chaos.staging import TESTBEDS, GatedTestbed, LabRun
from varuna_core.records.files import lock_file, read_json, write_json
from varuna_core.records.morphing import RUNNING, get_seat, read_state
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

RESULT = RESULTS / "chaos_table.md"
TABLE = RESULTS / "chaos_table.json"
AIMED = 5
"""Hits that each cell is to have."""
FAULTS_A_RUN = 12
PATIENCE_S = 180.0
CATCH_S = 30.0
"""How long to wait for the phase with something to hit in it."""
MOST_NODES = 5
"""More are sent home, so that others can be asked for."""
GROW_S = 40.0
"""Until nodes that were asked for and did not come are asked for again."""
POLL_S = 0.02
RETRY_S = 0.5
SHORT_S = (1.0, 4.0)
"""How long faults last; those that are to outlast a limit last that much longer."""
LASTING = (
    "freeze manager", "freeze node", "slow rank", "fill store", "fill run", "power off",
    "cut link", "slow link", "stop slurmd", "restart controller", "preempt",
)  # fmt: skip
"""Faults that are in effect for a while; the others are blows."""
BREAKING: Mapping[str, tuple[str, ...]] = {
    "kill rank": (MORPH,),
    "kill agent": (MORPH,),
    "kill node": (MORPH,),
    "kill waiting": (MORPH,),
    "freeze node": (MORPH,),
    "damage newest": (MORPH,),
    "warn": (REQUEUED,),
    "leave": (MORPH,),
    "shrink": (MORPH, TRAINING),
    "power off": (MORPH,),
    "cut link": (MORPH,),
    "requeue": (REQUEUED,),
    "preempt": (REQUEUED,),
}
"""Faults that end the attempt, and the phases that they bring themselves."""
BRINGS = {**BREAKING, "grow": (JOIN,)}
VISIT = 4
"""Faults in one visit of a phase: the last one may end it."""
MOST_A_RUN = {"kill manager": 2, "power off": 2}
"""Managers that end within a minute of each other are counted, and a first node stays off."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A fault and the phase that it is to hit."""

    kind: str
    phase: str
    pick: float
    lasts_s: float


# The table.


def read_runs(table: Path) -> list[dict[str, Any]]:
    value = read_json(table)
    return value["runs"] if isinstance(value, dict) else []


def add_run(table: Path, run: dict[str, Any]) -> str:
    """Add a run to the table file; the id that it got there."""
    with lock_file(table.with_suffix(".lock")):
        runs = read_runs(table)
        run = {"id": f"{run['testbed']}-{len(runs) + 1}", **run}
        write_json(table, {"runs": [*runs, run]}, mode=0o644)
    return str(run["id"])


def count_hits(runs: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((one["kind"], one["hit"]) for run in runs for one in run["faults"] if one["hit"])


def draw_aims(
    seed: int, hits: Mapping[tuple[str, str], int], tries: Mapping[tuple[str, str], int],
    kinds: Sequence[str], phases: Sequence[str] = PHASES, count: int = FAULTS_A_RUN,
) -> list[Aim]:  # fmt: skip
    """Draw faults for the cells with the fewest hits, then the fewest tries, visit by visit.

    A visit of a phase is for several faults of which the last one may end it. A visit of the queue
    comes first, one of the end last.
    """
    rng = random.Random(seed)
    cells = [cell for cell in list_cells(kinds) if cell[1] in phases]
    rng.shuffle(cells)
    cells.sort(key=lambda cell: (hits.get(cell, 0), tries.get(cell, 0)))
    cells = [cell for cell in cells if hits.get(cell, 0) < AIMED] or cells
    visits: list[list[tuple[str, str]]] = []
    drawn: Counter[str] = Counter()
    while cells and sum(map(len, visits)) < count:
        phase = cells[0][1]
        room = min(VISIT, count - sum(map(len, visits)))
        visit = draw_visit([cell for cell in cells if cell[1] == phase], drawn, room)
        drawn.update(kind for kind, _ in visit)
        is_once = phase in (QUEUE, END) or not visit
        cells = [cell for cell in cells if cell not in visit and not (is_once and cell[1] == phase)]
        if visit:
            visits.append(visit)
    rng.shuffle(visits)
    visits.sort(key=lambda visit: {QUEUE: 0, END: 2}.get(visit[0][1], 1))
    return [
        Aim(kind=kind, phase=phase, pick=round(rng.random(), 3), lasts_s=draw_seconds(rng, kind))
        for visit in visits
        for kind, phase in visit
    ]


def draw_visit(
    cells: Sequence[tuple[str, str]], drawn: Mapping[str, int], room: int
) -> list[tuple[str, str]]:
    """The first of these that one visit can take: one that ends an attempt at most, as the last."""
    found: list[tuple[str, str]] = []
    for cell in cells:
        is_second = cell[0] in BREAKING and any(kind in BREAKING for kind, _ in found)
        if not is_second and drawn.get(cell[0], 0) < MOST_A_RUN.get(cell[0], 99):
            found.append(cell)
        if len(found) == room:
            break
    return sorted(found, key=lambda cell: cell[0] in BREAKING)


def draw_seconds(rng: random.Random, kind: str) -> float:
    return round(rng.uniform(*(LASTS_S if kind == "step clock" else SHORT_S)), 1)


def judge_hit(aim: Aim, before: str, during: Sequence[str], after: str) -> str:
    """The phase in which a fault counts; empty where it came between two."""
    if aim.kind not in LASTING:
        return before if after in (before, *BRINGS.get(aim.kind, ())) else ""
    if aim.phase == SAVE and SAVE in during:
        return SAVE
    return during[0] if during else before


# One run.


class AimedRun:
    """A run from its start to its end, with faults in the phases that they are for."""

    def __init__(self, testbed: GatedTestbed, aims: Sequence[Aim]) -> None:
        self.testbed, self.aims = testbed, aims
        self.is_script = testbed.is_script
        if aims and aims[0].phase == QUEUE:
            testbed.close_gates(QUEUE)
        self.run = testbed.submit(2_000_000)
        self.monitor = Monitor(testbed)
        self.phases = PhaseReader(self.run, testbed.store)
        self.faults: list[dict[str, Any]] = []
        self._visited = QUEUE
        self._is_off = False
        self._is_lost = False

    def play(self) -> None:
        for number, aim in enumerate(self.aims):
            if not self._is_held(aim) and not self._stage(aim):
                break
            self._catch(aim)
            following = self.aims[number + 1 : number + 2]
            if aim.kind in BREAKING or [one.phase for one in following] != [aim.phase]:
                self._visited = ""
                self.testbed.open_gates()
        self.testbed.open_gates()
        if not self._is_lost:
            if not self._is_off:
                self._wait_for_progress(fewest=1)
                self._call_off()
            self._wait_over()
        self._check()

    def _is_held(self, aim: Aim) -> bool:
        """Whether the run is in the phase since the fault before this one."""
        return aim.phase == self._visited and self.phases.read() in (aim.phase, SAVE)

    def _stage(self, aim: Aim) -> bool:
        """Bring the run into the phase; False if it is over, or hangs."""
        self._visited = aim.phase
        if aim.phase == QUEUE or (aim.phase == END and self._is_off):
            return True
        self.testbed.open_gates()
        if self.monitor.best < 0 and any(one.kind == "damage newest" for one in self.aims):
            self._wait_for_progress(fewest=1)  # it needs a checkpoint before the newest
        if (extra := len(self.testbed.list_nodes()) - MOST_NODES) > 0:
            self.testbed.vjob("shrink", str(self.run.path), "--count", str(extra), code=None)
        if not self._wait_for_progress(fewest=count_needed(aim)):
            return False
        self.testbed.close_gates(aim.phase)
        self._provoke(aim.phase)
        return True

    def _wait_for_progress(self, fewest: int) -> bool:
        """Wait for a new checkpoint, and for so many nodes."""
        before, looked, grown = self._find_progress(), 0.0, -PATIENCE_S
        end = time.monotonic() + PATIENCE_S
        while True:
            self.monitor.poll()
            now = time.monotonic()
            has_progress = self._find_progress() > before and self._is_settled()
            missing = fewest - len(self.testbed.list_nodes())
            if has_progress and missing <= 0:
                return True
            if has_progress and now - grown > GROW_S:
                self._grow(max(missing, self.testbed.num_nodes - fewest + missing))
                grown = now
            if now > end:
                self._is_lost = True
                self.monitor.add_problem(
                    f"{missing} nodes are missing for {PATIENCE_S:g} s"
                    if has_progress
                    else f"no new checkpoint for {PATIENCE_S:g} s: it hangs"
                )
                return False
            if now - looked > 15:
                looked = now
                if self._is_over():
                    self._is_lost = True
                    return False
            time.sleep(0.2)

    def _is_settled(self) -> bool:
        """Whether ranks train and all nodes that the manager counts on are here."""
        members = self._list_members()
        is_on = self.testbed.read_state().get("phase") == RUNNING and bool(members)
        return is_on and members <= {node.seat for node in self.testbed.list_nodes()}

    def _list_members(self) -> set[int]:
        """Seats of the attempt's nodes."""
        state = read_state(self.run.morph)
        return set() if state is None else {get_seat(node) for node in state.members}

    def _find_progress(self) -> int:
        """The step that is saved."""
        if not self.is_script:
            return self.monitor.best
        try:
            return int((self.testbed.store / "place").read_text())
        except (OSError, ValueError):
            return -1

    def _grow(self, count: int) -> None:
        self.testbed.vjob("grow", str(self.run.path), "--count", str(count), code=None)

    def _provoke(self, phase: str) -> None:
        """Bring the run into the phase; training and save come by themselves."""
        if phase == JOIN:
            self._grow(1)
        elif phase in (MORPH, START):
            self.testbed.ask_to_leave(max(self._list_members()))  # ranks save before they end
        elif phase == REQUEUED:
            self.testbed.warn()
        elif phase == END:
            self._call_off()

    def _call_off(self) -> None:
        self._is_off = True
        with (self.testbed.folder / "cancel.out").open("a") as out:
            self.testbed.vjob.start("cancel", str(self.run.path), stdout=out)

    def _was_asked(self) -> bool:
        """Whether `vjob cancel` found ranks that save when they are asked to."""
        return "to checkpoint and leave" in (self.testbed.folder / "cancel.out").read_text()

    def _catch(self, aim: Aim) -> None:
        """Apply the fault once the run is in the phase, and note where it took effect."""
        fault = Fault(kind=aim.kind, at=0, pick=aim.pick, lasts_s=aim.lasts_s)
        waits_s = CATCH_S if self.is_script else 2 * CATCH_S
        if aim.phase == TRAINING:  # nodes that were asked for and called off count as awaited
            waits_s += GROWING_S
        if aim.phase == QUEUE:  # it comes at once, or is over
            waits_s = 3.0
        end = time.monotonic() + waits_s
        said, seen = f"{NO_TARGET}: the phase did not come", ["", ""]
        hit = ""
        while time.monotonic() < end:
            before = self.phases.read()
            if before != aim.phase:
                self.monitor.poll()
                time.sleep(POLL_S)
                continue
            during: list[str] = []

            def pause(seconds: float, during: list[str] = during) -> None:
                self._pause(seconds, during)

            if aim.kind in BREAKING:  # or the attempt that it ends may have a successor by then
                self.testbed.close_gates(MORPH)
            said = ACTIONS[aim.kind](self.testbed, fault, pause)
            if said.startswith(NO_TARGET):
                time.sleep(RETRY_S)
                continue
            seen = [before, (during or [self.phases.read()])[0]]
            hit = judge_hit(aim, before, during, seen[1])
            break
        if aim.kind == "damage newest" and seen[0]:
            self.monitor.expect_damage()
        self.monitor.note("applied", **asdict(aim), said=said, seen=seen)
        self.faults.append({**asdict(aim), "said": said, "seen": seen, "hit": hit})
        print(f"  {aim.kind} @ {aim.phase}: {said} ({' to '.join(seen)})", flush=True)

    def _pause(self, seconds: float, during: list[str] | None = None) -> None:
        end, poll_at = time.monotonic() + seconds, 0.0
        while True:
            if during is not None:
                during.append(self.phases.read())
            if time.monotonic() >= poll_at:
                self.monitor.poll()
                poll_at = time.monotonic() + 0.3
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.02 if during is not None else 0.3, left))

    def _is_over(self) -> bool:
        self.testbed.vjob("status", str(self.run.path), "--json", code=None)
        return read_json(self.run.record).get("state") in OVER

    def _wait_over(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self._is_over():
            if time.monotonic() > end:
                self.monitor.add_problem(f"it was called off, and is not over after {PATIENCE_S} s")
                return
            self._pause(1.0)

    def _check(self) -> None:
        record, problems = read_json(self.run.record), self.monitor.add_problem
        if record.get("state") not in OVER:
            return  # it hangs, and that is reported already
        is_hurried = any(one["phase"] == END for one in self.faults)
        if not self._is_off:
            problems(f"it ended by itself: {record.get('verdict')}: {record.get('message')}")
        elif record.get("verdict") != "COMPLETED" and not is_hurried and self._was_asked():
            problems(
                f"asked to save and leave, it ended as {record.get('verdict')}: "
                f"{record.get('message')}"
            )
        kinds = {one["kind"] for one in self.faults if one["seen"][0]}
        if self.is_script:
            found = check_steps((self.testbed.store / "history").read_text())
        else:
            found = check_losses(self.run, lines_may_lack="fill run" in kinds)
        for text in [*found, *check_history(self.run)]:
            problems(text)
        end = time.monotonic() + 30
        while (left := self.testbed.list_leftovers()) and time.monotonic() < end:
            time.sleep(0.3)
        if left:
            problems(f"{len(left)} processes are left: {left[:3]}")


def count_needed(aim: Aim) -> int:
    """Nodes that a run needs so that it can be brought there, and the fault has one to take."""
    return 2 + (aim.kind in ("leave", "shrink")) + (aim.phase in (MORPH, START))


def check_losses(run: RunFolder, *, lines_may_lack: bool) -> list[str]:
    """Compare the losses on the way to the last weights with an undisturbed training."""
    import torch

    from tests.varuna_core.programs.reference_training import train_plainly

    torch.set_num_threads(1)
    losses, problems = read_losses(run)
    if lines_may_lack:
        problems = []
    if not losses:
        return [*problems, "no step was done"]
    expected, _ = train_plainly(read_training(run.training), last=max(losses))
    for step, loss in sorted(losses.items()):
        if not abs(loss - expected[step]) <= ALIKE * abs(expected[step]):
            return [*problems, f"step {step}: loss {loss}, undisturbed {expected[step]}"]
    return problems


def check_steps(history: str) -> list[str]:
    """Check what the script's first ranks wrote down: attempts never go back, so that no two train
    at once, and each goes on from a step that was done."""
    problems = []
    attempt, done = -1, 0
    for line in history.splitlines():
        number, step = map(int, line.split())
        if number < attempt:
            problems.append(f"attempt {number} trained after attempt {attempt} had begun")
        elif number == attempt and step != done + 1:
            problems.append(f"attempt {number} did step {step} after {done}")
        elif number > attempt and not step <= done + 1:
            problems.append(f"attempt {number} begins with step {step} after {done}")
        attempt, done = max(attempt, number), step
    return problems[:3] or ([] if history else ["no step was done"])


def play_run(name: str, seed: int, aims: Sequence[Aim], parent: Path | None) -> dict[str, Any]:
    """Play one schedule on a testbed; what the table keeps of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-", dir=parent))
    testbed = TESTBEDS[name](folder)
    begun = time.monotonic()
    problems: list[str] = ["it did not come to its end"]
    try:
        testbed.open()
        aimed = AimedRun(testbed, aims)
        aimed.play()
        problems = aimed.monitor.problems
        return {
            "testbed": name,
            "seed": seed,
            "verdict": str(read_json(aimed.run.record).get("verdict")),
            "attempts": len(aimed.run.attempts()),
            "seconds": round(time.monotonic() - begun),
            "problems": problems,
            "faults": aimed.faults,
            "folder": folder.name if problems else "",
        }
    finally:
        if problems and "aimed" in locals():
            write_json(folder / "seen.json", aimed.monitor.seen)
        testbed.close(keep=bool(problems))
        if not problems:
            shutil.rmtree(folder, ignore_errors=True)


# The page.


def render_page(runs: Sequence[dict[str, Any]]) -> str:
    hits = count_hits(runs)
    cells = list_cells()
    enough = [cell for cell in cells if hits[cell] >= AIMED]
    faults = [one for run in runs for one in run["faults"]]
    between = sum(one["seen"][0] != "" and not one["hit"] for one in faults)
    lines = [
        "# Chaos as statistics: faults and the phases that they hit",
        "",
        "Made by `python -m benchmarks.chaos.statistics --write`; cells add up over runs, which",
        "stand in chaos_table.json. A fault that lasts counts in the phase that the run's records",
        "say once it took effect (for a save: if one went on while it lasted); a blow (a",
        "kill, a word) where they say the phase before it, and after it the same one or the one",
        "that it brings itself, as a killed rank brings a morph. The aim is five a cell. Phases,",
        "how a run is brought into them and held there, and what is checked:",
        "[docs/morph_design.md](../../docs/morph_design.md).",
        "",
        f"{len(runs)} runs, {len(faults)} faults tried, {sum(hits.values())} hits, {between} blows "
        f"that fell between two phases and count nowhere; {len(enough)} of {len(cells)} cells have "
        f"{AIMED} or more.",
        "",
        f"| fault | {' | '.join(PHASES)} |",
        f"|---|{'---|' * len(PHASES)}",
    ]
    for kind in (*ANYWHERE, *ON_SLURM):
        counts = [
            "-" if explain_impossible(kind, phase) else str(hits[kind, phase]) for phase in PHASES
        ]
        lines.append(f"| {kind} | {' | '.join(counts)} |")
    lines += ["", f"Fewer than {AIMED}, and so open:"]
    for phase in PHASES:
        few = [f"{k} {hits[k, p]}" for k, p in cells if p == phase and hits[k, p] < AIMED]
        if few:
            lines.append(f"- {phase}: {', '.join(few)}")
    lines += ["", "Impossible (-):"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for kind in (*ANYWHERE, *ON_SLURM):
        for phase in PHASES:
            if why := explain_impossible(kind, phase):
                reasons.setdefault((phase, why), []).append(kind)
    lines += [f"- {phase}: {', '.join(of)}: {why}" for (phase, why), of in reasons.items()]
    well = [run for run in runs if not run["problems"]]
    lines += ["", f"{len(well)} of {len(runs)} runs were well."]
    for run in runs:
        if run["problems"]:
            lines.append(
                f"- `--replay {run['id']}` (" +
                ", ".join(f"{one['kind']} @ {one['phase']}" for one in run["faults"])
                + f"), {run['verdict']}: {'; '.join(run['problems'])}{run.get('answer', '')}"
            )  # fmt: skip
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background has INT ignored
        signal.signal(number, signal.default_int_handler)
    options = build_parser().parse_args(words)
    is_bad = False
    testbed = TESTBEDS[options.testbed](Path("."))
    kinds = options.kinds or (
        [kind for kind in testbed.kinds if kind in ON_SLURM]
        if isinstance(testbed, LabRun)
        else testbed.kinds
    )
    for played in range(options.runs):
        runs = read_runs(options.table)
        seed = options.seed if options.seed is not None else random.randrange(10**6)
        aims = choose_aims(options, runs, seed + played, kinds)
        print(f"seed {seed + played}: {', '.join(f'{a.kind} @ {a.phase}' for a in aims)}")
        found = play_run(options.testbed, seed + played, aims, options.folder)
        name = "a replay" if options.replay else add_run(options.table, found)
        print(
            f"{name}: {found['verdict']}, {found['seconds']} s, {found['attempts']} attempts, "
            f"{sum(one['hit'] != '' for one in found['faults'])} hits, "
            f"problems: {found['problems']}",
            flush=True,
        )
        is_bad = is_bad or bool(found["problems"])
        if options.write:
            RESULT.write_text(render_page(read_runs(options.table)))
    if options.write:
        RESULT.write_text(render_page(read_runs(options.table)))
    return 1 if is_bad else 0


def choose_aims(
    options: argparse.Namespace, runs: Sequence[dict[str, Any]], seed: int, kinds: Sequence[str],
) -> list[Aim]:  # fmt: skip
    if options.replay:
        (run,) = [one for one in runs if one["id"] == options.replay]
        fields = ("kind", "phase", "pick", "lasts_s")
        return [Aim(**{name: one[name] for name in fields}) for one in run["faults"]]
    if options.aim:
        rng = random.Random(seed)
        pairs = [text.partition("@")[::2] for text in options.aim]
        return [
            Aim(kind=kind, phase=phase, pick=round(rng.random(), 3), lasts_s=options.lasts)
            for kind, phase in pairs
        ]
    tries = Counter((one["kind"], one["phase"]) for run in runs for one in run["faults"])
    return draw_aims(seed, count_hits(runs), tries, kinds, options.phases or PHASES, options.faults)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.statistics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--faults", type=int, default=FAULTS_A_RUN, help="in each run")
    parser.add_argument("--testbed", choices=sorted(TESTBEDS), default="local")
    parser.add_argument("--seed", type=int, help="of the first run; drawn without")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", default=[], help="draw from these")
    parser.add_argument(
        "--phases", nargs="+", choices=PHASES, metavar="PHASE", help="and for these"
    )
    parser.add_argument("--aim", nargs="+", metavar="KIND@PHASE", help="these cells, not drawn")
    parser.add_argument("--lasts", type=float, default=5.0, help="seconds of the faults of --aim")
    parser.add_argument("--replay", metavar="ID", help="the faults of a run of the table again")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE")
    parser.add_argument("--folder", type=Path, help="where runs' folders are made")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
