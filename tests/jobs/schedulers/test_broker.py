"""One answer of the controller serves all; whatever is wrong with the cache, the tool is asked."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import wait_for
from varuna_core.facts.known import Value
from vjob.jobs.errors import UncertainError
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.base import FLOOR_S, SELDOM_S
from vjob.jobs.schedulers.broker import Answer, ask
from vjob.jobs.schedulers.job import JobState
from vjob.jobs.schedulers.slurm import commands
from vjob.jobs.schedulers.slurm import scheduler as slurm
from vjob.jobs.schedulers.slurm.commands import build_squeue_command
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler

ROW = "{job}|N/A|N/A|{word}|a1|None|0|N/A|vjob:x|10:00|10:00|N/A|N/A|(null)|0|"
COMMAND = ["squeue", "--user=1"]


def ask_left(job: str) -> float:
    left = SlurmScheduler().ask_time_left(job)
    assert isinstance(left, Value)
    return left.value


def forget() -> None:
    broker._memory.clear()
    broker._files.clear()


class Tools:
    """Scripts in the place of Slurm's, which count their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder / "tools", folder / "state"
        self.folder.mkdir()
        for name in ("squeue", "scontrol", "sacct", "sinfo", "scancel"):
            self.say(name, "true")

    def say(self, name: str, body: str) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.folder}/calls\n{body}\n')
        part.chmod(0o755)
        part.rename(self.folder / name)

    def queue(self, **words: str) -> None:
        rows = [ROW.format(job=job[1:], word=word) for job, word in words.items()]
        self.say("squeue", "\n".join(["cat <<E", *rows, "E"]))

    def calls(self, name: str = "") -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(name)]

    @property
    def cache(self) -> Path:
        (path,) = (self.state / "vjob/scheduler").glob("*.squeue.json")
        return path


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    found = Tools(tmp_path)
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(found.state))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    forget()
    yield found
    forget()


def shift(tools: Tools, seconds: float) -> None:
    """Make the known answers older, here and in the file."""
    for path in (tools.state / "vjob/scheduler").glob("*.json"):
        entries = json.loads(path.read_text())
        for entry in entries.values():
            for name in ("asked", "confirmed", "failed"):
                entry[name] = entry[name] and entry[name] - seconds
        path.write_text(json.dumps(entries))
    forget()


def test_ten_viewers_who_ask_at_once_make_one_question(tools: Tools) -> None:
    tools.say("squeue", "sleep 0.3; echo yes")
    found: list[Answer] = []
    viewers = [
        threading.Thread(target=lambda: found.append(ask(COMMAND, floor_s=25))) for _ in range(10)
    ]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert len(tools.calls()) == 1
    assert {answer.text for answer in found} == {"yes\n"} and len({x.asked for x in found}) == 1


def test_another_process_takes_the_answer_until_the_floor(tools: Tools) -> None:
    ask(COMMAND, floor_s=25)
    broker._memory.clear()  # as another process
    ask(COMMAND, floor_s=25)
    assert len(tools.calls()) == 1
    shift(tools, 26)
    ask(COMMAND, floor_s=25)
    assert len(tools.calls()) == 2


def test_an_answer_from_before_a_change_is_no_use(tools: Tools) -> None:
    before = ask(COMMAND, floor_s=25)
    assert ask(COMMAND, floor_s=25, after=before.asked) == before
    assert ask(COMMAND, floor_s=25, after=time.time()).asked > before.asked
    ahead = time.time() + 100
    ask(COMMAND, floor_s=25, after=ahead)
    assert len(tools.calls()) == 2, "a file server whose clock is ahead makes no flood"


@pytest.mark.parametrize(("took_s", "gap_s"), [(0.01, 25), (2.0, 40), (30.0, 60)])
def test_a_slow_controller_is_asked_less_often(took_s: float, gap_s: float) -> None:
    now = time.time()
    for age_s, is_fresh in ((gap_s - 1, True), (gap_s + 1, False)):
        answer = Answer(asked=now - age_s, took_s=took_s)
        assert broker.is_fresh(answer, 25) is is_fresh


def test_a_question_in_vain_is_not_repeated_at_once(tools: Tools) -> None:
    tools.say("squeue", "echo Unable to contact slurm controller >&2; exit 1")
    for _ in range(3):
        with pytest.raises(UncertainError, match="squeue failed: Unable to contact"):
            ask(COMMAND, floor_s=25)
    assert len(tools.calls()) == 1
    tools.say("squeue", "echo here again")
    shift(tools, broker.RETRY_S + 1)
    assert ask(COMMAND, floor_s=25).text == "here again\n"


