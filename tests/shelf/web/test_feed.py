"""One reading for all tabs, and none while nobody looks."""

from __future__ import annotations

import threading

from tests.command import wait_for
from vjob.jobs.errors import InputError
from vjob.shelf.web import feed as feeds
from vjob.shelf.web.feed import Feed, JobReading
from vjob.shelf.web.server import build_state


class Source:
    """Makes what a test sets, and counts."""

    def __init__(self, made: JobReading | Exception) -> None:
        self.made = made
        self.num = 0

    def make(self) -> JobReading:
        self.num += 1
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def test_ten_tabs_are_one_reading() -> None:
    source = Source(JobReading(parts={"page": b"1"}, note="live"))
    feed = Feed(source.make, every_s=1000)
    tabs = [threading.Thread(target=feed.look) for _ in range(10)]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    wait_for(lambda: feed.look().version == 1, 30, lambda: str(feed.look()))
    assert source.num == 1
    feed.close()


def test_without_a_tab_nothing_is_read() -> None:
    now = [0.0]
    source = Source(JobReading(parts={"page": b"1"}))
    feed = Feed(source.make, every_s=0.01, clock=lambda: now[0])
    assert source.num == 0
    feed.look()
    wait_for(lambda: source.num > 2, 30, lambda: str(source.num))
    now[0] = 10 * feeds.IDLE_S  # no tab has asked for long
    wait_for(lambda: feed._thread is None, 30, lambda: str(source.num))
    num = source.num
    feed.look()
    wait_for(lambda: source.num > num, 30, lambda: str(source.num))
    feed.close()


def test_what_takes_long_is_done_seldom() -> None:
    now, waits = [0.0], []

    def make() -> JobReading:
        now[0] += 10.0
        return JobReading(parts={"page": b"1"})

    feed = Feed(make, every_s=5.0, clock=lambda: now[0])

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += 1000  # nobody looks any more: the thread ends after the next reading

    feed._wake.wait = wait  # type: ignore[method-assign, assignment]
    feed.look()
    wait_for(lambda: bool(waits) and feed._thread is None, 30, lambda: str(waits))
    assert waits == [40.0]


def test_a_tab_gets_the_names_of_parts_only_where_one_changed() -> None:
    source = Source(
        JobReading(parts={"page": b"1", "model": b"2"}, blobs={"step-1": b"3"}, note="live")
    )
    feed = Feed(source.make, every_s=1000)
    feed.renew()
    first = build_state(feed, 0, 0)
    assert (first["version"], first["note"], first["is_over"]) == (1, "live", False)
    assert {name: feed.find_part(key) for name, key in first["parts"].items()} == {
        "page": b"1",
        "model": b"2",
    }
    assert feed.find_part("step-1") == b"3" and feed.find_part("step-2") is None
    source.made = JobReading(note="live")  # nothing changed
    feed.renew()
    assert "parts" not in build_state(feed, 1, 0)
    source.made = JobReading(parts={"page": b"4", "model": b"2"})
    feed.renew()
    later = build_state(feed, 1, 0)
    assert later["version"] == 2 and later["parts"]["model"] == first["parts"]["model"]
    assert feed.find_part(first["parts"]["page"]) == b"1"  # a tab may be asking for it right now
    feed.close()


def test_lines_come_once_and_the_oldest_give_way() -> None:
    source = Source(JobReading(lines=["a", "b"]))
    feed = Feed(source.make, every_s=1000)
    feed.renew()
    assert feed.list_lines(0) == (["a", "b"], 2)
    assert feed.list_lines(2) == ([], 2)
    source.made = JobReading(lines=["c"])
    feed.renew()
    assert feed.list_lines(2) == (["c"], 3)
    assert feed.list_lines(99) == (["a", "b", "c"], 3)  # of a server before this one
    source.made = JobReading(lines=[str(number) for number in range(feeds.MOST_LINES)])
    feed.renew()
    lines, last = feed.list_lines(1)
    assert (len(lines), lines[0], last) == (feeds.MOST_LINES, "0", feeds.MOST_LINES + 3)


def test_a_failed_reading_leaves_what_was_there_and_says_why() -> None:
    source = Source(JobReading(parts={"page": b"1"}, note="live"))
    feed = Feed(source.make, every_s=1000)
    feed.renew()
    source.made = InputError("/scratch/run does not exist (any more)")
    shown = feed.renew()
    assert shown.version == 1 and shown.is_trouble and not shown.is_over
    assert shown.note.startswith("What is shown is as of ")
    assert shown.note.endswith("/scratch/run does not exist (any more)")
    source.made = JobReading(note="live")
    assert not feed.renew().is_trouble


def test_after_the_end_nothing_is_read() -> None:
    source = Source(JobReading(parts={"page": b"1"}, note="over", is_over=True))
    feed = Feed(source.make, every_s=0.01)
    feed.look()
    wait_for(lambda: feed.look().is_over, 30, lambda: str(source.num))
    wait_for(lambda: feed._thread is None, 30, lambda: str(source.num))
    assert feed.look().is_over and feed._thread is None and source.num == 1
