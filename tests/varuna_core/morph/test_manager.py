"""Manager and nodes as real processes; the ranks are a line of shell that stands for a training."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import read_rank
from tests.varuna_core.agent.local_run import TIMING, make_group, make_plan, wait_until
from tests.varuna_core.programs.trainings import GPT
from varuna_core.agent.bundle import write_bundle
from varuna_core.facts.cause import EndCause
from varuna_core.facts.sentences import describe_end
from varuna_core.morph import manager
from varuna_core.morph.orders import Orders, read_orders
from varuna_core.records.exits import read_judgement, read_outcome
from varuna_core.records.files import read_json, read_lines, write_json
from varuna_core.records.morphing import (
    RUNNING,
    ManagerState,
    claim_epoch,
    read_state,
    write_state,
)
from varuna_core.records.plan import MorphPlan, read_attempt_plan, read_plan, write_plan
from varuna_core.records.record import (
    CANCEL_ASKED,
    MORPH_PARTS,
    append_event,
    read_events,
    read_morph_parts,
    read_pause_s,
)
from varuna_core.records.runfolder import MorphFolder, RunFolder
from varuna_core.records.training import derive_facts, read_training, render_training

HANGS_AT_FIRST = '[ "$VJOB_ATTEMPT" = 0 ] && exec sleep 1000; '
TRAINS = 'mkdir -p "$0/varuna_ckpt_6" && echo {} > "$0/varuna_ckpt_6/manifest.json"'


class Elastic:
    """A run of three nodes."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        warm: bool = False,
        python: str = "",
        restarts: int | None = None,
        min_nodes: int = 2,
        **timing: float,
    ) -> None:
        """Ranks that are a line of shell, or with `python` a program in it."""
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir(mode=0o700)
        self.run.program.write_text(python)
        store = str(folder / "ckpt")
        plan = make_plan(
            make_group("all", 3, 1),
            command=(sys.executable, str(self.run.program), "0.json")
            if python
            else ("sh", "-c", text, store),
            timing=replace(TIMING, **{"lost_s": 6.0, "join_s": 60.0, **timing}),
            restarts=restarts,
            morph=True,
            morphing=MorphPlan(
                min_nodes=min_nodes, max_nodes=3, requeue=False, save_s=5, warm=warm
            ),
        )
        write_plan(self.run.plan, plan)
        training = replace(GPT, pipeline=3, checkpoint_folder=store)
        self.run.training.write_text(render_training(training))
        write_bundle(self.run.agent, plan=plan)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, session: str = "7.0", node: int = 0) -> subprocess.Popen[str]:
        options = ["--run", str(self.run.path), "--session", session]
        process = subprocess.Popen(
            [sys.executable, str(self.run.agent), "morph", *words, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "VJOB_NODE_NAME": f"n{node}"},
        )
        self.started.append(process)
        return process

    def stay(self, node: int, session: str = "7.0") -> subprocess.Popen[str]:
        return self.start("stay", "--node", str(node), session=session, node=node)

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    def answer(self, session: str = "7.0") -> str:
        return self.finish(self.start("answer", session=session))[1].strip()

    def read_state(self) -> ManagerState:
        state = read_state(self.run.morph)
        assert state is not None
        return state

    def has_started(self, attempt: int) -> bool:
        return self.run.attempt(attempt).go.exists()

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Elastic]:
    found = Elastic(tmp_path, HANGS_AT_FIRST + TRAINS)
    yield found
    found.end()