def test_a_fresh_answer_is_good_though_a_later_question_was_in_vain(tools: Tools) -> None:
    before = ask(COMMAND, floor_s=25)
    tools.say("squeue", "exit 1")
    with pytest.raises(UncertainError):
        ask(COMMAND, floor_s=25, after=time.time())
    assert ask(COMMAND, floor_s=25).text == before.text


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\0" * 4096,
        b"[]",
        b'{"squeue --user=1": 7}',
        b'{"squeue --user=1": {"text": 7, "asked": 1}}',
        b'{"squeue --user=1": {"asked": "soon"}}',
        b'{"squeue --user=1": {"asked": NaN, "text": "x"}}',
        b'{"squeue --user=1": {"text": "old", "asked": 99999999999}}',
        b'{"squeue --user=1": {"text": "old", "what": 1}}',
        b'{"other": {}, "squeue --user=1": null}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_cache_is_asked_past(tools: Tools, damage: bytes) -> None:
    ask(COMMAND, floor_s=25)
    tools.cache.write_bytes(damage)
    forget()
    tools.say("squeue", "echo now")
    assert ask(COMMAND, floor_s=25).text == "now\n"
    forget()
    assert ask(COMMAND, floor_s=25).text == "now\n" and len(tools.calls()) == 2


def test_a_clock_that_was_set_makes_no_answer_eternal(tools: Tools) -> None:
    ask(COMMAND, floor_s=25)
    for seconds in (-7200, 7200):  # an answer from the future, and one of long ago
        shift(tools, seconds)
        tools.say("squeue", f"echo {seconds}")
        assert ask(COMMAND, floor_s=25).text == f"{seconds}\n"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_lies_in_the_place_of_the_cache_is_not_followed(tools: Tools, kind: str) -> None:
    ask(COMMAND, floor_s=25)
    path, victim = tools.cache, tools.state / "victim"
    victim.write_text(path.read_text())
    path.unlink()
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    forget()
    kept = victim.read_text()
    tools.say("squeue", "echo asked")
    assert ask(COMMAND, floor_s=25).text == "asked\n" and victim.read_text() == kept


