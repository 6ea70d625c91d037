"""What happens to the run of a ported program, here and on the lab, and what is seen of it.

It is submitted, looked at while it runs, cancelled with a checkpoint, submitted again, and loses
a rank or a node; then it has the losses of the undisturbed original.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command import Vjob, wait_for
from tests.foreign.programs import (
    STEPS,
    Program,
    read_losses,
    read_rank,
    render_conf,
    write_data,
    write_pauses,
)
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.exits import NODE_LOST
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder

PAUSE_S = 0.15
"""In each activation: a second and more for a step, so that there is time to look."""
LONG_S = 4.0
"""Steps of half a minute, so that none of importance ends while something is done to the run."""


@dataclass(kw_only=True)
class Story:
    """One program and its runs, in a folder of their own."""

    program: Program
    vjob: Vjob
    cluster: str
    """The conf's section."""
    num_nodes: int = 2
    runs: list[RunFolder] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.vjob.folder

    @property
    def run(self) -> RunFolder:
        return self.runs[-1]

    def list_steps(self, run: RunFolder, attempt: int) -> list[str]:
        """Steps of training that an attempt printed."""
        losses = self.program.read(read_rank(run, attempt))
        return [name for name in losses if not re.search("val|train|test|epoch", name)]

    def find_hosts(self) -> list[str]:
        """The hosts of the nodes, in their order, by their first beats."""

        def read() -> list[Any]:
            beats = sorted(self.run.attempts()[-1].path.glob("beat/*.json"))
            return [read_json(path) for path in beats]

        wait_for(lambda: len(read()) == self.num_nodes and all(read()), 200)
        return [beat["host"] for beat in read()]

    def set_pause(self, seconds: float) -> None:
        write_pauses(self.folder / "pauses", seconds)

    def submit(self) -> None:
        path = f"{self.folder}/pauses:{ROOT}"
        text = render_conf(self.program, self.cluster, path)
        self.runs.append(self.vjob.submit(text))

    def list_saved(self) -> list[int]:
        return [found.iteration for found in list_complete(self.folder / "checkpoints")]

    def count_losses(self, attempt: int = 0) -> int:
        return len(self.program.read(read_rank(self.run, attempt)))

    def wait_for_losses(self, count: int, attempt: int = 0, timeout_s: float = 400) -> None:
        wait_for(
            lambda: self.count_losses(attempt) >= count or self.is_over(attempt),
            timeout_s,
            lambda: self.vjob.explain(self.run),
        )
        assert not self.is_over(attempt), self.vjob.explain(self.run)

    def is_over(self, attempt: int) -> bool:
        return self.run.attempt(attempt).outcome.exists()

    def look_while_it_runs(self) -> None:
        """Pace, time left and health; the line of the user's file that each rank is at."""

        text = rf"HEALTHY.*\b\d+ s left.*\bstep \d+ of {STEPS}, [\d.]+ m?s a step"
        pattern = re.compile(text, re.DOTALL)

        def read() -> str:
            return self.vjob("status", str(self.run.path), code=None).stdout

        wait_for(lambda: pattern.search(read()), 200, read)
        self.set_pause(LONG_S)
        found = json.loads(self.vjob("stacks", str(self.run.path), "--json").stdout)
        frames = [
            frame
            for group in found["groups"]
            for stack in group["stacks"]
            for thread in stack["threads"]
            for frame in thread["frames"]
        ]
        assert any(frame["file"].endswith("ported.py") for frame in frames), found
        ranks = [rank for group in found["groups"] for rank in group["ranks"]]
        assert sorted(ranks) == [0, 1, 2, 3], found

    def go_on_for_a_while(self) -> None:
        """Submit again; it has gone on from the checkpoint, and is far from its end."""
        self.set_pause(PAUSE_S)
        self.submit()
        self.wait_for_losses(2)
        self.set_pause(LONG_S)

    def cancel_with_a_checkpoint(self) -> None:
        """The ranks save where they are, and leave."""
        self.set_pause(2 * PAUSE_S)
        self.vjob("cancel", str(self.run.path))
        self.vjob.wait_over(self.run, 400, may_fail=True)
        left = json.loads((self.folder / "checkpoints/left.json").read_text())
        assert 0 < left["iteration"] < STEPS and left["iteration"] == self.list_saved()[-1], left

    def check_losses(self, plain: dict[str, float]) -> None:
        losses = read_losses(self.program, *self.runs)
        assert losses.keys() == plain.keys()
        assert losses == pytest.approx(plain, rel=self.program.tolerance)

    def check_report(self) -> None:
        """A timeline, and the steps that were done; of ranks that died at once the last ones may be
        missing."""
        for run in self.runs:
            said = self.vjob("report", str(run.path), "--text").stdout
            attempts = [self.list_steps(run, one.number) for one in run.attempts()]
            done = sum(map(len, attempts))
            lost = done - len(attempts[-1]) if len(attempts) > 1 else 0
            outcome = json.loads(run.record.read_text())["outcome"]
            if outcome["code"] == NODE_LOST:  # all of them died at once
                lost = done - 1
            traced = int(re.findall(r"  traced steps: (\d+)", said)[0])
            assert done - lost <= traced <= done, (done, said)
            assert "\nPIPELINE\n" in said and "\nSTAGES\n" in said, said


def begin(program: Program, vjob: Vjob, cluster: str, num_nodes: int = 2) -> Story:
    """The data and a slow sitecustomize are in the folder."""
    write_data(vjob.folder)
    story = Story(program=program, vjob=vjob, cluster=cluster, num_nodes=num_nodes)
    story.set_pause(PAUSE_S)
    return story
