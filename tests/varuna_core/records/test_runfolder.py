"""The run folder, its files that land whole, and readers that bear with what did not."""

import errno
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from varuna_core.records import files
from varuna_core.records.files import (
    append_line,
    is_listed,
    list_names,
    read_json,
    read_lines,
    write_first,
    write_json,
)
from varuna_core.records.nodes import Check, NodeReport, read_reports, write_report
from varuna_core.records.record import append_event, read_events
from varuna_core.records.requests import read_stop, write_stop
from varuna_core.records.runfolder import RunFolder


def test_attempts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for number in (10, 2, 0):
        run.attempt(number).make()
    (tmp_path / "attempt-x").mkdir()
    assert [attempt.number for attempt in run.attempts()] == [0, 2, 10]
    assert RunFolder(tmp_path / "absent").attempts() == []


def test_folders_are_private(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    attempt.make()
    assert {path.stat().st_mode & 0o777 for path in attempt.path.iterdir()} == {0o700}


def test_an_older_try_is_set_aside_with_all_it_left(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(0)
    for number in range(2):
        attempt.make()
        write_json(attempt.exit(0), {"try": number})
        attempt.set_aside()
        assert read_json(attempt.path / f"earlier-{number}" / "exit" / "0.json") == {"try": number}
        assert list_names(attempt.exit(0).parent) == []


def test_of_two_writers_the_first_wins(tmp_path: Path) -> None:
    path = tmp_path / "stop.json"
    assert write_first(path, 1) and not write_first(path, 2)
    assert read_json(path) == 1
    assert os.listdir(tmp_path) == ["stop.json"]


def test_who_was_first_knows_it_though_the_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks its file server again, which says that the name is there: its own link."""
    link = os.link

    def ask_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", ask_twice)
    assert write_first(tmp_path / "first.json", 1)
    assert not write_first(tmp_path / "first.json", 2)
    assert read_json(tmp_path / "first.json") == 1


def test_the_first_wins_where_links_are_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "links are unsupported")

    monkeypatch.setattr(os, "link", refuse)
    test_of_two_writers_the_first_wins(tmp_path)


def test_readers_bear_with_torn_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == [] and read_json(path) is None
    append_line(path, {"a": 1})
    with path.open("a") as handle:
        handle.write('not json\n\n{"torn": ')
    assert list(read_lines(path)) == [{"a": 1}]
    assert is_listed(path) and not is_listed(tmp_path / "none" / "x")


def test_of_very_many_lines_the_last_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_LINES", 3)
    parsed: list[bytes] = []
    monkeypatch.setattr(files, "parse_json", lambda line: parsed.append(line) or 1)
    path = tmp_path / "lines.jsonl"
    for count in (1, 2, 3, 4, 9):
        parsed.clear()
        path.write_text("".join(f"{number}\n" for number in range(count)))
        list(read_lines(path))
        assert len(parsed) <= 3 and parsed[-2] == b"%d" % (count - 1)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, 1)
    with pytest.raises(TypeError):
        write_json(path, object())
    assert read_json(path) == 1 and os.listdir(tmp_path) == ["x.json"]


def test_events_of_all_jobs_are_in_time_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    for now, group, kind in ((2.0, None, "b"), (1.0, "small", "a"), (3.0, None, "c")):
        monkeypatch.setattr("time.time", lambda now=now: now)
        append_event(run.events(group), kind, attempt=0)
    assert [event["kind"] for event in read_events(run)] == ["a", "b", "c"]


def test_a_stop_of_an_older_try_is_not_ours(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    assert read_stop(attempt) is None
    write_json(attempt.master, {"time": 1.5})
    write_stop(attempt, "rank", 9, "rank 0 failed", node="n0", rank=0)
    assert read_stop(attempt, 2.5) is None
    stop = read_stop(attempt, 1.5)
    assert stop is not None and stop["reason"] == "rank 0 failed"


def test_node_reports_come_back_and_foreign_ones_are_passed_over(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    report = NodeReport(
        index=3,
        host="n60",
        group="a",
        address="10.0.0.1",
        interface="eth0",
        gpus=4,
        clock_offset_s=0.1,
        opened=1.5,
        ready=True,
        checks=(Check("gpus", "ok", "4 seen"), Check("disk", "fail", "full")),
        environment=("RANK",),
    )
    write_report(attempt, report)
    attempt.node_report(4).write_text('{"index": 4}')
    assert read_reports(attempt) == {3: report}
    assert read_json(attempt.node_report(3))["ok"] is False


def list_places(folder: object) -> dict[str, Any]:
    """Each place that a folder of ours names; a number or a word where it asks for one."""
    found = {}
    for name, member in vars(type(folder)).items():
        made = member.fget if isinstance(member, property) else member
        if inspect.isfunction(made) and made.__annotations__.get("return") == "Path":
            asked = list(inspect.signature(made).parameters.values())[1:]
            found[name] = made(folder, *("k" if "str" in str(one) else 3 for one in asked))
    return found


def test_every_file_of_a_run_has_a_place_of_its_own_below_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for folder in (run, run.attempt(2), run.morph):
        places = list_places(folder)
        assert len(places) > 15 and len(set(places.values())) == len(places)
        assert [name for name, at in places.items() if folder.path not in at.parents] == []