def find_agent(node: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def test_a_node_that_fell_silent_is_fenced_and_goes_home_when_it_wakes(elastic: Elastic) -> None:
    manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
    wait_until(lambda: elastic.has_started(0), "the first attempt")
    nodes[2].send_signal(signal.SIGSTOP)
    code, _, said = elastic.finish(manager)
    assert (code, elastic.answer()) == (0, "0"), said
    plan = read_attempt_plan(elastic.run, 1)
    assert plan is not None and (plan.pipeline, plan.num_nodes) == (2, 2)
    outcome = read_outcome(elastic.run.attempt(0))
    assert outcome is not None and outcome.code == 113 and "n2 was lost" in outcome.reason
    nodes[2].send_signal(signal.SIGCONT)
    assert [elastic.finish(node)[0] for node in nodes] == [0, 0, 0]
    (morph,) = [event for event in read_events(elastic.run) if event["kind"] == "morph"]
    assert (morph["from"], morph["to"], morph["nodes"]) == ("3 x 1", "2 x 1", [0, 1])


def test_an_agent_that_dies_without_a_word_ends_its_attempt_at_once(elastic: Elastic) -> None:
    """As where a node goes down piece by piece: its ranks are gone, and nobody says that they
    failed. The others may wait for them for good."""
    manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
    wait_until(lambda: elastic.has_started(0), "the first attempt")
    os.kill(find_agent(nodes[2]), signal.SIGKILL)
    code, _, said = elastic.finish(manager)
    assert (code, elastic.answer()) == (0, "0"), said
    assert "attempt 0 ends: the agent of n2 ended with 137" in said
    plan = read_attempt_plan(elastic.run, 1)
    assert plan is not None and plan.num_nodes == 3, "the node itself is well"


def test_a_stopped_agent_ends_its_ranks_with_the_others(elastic: Elastic) -> None:
    """Its node is waited for, two minutes by default, for its ranks may hold GPUs and ports."""
    manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
    wait_until(lambda: elastic.has_started(0), "the first attempt")
    os.kill(find_agent(nodes[2]), signal.SIGSTOP)
    os.kill(find_agent(nodes[1]), signal.SIGKILL)
    code, _, said = elastic.finish(manager)
    assert (code, elastic.answer()) == (0, "0"), said
    assert "did not end its ranks" not in said
    plan = read_attempt_plan(elastic.run, 1)
    assert plan is not None and plan.num_nodes == 3


def test_every_attempt_names_the_job_and_not_the_session(elastic: Elastic) -> None:
    """A submit that was cut off adopts the jobs that `started` names: the job's second name, its
    session, would count as another job, and both would be cancelled as one too many."""
    manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
    wait_until(lambda: elastic.has_started(0), "the first attempt")
    nodes[2].kill()
    assert elastic.finish(manager)[0] == 0
    started = [event for event in read_events(elastic.run) if event["kind"] == "started"]
    assert [event["job_id"] for event in started] == ["7", "7"]


def test_a_manager_killed_again_and_again_loses_nothing(elastic: Elastic) -> None:
    manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
    for epoch, mark in enumerate(("claim", "manager", "orders")):
        wait_until(getattr(elastic.run.morph, mark)(epoch).exists, mark)
        manager.kill()
        manager = elastic.start("manage")
    wait_until(lambda: elastic.has_started(0), "the first attempt")
    manager.kill()
    nodes[1].kill()
    manager = elastic.start("manage")
    wait_until(elastic.run.attempt(0).stop.exists, "the stop")
    manager.kill()
    code, _, said = elastic.finish(elastic.start("manage"))
    assert (code, elastic.answer()) == (0, "0"), said
    assert [attempt.number for attempt in elastic.run.attempts()] == [0, 1]


def test_a_guest_goes_over_from_one_session_to_the_next_and_home_at_the_end(tmp_path: Path) -> None:
    """The first job of the run is lost with its manager, and comes back."""
    elastic = Elastic(tmp_path, HANGS_AT_FIRST + TRAINS)
    try:
        guest = elastic.stay(2, session="")
        manager, nodes = elastic.start("manage"), [elastic.stay(0), elastic.stay(1)]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        for process in (manager, *nodes):
            process.kill()
        before = read_json(elastic.run.morph.node(2))
        assert before["session"] == "7.0"
        manager = elastic.start("manage", session="7.1")
        [elastic.stay(index, session="7.1") for index in (0, 1)]
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer("7.1")) == (0, "0"), said
        plan = read_attempt_plan(elastic.run, 1)
        assert plan is not None and plan.num_nodes == 3
        after = read_json(elastic.run.morph.node(2))
        assert after["session"] == "7.1" and after["key"] != before["key"]
        code, _, said = elastic.finish(guest)
        assert code == 0 and "the run has ended" in said
        late = elastic.stay(2, session="")  # its job pended until now
        assert elastic.finish(late)[0] == 0
        told = [list(read_lines(path)) for path in elastic.run.morph.obeyed.glob("2-*.jsonl")]
        said = [(line["what"], line["session"]) for line in max(told, key=len)]
        parts = [("join", "7.0"), ("start", "7.0"), ("end", "7.0")]
        parts += [("join", "7.1"), ("start", "7.1"), ("end", "7.1")]
        assert [one for one in said if one[0] != "leave"] == parts
        assert elastic.answer(session="") == "0"
    finally:
        elastic.end()


