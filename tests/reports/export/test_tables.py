"""The tables of a job: equal to what its files hold, in documented types, and as files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings

from tests import ROOT
from tests.jobs.monitor.readers.test_times_of_writing import NodeLogs
from tests.reports.export.runs import BEGAN_S, RUNS, MadeRun, count_run, list_lines, write_run
from tests.reports.traces import write_simulated
from varuna_core.records.logs.trace import OTHER
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis.findings import find_all
from vjob.reports.export.schema import KIND_COLUMNS, TABLES, TYPES
from vjob.reports.export.tables import MAKERS, JobTables, load_job, write_csv, write_parquet
from vjob.reports.load import log_lines, trace_file, trace_reader
from vjob.reports.load.sources import SourceError, locate_sources


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "run"


def load(place: Path, made: MadeRun) -> JobTables:
    shutil.rmtree(place, ignore_errors=True)
    write_run(place, made)
    return load_job(place)


@given(RUNS)
@settings(max_examples=20)
def test_tables_hold_what_the_files_hold(place: Path, made: MadeRun) -> None:
    tables, counted = load(place, made), count_run(place)
    events = tables.events.assign(
        begin=tables.events.begin.astype("int64"), micro=tables.events.microbatch.fillna(-1)
    )
    columns = ["attempt", "rank", "step", "kind", "micro", "begin", "wait_s", "work_s", "bytes"]
    rows = [
        (*own[:6], round(own[6] * 1e9), round(own[7] * 1e9), *own[8:])
        for own in events[[*columns, "what"]].itertuples(index=False)
    ]
    assert sorted(rows) == sorted(counted.events)
    steps = tables.rank_steps
    assert len(steps) == len(counted.steps)
    for row in steps.to_dict("records"):
        begin, took, works = counted.steps[row["attempt"], row["rank"], row["step"]]
        assert row["begin"].value == begin and round(row["took_s"] * 1e9) == took
        for kind, (name, _) in KIND_COLUMNS.items():
            assert round(row[name] * 1e9) == works.get(kind, 0)
    by_step: dict[tuple[str, int], int] = {}
    for (attempt, _, step), (begin, took, _) in counted.steps.items():
        by_step[attempt, step] = max(begin + took, by_step.get((attempt, step), 0))
    if counted.steps:  # else from the log
        begins = tables.steps.begin.astype("int64")
        ends = begins + (tables.steps.took_s * 1e9).round().astype("int64")
        keys = zip(tables.steps.attempt, tables.steps.step, strict=True)
        assert dict(zip(keys, ends, strict=True)) == pytest.approx(by_step, abs=9, rel=0)
        ordered = ends.sort_values()
        before = ordered.groupby(tables.steps.attempt).shift()
        assert not (begins[ordered.index] < before - 9).any(), "no time is counted twice"
        last = tables.steps[~tables.steps.is_repeated]
        assert sorted(last.step) == sorted({step for _, step in by_step})
        for row in last.itertuples():
            assert int(row.attempt) == max(int(a) for a, step in by_step if step == row.step)
    else:
        assert list(tables.steps.took_s) == [0.012] * (len(made.losses) if made.attempts else 0)
    account = tables.accounting.drop(columns=["attempt", "rank", "span_s", "overlap_s"])
    spent = account.sum(axis=1) - tables.accounting.overlap_s
    assert spent.tolist() == pytest.approx(tables.accounting.span_s.tolist())
    assert tables.ranks.num_events.sum() == len(counted.events)
    assert tables.ranks.exit_code.notna().sum() == counted.exits
    if made.attempts:
        assert list(tables.losses.loss) == pytest.approx(list(made.losses))
        assert list(tables.losses["lm loss"]) == list(tables.losses.loss) if made.losses else True
        first = BEGAN_S + 10.125 + len(made.lines)
        written = [time.timestamp() for time in tables.losses.time]
        assert written == [first + at for at in range(len(made.losses))]
        assert len(tables.gpus) == 2 * len(made.temperatures)
        assert set(tables.gpus.temperature_c) == set(made.temperatures)
        assert tables.attempts.attempt.tolist() == [str(n) for n in range(len(made.attempts))]
    assert list(tables.logs.text) == list(list_lines(place))
    seconds = [time.timestamp() - BEGAN_S - 10.125 for time in tables.logs.time]
    assert seconds == list(range(len(seconds)))
    assert set(tables.history.kind) <= {"submitted", "started"}
    assert len(tables.history) == 1 + len(made.attempts)


@given(RUNS)
@settings(max_examples=8)
def test_tables_come_back_whole_from_csv_and_parquet(place: Path, made: MadeRun) -> None:
    tables = load(place, made)
    folder = place / "written"
    as_csv, as_parquet = write_csv(tables, folder), write_parquet(tables, folder)
    names = [name for name in tables if len(tables[name])]
    assert [path.stem for path in as_csv] == [path.stem for path in as_parquet] == names
    for text, packed in zip(as_csv, as_parquet, strict=True):
        pd.testing.assert_frame_equal(pd.read_parquet(packed), tables[text.stem])
        pd.testing.assert_frame_equal(read_csv(text), tables[text.stem])


def read_csv(path: Path) -> pd.DataFrame:
    """As docs/notebook.md has the types."""
    kinds = {column.name: column.type for column in TABLES[path.stem].columns}
    table = pd.read_csv(path, dtype="string", keep_default_na=False, lineterminator="\n")
    for name in table.columns:
        kind, values = kinds.get(name, "float"), table[name]
        if kind == "text":
            continue
        values = values.mask(values == "")
        if kind == "time":
            table[name] = pd.to_datetime(values, utc=True, format="ISO8601").astype(TYPES[kind])
        elif kind == "bool":
            table[name] = values.map({"True": True, "False": False}).astype("boolean")
        else:
            table[name] = values.astype(TYPES[kind])
    return table


def check_types(tables: JobTables) -> None:
    for name, table in TABLES.items():
        listed = {column.name: TYPES[column.type] for column in table.columns}
        found = {str(column): str(kind) for column, kind in tables[name].dtypes.items()}
        assert list(found)[: len(listed)] == list(listed), name
        assert {column: found[column] for column in listed} == listed, name
        more = set(found) - set(listed)
        assert not more or (table.more and {found[column] for column in more} == {"float64"})


@given(RUNS)
@settings(max_examples=6)
def test_every_table_has_the_documented_columns_and_types(place: Path, made: MadeRun) -> None:
    check_types(load(place, made))


def render_columns() -> str:
    """The end of docs/notebook.md: all tables and their columns."""
    lines = ["| table | one row per | columns |", "|---|---|---|"]
    for name, table in TABLES.items():
        columns = ", ".join(f"`{column.name}`" for column in table.columns)
        more = f", and {table.more}" if table.more else ""
        row = re.split(r"[.:;] |\.$", table.doc)[0].removeprefix("One row per ")
        lines.append(f"| `{name}` | {row} | {columns}{more} |")
    return "\n".join(lines) + "\n"


def test_the_page_documents_every_column() -> None:
    text = (ROOT / "docs/notebook.md").read_text()
    assert text.endswith("## All columns\n" + render_columns())
    assert TABLES.keys() == MAKERS.keys()
    assert KIND_COLUMNS.keys() == {*trace_file.KINDS, OTHER}


def test_a_run_that_has_started_nothing_has_empty_tables(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    tables = load_job(tmp_path)
    check_types(tables)
    assert {name for name in tables if len(tables[name])} <= {"findings"}


def test_a_folder_of_logs_and_one_log_have_the_steps_of_their_lines(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for step in range(1, 11):
        logs.write(BEGAN_S + 2 * step, f"0: step {step}/10 loss {4 / step:.4f}")
    logs.write(BEGAN_S + 30, "0: RuntimeError: no more", is_err=True)
    for path in (tmp_path, tmp_path / "n0.out"):
        tables = load_job(path)
        check_types(tables)
        assert tables.steps.took_s.tolist() == [2.0] * 9 and set(tables.steps.attempt) == {""}
        assert tables.steps.begin.isna().all() and len(tables.losses) == 10
        assert tables.losses.time.map(pd.Timestamp.timestamp).tolist() == [
            BEGAN_S + 2 * step for step in range(1, 11)
        ]
        assert len(tables.logs) == (11 if path == tmp_path else 10)


def test_findings_say_what_they_cost(tmp_path: Path) -> None:
    write_simulated(tmp_path, build_schedule("1f1b", 2, 3), build_even_costs(2), steps=range(1, 9))
    tables = load_job(tmp_path)
    found = find_all(tables.job, tables.analysis)
    assert tables.findings.sentence.tolist() == [one.sentence for one in found] != []
    assert tables.findings.lost_s.tolist() == [one.lost_s for one in found]


def test_a_name_that_is_no_folder_is_refused_with_it() -> None:
    with pytest.raises(SourceError, match=r"^nothing/here is neither a folder nor a file"):
        load_job("nothing/here")
    with pytest.raises(AttributeError, match="no table 'stepps': attempts, accounting,"):
        _ = load_job(ROOT / "constraints.txt").stepps


def test_of_a_large_log_the_last_lines_are_there(tmp_path: Path) -> None:
    (tmp_path / "n0.out").write_text("".join(f"0: line {n}\n" for n in range(10_000)))
    table = log_lines.read_log_lines(locate_sources(tmp_path), most_bytes=10_000)
    assert table.text.iloc[-1] == "line 9999" and 500 < len(table) < 1000
    data = (tmp_path / "n0.out").read_bytes()
    for row in table.iloc[[0, -1]].itertuples():
        assert data[row.offset :].startswith(f"0: {row.text}\n".encode())


def test_of_too_many_events_whole_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_simulated(tmp_path, build_schedule("1f1b", 2, 3), build_even_costs(2), steps=range(1, 41))
    everything = load_job(tmp_path).events
    monkeypatch.setattr("vjob.reports.export.tables.MOST_EVENTS", len(everything) // 4)
    kept = load_job(tmp_path).events
    assert 4 <= kept.step.nunique() < 40 and {1, 40} <= set(kept.step)
    assert (kept.groupby("step").size() == len(everything) // 40).all()
    assert len(everything) < trace_reader.MOST_EVENTS
    write_csv(load_job(tmp_path), tmp_path / "csv")
    assert len(pd.read_csv(tmp_path / "csv/events.csv")) == len(everything)


def test_importing_vjob_and_its_reports_loads_no_library() -> None:
    code = (
        "import sys, vjob\n"
        "assert 'vjob.reports' not in sys.modules\n"
        "assert 'losses' in dir(vjob.reports)\n"
        "bad = {'pandas', 'numpy', 'plotly', 'pyarrow', 'torch'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "sys.modules['pandas'] = None\n"
        "try: vjob.reports.load_job\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == (
        "vjob.reports needs pandas, which is not installed: pip install pandas\n"
    )
