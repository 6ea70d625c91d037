"""Ranks that one process forks: each is a rank as any other, for the agent and for itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT
from tests.varuna_core.agent.local_run import (
    Stage,
    is_running,
    make_container,
    make_group,
    make_plan,
    wait_until,
)
from varuna_core.agent.processes.process import (
    _PR_SET_CHILD_SUBREAPER,
    RankProcess,
    adopt_orphans,
    set_process_option,
)
from varuna_core.agent.setup.forked_ranks import STANDBY, Origin, can_fork, fits
from varuna_core.agent.setup.ranks import Meeting, RankStart, build_rank
from varuna_core.programs import forking
from varuna_core.records.plan import Plan, write_plan
from varuna_core.records.runfolder import RunFolder

MakeStage = Callable[..., Stage]

PROGRAM = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
origin = os.getpid()

def import_all():
    os.environ["SET_AT_IMPORT"] = "yes"
    print("imported", flush=True)
    {{imports}}

from varuna_core.programs import forking
forking.import_all = import_all
is_forked = "--fork" in sys.argv or "--standby" in sys.argv
if is_forked:
    forking.fork_ranks(is_early="--standby" in sys.argv)
rank = int(os.environ["RANK"])
{{rank}}
"""


def make(make_stage: MakeStage, rank: str, imports: str = "pass", ranks: int = 3) -> Stage:
    stage = make_stage(make_plan(make_group("a", 1, ranks)))
    stage.run.program.write_text(PROGRAM.format(rank=rank, imports=imports))
    command = (sys.executable, "-u", str(stage.run.program), "training.json")
    stage.plan = replace(stage.plan, command=command)
    write_plan(stage.run.plan, stage.plan)
    return stage


def test_each_has_its_own_place_session_pipes_and_parent(make_stage: MakeStage) -> None:
    stage = make(
        make_stage,
        """
import json
own = {name: os.environ.get(name) for name in ("LOCAL_RANK", "WORLD_SIZE", "SET_AT_IMPORT")}
print(json.dumps([is_forked, origin != os.getpid(), os.getsid(0) == os.getpid(), os.getppid(),
                  own, sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))]))
print("error of", rank, file=sys.stderr)
""",
    )
    stage.open()
    stage.start_all()
    assert stage.wait() == [0]
    lines = sorted(line for line in stage.log("n0", "out").splitlines() if "[" in line)
    assert [line[0] for line in lines] == ["0", "1", "2"]
    for number, line in enumerate(lines):
        own = {"LOCAL_RANK": str(number), "WORLD_SIZE": "3", "SET_AT_IMPORT": "yes"}
        *facts, open_files = json.loads(line[3:])
        assert facts == [True, True, True, stage.nodes[0].pid, own, ""]
        assert open_files == ["0", "1", "2", "3"], "and the listing itself"
    errors = sorted(stage.log("n0", "err").splitlines())
    assert errors == ["0: error of 0", "0: imported", "1: error of 1", "2: error of 2"]
    assert {rank: exit.code for rank, exit in stage.exits().items()} == {0: 0, 1: 0, 2: 0}


