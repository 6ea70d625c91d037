"""One conf on the real Slurm of the lab, in containers: only `runtime` changes. Bare ranks have all
that in test_jobs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_jobs import LAYOUTS, wait_ready
from tests.command import PROGRAMS, Vjob, read_out
from varuna_core.records.nodes import read_report

pytestmark = pytest.mark.slurm

CONF = """
name: {layout}
program: {{script: {script}, args: {args}, python: /usr/bin/python3}}
cluster:
  scheduler: slurm
  hetero: {hetero}
  walltime_min: 5
  grace_s: 3
  nodes:
{nodes}
container: {{runtime: {runtime}, image: {image}, scratch: {scratch}}}
env: {{NOTE: "it's \\"$(id)\\"\\nünï", NVIDIA_VISIBLE_DEVICES: void}} # no driver here
"""

RUNTIMES = [
    *(
        pytest.param(
            name,
            marks=[
                getattr(pytest.mark, name),
                pytest.mark.skipif(shutil.which(tool) is None, reason=f"{name} is not installed"),
            ],
        )
        for name, tool in (("charliecloud", "ch-run"), ("enroot", "enroot"))
    ),
    pytest.param(
        "pyxis",
        marks=[
            pytest.mark.pyxis,
            pytest.mark.skipif(
                not os.environ.get("VJOB_LAB_PYXIS"), reason="VJOB_LAB_PYXIS names no plugin"
            ),
        ],
    ),
]

ENDS = {
    "charliecloud": ["single"],
    "enroot": ["hetjob"],
    "pyxis": list(LAYOUTS),
}
"""Layouts in which ranks are also called to leave, and one of them fails: what reaches a rank does
so from its node's agent, the same in all layouts."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_ranks_and_signals_are_right_in_every_layout(
    clean_lab: Lab, tmp_path: Path, image: Path, runtime: str, layout: str
) -> None:
    vjob = Vjob(tmp_path, clean_lab.env)
    hetero, nodes = LAYOUTS[layout]

    def conf(program: str, *args: str) -> str:
        shutil.copy(PROGRAMS / program, tmp_path)
        return CONF.format(
            layout=layout,
            hetero=hetero,
            nodes=nodes,
            script=program,
            args=json.dumps(args),
            runtime=runtime,
            image=json.dumps(str(image)),
            scratch=tmp_path / "scratch",
        )

    run = vjob.submit(conf("report_rank.py", "a b"))
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    rows = {row["rank"]: row for row in map(json.loads, read_out(run).splitlines())}
    shape = [2] * 6 if layout == "single" else [2, 2, 2, 2, 4, 4]
    assert sorted(rows) == list(range(sum(shape)))
    first = "a1" if layout == "single" else "b1"
    assert rows[0]["host"] == first, "rank 0 is on the first node of the first group"
    assert len({row["host"] for row in rows.values()}) == 6
    for row in rows.values():
        assert row["peer"] == clean_lab.node_addresses[row["host"]]
        assert (row["note"], row["args"]) == ('it\'s "$(id)"\nünï', ["a b"])
    report = read_report(run.attempt(0), 0)
    assert report is not None and "NOTE" in report.environment
    if layout not in ENDS[runtime]:
        return

    run = vjob.submit(conf("fail_as_told.py", "-1", "hang", "catch", "child"))
    wait_ready(vjob, run, sum(shape))
    assert "left after it was asked to save" in vjob("cancel", "last").stdout
    assert read_out(run).count("got SIGUSR1") == sum(shape)
    assert read_out(run).count("child lives") == sum(shape)

    run = vjob.submit(conf("fail_as_told.py", "5", "exit:37"))
    outcome = vjob.wait_over(run)["outcome"]
    assert (outcome["code"], outcome["culprit_rank"]) == (37, 5), vjob.explain(run)