def test_a_job_that_was_given_fewer_nodes_starts_with_those(tmp_path: Path) -> None:
    elastic = Elastic(tmp_path, TRAINS)
    try:
        manager = elastic.start("manage", "--expected", "2")
        nodes = [elastic.stay(index) for index in range(2)]
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "0"), said
        plan = read_attempt_plan(elastic.run, 0)
        assert plan is not None and plan.num_nodes == 2
        assert [elastic.finish(node)[0] for node in nodes] == [0, 0]
    finally:
        elastic.end()


class Seen(Exception):
    """Enough of a manager that otherwise goes on."""


def test_orders_tell_of_an_attempt_once_its_plan_is_there(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they change for another reason in the same breath, and after a kill in it."""
    run, plan, text = elastic.run, read_plan(elastic.run.plan), elastic.run.training
    assert plan is not None
    seen: list[bool] = []

    def see(folder: MorphFolder, orders: Orders) -> None:
        seen.append(orders.attempt == 4 and run.attempt(4).plan.exists())
        raise Seen

    monkeypatch.setattr(manager, "write_orders", see)
    monkeypatch.setattr(manager, "Signals", lambda: None)
    nodes = ("0/a", "2/c")
    state = ManagerState(phase=RUNNING, attempt=4, nodes=nodes, members=nodes, fenced=("1/b",))
    state = replace(state, session="7.0")
    run.morph.make()
    write_state(run.morph, claim_epoch(run.morph, "7.0"), state)
    with pytest.raises(Seen):
        manager.Manager(run, plan, derive_facts(read_training(text)), "7.0").run()
    assert seen == [True]


def test_a_second_manager_is_refused(elastic: Elastic) -> None:
    elastic.start("manage")
    wait_until(elastic.run.morph.orders(0).exists, "the first manager")
    code, _, said = elastic.finish(elastic.start("manage"))
    assert code == 112 and "another manager of this run" in said


def test_a_manager_whose_run_went_on_in_another_job_ends(elastic: Elastic) -> None:
    manager = elastic.start("manage")
    wait_until(elastic.run.morph.orders(0).exists, "the manager")
    assert claim_epoch(elastic.run.morph, "8.0") == 1
    code, _, said = elastic.finish(manager)
    assert code == 0 and "the run went on in another job" in said
    assert elastic.answer() == "replaced"
    code, _, said = elastic.finish(elastic.start("manage"))
    assert code == 0 and "the run goes on in another job" in said, "killed, and started again"
    assert elastic.answer("8.0") == "112", "its manager came to no verdict yet"


def test_where_no_node_comes_the_job_says_so_and_spares_the_attempts_before(tmp_path: Path) -> None:
    elastic = Elastic(tmp_path, TRAINS, join_s=0.5)
    try:
        for number, session in enumerate(("7.0", "7.1")):
            assert elastic.finish(elastic.start("manage", session=session))[0] == 0
            assert elastic.answer(session) == "113"
            judged = read_judgement(elastic.run.attempt(number))
            assert judged is not None
            assert describe_end(judged.end) == "0 nodes are here, at least 2 are needed"
            assert judged.outcome.reason == describe_end(judged.end)
    finally:
        elastic.end()


def test_a_run_with_too_few_nodes_names_the_lost_one_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    """The node that the ranks' errors came from was well, yet it was the one to exclude; and the
    run's record had the loss alone, not why no attempt followed."""
    waits = 'mkdir -p "$0"; while [ ! -e "$0/cut" ]; do sleep 0.1; done; '
    waits += 'echo "ConnectionResetError: Connection reset by peer" >&2; exit 1'
    elastic = Elastic(tmp_path, waits, min_nodes=3, join_s=3.0)
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        wait_until((tmp_path / "ckpt").is_dir, "a rank")
        nodes[2].kill()
        (tmp_path / "ckpt" / "cut").touch()
        assert elastic.finish(manager)[0] == 0
        judged = read_judgement(elastic.run.attempt(0))
        assert judged is not None
        assert (judged.end.cause, judged.end.node) == (EndCause.NODE_SILENT, "n2")
        said = r"n2 was lost: no sign of life for \S+ s; 2 nodes are here, at least 3 are needed"
        assert re.fullmatch(said, describe_end(judged.end)) is not None, judged
    finally:
        elastic.end()


@pytest.mark.parametrize("why", ["", "it is slow"])
def test_a_node_asked_to_leave_goes_and_the_others_train(tmp_path: Path, why: str) -> None:
    """By a person's word, or by the run's own with a reason."""
    saves = f"trap '{TRAINS.replace('_6', '_3')}; exit 0' USR1; while :; do sleep 0.1; done"
    elastic = Elastic(tmp_path, f'if [ "$VJOB_ATTEMPT" = 0 ]; then {saves}; fi; {TRAINS}')
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        wait_until(
            lambda: all(
                (read_json(elastic.run.attempt(0).beat(index)) or {}).get("catches_usr1")
                for index in range(3)
            ),
            "the ranks' handlers",
        )
        options = ["leave", "--run", str(elastic.run.path), "--node", "0"]
        argv = [sys.executable, str(elastic.run.agent), "morph", *options]
        if why:
            write_json(elastic.run.morph.leave(0), {"node": 0, "why": why})
        else:
            subprocess.run(argv, check=True, timeout=120)
        assert elastic.finish(nodes[0])[0] == 0
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "0"), said
        assert elastic.read_state().saved == 6
        (morph,) = [event for event in read_events(elastic.run) if event["kind"] == "morph"]
        assert (morph["nodes"], morph["iteration"]) == ([1, 2], 3)
        told = [
            event["reason"] for event in read_events(elastic.run) if event["kind"] == "left-out"
        ]
        assert told == (["node 0 is left out: it is slow"] if why else [])
        assert list(elastic.read_state().left_out) == told
        assert morph["reason"] == (told[0] if why else "node 0 is to leave")
    finally:
        elastic.end()