def test_where_an_import_began_a_thread_each_starts_anew(make_stage: MakeStage) -> None:
    """A fork beside a thread may copy a lock that is held."""
    stage = make(
        make_stage,
        "print(rank, is_forked, os.environ['LOCAL_RANK'], os.getsid(0) == os.getpid(),"
        " os.getppid(), len(os.listdir('/proc/self/fd')))",
        "import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    )
    stage.open()
    stage.start_all()
    assert stage.wait() == [0]
    lines = sorted(line[3:] for line in stage.log("n0", "out").splitlines())
    agent = stage.nodes[0].pid
    assert lines == [f"{rank} False {rank} True {agent} 4" for rank in range(3)]


@pytest.mark.parametrize(
    ("targets", "holds"),
    [
        ([], False),
        (["/dev/null", "pipe:[1]"], False),
        (["/dev/null", "/dev/nvidiactl"], True),
        (["/dev/kfd"], True),
    ],
)
def test_a_gpu_that_is_open_is_seen(tmp_path: Path, targets: list[str], holds: bool) -> None:
    for number, target in enumerate(targets):
        (tmp_path / str(number)).symlink_to(target)
    assert forking.holds_gpu(tmp_path) is holds


def test_one_that_fails_is_the_culprit(make_stage: MakeStage) -> None:
    stage = make(make_stage, "if rank == 1: sys.exit('boom')\ntime.sleep(60)")
    codes, outcome = stage.play()
    assert (codes, outcome.code, outcome.culprit_rank) == ([1], 1, 1)
    assert outcome.reason == "rank 1 on n0 exited 1: boom"
    assert [stage.exits()[rank].stopped for rank in range(3)] == [True, False, True]


def test_one_that_a_signal_ended_is_told_apart(make_stage: MakeStage) -> None:
    stage = make(make_stage, "if rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    codes, outcome = stage.play()
    assert (codes, outcome.culprit_rank, outcome.culprit_signal) == ([137], 2, "SIGKILL")


def test_one_rank_alone_is_started(make_stage: MakeStage) -> None:
    stage = make(make_stage, "print(is_forked)", ranks=1)
    stage.open()
    stage.start_all()
    assert stage.wait() == [0]
    assert stage.log("n0", "out") == "0: False\n"


def test_they_die_with_a_killed_agent(make_stage: MakeStage) -> None:
    stage = make(make_stage, "print('pid', os.getpid(), flush=True)\ntime.sleep(60)")
    stage.open()
    agent = stage.start(0)
    wait_until(lambda: stage.log("n0", "out").count("pid") == 3, "three pids")
    pids = [int(line.split()[-1]) for line in stage.log("n0", "out").splitlines()]
    agent.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the ranks")


def test_what_ends_the_imports_ends_the_ranks(make_stage: MakeStage) -> None:
    stage = make(make_stage, "pass", "print('no torch', file=sys.stderr, flush=True); os._exit(5)")
    codes, outcome = stage.play()
    assert (codes, outcome.code, outcome.reason) == ([5], 5, "rank 0 on n0 exited 5: no torch")
    assert {rank: exit.code for rank, exit in stage.exits().items()} == {0: 5, 1: 5, 2: 5}


def test_an_agent_that_has_to_end_does_not_wait_for_imports(make_stage: MakeStage) -> None:
    stage = make(make_stage, "pass", "time.sleep(600)")
    stage.open()
    agent = stage.start(0)
    stage.wait_for_log("n0", "err", "imported")
    agent.send_signal(signal.SIGTERM)
    assert stage.wait() == [143]
    assert all(exit.stopped for exit in stage.exits().values())


def test_a_signal_that_is_forwarded_reaches_each(make_stage: MakeStage) -> None:
    stage = make(
        make_stage,
        """
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
print("ready", flush=True)
time.sleep(60)
""",
    )
    stage.open()
    agent = stage.start(0)
    wait_until(lambda: stage.log("n0", "out").count("ready") == 3, "three ranks")
    agent.send_signal(signal.SIGUSR1)
    assert stage.wait() == [0]


def ask(plan: Plan, run: Path, **changes: Any) -> bool:
    """Whether the ranks of the plan's first node may be forked."""
    meeting = Meeting(run, 0, run / "trace", "10.0.0.1", 6000, "eth0", "n0")
    node = plan.node(0)
    container = changes.pop("container", None)
    starts = [
        build_rank(plan, node, local_rank, meeting, {"PATH": os.environ["PATH"]}, container)
        for local_rank in range(node.group.ranks)
    ]
    site: Any = SimpleNamespace(plan=plan, run=RunFolder(run), container=container)
    return can_fork(site, starts)


def test_who_is_forked(tmp_path: Path) -> None:
    command = (sys.executable, "-u", str(RunFolder(tmp_path).program), "training.json")
    plan = make_plan(make_group("a", 1, 2), command=command)
    assert ask(plan, tmp_path)
    assert not ask(replace(plan, command=(sys.executable, "train.py", "x")), tmp_path)
    assert not ask(replace(plan, prefix=("nsys", "profile")), tmp_path)
    assert not ask(replace(plan, timeline=True), tmp_path)
    assert not ask(plan, tmp_path, container=make_container())


@pytest.mark.parametrize("line", [b"", b"half a line"])
def test_an_origin_that_nobody_tells_ends(line: bytes) -> None:
    code = "from varuna_core.programs.forking import fork_ranks; fork_ranks(); print('rank')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], input=line, capture_output=True, env=env)
    assert (done.returncode, done.stdout) == (0, b"")


# Origins that wait.

WAITS = """
import json, os, sys
if "--standby" in sys.argv:
    task = json.loads(sys.stdin.readline())
    for rank in task["ranks"]:
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(rank["out"], 1)
            print(json.dumps({**rank["env"], "arguments": task["arguments"]}), flush=True)
            os._exit(7)
        print(pid, flush=True)
    os._exit(0)
"""


def start_of(attempt: int, local_rank: int = 0, *, settings: str = "", **changes: Any) -> RankStart:
    """What starts a rank of an attempt; `own` is the agent's environment."""
    own = {"PATH": os.environ["PATH"], **changes.pop("own", {})}
    command = (sys.executable, "-c", WAITS, settings or f"{attempt}.json")
    plan = replace(make_plan(make_group("a", 1, 2), command=command), **changes)
    interface = "eth0" if attempt else None
    place = Meeting(
        Path("/run"), attempt, Path("/run/trace"), "10.0.0.1", 6000 + attempt, interface, "n0"
    )
    return build_rank(plan, plan.node(0), local_rank, place, own, None)


@pytest.fixture
def adopting() -> Iterator[None]:
    """Be the parent of forked ranks, as an agent is."""
    adopt_orphans()
    yield
    set_process_option(_PR_SET_CHILD_SUBREAPER, 0)


def read_all(rank: RankProcess) -> str:
    text = b""
    while data := os.read(rank.stdout, 65536):
        text += data
    wait_until(lambda: rank.poll() is not None, "the end of the rank")
    rank.close()
    return text.decode()


@pytest.mark.usefixtures("adopting")
@pytest.mark.parametrize("count", [2, 1])
def test_one_that_waited_forks_as_many_as_are_wanted(count: int) -> None:
    origin = Origin(start_of(0), 2, STANDBY)
    starts = [start_of(1, local_rank) for local_rank in range(count)]
    assert origin.fits(starts)
    ranks = origin.fork(starts)
    for start, rank in zip(starts, ranks, strict=True):
        assert json.loads(read_all(rank)) == {**start.env, "arguments": ["1.json"]}


def test_one_that_is_not_wanted_ends() -> None:
    origin = Origin(start_of(0), 2, STANDBY)
    pid = origin._process.pid
    origin.end()
    assert not is_running(pid)


def test_one_that_has_ended_forks_nobody() -> None:
    origin = Origin(start_of(0), 2, STANDBY)
    os.kill(origin._process.pid, signal.SIGKILL)
    wait_until(lambda: origin._process.poll() is not None, "its end")
    assert origin.fork([start_of(1)]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"OMP_NUM_THREADS": "2"}},
        {"workdir": "/elsewhere"},
        {"own": {"LD_PRELOAD": "x.so"}},
        {"command": (sys.executable, "-u", "other.pyz", "1.json")},
        {"command": (sys.executable, "-c", WAITS, "1.json", "--more")},
        {"groups": (replace(make_group("a", 1, 2), devices=(1, 3)),)},
    ],
)
def test_what_was_read_at_import_must_be_the_same(changes: dict[str, Any]) -> None:
    assert fits(start_of(0), start_of(1))
    assert not fits(start_of(0), start_of(1, **changes))


