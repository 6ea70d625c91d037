"""Programs of others, ported: trained here in two stages and two replicas, and disturbed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import Vjob
from tests.foreign.programs import (
    DISTURBED,
    PROGRAMS,
    count_changes,
    list_changes,
    train_plainly,
)
from tests.foreign.story import LONG_S, begin

pytest.importorskip("torch", reason="torch is not installed")

CLUSTER = """
cluster:
  scheduler: local
  walltime_min: 60
  grace_s: 20
  restarts: 1
  nodes: [{group: weak, ranks: 2}, {group: strong, ranks: 2}]
"""


def render_table() -> str:
    """The table of the documents."""
    counts = {program.title: count_changes(program) for program in PROGRAMS.values()}
    rows = [f"| {title} | {' | '.join(map(str, found))} |" for title, found in counts.items()]
    return "\n".join(rows)


def test_the_lines_that_a_port_changes_are_those_of_the_documents_and_at_most_ten() -> None:
    page = (ROOT / "docs/training.md").read_text()
    assert f"\n{render_table()}\n" in page, render_table()
    changed = {name: count_changes(program)[1] for name, program in PROGRAMS.items()}
    assert max(changed.values()) <= 10, changed


def test_every_line_that_differs_is_counted() -> None:
    for program in PROGRAMS.values():
        plain, ported = (
            Counter((program.folder / name).read_text().splitlines())
            for name in ("plain.py", "ported.py")
        )
        changes = list_changes(program)
        gone = Counter(line for change in changes for line in change.gone)
        new = Counter(line for change in changes for line in change.new)
        del plain[""], ported[""]
        assert plain - gone + new == ported, program.name


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", DISTURBED)
def test_a_ported_program_has_the_losses_of_the_original_though_it_is_disturbed(
    name: str, tmp_path: Path
) -> None:
    if name == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed")
    story = begin(PROGRAMS[name], Vjob(tmp_path), CLUSTER)
    plain = train_plainly(story.program, tmp_path)
    story.submit()
    story.wait_for_losses(3)
    story.look_while_it_runs()
    story.cancel_with_a_checkpoint()

    story.go_on_for_a_while()
    beat = json.loads(story.run.attempt(0).beat(1).read_text())
    os.kill(int(beat["ranks"]["3"]["pid"]), signal.SIGKILL)
    story.set_pause(0)
    record = story.vjob.wait_over(story.run, 400, may_fail=True)
    assert record["verdict"] == "COMPLETED", story.vjob.explain(story.run)
    assert [attempt.number for attempt in story.run.attempts()] == [0, 1]
    story.check_losses(plain)
    story.check_report()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_a_ported_program_has_the_losses_of_the_original(name: str, tmp_path: Path) -> None:
    story = begin(PROGRAMS[name], Vjob(tmp_path), CLUSTER)
    plain = train_plainly(story.program, tmp_path)
    story.set_pause(0)
    story.submit()
    record = story.vjob.wait_over(story.run, 400, may_fail=True)
    assert record["verdict"] == "COMPLETED", story.vjob.explain(story.run)
    story.check_losses(plain)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_ported_program_goes_on_in_another_layout_without_a_lost_node(tmp_path: Path) -> None:
    """Nothing of it knows of morphing; the next attempt has one replica."""
    cluster = CLUSTER.replace("restarts: 1", "join_s: 300")
    cluster = cluster[: cluster.index("nodes:")] + "nodes: [{group: all, count: 4, ranks: 1}]"
    morph = "\nmorph: {enabled: true}\n"
    story = begin(PROGRAMS["nanogpt"], Vjob(tmp_path), cluster + morph)
    plain = train_plainly(story.program, tmp_path)
    story.submit()
    story.wait_for_losses(17)
    story.set_pause(LONG_S)
    os.kill(json.loads(story.run.morph.node(3).read_text())["pid"], signal.SIGKILL)
    story.set_pause(0)
    record = story.vjob.wait_over(story.run, 400, may_fail=True)
    assert record["verdict"] == "COMPLETED", story.vjob.explain(story.run)
    assert "morphed from 2 x 2 to 2 x 1" in story.vjob("status", str(story.run.path)).stdout
    story.check_losses(plain)
    story.check_report()
