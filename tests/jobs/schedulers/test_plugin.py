"""A scheduler that another distribution adds: its few files, and no edit of ours."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Vjob, wait_for
from tests.toys import install_toy
from varuna_core.plugins import installed
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers import choose

TOY = Path(__file__).parent / "toy"
CONF = """\
name: played
program: {script: PROGRAM, args: ARGS}
cluster: {scheduler: toy, walltime_min: 5, grace_s: 2, nodes: [{group: all, count: 2, ranks: 1}]}
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    """With the toy as pip installs it: modules, and metadata that names the entry point."""
    found = Vjob(tmp_path, {"TOY_TABLE": str(tmp_path / "table")})
    folder = tmp_path / "site"
    entry = "toy = vjob_toy:ToyScheduler"
    install_toy(folder, "vjob.schedulers", entry, (TOY / "vjob_toy.py").read_text())
    (folder / "vjob_toy_job.py").write_text((TOY / "vjob_toy_job.py").read_text())
    found.env |= {"PYTHONPATH": f"{folder}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return found


def make(program: str, args: str) -> str:
    return CONF.replace("PROGRAM", str(PROGRAMS / program)).replace("ARGS", args)


def test_a_run_goes_through_a_scheduler_of_another_distribution(vjob: Vjob) -> None:
    run = vjob.submit(make("report_rank.py", "[]"))
    record = vjob.wait_over(run)
    assert (record["scheduler"], record["verdict"]) == ("toy", "COMPLETED")
    (job,) = record["jobs"]
    assert job["id"] == "T1" and (run.path.parent / "T1").is_symlink()
    assert "#TOY name=played\n" in run.batch_script().read_text()
    assert json.loads((vjob.folder / "table/T1.json").read_text())["state"] == "fine"
    assert vjob.status("T1")["verdict"]["health"] == "DONE"
    assert "COMPLETED" in vjob("list").stdout
    vjob("report", "T1", "-o", "page.html")
    assert run.name in (vjob.folder / "page.html").read_text()


def test_a_run_is_watched_and_cancelled(vjob: Vjob) -> None:
    run = vjob.submit(make("fail_as_told.py", '["-1", hang]'))
    wait_for(lambda: vjob.status("last")["state"] == "RUNNING", 60, lambda: vjob.explain(run))
    found = vjob.status("last")
    assert found["walltime_s"] == 300 and found["scheduler"]["jobs"][0]["word"] == "busy"
    assert "cancel" in vjob("cancel", "last", "--now").stdout
    record = vjob.wait_over(run)
    assert record["verdict"] == "CANCELLED"


def test_a_refusal_and_an_unknown_name_say_what_there_is(vjob: Vjob) -> None:
    del vjob.env["TOY_TABLE"]
    conf = vjob.write(make("report_rank.py", "[]"))
    assert (
        "cluster.scheduler is toy, but TOY_TABLE is not set" in vjob("submit", conf, code=2).stderr
    )
    with pytest.raises(InputError, match="no scheduler 'pbs'; give one of slurm, allocation"):
        choose.get_scheduler("pbs")


def test_a_plugin_cannot_take_a_built_in_name_and_a_broken_one_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(installed, "_by_state", {})
    monkeypatch.setattr(installed, "_warned", set())
    for entry, source in (
        ("slurm = mine_slurm:S", "class S: API = 1\n"),
        ("bad = mine_bad:S", "1/0"),
    ):
        name = entry.partition(" ")[0]
        install_toy(tmp_path, "vjob.schedulers", entry, source, distribution=f"{name}-dist")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, "vjob.plugins"):
        assert choose.get_scheduler("slurm").title == "Slurm"
        assert "slurm" in choose.SEAM.list_names()
        with pytest.raises(InputError, match="no scheduler 'bad'"):
            choose.get_scheduler("bad")
    assert any("slurm of slurm-dist 1.0 is ignored" in line for line in caplog.messages)
    assert sum("bad of bad-dist 1.0 is ignored" in line for line in caplog.messages) == 1
