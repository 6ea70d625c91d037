"""Stages and micro-batches that the launcher plans, where the user leaves them out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT
from varuna_core import AutoConfig
from varuna_core.planner.profile.profile_file import write_profile
from varuna_core.planner.profile.transformer import Transformer, estimate_profile
from vjob.jobs.errors import InputError
from vjob.shelf.launcher.layout import choose_shape

SHOW = "import os, sys\nprint(*sys.argv[1:], os.environ['VJOB_PARTITION'])\n"
MODEL = Transformer(name="m", layers=6, hidden=1024, heads=8, length=512, vocabulary=8000)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "m.profile.json"
    write_profile(
        path, estimate_profile(MODEL, ("A10",), micro_batches=(1, 2, 4), degrees=(1,), inter_gb_s=2)
    )
    return path


@pytest.mark.parametrize(("gpus", "batch"), [(8, 32), (6, 24), (7, 12), (5, 7)])
def test_the_fastest_of_those_that_can_be_dealt_out(profile: Path, gpus: int, batch: int) -> None:
    config = AutoConfig(gpus, 4, batch, profile, verbose=False)
    even = {
        stages: candidate.step_s
        for stages, candidate in config.candidates.items()
        if candidate.option.shape.replicas == gpus // stages  # as the launcher deals them out
    }
    chosen = choose_shape(str(profile), gpus=gpus, gpus_per_node=4, batch_size=batch)
    assert even[chosen.stages] == min(even.values())
    share, rest = divmod(batch, gpus // chosen.stages)
    assert rest == 0 and share % chosen.chunk_size == 0
    for stages in even:
        own = choose_shape(
            str(profile), gpus=gpus, gpus_per_node=4, batch_size=batch, stages=stages
        )
        assert (own.stages, own.chunk_size) == (stages, config.micro_batch[stages])


def test_what_cannot_be_started_is_refused(profile: Path) -> None:
    with pytest.raises(InputError, match="nothing that fits 3 GPUs has 1 stages"):
        choose_shape(str(profile), gpus=3, gpus_per_node=3, batch_size=4, stages=1)
    profile.write_text("{")
    with pytest.raises(InputError, match=r"m\.profile\.json"):
        choose_shape(str(profile), gpus=4, gpus_per_node=4, batch_size=8)


def test_ranks_are_told_what_was_chosen(profile: Path, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "machines").write_text("127.0.0.1\n")
    words = ["--machine_list", "machines", "--gpus_per_node", "2", "--cpu", "--no_morphing"]
    words += ["--batch_size", "8", "--profile", profile.name, "show.py"]
    done = subprocess.run(
        [sys.executable, "-m", "varuna_core.launch", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = choose_shape(str(profile), gpus=2, gpus_per_node=2, batch_size=8)
    said = re.findall(r"--stage_to_rank_map=(\S+) --chunk_size=(\d+)", done.stdout)
    assert len(said) == 2 and {int(chunk) for _, chunk in said} == {chosen.chunk_size}
    assert all(stages.strip(";").count(";") + 1 == chosen.stages for stages, _ in said)
    assert chosen.partition is not None and done.stdout.count(f" {chosen.partition}\n") == 2
    told = chosen.text.replace(str(profile), "")
    assert told.split(": ")[1] in done.stderr