def test_a_run_that_is_cancelled_while_it_morphs_ends_with_what_was_saved(tmp_path: Path) -> None:
    """The ask to checkpoint went to the attempt that was ending, so the next one trained on."""
    saves = f"trap '{TRAINS.replace('_6', '_3')}; exit 0' USR1; while :; do sleep 0.1; done"
    elastic = Elastic(tmp_path, f'if [ "$VJOB_ATTEMPT" = 0 ]; then {saves}; fi; {TRAINS}')
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        wait_until(
            lambda: all(
                (read_json(elastic.run.attempt(0).beat(index)) or {}).get("catches_usr1")
                for index in range(3)
            ),
            "the ranks' handlers",
        )
        append_event(elastic.run.vjob_events, CANCEL_ASKED, now=False)
        write_json(elastic.run.morph.leave(0), {"node": 0})
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "143"), said
        assert [attempt.number for attempt in elastic.run.attempts()] == [0]
        assert elastic.read_state().saved == 3
        assert [elastic.finish(node)[0] for node in nodes] == [0, 0, 0]
    finally:
        elastic.end()


def test_a_run_that_is_cancelled_as_it_gathers_starts_no_attempt(tmp_path: Path) -> None:
    elastic = Elastic(tmp_path, TRAINS)
    try:
        append_event(elastic.run.vjob_events, CANCEL_ASKED, now=False)
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "143"), said
        assert not any(attempt.go.exists() for attempt in elastic.run.attempts())
        assert [elastic.finish(node)[0] for node in nodes] == [0, 0, 0]
    finally:
        elastic.end()


