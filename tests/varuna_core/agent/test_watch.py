"""The watch over an attempt, by its connection and by files where there is none."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import (
    TIMING,
    Stage,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from varuna_core.agent.meeting.link import Hub, call_hub, publish_place, read_place
from varuna_core.agent.meeting.watch import AttemptWatch, FolderNews, Peer
from varuna_core.records.files import read_json, write_json
from varuna_core.records.plan import Plan
from varuna_core.records.record import read_events
from varuna_core.records.requests import write_signal, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

MakeStage = Callable[..., Stage]
LONG = replace(TIMING, beat_s=5.0, lost_s=90.0)


class Watches:
    """The watches of an attempt's nodes, in this process."""

    def __init__(self, folder: Path) -> None:
        self.plan: Plan = make_plan(make_group("all", 3, 1), timing=LONG)
        self.attempt: AttemptFolder = RunFolder(folder).attempt(0)
        self.attempt.make()
        write_json(self.attempt.master, {"time": 1.0})
        self.forwarded: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.started: dict[int, AttemptWatch] = {}

    def start(self, index: int, *, reads_files: bool = True) -> AttemptWatch:
        watch = AttemptWatch(
            self.plan,
            self.plan.node(index),
            self.attempt,
            f"n{index}",
            1.0,
            lambda: {"ranks_alive": 1},
            lambda: {},
            lambda: None,
            self.forwarded[index].append,
            address="127.0.0.1",
        )
        if not reads_files:
            watch._look = lambda now: None  # type: ignore[method-assign]
        self.started[index] = watch
        watch.start()
        return watch

    def wait_for_links(self) -> None:
        wait_until(
            lambda: all(watch._is_linked for watch in self.started.values()), "all connections"
        )

    def end(self) -> None:
        for watch in reversed(self.started.values()):
            watch.end()


@pytest.fixture
def watches(tmp_path: Path) -> Iterator[Watches]:
    found = Watches(tmp_path)
    yield found
    found.end()


def test_a_stop_reaches_all_by_the_link_alone(watches: Watches) -> None:
    hub, *members = [watches.start(index, reads_files=index == 0) for index in range(3)]
    watches.wait_for_links()
    write_stop(watches.attempt, "rank", 9, "rank 1 failed")
    members[0].look_now()
    for watch in (hub, *members):
        wait_until(lambda watch=watch: watch.stop, "the stop")  # type: ignore[misc]
        assert watch.stop is not None and watch.stop["reason"] == "rank 1 failed"


def test_a_signal_reaches_each_node_once_by_both_ways(watches: Watches) -> None:
    for index in range(3):
        watches.start(index)
    watches.wait_for_links()
    write_signal(watches.attempt, "USR1", "one")
    assert call_hub(watches.attempt.link, 10.0)
    wait_until(lambda: all(watches.forwarded.values()), "the signal")
    for watch in watches.started.values():
        watch._is_linked = False
        watch._read_state()
    write_signal(watches.attempt, "USR2", "two")
    assert call_hub(watches.attempt.link, 10.0)
    both = [signal.SIGUSR1, signal.SIGUSR2]
    wait_until(lambda: all(got == both for got in watches.forwarded.values()), "each one once")


def test_a_latecomer_hears_what_was_said_before(watches: Watches) -> None:
    watches.start(0)
    write_signal(watches.attempt, "USR1", "one")
    wait_until(lambda: watches.forwarded[0], "the hub has it")
    watches.start(1, reads_files=False)
    wait_until(lambda: watches.forwarded[1] == [signal.SIGUSR1], "the latecomer has it")


def test_of_another_try_of_the_attempt_nothing_is_obeyed(watches: Watches) -> None:
    watch = watches.start(1, reads_files=False)
    word = {"attempt": 0, "opened": 1.0, "stop": {"code": 1}, "signal": [signal.SIGUSR1, "one"]}
    watch._obey({**word, "opened": 2.0})
    watch._obey({**word, "attempt": 1})
    watch._obey({**word, "opened": None, "stop": {"code": 1, "opened": 2.0}})
    watch._obey({**word, "stop": {"code": "1"}, "signal": ["x"]})
    watch._obey("noise")
    assert watch.stop is None and not watches.forwarded[1]