IMPORTS = """
import os, sys, threading
from varuna_core.programs import forking, pretrain

parse = pretrain._parse

def spy(words):
    wanted = parse(words)
    if not wanted.standby:
        loaded = [name for name in ("torch", "torch._dynamo") if name in sys.modules]
        own = {name: os.environ.get(name) for name in ("NEW", "OLD", "PATH", "SET_AT_IMPORT")}
        print(sys.argv[1:], own, os.getpriority(os.PRIO_PROCESS, 0))
        print(loaded, repr(sys.stdin.read()), threading.active_count())
        sys.exit(3)
    return wanted

pretrain._parse = spy
class Modules(tuple):
    def __iter__(self):
        os.environ["SET_AT_IMPORT"] = "yes"
        return super().__iter__()

forking.MODULES = Modules(forking.MODULES)
pretrain.run()
"""


@pytest.mark.usefixtures("adopting")
def test_a_rank_of_one_that_waited_has_all_imported_and_only_what_it_was_told() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OLD": "1"}
    waiting = RankStart((sys.executable, "-c", IMPORTS, "0.json"), own, "/", ())
    origin = Origin(waiting, 1, STANDBY)
    start = replace(waiting, argv=(*waiting.argv[:-1], "1.json"), env={"NEW": "\udcff\n'"})
    (rank,) = origin.fork([start])
    first, second = read_all(rank).splitlines()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    told = {"NEW": "\udcff\n'", "OLD": None, "PATH": None, "SET_AT_IMPORT": "yes"}
    assert first == f"['1.json'] {told} {nice}"
    assert second == "['torch', 'torch._dynamo'] '' 1"
    assert rank.poll() == 3