WAITS = """
import os, pathlib, sys, time
if "--standby" in sys.argv:
    sys.path.insert(0, {root!r})
    from varuna_core.programs import forking
    forking.MODULES = ()
    forking.fork_ranks(is_early=True)
    print("waited", flush=True)
print("first step of this start is done (1)", os.getpid(), flush=True)
if os.environ["VJOB_ATTEMPT"] == "0":
    time.sleep(1000)
saved = pathlib.Path({store!r}) / "varuna_ckpt_6"
saved.mkdir(parents=True, exist_ok=True)
(saved / "manifest.json").touch()
"""


def find_waiting(run: RunFolder) -> list[int]:
    """Processes whose command line is that of a rank that waits."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            if b"--standby" in words and str(run.program).encode() in words:
                found.append(int(name))
    return found


def has_trained(run: RunFolder) -> bool:
    orders = read_orders(run.morph)
    return orders is not None and orders.trained


def test_the_next_attempt_takes_over_the_ranks_that_wait(tmp_path: Path) -> None:
    program = WAITS.format(store=str(tmp_path / "ckpt"), root=str(ROOT))
    elastic = Elastic(tmp_path, "", python=program, warm=True)
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        wait_until(lambda: has_trained(elastic.run), "its first step")
        wait_until(lambda: len(find_waiting(elastic.run)) == 3, "ranks that wait")
        nodes[2].kill()
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "0"), said
        for rank in range(2):
            assert read_rank(elastic.run, rank, attempt=1).startswith("waited\n")
        assert [elastic.finish(node)[0] for node in nodes[:2]] == [0, 0]
        assert find_waiting(elastic.run) == [], "nobody is left behind"
        (morph,) = [event for event in read_events(elastic.run) if event["kind"] == "morph"]
        assert set(read_morph_parts(morph)) == set(MORPH_PARTS)
        assert read_pause_s(morph) == pytest.approx(sum(read_morph_parts(morph).values()), abs=0.01)
    finally:
        elastic.end()


@pytest.mark.long
def test_without_warm_nobody_waits(tmp_path: Path) -> None:
    program = WAITS.format(store=str(tmp_path / "ckpt"), root=str(ROOT))
    elastic = Elastic(tmp_path, "", python=program)
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        wait_until(lambda: elastic.has_started(0), "the first attempt")
        wait_until(lambda: has_trained(elastic.run), "its first step")
        nodes[2].kill()
        assert elastic.finish(manager)[0] == 0
        for rank in range(2):
            assert "waited" not in read_rank(elastic.run, rank, attempt=1)
    finally:
        elastic.end()


FAILS_ALIKE = (
    "[ $RANK = $VJOB_ATTEMPT ] || exec sleep 1000; "
    'echo "step 7/50 loss 2.5"; echo "lost shard $$" >&2; exit 7'
)
"""On another node each time: none is left out."""


@pytest.mark.parametrize(
    ("restarts", "text", "num_attempts", "why"),
    [
        (0, "exit 7", 1, "no new checkpoint in 1 attempt;"),
        (4, FAILS_ALIKE, 2, "the same error after step 7 twice in a row: not started again"),
        pytest.param(*(1, "exit 7", 2, "no new checkpoint in 2 attempts"), marks=pytest.mark.long),
        pytest.param(
            *(None, FAILS_ALIKE, 3, "no new checkpoint in 3 attempts"), marks=pytest.mark.long
        ),
    ],
)
def test_restarts_of_the_conf_are_the_limit_of_attempts_without_a_new_checkpoint(
    tmp_path: Path, restarts: int | None, text: str, num_attempts: int, why: str
) -> None:
    elastic = Elastic(tmp_path, text, restarts=restarts)
    try:
        manager, nodes = elastic.start("manage"), [elastic.stay(index) for index in range(3)]
        code, _, said = elastic.finish(manager)
        assert (code, elastic.answer()) == (0, "7"), said
        assert why in elastic.read_state().why
        numbers = [attempt.number for attempt in elastic.run.attempts()]
        assert numbers == list(range(num_attempts))
        assert [elastic.finish(node)[0] for node in nodes] == [0, 0, 0]
    finally:
        elastic.end()