def test_without_a_connection_files_do_all_and_it_is_said_once(
    watches: Watches, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = Hub("127.0.0.1", num_members=1, silent_s=1.0)
        place = closed.place._replace(port=server.getsockname()[1])
        closed.close()
    publish_place(watches.attempt.link, place)
    watch = watches.start(1)
    wait_until(lambda: watch._member is not None and watch._member._complain is None, "a refusal")
    write_stop(watches.attempt, "rank", 9, "rank 2 failed")
    wait_until(lambda: watch.stop, "the stop by its file")
    assert read_json(watches.attempt.beat(1))["every_s"] == LONG.beat_s
    watches.end()
    assert capfd.readouterr().err.count("files are used instead") == 1


def test_a_connection_that_is_cut_comes_back(watches: Watches) -> None:
    hub, watch = watches.start(0), watches.start(1, reads_files=False)
    wait_until(lambda: watch._is_linked, "a connection")
    member = watch._member
    assert member is not None and member._wire is not None
    before = member._wire.sock
    before.shutdown(socket.SHUT_RDWR)

    def is_another() -> bool:
        wire = member._wire  # None while it connects
        return watch._is_linked and wire is not None and wire.sock is not before

    wait_until(is_another, "another one")
    write_stop(watches.attempt, "rank", 9, "rank 0 failed")
    hub.look_now()
    wait_until(lambda: watch.stop, "the stop by the link")


def test_a_link_file_of_a_later_try_outlives_the_hub_before(watches: Watches) -> None:
    watches.start(0)
    wait_until(lambda: read_place(watches.attempt.link), "the hub")
    later = Hub("127.0.0.1", num_members=1, silent_s=1.0)
    publish_place(watches.attempt.link, later.place)
    watches.end()
    watches.started.clear()
    assert read_place(watches.attempt.link) == later.place
    later.close()


def test_a_hub_that_ended_well_takes_its_file_along_and_nobody_complains(
    watches: Watches, capfd: pytest.CaptureFixture[str]
) -> None:
    hub, watch = watches.start(0), watches.start(1)
    wait_until(lambda: watch._is_linked, "a connection")
    hub.end()
    wait_until(lambda: not watch._is_linked, "it is gone")
    assert not watches.attempt.link.exists()
    wait_until(
        lambda: read_json(watches.attempt.beat(1))["every_s"] == LONG.beat_s, "beats by files"
    )
    del watches.started[0]
    watches.end()
    assert "files are used" not in capfd.readouterr().err


def test_beats_go_back_to_files_while_the_hub_stands_still(make_stage: MakeStage) -> None:
    timing = replace(TIMING, lost_s=6.0)
    plan = make_plan(make_group("a", 2, 1), command=shell("exec sleep 60"), timing=timing)
    stage = make_stage(plan)
    stage.open()
    stage.start_all()

    def promises(every_s: float) -> Any:
        return lambda: (read_json(stage.attempt.beat(1)) or {}).get("every_s") == every_s

    wait_until(promises(2.0), "few beats by files: there is a connection")
    stage.nodes[0].send_signal(signal.SIGSTOP)
    wait_until(promises(timing.beat_s), "beats by files as often as without one")
    count = read_json(stage.attempt.beat(1))["count"]
    wait_until(lambda: read_json(stage.attempt.beat(1))["count"] > count + 2, "and they go on")
    stage.nodes[0].send_signal(signal.SIGCONT)
    wait_until(promises(2.0), "the connection is back")


def test_who_asks_to_save_is_heard_at_once(make_stage: MakeStage) -> None:
    """The hub of a run on one node looks by itself four times a minute."""
    text = "trap 'echo saved; exit 0' USR1; echo on; while :; do sleep 0.05; done"
    plan = make_plan(make_group("a", 1, 1), command=shell(text), timing=LONG)
    stage = make_stage(plan)
    stage.open()
    stage.start_all()
    stage.wait_for_log("n0", "out", "on")
    wait_until(lambda: (read_json(stage.attempt.beat(0)) or {}).get("catches_usr1"), "a handler")
    write_signal(stage.attempt, "USR1", "key")
    assert call_hub(stage.attempt.link, 10.0)
    assert stage.wait() == [0]
    assert "0: saved" in stage.log("n0", "out")


def test_a_signal_for_which_a_rank_has_no_handler_is_told(make_stage: MakeStage) -> None:
    plan = make_plan(make_group("a", 1, 1), command=shell("echo on; sleep 60"), timing=LONG)
    stage = make_stage(plan)
    stage.open()
    stage.start_all()
    stage.wait_for_log("n0", "out", "on")
    write_signal(stage.attempt, "USR1", "key")
    wait_until(lambda: call_hub(stage.attempt.link, 10.0), "an answer of the hub")
    stderr = stage.nodes[0].stderr
    assert stderr is not None
    assert any("SIGUSR1 waits for a handler of rank 0" in line for line in stderr)
    wait_until(
        lambda: (read_json(stage.attempt.beat(0)) or {}).get("heard_usr1") is False, "a beat"
    )


LOST_S = 15.0


def test_a_node_is_lost_no_later_by_its_connection_than_by_its_file() -> None:
    by_file, by_link = (Peer(make_plan(make_group("a", 2, 1)).node(1)) for _ in range(2))
    beat = {"count": 3, "time": 1.0, "state": "running"}
    old = {"count": 1, "time": 0.0, "state": "running"}
    assert not by_file.is_lost(old, 0.0, LOST_S)
    assert not by_file.is_lost(beat, 100.0, LOST_S)
    by_link.note_link(99.0)
    by_link.note_link(100.0)
    for late_s, is_lost in ((0.0, False), (LOST_S - 0.1, False), (LOST_S + 0.1, True)):
        assert by_file.is_lost(beat, 100.0 + late_s, LOST_S) == is_lost
        # What the file says was written while there was a connection.
        assert by_link.is_lost(beat, 100.0 + late_s, LOST_S) == is_lost


def test_a_node_that_lost_its_connection_and_writes_beats_lives() -> None:
    peer = Peer(make_plan(make_group("a", 2, 1)).node(1))
    peer.note_link(100.0)
    for count in range(20):
        beat = {"count": count, "time": float(count), "state": "running"}
        assert not peer.is_lost(beat, 100.0 + 5 * count, LOST_S)
    assert peer.is_lost(beat, 195.0 + LOST_S + 0.1, LOST_S)
    assert not peer.is_lost({**beat, "state": "done"}, 300.0, LOST_S)


def test_a_folder_is_listed_when_its_time_changed_and_now_and_then(tmp_path: Path) -> None:
    news = FolderNews(tmp_path)
    looks = [news.look(now) for now in (0.0, 1.0, 2.0, 3.0, 3.1)]
    assert looks == [True, True, True, False, False], "times may be as coarse as two seconds"
    (tmp_path / "stop.json").touch()
    assert [news.look(now) for now in (5.0, 6.0, 7.0, 8.0)] == [True, True, True, False]
    assert news.look(70.0)
    (tmp_path / "stop.json").unlink()
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        news.look(80.0)


def test_a_clock_that_is_set_is_recorded_by_the_first_node_and_told_at_once(
    watches: Watches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(2):
        watches.start(index)
    beats = [watches.attempt.beat(index) for index in range(2)]
    wait_until(lambda: all(map(read_json, beats)), "the first beats")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    for beat in beats:
        wait_until(lambda: read_json(beat)["time"] < real() - 3000, "a beat")  # noqa: B023
    (event,) = read_events(RunFolder(watches.attempt.path.parent))
    assert (event["kind"], event["by"]) == ("clock-set", pytest.approx(-3600, abs=1))
