"""`vjob compare`, from the command line to its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.reports.analysis.test_readings import count, write_run
from tests.reports.traces import write_simulated
from varuna_core.records.logs.training_log import Iteration, format_iteration
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.page.comparison import flatten
from vjob.shelf.commands.cli import cli


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`slow` takes twice as long as `fast` for 1f1b of two stages, 15 units; and a bare folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name, unit_ns, micro in (("fast", 10**6, 2), ("slow", 2 * 10**6, 1)):
        folder = tmp_path / name / "attempt-0"
        schedule = build_schedule("1f1b", 2, 4)
        write_simulated(folder, schedule, build_even_costs(2), steps=range(1, 6), unit_ns=unit_ns)
        line = Iteration(5, 5, time_ms=15.0, losses={"lm loss": 9.0})
        (folder / "n0.out").write_text(format_iteration(line) + "\n")
        (tmp_path / name / "plan.json").write_text("{}")
        conf = (
            f"train: {{micro_batch_size: {micro}, steps: 5}}\ncluster: {{nodes: [{{ranks: 2}}]}}\n"
        )
        (tmp_path / name / "resolved.yaml").write_text(conf)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "n0.out").write_text(
        "NODE_RANK: 0\nMODEL: <b>xl</b>\n" + format_iteration(Iteration(1, 5, time_ms=15.0)) + "\n"
    )
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *words])


def test_the_table_holds_jobs_against_the_first(jobs: Path) -> None:
    done = run("fast", "slow")
    assert done.exit_code == 0, done.output
    printed = [line.lstrip() for line in done.output.splitlines()]
    lines = {line.split("  ")[0]: line for line in printed}
    assert "0.015  0.03 (+100 %)" in lines["median step, s"]
    assert "20.0 %  20.0 %" in lines["idle in the pipeline, median of the steps"]
    assert lines["train.micro_batch_size"].split() == ["train.micro_batch_size", "2", "1"]
    assert "train.steps" not in lines


def test_json_says_the_same(jobs: Path) -> None:
    done = run("fast", "slow", "--json")
    found = json.loads(done.output)
    assert [job["name"] for job in found["jobs"]] == ["fast", "slow"]
    assert [job["step_s"] for job in found["jobs"]] == pytest.approx([0.015, 0.030])
    assert found["differences"] == {"train.micro_batch_size": ["2", "1"]}


def test_of_long_arguments_only_those_that_differ_are_shown(jobs: Path) -> None:
    for name, more in (("fast", "--lr, '1e-3', -v"), ("slow", "-v, --lr, '2e-3'")):
        path = jobs / name / "resolved.yaml"
        path.write_text(path.read_text() + f"program: {{args: [a.py, {more}, --out=o]}}\n")
    lines = [line.split() for line in run("fast", "slow").output.splitlines()]
    assert ["program.args", "...", "--lr", "1e-3", "...", "--lr", "2e-3"] in lines


def test_bounds_of_the_goodput_are_those_of_the_report(jobs: Path) -> None:
    for name, every in (("each", 1), ("tenth", 10)):
        (jobs / name).mkdir()
        write_run(jobs / name, count(every, 80, every, 15, 80))
    said = run("each", "tenth").output
    assert "useful part of the time  80 %  70 % to 85 %" in said, said


def test_losses_of_evaluations_are_compared_too(jobs: Path) -> None:
    """Runs that are chosen by their validation loss were compared without it."""
    for name, losses in (("one", (3.0, 2.5, 2.75)), ("two", (3.5, 2.0))):
        (jobs / name).mkdir()
        lines = [
            (20.0 + at, f"step {at * 10} val_loss {loss}") for at, loss in enumerate(losses, 1)
        ]
        write_run(jobs / name, [(19.0, "step 10 loss 1.0"), *lines])
    printed = run("one", "two").output
    assert "last validation loss  2.75  2\n" in printed, printed
    found = json.loads(run("one", "two", "--json").output)["jobs"]
    assert [job["best_val_loss"] for job in found] == [2.5, 2.0]


def test_a_bare_folder_has_no_conf_to_differ(jobs: Path) -> None:
    done = run("fast", "bare", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["differences"] == {}
    assert found["jobs"][1]["idle_share"] is None


def test_the_page_has_both_jobs(jobs: Path) -> None:
    done = run("fast", "slow", "bare", "-o", "compared.html")
    assert done.exit_code == 0, done.output
    page = Path("compared.html").read_text()
    assert "fast and slow and bare" in page and 'id="figure-series"' in page
    assert "Timeline</h2>" not in page and "<b>xl" not in page


@pytest.mark.parametrize("words", [["fast"], ["fast", "nothing"]])
def test_what_cannot_be_compared_is_said(jobs: Path, words: list[str]) -> None:
    done = run(*words)
    assert done.exit_code == 2 and "vjob: " in done.output


def test_a_conf_is_flattened_by_dotted_keys() -> None:
    conf = {"a": {"b": 1, "c": [1, 2]}, "nodes": [{"group": "x"}, {"group": "y"}], "d": None}
    assert flatten(conf) == {
        "a.b": "1",
        "a.c": "[1, 2]",
        "nodes.0.group": "x",
        "nodes.1.group": "y",
        "d": "None",
    }
