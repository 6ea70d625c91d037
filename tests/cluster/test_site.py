"""A site's file on the lab: a locked key is refused, and `queue: auto` finds the right queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, read_out
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm

SITE = """\
defaults:
  cluster: {scheduler: slurm, walltime_min: 5}
locked:
  cluster.requeue: Jobs are never requeued on this cluster.
queues:
  gpu1: {gpus: "a100:4", memory_gb: 62, walltime_min: 2d}
  gpu2: {gpus: "a10:4", memory_gb: 31, walltime_min: 2d}
"""
CONF = """\
name: site
program: {{script: {script}}}
cluster:
  nodes: [{{group: weak, queue: auto, gpus: "a10:2"}}]
"""


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    found = Vjob(tmp_path, clean_lab.env)
    found.env["VJOB_SITE"] = str(tmp_path / "site.yaml")
    (tmp_path / "site.yaml").write_text(SITE)
    return found


def expect_weak_nodes(vjob: Vjob, run: RunFolder) -> str:
    """Wait for the run on nodes of gpu2, and return the reason for that queue."""
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    hosts = {json.loads(line)["host"] for line in read_out(run).splitlines()}
    assert len(hosts) == 1 and hosts < {"b1", "b2", "b3", "b4"}
    plan = read_plan(run.plan)
    assert plan is not None and plan.groups[0].queue == "gpu2" and plan.queues is not None
    return plan.queues["weak"]


def test_a_site_locks_a_key_and_its_queues_are_chosen_from(vjob: Vjob) -> None:
    text = CONF.format(script=PROGRAMS / "report_rank.py")
    refused = vjob("submit", vjob.write(text), "--set", "cluster.requeue=true", code=2).stderr
    assert "cluster.requeue = True: Jobs are never requeued on this cluster." in refused
    why = expect_weak_nodes(vjob, vjob.submit(text))
    assert why.startswith("gpu2, the first of the site's queues with a10:2 a node")
    assert why.endswith("(gpu1 has a100:4)")


def test_sinfo_stands_in_for_a_site_without_queues(vjob: Vjob) -> None:
    (vjob.folder / "site.yaml").write_text("defaults: {cluster: {scheduler: slurm}}\n")
    text = CONF.format(script=PROGRAMS / "report_rank.py").replace('"a10:2"', '"a10:4", cpus: 2')
    dry = vjob("submit", vjob.write(text), "--dry-run", "--json").stdout
    (why,) = json.loads(dry)["plan"]["queues"].values()
    assert why.startswith("all, the first of the queues that Slurm shows with a10:4 and 2 CPUs")
    impossible = text.replace("a10:4", "h100:4")
    said = vjob("submit", vjob.write(impossible), code=2).stderr
    assert "none of the queues that Slurm shows has h100:4" in said and "  gpu1 has a100:4" in said