def test_without_a_folder_to_write_to_the_tool_is_asked_and_remembered(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.state.write_text("a file, where the folder should be")
    for _ in range(3):
        assert ask(COMMAND, floor_s=25).text == ""
    assert len(tools.calls()) == 1
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/vjob")
    assert ask(COMMAND, floor_s=25).text == ""


def test_a_full_disk_is_no_matter(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broker, "write_json", fail)
    for _ in range(2):
        ask(COMMAND, floor_s=25)
    assert len(tools.calls()) == 1


def test_the_cache_is_its_owners_alone(tools: Tools) -> None:
    ask(COMMAND, floor_s=25)
    for path in (tools.cache, tools.cache.with_suffix(".lock")):
        assert path.stat().st_mode & 0o777 == 0o600
    assert tools.cache.parent.stat().st_mode & 0o777 == 0o700


def test_a_holder_that_was_killed_holds_up_nobody(tools: Tools) -> None:
    ask(COMMAND, floor_s=25)
    lock = tools.cache.with_suffix(".lock")
    shift(tools, 1000)
    hold = f"import fcntl, time; fcntl.flock(open({str(lock)!r}), 2); print(1, flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline()
    asking = threading.Thread(target=ask, args=(COMMAND,), kwargs={"floor_s": 25})
    asking.start()
    holder.kill()
    with holder:
        asking.join()
    assert len(tools.calls()) == 2


def test_who_waits_in_vain_takes_the_old_answer_or_asks(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "WAIT_S", 0.1)
    before = ask(COMMAND, floor_s=25)
    with tools.cache.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shift(tools, 40)
        found = ask(COMMAND, floor_s=25)
        assert (found.text, len(tools.calls())) == (before.text, 1)
        assert time.time() - found.asked > 39, "with its age"
        shift(tools, 400)
        assert time.time() - ask(COMMAND, floor_s=25).asked < 30 and len(tools.calls()) == 2


def test_clusters_do_not_share_answers(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for cluster in ("one", "two"):
        conf = tools.folder / "slurm.conf"  # of the same path, on machines of one home
        conf.write_text(f"ClusterName={cluster}\nSlurmctldHost=head\n")
        monkeypatch.setenv("SLURM_CONF", str(conf))
        names.add(broker.name_controller("squeue"))
        conf.write_text(f"# comment\nClusterName={cluster}\nSlurmctldHost=head\nMaxJobCount=9\n")
        names.add(broker.name_controller("squeue"))
    assert len(names) == 2


# The jobs of a user.


def find_states(found: object) -> dict[str, list[str]]:
    assert isinstance(found, dict)
    return {job: [info.state.value for info in infos] for job, infos in found.items()}


def test_all_runs_of_a_user_are_known_by_one_squeue(tools: Tools) -> None:
    tools.queue(j1="RUNNING", j2="PENDING", j3="RUNNING")
    for job in ("1", "2", "3"):
        assert len(SlurmScheduler().poll([job])[job]) == 1
    SlurmScheduler().find_orphans()
    assert ask_left("1") == pytest.approx(600, abs=20)
    assert [line.split()[0] for line in tools.calls()] == ["squeue"]
    assert f"--user={os.getuid()}" in tools.calls()[0]


def test_answers_know_their_age(tools: Tools) -> None:
    tools.queue(j1="RUNNING")
    SlurmScheduler().poll(["1"])
    shift(tools, 12)
    (info,) = SlurmScheduler().poll(["1"])["1"]
    assert info.asked is not None and time.time() - info.asked == pytest.approx(12, abs=10)
    assert info.asked <= time.time() - 12


def test_a_job_that_was_just_submitted_has_not_vanished(tools: Tools) -> None:
    """The answer is from before it: the controller is asked about that job alone."""
    tools.queue(j1="RUNNING")
    poll = SlurmScheduler().poll
    poll(["1"])
    submitted = time.time()
    tools.say("scontrol", "echo JobId=2 JobState=PENDING Reason=Priority TimeLimit=00:10:00")
    tools.queue(j1="RUNNING", j2="PENDING")
    for _ in range(3):
        found = poll(["1", "2"], after={"1": 1.0, "2": submitted})
        assert find_states(found) == {"1": ["RUNNING"], "2": ["PENDING"]}
    assert [line.split()[0] for line in tools.calls()] == ["squeue", "scontrol"]


def test_several_changes_at_once_are_one_squeue(tools: Tools) -> None:
    tools.queue(j1="RUNNING", j2="RUNNING")
    poll = SlurmScheduler().poll
    poll(["1", "2"])
    tools.queue(j1="COMPLETED", j2="COMPLETED")
    for _ in range(3):
        found = poll(["1", "2"], after=dict.fromkeys("12", time.time() if _ == 0 else 1.0))
    assert find_states(found) == {"1": ["COMPLETED"], "2": ["COMPLETED"]}
    assert [line.split()[0] for line in tools.calls()] == ["squeue", "squeue"]


def test_forgotten_jobs_cost_one_scontrol_and_one_sacct(tools: Tools) -> None:
    jobs = [str(number) for number in range(100, 150)]
    rows = "".join(f"{job}|COMPLETED|a1|None|0:0|x|x|05:00|\n" for job in jobs)
    tools.say("sacct", f"cat <<E\n{rows}E")
    tools.say("scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    for _ in range(3):
        found = SlurmScheduler().poll(jobs)
        assert all(infos[0].state is JobState.COMPLETED for infos in found.values())
    assert [line.split()[0] for line in tools.calls()] == ["squeue", "scontrol", "sacct"]


def test_a_job_that_squeue_did_not_know_yet_brings_another_squeue(tools: Tools) -> None:
    """Where files do not tell, as clocks differ: one that lives makes the answer too old."""
    poll = SlurmScheduler().poll
    poll(["1"])
    tools.say("scontrol", "echo JobId=2 JobState=RUNNING")
    tools.queue(j1="RUNNING", j2="RUNNING", j3="RUNNING")
    found = poll(["2", "3"])
    assert find_states(found) == {"2": ["RUNNING"], "3": ["RUNNING"]}


def test_jobs_that_run_are_asked_about_by_their_states_where_squeue_can(tools: Tools) -> None:
    rows = "\n".join(ROW.format(job=job, word="RUNNING") for job in "12")
    body = (
        'case "$*" in *--version*) echo slurm 24.05.2;; '
        '*--only-job-state*) printf "1|RUNNING\n2|%s\n" $word;; '
        f"*) cat <<E\n{rows}\nE\n;; esac"
    )
    tools.say("squeue", f"word=RUNNING; {body}")
    poll = SlurmScheduler().poll
    poll(["1", "2"])
    shift(tools, FLOOR_S + 1)
    (info,) = poll(["1", "2"])["1"]
    kinds = ["whole" if "--user" in line else line.split()[-1] for line in tools.calls()]
    assert kinds == ["whole", "--version", "%i|%T"]
    assert info.asked is not None and time.time() - info.asked < 20
    shift(tools, FLOOR_S + 1)
    tools.say("squeue", f"word=COMPLETED; {body}")
    poll(["1", "2"])
    kinds = ["whole" if "--user" in line else line.split()[-1] for line in tools.calls()]
    assert kinds == ["whole", "--version", "%i|%T", "%i|%T", "whole"]


def test_an_older_squeue_is_never_asked_for_states_alone(tools: Tools) -> None:
    tools.queue(j1="RUNNING")
    SlurmScheduler().poll(["1"])
    shift(tools, FLOOR_S + 1)
    SlurmScheduler().poll(["1"])
    assert not any("--only-job-state" in line for line in tools.calls())


def test_a_user_of_many_jobs_waits_longer(tools: Tools) -> None:
    many = [ROW.format(job=job, word="PENDING") for job in range(slurm.MANY_JOBS + 1)]
    tools.say("squeue", "\n".join(["cat <<E", *many, "E"]))
    SlurmScheduler().poll(["1"])
    shift(tools, (FLOOR_S + slurm.LONG_FLOOR_S) / 2)
    SlurmScheduler().poll(["1"])
    assert len(tools.calls()) == 1
    assert build_squeue_command(os.getuid())[0] == "squeue"


def test_many_polls_of_one_answer_read_and_parse_it_once(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    built: list[str] = []
    parse, build = broker.parse_object, commands.build_job
    monkeypatch.setattr(broker, "parse_object", lambda text: parsed.append("") or parse(text))
    monkeypatch.setattr(
        commands, "build_job", lambda job, *a, **b: built.append(job) or build(job, *a, **b)
    )
    many = [ROW.format(job=job, word="PENDING") for job in (*range(300), *[1] * 300)]
    tools.say("squeue", "\n".join(["cat <<E", *many, "E"]))
    for _ in range(9):
        assert find_states(SlurmScheduler().poll(["1", "2"])) == {
            "1": ["PENDING"],
            "2": ["PENDING"],
        }
    assert built == ["1", "2"] and len(parsed) <= 2
    shift(tools, 2 * FLOOR_S)
    SlurmScheduler().poll(["1", "2"])
    assert len(tools.calls("squeue --noheader")) == 2


def test_a_viewer_who_waits_for_another_sees_its_answer(tools: Tools) -> None:
    tools.say("squeue", f"until [ -e {tools.folder}/go ]; do sleep 0.05; done; echo yes")
    found: list[Answer] = []
    first, second = (
        threading.Thread(target=lambda: found.append(ask(COMMAND, floor_s=25))) for _ in range(2)
    )
    first.start()
    wait_for(lambda: tools.calls(), 60)
    second.start()
    (tools.folder / "go").touch()
    first.join()
    second.join()
    assert len(found) == 2 and len(tools.calls()) == 1


def test_who_looks_after_one_job_alone_asks_about_that_alone(tools: Tools) -> None:
    tools.say("scontrol", "echo JobId=1 JobState=RUNNING TimeLimit=00:10:00 RunTime=00:00:10")
    for _ in range(3):
        found = SlurmScheduler().poll(["1"], floor_s=SELDOM_S)
        assert find_states(found) == {"1": ["RUNNING"]}
        assert ask_left("1") == pytest.approx(590, abs=30)
    assert [line.split()[0] for line in tools.calls()] == ["scontrol"]


def test_a_job_that_was_just_asked_about_needs_no_squeue_before_the_floor(tools: Tools) -> None:
    tools.say("scontrol", "echo JobId=1 JobState=RUNNING")
    tools.queue(j1="RUNNING")
    began = time.time()
    for _ in range(3):
        SlurmScheduler().poll(["1"], after={"1": began})
        assert [line.split()[0] for line in tools.calls()] == ["scontrol"]
        began -= 60  # the same change, looked at a minute later
