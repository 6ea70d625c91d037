"""The history of a run: the orders that its agents obeyed, and the steps and losses that lead to
its final weights, from its logs and traces.

attempt 0   1 ────────► 40┄┄┄45        resumed from 40: what came after it was for nothing
attempt 1               41 ───────► 90
                                       kept: 1 to 40 of the first, 41 to 90 of the second
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.records.files import read_lines
from varuna_core.records.logs.rank_output import list_outputs
from varuna_core.records.morphing import read_claim, read_newest_epoch
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import read_training

LINE = re.compile(r" iteration +(\d+)/(?:(?! iteration +\d).)*? lm loss: (\S+)")
"""Of one step: a full disk cuts a line short, and the next one follows on it."""
ALIKE = 2e-5
"""Relative, between losses of layouts that add up in another order (docs/morph_design.md)."""
ELSEWHERE = "the run went on in another job"
SAMPLES = re.compile(r" iteration +(\d+)/[^|\n]*\| consumed samples: +(\d+) ")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A row of steps that one attempt did."""

    attempt: int
    first: int
    last: int
    """The last one that later steps stand on."""
    done: int
    """The last one that it did."""


def read_spans(run: RunFolder, batch: int) -> tuple[list[Span], list[str]]:
    """Read the spans that lead to the final weights, and the problems found in them.

    Step s reads the samples from (s - 1) x batch on, whatever the layout, and tells how many were
    read: so each sample is used once if each step is, and the count is right.
    """
    spans: list[Span] = []
    problems = []
    for attempt in run.attempts():
        text = "".join(path.read_text(errors="replace") for path in list_outputs(attempt))
        steps = [int(step) for step, _ in LINE.findall(text)]
        if not steps:
            continue
        first, done = min(steps), max(steps)
        if steps != list(range(first, done + 1)):
            problems.append(f"attempt {attempt.number} did {steps}, not each step once")
        for step, samples in SAMPLES.findall(text):
            if int(samples) != int(step) * batch:
                problems.append(f"after step {step} {samples} samples of {batch} a step were read")
        spans = [replace(one, last=min(one.last, first - 1)) for one in spans]
        spans.append(Span(attempt=attempt.number, first=first, last=done, done=done))
    kept = [one for one in spans if one.last >= one.first]
    for before, after in itertools.pairwise(kept):
        if after.first != before.last + 1:
            problems.append(f"from step {before.last} on to {after.first}")
    return kept, problems


def read_losses(run: RunFolder) -> tuple[dict[int, float], list[str]]:
    """Read the loss of each step that leads to the final weights, and problems in the logs.

    An attempt goes on from a step that an earlier one has done; of a step that was done more than
    once the last time counts, for later steps stand on it.
    """
    found: dict[int, float] = {}
    problems = []
    for attempt in run.attempts():
        text = "".join(path.read_text(errors="replace") for path in list_outputs(attempt))
        steps = {int(step): float(loss) for step, loss in LINE.findall(text)}
        resumed = re.search(r"resumed from iteration (\d+)", text)
        first = int(resumed[1]) if resumed else 0
        where = f"attempt {attempt.number}"
        if steps and min(steps) != first + 1:
            problems.append(f"{where} begins with step {min(steps)} after iteration {first}")
        if steps and sorted(steps) != list(range(min(steps), max(steps) + 1)):
            problems.append(f"{where} leaves out steps")
        if steps and first and first not in found:
            problems.append(f"{where} goes on from step {first}, which nobody has done")
        found.update(steps)
    return found, problems


def check_losses(run: RunFolder, *, lines_may_lack: bool) -> tuple[list[str], dict[int, float]]:
    """Compare every step's loss with the undisturbed training: problems, and undisturbed losses.

    The batch of each step is its own, so a sample that came twice or never would show in the loss.
    `lines_may_lack`: the disk that holds the logs was full.
    """
    import torch

    from tests.varuna_core.programs.reference_training import train_plainly

    torch.set_num_threads(1)
    training = read_training(run.training)
    losses, problems = read_losses(run)
    expected, _ = train_plainly(training)
    missing = sorted(set(expected) - set(losses))
    if lines_may_lack:
        problems = []
    elif missing:
        problems.append(f"{len(missing)} steps have no loss: {missing[:5]}")
    for step, loss in sorted(losses.items()):
        if not abs(loss - expected[step]) <= ALIKE * abs(expected[step]):
            problems.append(f"step {step}: loss {loss}, undisturbed {expected[step]}")
            break
    return problems, expected


