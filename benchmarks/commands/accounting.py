"""Every second of real runs on the lab: the report's classes against a count from the raw files.

    python -m benchmarks.commands.accounting [--only NAME] [--write]

Results are kept in accounting.json, so that the page has runs of several calls.

The count shares no code with the report: the queue and the end are sacct's, steps are the lines of
the ranks and when these were written, saves and evaluations the events of the traces, what was lost
the steps that two attempts have, and the time between an attempt's last line and the next start.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import RESULTS
from tests import ROOT
from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, wait_for
from tests.reports.counted import EDGE_S, PART, Result, Row, ask_sacct, compare
from tests.small_training import list_morphs, write_slow_steps, write_text
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder

RESULT, TABLE = RESULTS / "accounting.md", RESULTS / "accounting.json"
# The runs.

CONF = """
name: {name}
program: {program}
{more}
cluster:
  scheduler: slurm
  hetero: {hetero}
  walltime_min: 10
  grace_s: 5
  join_s: 60
  lost_s: 15
  requeue: {requeue}
  nodes: [{nodes}]
env: {{OMP_NUM_THREADS: "1", PYTHONPATH: "calm:{root}"}}
"""
TRAINING = """
model: {{layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "8,2,0"}}
train:
  steps: 60
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {{lr: 1.0e-2, weight_decay: 0.1}}
  schedule: {{warmup_steps: 2, min_lr: 1.0e-3}}
  log_every: 1
  evaluate: {{every: {evaluate}}}
  checkpoint: {{folder: ckpt, every: 10, keep: 2}}
parallel: {{pipeline: {pipeline}}}
"""
FOUR, THREE = (f"{{group: all, count: {number}, queue: gpu2, ranks: 1}}" for number in (4, 3))
TWO = "{group: all, count: 2, queue: gpu1, ranks: 1}"
HET = "{group: one, queue: gpu1, ranks: 1}, {group: two, count: 2, queue: gpu2, ranks: 1}"
MORPH = "morph: {enabled: true, min_nodes: 1}\n"
TRACED = '''
"""A script without torch that traces its steps and prints them, each rank at its own pace."""
import os, time
from varuna_core import trace

time.sleep(1)
for step in range(1, 101):
    with trace.step(step):
        with trace.span("data"):
            time.sleep(0.01)
        with trace.span("compute"):
            time.sleep(0.04 * (1 + int(os.environ["RANK"])))
        if step % 20 == 0:  # of which the trace has details
            with trace.span("checkpoint"):
                time.sleep(0.3)
    print(f"step {step}/100", flush=True)
'''


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run on the lab."""

    name: str
    title: str
    conf: str
    disturb: Callable[[Lab, Vjob, RunFolder], None] = lambda lab, vjob, run: None


def crash(lab: Lab, vjob: Vjob, run: RunFolder) -> None:
    """The last node, once there is a checkpoint, or a DDP script has come far enough."""
    logs = run.attempt(0).path

    def is_far() -> bool:
        texts = (path.read_text() for path in logs.glob("*.out"))
        return bool(list_complete(vjob.folder / "ckpt")) or any("step 300/" in t for t in texts)

    wait_for(is_far, 180, lambda: vjob.explain(run))
    lab.crash_node(read_json(run.morph.node(3))["host"])


def requeue(lab: Lab, vjob: Vjob, run: RunFolder) -> None:
    """With a node less to come back to."""
    wait_for(lambda: list_complete(vjob.folder / "ckpt"), 180, lambda: vjob.explain(run))
    host = read_json(run.morph.node(1))["host"]
    lab.run(["scontrol", "update", f"nodename={host}", "state=drain", "reason=test"])
    job = str(read_json(run.record)["jobs"][0]["id"])
    lab.run(["scancel", "--batch", "--signal=USR1", job])


def build_conf(
    name: str,
    nodes: str,
    *,
    program: str = "pretrain_gpt",
    more: str = "",
    hetero: str = "auto",
    pipeline: int = 0,
    evaluate: int = 0,
    requeue: bool = False,
) -> str:
    training = TRAINING.format(pipeline=pipeline, evaluate=evaluate) if pipeline else ""
    return CONF.format(
        name=name, program=program, more=training + more, hetero=hetero, nodes=nodes, root=ROOT,
        requeue=str(requeue).lower(),
    )  # fmt: skip


def build_script(script: Path | str, *words: str) -> str:
    return f"{{script: {script}, args: {json.dumps(words)}, snapshot: none}}"


