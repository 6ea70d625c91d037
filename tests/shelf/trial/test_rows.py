"""Slurm's words about a run that is only asked about, the table, and where ranks are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.jobs.monitor.builders import change_node, healthy
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.schema import Cluster, JobConf, NodeGroup, Program
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.rules.judge import judge
from vjob.jobs.schedulers.slurm.scheduler import refuse
from vjob.shelf.trial import watch as watching
from vjob.shelf.trial.folder import CheckpointFolder
from vjob.shelf.trial.judgement import describe_checkpoint, describe_memory, quote_error
from vjob.shelf.trial.result import Result, Row, Trouble, render
from vjob.shelf.trial.smaller import Trial
from vjob.shelf.trial.watch import watch

CONF = JobConf(
    name="x",
    program=Program(kind="script", path="train.py"),
    cluster=Cluster(nodes=(NodeGroup(group="all", ranks=1),)),
)
REFUSED = "sbatch: error: Batch job submission failed: Invalid partition name specified"


def test_a_refusal_is_a_cause_and_a_remedy() -> None:
    found = quote_error(refuse(REFUSED).with_note("\n  The scripts are in log/x"))
    assert found.cause.endswith("Invalid partition name specified")
    assert "sbatch refused" in found.cause and "cluster.nodes[].queue" in found.remedy


def test_each_problem_of_a_conf_has_a_line_of_its_own() -> None:
    found = quote_error(InputError("2 problems in the conf:\n  a.yaml:3: x\n  a.yaml:4: y"))
    assert found.remedy == "a.yaml:3: x\na.yaml:4: y"
    result = Result(conf="a", findings=[found])
    assert [line.split("-> ")[1] for line in render(result).splitlines() if "->" in line] == [
        "a.yaml:3: x",
        "a.yaml:4: y",
    ]


def test_the_table_fits_80_columns_and_has_what_was_found_first() -> None:
    result = Result(
        conf="/x/conf.yaml",
        rows=[Row(name="memory", text="1.2 GiB " * 30)],
        findings=[Trouble(cause="it broke " * 20, remedy="fix it")],
        differs=["one node"],
    )
    lines = render(result).splitlines()
    assert lines[0].startswith("FOUND       it broke")
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "differs     one node"


@pytest.mark.parametrize(
    ("files", "text"), [(["own.pt"], "saved, 5 B"), ([], "the folder can be written; no ")]
)
def test_a_script_saves_in_a_format_of_its_own(files: list[str], text: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("state")
    trial = Trial(conf=CONF, notes=(), is_small=False)
    folder = CheckpointFolder(asked="ckpt", seen=str(tmp_path), here=tmp_path)
    row = describe_checkpoint(trial, folder)
    assert isinstance(row, Row) and row.text.startswith(text)


def test_nothing_is_waited_for_where_no_gpu_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script does more steps in each second after the two that were seen."""
    why = "nvidia-smi is not on PATH"
    snapshot = change_node(healthy(1), "n000", gpus=(), gpus_not_known=why)
    reads = iter([(snapshot, judge(snapshot))])
    reader = SimpleNamespace(read=lambda: next(reads))
    monkeypatch.setattr(watching, "RunReader", lambda run, **options: run)
    monkeypatch.setattr(watching, "JudgedReader", lambda run: reader)
    seen = watch(RunFolder(tmp_path), ends_itself=False, limit_s=60, say=print)
    assert seen.is_enough
    trial = Trial(conf=CONF, notes=(), is_small=False)
    assert describe_memory(trial, seen).text == f"not known: {why}"
