"""Ranks that are no children of the agent: a stand-in for podman and its like stays in between.

Its client swallows every signal but SIGKILL, and when that ends it the rank goes on, below a
process of the runtime's own in another session, as podman 4.3.1's do.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.varuna_core.agent.local_run import (
    TIMING,
    Stage,
    is_running,
    make_container,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from varuna_core.agent.processes.proc import ContainerProcesses
from varuna_core.records.files import read_json

MakeStage = Callable[..., Stage]

CLIENT = """
import os, signal, subprocess, sys
code, report = os.pipe()
if os.fork():
    os.close(report)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    said = b""
    while not said:
        said = os.read(code, 9)
    sys.exit(int(said))
os.setsid()
if os.fork():
    os._exit(0)
ended = subprocess.Popen(sys.argv[1:], start_new_session=True).wait()
os.write(report, str(128 - ended if ended < 0 else ended).encode())
"""

PROGRAM = """
import os, signal, subprocess, sys, time
def tell(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(0)
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), tell)
child = subprocess.Popen(["sleep", "60"])
stray = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("ready", os.getpid(), child.pid, stray.pid, flush=True)
while True:
    time.sleep(0.01)
"""


def make_wrapped(make_stage: MakeStage, *command: str, ranks: int = 1) -> Stage:
    container = replace(make_container(sys.executable, "-c", CLIENT), wraps=True)
    plan = make_plan(
        make_group("a", 1, ranks),
        command=command,
        containers=(container,),
        timing=replace(TIMING, grace_s=0.5),
    )
    stage = make_stage(plan)
    stage.open()
    stage.start_all()
    return stage


def read_pids(stage: Stage) -> list[int]:
    """The program, its child, and one that ran off."""
    return [int(word) for word in stage.wait_for_log("n0", "out", "ready").split()[2:5]]


def wait_for_beat(stage: Stage, catches: bool) -> None:
    def is_so() -> bool:
        beat = read_json(stage.attempt.beat(0))
        return bool(beat) and beat.get("ranks_alive") and beat.get("catches_usr1") is catches

    wait_until(is_so, f"a beat that says {catches}")


def test_a_signal_reaches_the_program_once_and_its_children_not_at_all(
    make_stage: MakeStage,
) -> None:
    stage = make_wrapped(make_stage, sys.executable, "-c", PROGRAM, "SIGUSR1", "SIGTERM")
    pids = read_pids(stage)
    wait_for_beat(stage, True)
    stage.nodes[0].send_signal(signal.SIGUSR1)
    stage.wait_for_log("n0", "out", "got SIGUSR1")
    assert all(map(is_running, pids))
    stage.nodes[0].terminate()
    assert stage.wait() == [143]
    log = stage.log("n0", "out")
    assert (log.count("got SIGUSR1"), log.count("got SIGTERM")) == (1, 1)
    assert [item.code for item in stage.exits().values()] == [0]
    assert not [pid for pid in pids if is_running(pid)], "it ended, and its container with it"


def test_a_client_with_handlers_does_not_make_the_program_catch(make_stage: MakeStage) -> None:
    stage = make_wrapped(make_stage, sys.executable, "-c", PROGRAM)
    read_pids(stage)
    wait_for_beat(stage, False)
    stage.nodes[0].terminate()
    assert stage.wait() == [143]


def test_a_deaf_program_is_killed_behind_its_client(make_stage: MakeStage) -> None:
    stage = make_wrapped(
        make_stage, *shell('trap "" TERM; echo ready $$; while sleep 0.1; do :; done')
    )
    [pid] = read_pids(stage)
    stage.nodes[0].terminate()
    assert stage.wait() == [143]
    assert not is_running(pid)
    assert stage.exits()[0].stopped


def test_the_signal_that_killed_a_rank_is_named_and_an_exit_stays_itself(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    for number, (words, code, name) in enumerate(
        [("kill -9 $$", 137, "SIGKILL"), ("exit 37", 37, None), ("exit 255", 255, None)]
    ):
        container = replace(make_container(sys.executable, "-c", CLIENT), wraps=True)
        plan = make_plan(make_group("a", 1, 2), containers=(container,))
        plan = replace(plan, command=shell(f'if [ "$RANK" = 1 ]; then {words}; fi; sleep 30'))
        outcome = make_stage(plan, tmp_path / str(number)).play()[1]
        assert (outcome.code, outcome.culprit_rank) == (code, 1), outcome
        assert outcome.culprit_signal == name


def test_a_killed_client_takes_its_rank_along(make_stage: MakeStage) -> None:
    stage = make_wrapped(make_stage, sys.executable, "-c", PROGRAM)
    pids = read_pids(stage)
    os.kill(find_client(stage), signal.SIGKILL)
    assert stage.wait() == [137]
    assert not [pid for pid in pids if is_running(pid)]
    assert stage.close(137).culprit_signal == "SIGKILL"


def test_what_podman_keeps_for_its_next_container_is_left(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """The user's other containers on the node are in the name space that it holds."""
    program = tmp_path / "catatonit"
    shutil.copy(Path(shutil.which("sleep") or "").resolve(), program)
    # Without our marks, as podman's own processes are.
    start = f"env -u VJOB_TRACE setsid {program} 600 >/dev/null 2>&1 & pid=$!; "
    runs = f'until [ "$(readlink /proc/$pid/exe)" = {program} ]; do sleep 0.01; done; '
    stage = make_wrapped(make_stage, *shell(f'{start}{runs}echo "pid $pid"'))
    assert stage.wait() == [0]
    pid = int(stage.wait_for_log("n0", "out", "pid").split()[-1])
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def find_client(stage: Stage) -> int:
    """The agent's child with our words in its command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == stage.nodes[0].pid and CLIENT.encode() in words:
            return int(entry.name)
    raise AssertionError("no client")


def test_a_rank_is_found_by_all_of_its_marks() -> None:
    known = {"VJOB_RUN": os.environ["HOME"], "RANK": "0"}
    assert ContainerProcesses(known).find_main() is None
    mine = {name: os.environ[name] for name in ("HOME", "PATH")}
    assert os.getpid() in ContainerProcesses(mine).find_all()
