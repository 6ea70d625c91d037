"""A script's own lines: pace and time left in status, steps in the report, and no claim without."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for

CONF = """
name: own
program: {{script: train.py, python: python3}}
{more}
cluster:
  scheduler: local
  walltime_min: 2
  nodes: [{{group: m, count: 1, ranks: 2}}]
"""
LOOP = """
import sys, time
for step in range(1, 31):
    time.sleep(0.25)  # the work of a step
    print({line}, flush=True)
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def write_script(vjob: Vjob, line: str) -> None:
    vjob.write(LOOP.format(line=line), "train.py")


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ('f"step {step}/30 loss {4 / step:.4f}"', ""),
        (
            'f"{step} of 30 done, err={4 / step:.4f}"',
            r"progress: '(?P<step>\d+) of (?P<total>\d+) done, err=(?P<loss>[\d.]+)'",
        ),
    ],
    ids=["plain", "own pattern"],
)
def test_a_script_without_times_has_pace_time_left_and_steps(
    vjob: Vjob, line: str, more: str
) -> None:
    write_script(vjob, line)
    run = vjob.submit(CONF.format(more=more))
    seen = list[str]()

    def is_pace_told() -> bool:
        seen.append(vjob("status", "last", code=None).stdout)
        return " s a step" in seen[-1] and " left" in seen[-1]

    wait_for(is_pace_told, 60, lambda: vjob.explain(run))
    pace = r"0\.[2-9]\d* s a step (in one reading|\(the median of the last \d+ readings\))"
    assert re.search(rf"step \d+ of 30, {pace}, loss", seen[-1])
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    progress = vjob.status("last")["progress"]
    assert (progress["step"], progress["num_steps"]) == (30, 30)
    text = vjob("report", "last", "--text").stdout
    assert "went to useful steps" in text and " 0 % of" not in text
    assert "1 to 30" in text
    assert "profile.timeline" not in text
    assert "The loss went from 1.333 to 0.1429 (medians of the first and last 5 lines)" in text


def test_nothing_is_said_of_steps_that_are_not_known(vjob: Vjob) -> None:
    write_script(vjob, '"still at it"')
    run = vjob.submit(CONF.format(more=""))
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    assert vjob.status("last")["progress"] is None
    text = vjob("report", "last", "--text").stdout
    assert "useful" not in text and "profile.timeline" not in text
    assert "2 ranks: 2 ended well; no line of its logs was recognized as a step" in text
    assert "change: progress" in text and "not known" in text


def test_a_program_that_prints_nothing_has_its_optimizer_steps_counted(vjob: Vjob) -> None:
    """Two ranks without a collective, of which one does fewer steps."""
    pytest.importorskip("torch")
    vjob.write(
        "import os, time, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "own = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "for _ in range(30 if os.environ['RANK'] == '0' else 12):\n"
        "    time.sleep(0.02)  # the work of a step\n"
        "    own.step()\n",
        "train.py",
    )
    text = CONF.format(more="").replace("python: python3", f"python: {sys.executable}")
    run = vjob.submit(text)
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    status = vjob.status("last")
    progress = status["progress"]
    assert (progress["step"], progress["done"], progress["num_steps"]) == (30, 30, None)
    assert (progress["source"], progress["is_counted"]) == ("optimizer", True)
    assert [rank["step"] for rank in status["ranks"]] == [30, 12]
    assert "30 optimizer steps" in vjob("status", "last", "--once").stdout
    vjob("report", "last", "--export", "csv", "-o", "tables")
    rows = (vjob.folder / "tables/ranks.csv").read_text().splitlines()
    at = rows[0].split(",").index("steps")
    assert [row.split(",")[at] for row in rows[1:]] == ["30", "12"]


@pytest.mark.parametrize(
    ("pattern", "word"),
    [("'step ('", "not a regular expression"), (r"'(\d+)'", "needs a group named step")],
)
def test_a_pattern_that_finds_no_step_is_refused(vjob: Vjob, pattern: str, word: str) -> None:
    write_script(vjob, "step")
    name = vjob.write(CONF.format(more=f"progress: {pattern}"))
    done = vjob("submit", name, "--dry-run", code=2)
    assert "progress" in done.stderr and word in done.stderr
