"""Each point is shown once over all attempts, whenever a tracker was killed."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from varuna_core.agent.track.cursor import Cursor, read_cursor, write_cursor
from varuna_core.agent.track.points import Point


def make_points(attempt: int, steps: list[int]) -> list[Point]:
    return [
        Point("steps", step, 100.0, {"loss": 1.0}, attempt, float(attempt), float(step))
        for step in steps
    ]


def list_shown(cursor: Cursor, points: list[Point]) -> list[tuple[str, int]]:
    found = [taken for taken in map(cursor.take, points) if taken is not None]
    return [(name, point.step) for point in found for name in point.values]


def test_steps_that_an_attempt_repeats_are_marked() -> None:
    cursor = Cursor()
    list_shown(cursor, make_points(0, [10, 20, 30, 40]))
    assert list_shown(cursor, make_points(1, [30, 40, 50])) == [
        ("repeated/loss", 30),
        ("repeated/loss", 40),
        ("loss", 50),
    ]


def test_an_attempt_that_was_set_aside_is_another_one() -> None:
    cursor = Cursor()
    first = make_points(0, [10])
    again = [Point("steps", 10, 200.0, {"loss": 2.0}, 0, 7.0, 10.0)]
    assert list_shown(cursor, first) == [("loss", 10)]
    assert list_shown(cursor, again) == [("repeated/loss", 10)]


def test_two_lines_about_one_step_are_both_shown() -> None:
    cursor = Cursor()
    lines = [
        Point("steps", 10, 100.0, {name: 1.0}, 0, 0.0, place)
        for name, place in (("learning_rate", 10.0), ("loss", 10.001))
    ]
    assert list_shown(cursor, lines) == [("learning_rate", 10), ("loss", 10)]
    assert list_shown(cursor, lines) == []


@given(
    ends=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5),
    shown=st.lists(st.integers(0, 12), min_size=5, max_size=5),
)
def test_every_step_is_shown_once_wherever_trackers_were_killed(
    ends: list[tuple[int, int]], shown: list[int]
) -> None:
    """Attempt n goes on where the one before saved, and trains some steps; its tracker is killed
    after `shown[n]` points, and the next one reads all attempts again."""
    attempts: list[list[Point]] = []
    begin = 0
    for number, (length, lost) in enumerate(ends):
        attempts.append(make_points(number, list(range(begin + 1, begin + length + 1))))
        begin = max(0, begin + length - lost)
    cursor, seen = Cursor(), []
    for number in range(len(attempts)):
        points = [point for attempt in attempts[: number + 1] for point in attempt]
        seen += list_shown(cursor, points[: len(points) - shown[number]])
    seen += list_shown(cursor, [point for attempt in attempts for point in attempt])
    trained = [point.step for attempt in attempts for point in attempt]
    steps = [step for name, step in seen if name == "loss"]
    assert sorted(steps) == sorted(set(trained)), "each once, none is missing"
    assert sorted(step for _, step in seen) == sorted(trained), "the others are marked"


def test_a_cursor_survives_its_process_and_a_torn_file(tmp_path: Path) -> None:
    cursor = Cursor(own={"run_id": "abc"})
    list_shown(cursor, make_points(3, [10, 20]))
    path = tmp_path / "mlflow.json"
    write_cursor(path, cursor)
    assert read_cursor(path) == cursor
    path.write_text(path.read_text()[:40])
    assert read_cursor(path) == Cursor()
    path.write_text('{"attempt": "x"}')
    assert read_cursor(path) == Cursor()
