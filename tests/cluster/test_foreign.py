"""Programs of others, ported, on two groups of the lab's nodes.

Runs beside each other are looked at, cancelled with a checkpoint, submitted again, and lose a node.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob
from tests.foreign.programs import DISTURBED, PROGRAMS, train_plainly
from tests.foreign.story import Story, begin

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]

CLUSTER = """
cluster:
  scheduler: slurm
  walltime_min: 60
  grace_s: 20
  join_s: 300
  requeue: true
  nodes:
    - {group: weak, count: 2, queue: gpu2, ranks: 1, cpus: 2}
    - {group: strong, count: 1, queue: gpu1, ranks: 2, cpus: 2}
"""


def train_until_it_is_cancelled(story: Story) -> None:
    story.submit()
    story.wait_for_losses(3)
    story.look_while_it_runs()
    story.cancel_with_a_checkpoint()


def end(story: Story) -> None:
    story.set_pause(0)
    record = story.vjob.wait_over(story.run, 400, may_fail=True)
    assert record["verdict"] == "COMPLETED", story.vjob.explain(story.run)
    assert [attempt.number for attempt in story.run.attempts()] == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("names", [DISTURBED])
def test_ported_programs_lose_a_node_and_have_the_losses_of_their_originals(
    clean_lab: Lab, tmp_path: Path, names: tuple[str, ...]
) -> None:
    for library in ("torch", "transformers"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    stories = []
    for program in map(PROGRAMS.__getitem__, names):
        (tmp_path / program.name).mkdir()
        vjob = Vjob(tmp_path / program.name, clean_lab.env)
        stories.append(begin(program, vjob, CLUSTER, num_nodes=3))
    with ThreadPoolExecutor(len(stories)) as pool:
        plain = [train_plainly(story.program, story.folder) for story in stories]
        list(pool.map(train_until_it_is_cancelled, stories))
        list(pool.map(Story.go_on_for_a_while, stories))
        nodes = {story.find_hosts()[1] for story in stories}
        for node in nodes:
            clean_lab.crash_node(node)
        list(pool.map(end, stories))
    for story, losses in zip(stories, plain, strict=True):
        assert not nodes & set(story.find_hosts())
        story.check_losses(losses)
        story.check_report()
