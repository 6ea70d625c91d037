"""Figures for notebooks: what they show, and one notebook that is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from tests import ROOT
from tests.jobs.monitor.readers.test_times_of_writing import NodeLogs
from tests.reports.traces import MS, write_simulated
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob import reports

FIGURES = ("losses", "memory", "overview", "shares", "stages", "timers", "training")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_simulated(
        tmp_path, build_schedule("1f1b", 2, 3), build_even_costs(2), steps=(1, 2, 3), unit_ns=MS
    )
    logs = NodeLogs(tmp_path)
    for step in range(1, 4):
        logs.write(1_700_000_000.0 + step, f"0: step {step}/3 loss {4 / step:.4f}")
    samples = [
        {"time": 1_700_000_000.0 + at, "gpus": [{"index": 0, "memory_used_mb": 1024.0 * at}]}
        for at in range(4)
    ]
    (tmp_path / "n0.gpu.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return tmp_path


def test_losses_of_several_jobs_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b.out").write_text("step 1/2 loss 1.5\nstep 2/2 loss 1.25\n")
    figure = reports.losses(folder / "n0.out", tmp_path / "b.out")
    assert [(trace.name, list(trace.y)) for trace in figure.data] == [
        ("n0.out", [4.0, 2.0, 1.3333]), ("b.out", [1.5, 1.25]),
    ]  # fmt: skip
    assert figure.layout.showlegend


def test_memory_is_that_of_the_samples(folder: Path) -> None:
    (line,) = reports.memory(folder).data
    assert line.name == "n0 GPU 0" and list(line.y) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_plotlys_whatever_the_job_left(
    name: str, folder: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "plan.json").write_text("{}")
    for path in (folder, empty):
        figure = getattr(reports, name)(path)
        assert isinstance(figure, go.Figure)
        assert figure.data or figure.layout.title.text
        assert figure.to_json()
    assert not figure.data, "nothing is there to draw"


def test_an_event_without_a_kind_is_drawn_as_what_else_it_says(tmp_path: Path) -> None:
    write_simulated(tmp_path / "attempt-0", build_schedule("1f1b", 2, 3), build_even_costs(2))
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text('{"time": 1700000000.01, "reason": "torn"}\n')
    texts = [text for trace in reports.overview(tmp_path).data for text in trace.text or ()]
    assert ": reason torn" in texts


def test_the_page_has_the_same_figures(folder: Path) -> None:
    from vjob.reports.page.run_page import draw_memory, draw_stages

    job = reports.load_job(folder)
    for drawn, built in (
        (draw_memory(job.job), reports.memory(job)),
        (draw_stages(job.job, job.analysis), reports.stages(job)),
    ):
        assert drawn is not None and go.Figure(data=drawn["data"]).data == built.data


def test_a_notebook_with_the_code_of_the_page_runs(folder: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    text = (ROOT / "docs/notebook.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    first = re.sub(r'"log/gpt-[^"]*"', repr(str(folder)), first)
    second = second.replace("vjob.runs(10)", "[]")
    cells = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})",
        first,
        second,
        "len(errors), len(hot), len(by_rank)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(folder)}}
    )
    manager = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", str(folder / "k")  # socket files of ours, no ports
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("application/vnd.plotly.v1+json" in one.get("data", {}) for one in shown)
    assert shown[-1]["data"]["text/plain"] == "(0, 1, 2)"
