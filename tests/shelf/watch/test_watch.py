"""`vjob watch`: which changes make lines, which make notices, and what is done on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.facts.finding import Finding
from varuna_core.records.record import JobRecord, RunRecord, append_event, read_record, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, UncertainError, VjobError
from vjob.jobs.monitor.model.snapshot import ENDED, Health, JobRow, Scheduler, Snapshot, Verdict
from vjob.shelf.watch.desk import ALLOWED, act, check_actions, parse_action
from vjob.shelf.watch.watch import FINE, HOLD, Notice, news_of, watch_job

BAD = (Health.SLOW, Health.STALLED, Health.FAILING, Health.UNKNOWN)


def make_snapshot(folder: Path | str = "/run", **changes: object) -> Snapshot:
    scheduler = Scheduler(name="slurm", jobs=(JobRow(id="12", state="RUNNING"),))
    return Snapshot(now=1e9, run="gpt-1", folder=str(folder), scheduler=scheduler, **changes)  # type: ignore[arg-type]


def make_verdict(health: Health, **changes: object) -> Verdict:
    facts = {"reason": f"it is {health.value}", "main": Finding(health.value.lower()), **changes}
    return Verdict(health=health, **facts)  # type: ignore[arg-type]


class Recorded:
    """Surroundings that only note what they hear."""

    def __init__(self, most: int = 10**6) -> None:
        self.told: list[Verdict] = []
        self.notices: list[str] = []
        self.complaints: list[str] = []
        self.waits: list[float] = []
        self._most = most

    def tell(self, verdict: Verdict, snapshot: Snapshot) -> None:
        self.told.append(verdict)

    def notify(self, notice: Notice) -> None:
        self.notices.append(notice.news)

    def complain(self, text: str) -> None:
        self.complaints.append(text)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) < self._most


def play(healths: Sequence[Health], last_news: str = FINE) -> tuple[Recorded, int]:
    """A watch that sees these, one a look."""
    around = Recorded(len(healths))
    left = iter(healths)
    code = watch_job(
        lambda: (make_snapshot(), make_verdict(next(left))), around, every_s=30, last_news=last_news
    )
    return around, code


LIVING = st.sampled_from([health for health in Health if health not in ENDED])


@given(st.lists(LIVING, min_size=1, max_size=40))
def test_lines_tell_each_change_and_notices_only_what_held(healths: list[Health]) -> None:
    around, code = play(healths)
    changes = [b for a, b in zip([None, *healths], healths, strict=False) if a != b]
    assert [verdict.health for verdict in around.told] == changes
    assert code == make_verdict(healths[-1]).exit_code
    news = [news_of(make_verdict(health)) for health in healths]
    held = [b for a, b in itertools.pairwise(news) if a == b]
    told = around.notices
    assert all(a != b for a, b in zip([FINE, *told], told, strict=False)), "nothing twice"
    left = iter(held)
    assert all(item in left for item in told), "each one held, and they come in order"


@given(
    st.lists(
        st.tuples(LIVING, LIVING).filter(
            lambda ab: news_of(make_verdict(ab[0])) != news_of(make_verdict(ab[1]))
        ),
        max_size=1,
    ),
    st.integers(1, 20),
)
def test_a_verdict_that_flaps_makes_no_notice(pairs: list[tuple[Health, Health]], n: int) -> None:
    around, _ = play([health for pair in pairs for health in pair * n] or [Health.HEALTHY])
    assert around.notices == []


@given(LIVING, st.integers(HOLD, 30), st.integers(HOLD, 30))
def test_a_stall_is_told_once_and_its_end_once(other: Health, stalled: int, after: int) -> None:
    healths = [Health.HEALTHY] * 3 + [Health.STALLED] * stalled + [other] * after
    around, _ = play(healths)
    news = news_of(make_verdict(other))
    assert around.notices == (["STALLED"] if news == "STALLED" else ["STALLED", news])


@pytest.mark.parametrize("health", ENDED)
def test_the_end_is_confirmed_told_and_ends_the_watch(health: Health) -> None:
    around, code = play([Health.HEALTHY, health, health, Health.HEALTHY])
    assert around.notices == [health.value]
    assert around.waits == [30, 5], "the second look comes soon"
    assert code == make_verdict(health).exit_code


def test_what_an_earlier_watch_told_is_not_told_again() -> None:
    assert play([Health.STALLED] * 5, last_news="STALLED")[0].notices == []
    assert play([Health.HEALTHY] * 5, last_news="STALLED")[0].notices == [FINE]
    around, code = play([Health.DEAD] * 5, last_news="DEAD")
    assert (around.notices, around.waits, code) == ([], [], 10)


def test_a_requeue_is_told_and_that_it_goes_on_is_not() -> None:
    assert play([Health.REQUEUED] * 3 + [Health.HEALTHY] * 3)[0].notices == ["requeued"]


def test_a_look_that_fails_is_said_once_and_the_watch_goes_on() -> None:
    answers: Iterator[Exception | Health] = iter(
        [UncertainError("no answer"), UncertainError("no answer"), OSError("gone"), Health.DONE,
         UncertainError("no answer"), Health.DONE]
    )  # fmt: skip

    def look() -> tuple[Snapshot, Verdict]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return make_snapshot(), make_verdict(answer)

    around = Recorded()
    assert watch_job(look, around, every_s=30) == 0
    assert around.complaints == ["no answer", "gone", "no answer"]
    assert around.notices == ["DONE"]


def test_without_any_look_nothing_is_known() -> None:
    def look() -> tuple[Snapshot, Verdict]:
        raise VjobError("no")

    assert watch_job(look, Recorded(2), every_s=1) == 11


@given(st.text(max_size=20), st.text(max_size=20))
def test_only_what_is_listed_can_be_asked_for(news: str, verb: str) -> None:
    with pytest.raises(InputError, match="allowed are"):
        parse_action(f"{news}={verb}")


def test_the_actions_that_are_listed() -> None:
    for news, verbs in ALLOWED.items():
        for verb in verbs:
            action = parse_action(f"{news.lower()}={verb}")
            assert (action.news, action.verb) == (news, verb)
    for text in ("UNKNOWN=cancel", "DEAD=requeue", "HEALTHY=cancel", "STALLED"):
        with pytest.raises(InputError):
            parse_action(text)


def make_run(folder: Path, **changes: object) -> RunFolder:
    run = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    facts: dict[str, object] = {
        "run": "gpt-1", "name": "gpt", "state": "submitted", "scheduler": "slurm",
        "layout": "single", "num_jobs": 1, "jobs": (JobRecord("12", None),), "submitted": 1.0,
        "user": "me", "host": "login", "conf": "/home/me/my conf.yaml", "version": "1", "pid": 1,
        "pid_start": None, **changes,
    }  # fmt: skip
    write_record(run, RunRecord(**facts))  # type: ignore[arg-type]
    return run


def test_exclude_names_the_nodes_of_this_run_for_the_next_submit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    record = read_record(run)
    assert record is not None
    run.resolved.write_text("cluster: {exclude: [b9]}\n")
    action = parse_action("STALLED=exclude")
    said = []
    for node in ("b2", "b1", ""):
        verdict = make_verdict(Health.STALLED, node=node)
        notice = Notice(news="STALLED", snapshot=make_snapshot(), verdict=verdict)
        said.append(act(action, notice, run, record, lambda text: None))
        append_event(run.vjob_events, "action", verb="exclude", node=node)
    submit = "vjob submit '/home/me/my conf.yaml' --set 'cluster.exclude=[{}]'"
    assert said[0] == "b2 should be avoided: " + submit.format("b2, b9")
    assert said[1] == "b1 should be avoided: " + submit.format("b1, b2, b9")
    assert "none is excluded" in said[2]


def test_a_requeue_that_cannot_be_is_refused_before_the_watch(tmp_path: Path) -> None:
    for number, changes in enumerate(({"scheduler": "local"}, {"layout": "split"})):
        record = read_record(make_run(tmp_path / str(number), **changes))
        assert record is not None
        check_actions([parse_action("STALLED=cancel")], record)
        with pytest.raises(InputError, match="requeue"):
            check_actions([parse_action("STALLED=requeue")], record)