NANOGPT = ("--data_dir=bins", "--max_iters=300", "--eval_interval=50", "--eval_iters=20")
CASES = (
    Case(
        name="plain",
        title="pretrain_gpt in three stages, saves and evaluations",
        conf=build_conf("plain", THREE, pipeline=3, evaluate=20),
    ),
    Case(
        name="het",
        title="the same as a heterogeneous job of two queues",
        conf=build_conf("het", HET, hetero="hetjob", pipeline=3),
    ),
    Case(
        name="morph",
        title="four stages, one node without power, three stages",
        conf=build_conf("morph", FOUR, pipeline=4, more=MORPH),
        disturb=crash,
    ),
    Case(
        name="requeue",
        title="two stages, requeued, one stage on the node that is left",
        conf=build_conf("requeue", TWO, pipeline=2, more=MORPH, requeue=True),
        disturb=requeue,
    ),
    Case(
        name="nanogpt",
        title="a script of others, one process, no trace",
        conf=build_conf(
            "nanogpt",
            "{group: all, count: 1, queue: gpu2}",
            program=build_script("plain.py", *NANOGPT),
        ),
    ),
    Case(
        name="ddp",
        title="a DDP script that loses one of four nodes, no trace",
        conf=build_conf(
            "ddp", FOUR, program=build_script(PROGRAMS / "ddp_script.py", "1500"),
            more="morph: {enabled: true, mode: world, max_nodes: 4}",
        ),
        disturb=crash,
    ),
    Case(
        name="traced",
        title="a het job of a script whose two ranks never meet, traced",
        conf=build_conf(
            "traced", "{group: one, queue: gpu1, ranks: 1}, {group: two, queue: gpu2, ranks: 1}",
            program=build_script("traced.py"), hetero="hetjob",
        ),
    ),
)  # fmt: skip


def prepare(folder: Path) -> None:
    """What the programs of the cases read."""
    write_text(folder)
    write_slow_steps(folder / "calm")
    (folder / "traced.py").write_text(TRACED)
    (folder / "plain.py").write_text((ROOT / "tests/foreign/nanogpt/plain.py").read_text())
    (folder / "bins").mkdir()
    for name in ("train", "val"):
        tokens = (number % 60 for number in range(20_000))
        (folder / "bins" / f"{name}.bin").write_bytes(b"".join(bytes((t, 0)) for t in tokens))


def run_case(lab: Lab, case: Case, folder: Path) -> Result:
    own = folder / case.name
    own.mkdir()
    prepare(own)
    vjob = Vjob(own, lab.env)
    run = vjob.submit(case.conf)
    case.disturb(lab, vjob, run)
    record = vjob.wait_over(run, 300, may_fail=True)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert len(list_morphs(run)) == (case.name in ("morph", "ddp")), vjob.explain(run)
    return compare(run.path, ask_sacct(lab, run))


# The page.


def read_results() -> dict[str, Result]:
    """Those of earlier calls, in the order of the cases."""
    kept = read_json(TABLE) or {}
    names = [case.name for case in CASES if case.name in kept]
    rows = {name: tuple(Row(**row) for row in kept[name]["rows"]) for name in names}
    return {name: Result(**{**kept[name], "rows": rows[name]}) for name in names}


def write_results(found: Mapping[str, Result]) -> None:
    kept = {name: asdict(result) for name, result in {**read_results(), **found}.items()}
    TABLE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def render(found: Mapping[str, Result], version: str) -> str:
    results = list(found.values())
    bad = [name for name, result in found.items() if result.find_problems()]
    apart = max(abs(sum(result.shares.values()) - 1) for result in results)
    unknown = max(result.shares.get("unknown", 0.0) for result in results)
    twice = max(result.overlap for result in results)
    names = [row.name for row in results[0].rows]
    lines = [
        "# Every second of real runs",
        "",
        "Made by `python -m benchmarks.commands.accounting --write`: runs on the lab of Slurm. "
        "Their reports are compared with a count from the raw files that shares no code with them: "
        "sacct, the lines of ranks and when they were written, the events of the traces, and the "
        f"steps that two attempts have. {version}.",
        "",
        f"**{len(results) - len(bad)} of {len(results)}** runs agree. The classes sum to 100 % "
        f"within {apart:.4%} (bound 0.1 %); at most {unknown:.2%} is unknown (bound 2 %), "
        f"{twice:.4%} is claimed twice. A class may be {PART:.0%} and {EDGE_S} s a rank and "
        "attempt from the count: Slurm has whole seconds, and its prolog is in our queue. Saves "
        "are within the steps; `after` is the time until Slurm's job ended, after the attempt that "
        "was its last: it is in no class, or in the queue before the next attempt.",
        "",
        "Rank-seconds, as the report has them / as counted:",
        "",
        f"| run | {' | '.join(names)} | after | unknown | wrong, says the report |",
        "|---|" + "---|" * (len(names) + 3),
    ]
    titles = {case.name: case.title for case in CASES}
    for name, result in found.items():
        cells = [
            f"{row.reported:.1f} / {row.counted:.1f}" + ("" if row.is_right else " NO")
            for row in result.rows
        ]
        share = f"{result.shares.get('unknown', 0.0):.2%}"
        causes = ", ".join(result.causes) or "nothing"
        cells += [f"{result.after_s:.1f}", share, causes]
        lines.append(f"| {titles[name]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this pattern")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    wanted = parser.parse_args()
    cases = [case for case in CASES if re.search(wanted.only, case.name)]
    found: dict[str, Result] = {}
    lab = Lab.start()
    try:
        version = lab.run(["sinfo", "--version"]).stdout.strip()
        for case in cases:
            lab.repair()
            with tempfile.TemporaryDirectory(
                prefix="vjob-accounting-", ignore_cleanup_errors=True
            ) as folder:
                found[case.name] = run_case(lab, case, Path(folder))
            print(case.name, found[case.name].find_problems() or "agrees", flush=True)
            if wanted.write:
                write_results(found)
    finally:
        if lab.started_here:
            lab.stop()
    print(render(found, version))
    if wanted.write:
        RESULT.write_text(render(read_results(), version))
    raise SystemExit(any(result.find_problems() for result in found.values()))


if __name__ == "__main__":
    main()