def check_history(run: RunFolder) -> list[str]:
    """Check what the agents obeyed and when ranks trained; each problem is a sentence."""
    problems = []
    owners: dict[int, str] = {}
    for path in sorted(run.morph.obeyed.glob("*.jsonl")):
        lines = [line for line in read_lines(path) if isinstance(line, dict) and "what" in line]
        problems += check_agent(run, path.stem, lines)
        for line in lines:
            if line["what"] == "start":
                owner = owners.setdefault(line["attempt"], line["session"])
                if owner != line["session"]:
                    problems.append(
                        f"attempt {line['attempt']} ran in {owner} and {line['session']}"
                    )
    return problems + check_one_trains(run)


def check_agent(run: RunFolder, name: str, lines: list[dict[str, Any]]) -> list[str]:
    """The history of one agent."""
    problems = []
    epoch, attempt, running = -1, -1, False
    for line in lines:
        if line["epoch"] < epoch:
            problems.append(f"agent {name} obeys epoch {line['epoch']} after {epoch}")
        epoch = max(epoch, line["epoch"])
        if line["what"] == "start":
            if line["attempt"] <= attempt:
                problems.append(f"agent {name} starts attempt {line['attempt']} after {attempt}")
            if running:
                problems.append(f"agent {name} starts attempt {line['attempt']} beside {attempt}")
            attempt, running = line["attempt"], True
        elif line["what"] == "end":
            running = False
        elif line["what"] == "join" and running:
            problems.append(f"agent {name} goes over to {line['session']} in attempt {attempt}")
        elif line["what"] == "leave" and line["reason"] == ELSEWHERE:
            problems += check_left(run, name, line["session"])
    return problems


def check_left(run: RunFolder, name: str, session: str) -> list[str]:
    """Whether another session has claimed the run after the one that this agent left."""
    claim = read_claim(run.morph, read_newest_epoch(run.morph))
    if claim is not None and claim.session != session:
        return []
    return [f"agent {name} left {session}, the last session, because {ELSEWHERE}"]


def check_one_trains(run: RunFolder) -> list[str]:
    """Check by the traces that no attempt did a step after a later one had begun to.

    Wall clocks of different hosts may differ; the testbeds are one machine.
    """
    spans = [(attempt.number, *span) for attempt in run.attempts() if (span := read_span(attempt))]
    return [
        f"attempt {number} trained for {end - begin:.1f} s beside attempt {later}"
        for (number, _, end), (later, begin, _) in itertools.pairwise(spans)
        if end > begin
    ]


def read_span(attempt: AttemptFolder) -> tuple[float, float] | None:
    """When the first step began and the last one ended, in seconds of the wall clock."""
    steps = [step for path in attempt.path.glob("trace/*.jsonl") for step in _read_steps(path)]
    if not steps:
        return None
    return min(begin for begin, _ in steps), max(end for _, end in steps)


def _read_steps(path: Path) -> list[tuple[float, float]]:
    """Of a file that one rank writes, or those of a node, each with lines that say whose follow."""
    origins: dict[int, int] = {}
    rank, steps = -1, []
    for line in read_lines(path):
        if not isinstance(line, dict):
            continue
        rank = line.get("rank", rank)
        if "trace" in line:
            origins[rank] = line["origin"]
        elif "step" in line and rank in origins:
            begin = origins[rank] + line["begin"]
            steps.append((begin / 1e9, (begin + line["took"]) / 1e9))
    return steps


def main(words: list[str] | None = None) -> int:
    """Check the history of each run folder; 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.history")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    problems = [
        text for path in parser.parse_args(words).runs for text in check_history(RunFolder(path))
    ]
    print("\n".join(problems or ["no problem"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
