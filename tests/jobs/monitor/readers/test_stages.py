"""The stages of a rank: `status` took its place in the pipeline for its only stage."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.records.files import write_json
from varuna_core.records.logs.trace import TraceWriter
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import render_training
from vjob.jobs.monitor.readers.attempt import AttemptReader


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    found = RunFolder(tmp_path).attempt(0)
    found.make()
    write_json(found.beat(0), {"host": "n0", "state": "running"})
    return found


def read_stages(attempt: AttemptFolder) -> list[tuple[int | None, tuple[int, ...]]]:
    plan = replace(make_plan(make_group("a", 1, 2)), pipeline=2, data=1, stage_map="0;1;")
    return [(rank.stage, rank.stages) for rank in AttemptReader(attempt, plan, 0).read().ranks]


def test_a_built_in_program_tells_its_schedule_in_training_json(attempt: AttemptFolder) -> None:
    assert read_stages(attempt) == [(0, (0,)), (1, (1,))]
    text = render_training(replace(GPT, schedule="zbv", partition=None))
    RunFolder(attempt.path.parent).training.write_text(text)
    assert read_stages(attempt) == [(0, (0, 3)), (1, (1, 2))]


def test_a_users_program_tells_its_stages_in_the_traces(attempt: AttemptFolder) -> None:
    TraceWriter(attempt.trace(0), 0, stages=(0, 3)).close()
    assert read_stages(attempt) == [(0, (0, 3)), (1, (1,))]
