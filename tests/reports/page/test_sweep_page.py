"""The page of a sweep: its table and the data of its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from varuna_core.records.logs.training_log import Iteration, format_iteration
from vjob.reports.page.sweep_page import (
    NAMES,
    SweptRun,
    build_sweep_json,
    build_sweep_table,
    draw_key,
    read_numbers,
    render_sweep,
    sort_runs,
)
from vjob.shelf.compare import Chosen, load_sweep

NAN = float("nan")
KEYS = {"train.optimizer.lr": "lr", "parallel.schedule": "schedule"}


def make_run(name: str, lr: str, schedule: str, loss: float | None, **facts: float) -> SweptRun:
    figures = {**dict.fromkeys(NAMES), "last_loss": loss, **facts}
    return SweptRun(
        name=name,
        state="FAILED" if loss is None else "COMPLETED",
        message="rank 3 on n0 exited 1" if loss is None else "",
        values={"train.optimizer.lr": lr, "parallel.schedule": schedule},
        figures=figures,
    )


RUNS = [
    make_run("s-1", "1e-3", "<b>gpipe", 3.0, step_s=0.5, last_step=20),
    make_run("s-2", "1e-3", "1f1b", NAN, step_s=0.4, last_step=20),
    make_run("s-3", "1e-4", "<b>gpipe", 2.5, step_s=0.5, last_step=20),
    make_run("s-4", "1e-4", "1f1b", None),
    make_run("s-5", "3e-4", "1f1b", 2.0, step_s=0.4, last_step=20),
]


def test_the_least_loss_stands_first_then_nan_then_what_has_none() -> None:
    assert [run.name for run in sort_runs(RUNS)] == ["s-5", "s-3", "s-1", "s-2", "s-4"]
    table = build_sweep_table(RUNS, KEYS)
    assert table.columns == ("run", "lr", "schedule", "state", "step", "loss", "s/step", "")
    assert table.rows[0] == ("s-5", "3e-4", "1f1b", "COMPLETED", "20", "2", "0.4", "")
    assert table.rows[3][5] == "nan"
    assert table.rows[4][4:] == ("-", "-", "-", "rank 3 on n0 exited 1"), "it stands there too"


def test_json_has_no_nan_and_tells_it_from_what_is_not_known() -> None:
    rows = json.loads(json.dumps(build_sweep_json(RUNS), allow_nan=False))
    assert [(row["last_loss"], row["is_nan"]) for row in rows[2:]] == [
        (3.0, False), (None, True), (None, False),
    ]  # fmt: skip
    assert rows[0]["swept"] == {"train.optimizer.lr": "3e-4", "parallel.schedule": "1f1b"}


def test_numbers_that_span_decades_are_on_a_logarithmic_axis() -> None:
    figure = draw_key(RUNS, "train.optimizer.lr", KEYS)
    assert figure is not None
    axis = figure["layout"]["xaxis"]
    assert axis["type"] == "log" and axis["title"] == {"text": "train.optimizer.lr"}
    assert dict(zip(axis["ticktext"], axis["tickvals"], strict=True)) == {
        "1e-3": 1e-3, "1e-4": 1e-4, "3e-4": 3e-4,
    }  # fmt: skip
    losses = {trace["name"]: trace for trace in figure["data"] if trace["yaxis"] == "y"}
    assert list(losses) == ["schedule &lt;b&gt;gpipe", "schedule 1f1b"]
    line = losses["schedule &lt;b&gt;gpipe"]
    assert (line["x"], line["y"], line["mode"]) == ([1e-4, 1e-3], [2.5, 3.0], "lines+markers")
    assert losses["schedule 1f1b"]["y"] == [2.0], "NaN is no point"
    steps = [trace for trace in figure["data"] if trace["yaxis"] == "y2"]
    assert [trace["y"] for trace in steps] == [[0.5, 0.5], [0.4, 0.4]]
    assert [trace["showlegend"] for trace in figure["data"]] == [True, True, False, False]


def test_numbers_close_together_are_on_a_linear_axis() -> None:
    runs = [make_run(f"s-{n}", str(n), "gpipe", 1.0 / n) for n in (2, 4, 8)]
    figure = draw_key(runs, "train.optimizer.lr", KEYS)
    assert figure is not None and figure["layout"]["xaxis"]["type"] == "linear"
    assert figure["layout"]["showlegend"] is False, "the other key has one value"
    runs.append(make_run("s-0", "0", "gpipe", 1.0))
    figure = draw_key([*runs, make_run("s-9", "90", "gpipe", 1.0)], "train.optimizer.lr", KEYS)
    assert figure is not None and figure["layout"]["xaxis"]["type"] == "linear", "0 has no log"


def test_words_are_categories_in_their_order_and_tags_are_escaped() -> None:
    figure = draw_key(RUNS, "parallel.schedule", KEYS)
    assert figure is not None
    axis = figure["layout"]["xaxis"]
    assert (axis["type"], axis["categoryarray"]) == ("category", ["&lt;b&gt;gpipe", "1f1b"])
    assert all(trace["mode"] == "markers" for trace in figure["data"])


def test_a_key_with_one_value_or_without_figures_is_not_drawn() -> None:
    assert draw_key(RUNS[3:], "parallel.schedule", KEYS) is None
    assert draw_key([RUNS[3], RUNS[3]], "train.optimizer.lr", KEYS) is None


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        (["1", "2.5", '"3e-4"'], [1.0, 2.5, 3e-4]),
        (["1", "auto"], None),
        (["1", "inf"], None),
        (["[1]", "2"], None),
    ],
)
def test_values_are_numbers_only_where_all_are(
    values: list[str], numbers: list[float] | None
) -> None:
    found = read_numbers(values)
    assert (None if found is None else list(found.values())) == numbers


def test_the_page_has_the_table_whole_and_a_figure_a_key() -> None:
    many = [make_run(f"s-{n}", str(n), "gpipe", float(n)) for n in range(1, 60)]
    page = render_sweep("lr", many, KEYS, made_at="now")
    assert all(f"<td>s-{n}</td>" in page.replace(" class", "") for n in (1, 30, 59)), page[:3000]
    assert 'id="figure-key-0"' in page and 'id="figure-key-1"' not in page


@pytest.mark.parametrize(
    ("losses", "last"),
    [([3.0, 2.0], 2.0), ([3.0, NAN], NAN), ([NAN, NAN], NAN), ([3.0, None], 3.0), ([None], None)],
)
def test_the_final_loss_is_that_of_the_last_step_that_was_taken(
    tmp_path: Path, losses: list[float | None], last: float | None
) -> None:
    """Megatron prints no loss where every step since the line before was skipped."""
    lines = [
        Iteration(step, 9, time_ms=5.0, skipped=int(loss is None),
                  losses={} if loss is None else {"lm loss": loss})
        for step, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    (tmp_path / "n0.out").write_text("".join(f"{format_iteration(line)}\n" for line in lines))
    (run,) = load_sweep(Chosen(folders=((tmp_path, None),), sweeps=()))
    found = run.figures["last_loss"]
    assert (found is None) == (last is None)
    assert last is None or (found == last or (math.isnan(found or 0.0) and math.isnan(last)))
    assert run.figures["last_step"] == len(losses)
