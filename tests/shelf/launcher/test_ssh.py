"""Whole runs by the launcher's flags: this machine and a real sshd on loopback as its machines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import read_rank
from tests.shelf.launcher.launcher_user import SECRET, WAITING, User, wait_until
from tests.varuna_core.launch.sshd import SSHD, Sshd, find_step
from varuna_core.agent.processes.signals import GONE
from varuna_core.records.exits import NODE_LOST, NOT_READY, read_exits, read_outcome

pytestmark = pytest.mark.skipif(
    SSHD is None, reason="no sshd here: apt-get install openssh-server, `make packages` as root"
)

SUM = "sum 3.0"
HERE = os.uname().nodename.partition(".")[0]

REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture
def user(tmp_path: Path, sshd: Sshd) -> Iterator[User]:
    made = User(tmp_path, sshd)
    yield made
    made.end()


def test_ranks_on_two_machines_reduce(user: User) -> None:
    (user.folder / "reduce.py").write_text(REDUCE)
    user.start("reduce.py")
    assert user.wait() == 0, user.said
    out = sorted((user.folder / "out").read_text().splitlines())
    assert out == [f"localhost | 1: {SUM}", f"{HERE} | 0: {SUM}"]
    assert "all 2 ranks exited 0" in user.said and "are one machine" in user.said
    user.check_nothing_is_left()


def test_every_rank_gets_varunas_arguments_and_its_own(user: User) -> None:
    (user.folder / "show.py").write_text("import sys; print(sys.argv[1:])")
    user.start("show.py", "--lr", "1e-4", "a b;$(c)", "%{rank}", ranks=2)
    assert user.wait() == 0, user.said
    out = (user.folder / "out").read_text().splitlines()
    own = "'--stage_to_rank_map=0,2;1,3;', '--chunk_size=2', '--batch-size=4'"
    theirs = "'--lr', '1e-4', 'a b;$(c)', '%{rank}'"
    for rank in range(4):
        words = f"['--rank={rank}', '--local_rank={rank % 2}', {own}, {theirs}]"
        assert f"{HERE if rank < 2 else 'localhost'} | {rank}: {words}" in out


def test_no_secret_shows_and_nothing_of_the_shell_reaches_a_rank(user: User) -> None:
    for rank in range(2):
        (user.folder / f"end-{rank}").write_text("0")
    (user.folder / "leak.py").write_text("import os\nprint(os.environ.get('LEAK'))\n" + WAITING)
    user.start("leak.py")
    assert user.wait() == 0, user.said
    outs = [read_rank(user.run, rank) for rank in range(2)]
    for out in outs:
        assert re.search(rf"None\nready \d+ {len(SECRET)} \[\]", out), out
    for path in user.run.path.rglob("*"):
        if path.is_file() and path != user.run.plan:
            assert SECRET.encode() not in path.read_bytes(), path
    for path in (user.run.plan, user.run.launch, user.run.resolved):
        assert path.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("code", [3, 255])  # 255 is ssh's own too
def test_the_code_of_one_rank_is_the_launchers(user: User, code: int) -> None:
    user.start("wait.py")
    user.wait_for_ranks()
    (user.folder / "end-1").write_text(str(code))
    assert user.wait() == code
    assert f"code {code}: rank 1 on localhost exited {code}" in user.said
    assert "was lost" not in user.said
    user.check_nothing_is_left()


def test_a_killed_rank_is_137(user: User) -> None:
    user.start("wait.py")
    os.kill(user.wait_for_ranks()[1], signal.SIGKILL)
    assert user.wait() == 137
    assert "rank 1 on localhost was ended by SIGKILL" in user.said
    user.check_nothing_is_left()


def test_the_run_goes_on_without_its_launcher_until_it_is_killed(user: User) -> None:
    user.start("wait.py")
    user.wait_for_ranks()
    user.signal(signal.SIGKILL)
    user.wait()
    assert "RUNNING" in user.vjob("status", "last")
    done = user.call("--kill")
    assert done.returncode == 0, done.stderr
    outcome = read_outcome(user.run.attempt(0))
    assert outcome is not None and outcome.code == 143
    user.check_nothing_is_left()
    assert "is live in" in user.call("--kill").stderr


def test_ranks_end_with_a_killed_master(user: User) -> None:
    """Not the launcher: the process that holds the agents' inputs."""
    user.start("wait.py")
    user.wait_for_ranks()
    os.kill(find_step(user.run, "step"), signal.SIGKILL)
    assert user.wait() != 0
    user.check_nothing_is_left()
    outcome = read_outcome(user.run.attempt(0))
    assert outcome is not None and outcome.reason.startswith(GONE)


def test_a_killed_ssh_is_a_lost_machine_and_its_ranks_end(user: User) -> None:
    user.start("wait.py")
    user.wait_for_ranks()
    os.kill(find_step(user.run), signal.SIGKILL)
    assert user.wait() == NODE_LOST
    assert "localhost was lost: the ssh to it was ended by SIGKILL" in user.said
    assert set(read_exits(user.run.attempt(0), 2)) == {0, 1}
    user.check_nothing_is_left()


def test_kill_from_another_terminal_then_resume_with_another_batch(user: User) -> None:
    user.start("wait.py", "--mine")
    user.wait_for_ranks()
    first = user.run
    assert "still runs, or may" in user.call("--resume").stderr
    done = user.call("--kill")
    assert done.returncode == 0, done.stderr
    assert user.wait() == 143
    user.check_nothing_is_left()
    user.resume("--batch_size", "6")
    wait_until(lambda: user.run.name != first.name, "another run")
    user.wait_for_ranks()
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    mine = [item for item in words if b"--mine" in item and b"--batch-size=6" in item]
    assert len(mine) == 2
    user.signal(signal.SIGTERM)
    assert user.wait() == 143
    user.check_nothing_is_left()


def test_sigusr1_reaches_every_rank_and_ctrl_c_twice_leaves_nothing(user: User) -> None:
    user.start("wait.py")
    user.wait_for_ranks()
    user.signal(signal.SIGUSR1)
    wait_until(
        lambda: all("caught 10" in read_rank(user.run, rank) for rank in range(2)), "the signal"
    )
    user.signal(signal.SIGINT)
    user.wait_for_word("again to end it at once")
    user.signal(signal.SIGINT)
    assert user.wait() == 130
    assert "is cancelled" in user.said
    user.check_nothing_is_left()


def test_the_commands_know_a_launched_run(user: User) -> None:
    user.start("wait.py")
    user.wait_for_ranks()
    assert "wait" in user.vjob("list") and "RUNNING" in user.vjob("status", "last")
    found = json.loads(user.vjob("stacks", "last", "--json"))
    assert sorted(rank for group in found["groups"] for rank in group["ranks"]) == [0, 1]
    for rank in range(2):
        (user.folder / f"end-{rank}").write_text("0")
    assert user.wait() == 0, user.said
    assert "all 2 ranks exited 0" in user.vjob("status", "last")
    assert "localhost | 1: ready" in user.vjob("logs", "last", "--raw")


STAGED = """
import argparse, contextlib, time
from pathlib import Path
import torch
import torch.distributed as dist
from tests.models.small import Gpt, make_inputs
from varuna_core import Varuna
from varuna_core.checkpoint.format.errors import NoCheckpoint

parser = argparse.ArgumentParser()
for name in ("--rank", "--local_rank", "--chunk_size", "--batch-size"):
    parser.add_argument(name, type=int, required=True)
parser.add_argument("--stage_to_rank_map", required=True)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
total = args.batch_size * len(args.stage_to_rank_map.split(";")[0].split(","))
torch.manual_seed(0)
model = Varuna(
    Gpt(), args.stage_to_rank_map, make_inputs(), total, args.chunk_size, device="cpu"
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.set_optimizer(optimizer)
model.save_on_signal("ckpt")
with contextlib.suppress(NoCheckpoint):
    model.load_checkpoint("ckpt")
mine = list(model.samples)
print(args.stage_to_rank_map, total, "from", model.iteration, flush=True)
while not (Path("last").exists() and model.iteration >= int(Path("last").read_text())):
    batch = make_inputs(total, seed=model.iteration)
    model.step({name: value[mine] for name, value in batch.items()})
    optimizer.step()
    model.zero_grad()
    print(f"step {model.iteration}/100 loss 1.0", flush=True)
    time.sleep(0.05)
model.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_without_no_morphing_a_machine_may_leave_and_the_batch_stays(user: User) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (user.folder / "staged.py").write_text(STAGED)
    with (user.folder / "varuna.env").open("a") as env:
        env.write(f"PYTHONPATH={ROOT}\n")
    user.may_morph = True
    user.start("staged.py", stages=1)
    user.wait_for_word("step 5/100")
    (user.folder / "machines").write_text("127.0.0.1\n")
    wait_until(lambda: len(user.run.attempts()) > 1, "another attempt")
    first = read_rank(user.run, 0)
    wait_until(lambda: "step" in read_rank(user.run, 0, attempt=1), "its steps")
    (user.folder / "last").write_text("0")
    assert user.wait() == 0, user.said
    assert first.startswith("0,1; 8 from 0\n")
    second = read_rank(user.run, 0, attempt=1)
    found = re.match(r"0; 8 from (\d+)\n", second)
    assert found and int(found[1]) >= 5, second
    user.check_nothing_is_left()


Change = Callable[[User, Sshd], "list[str]"]


def _close_port(user: User, sshd: Sshd) -> list[str]:
    (user.folder / "machines").write_text(f"127.0.0.1\n{sshd.user}@localhost:1\n")
    return []


def _take_wrong_key(user: User, sshd: Sshd) -> list[str]:
    user.config = sshd.write_config("wrong_key", key="stranger")
    return []


def _forget_host(user: User, sshd: Sshd) -> list[str]:
    user.config = sshd.write_config("forgot", known_hosts=sshd.folder / "nobody")
    return []


def _swap_host_key(user: User, sshd: Sshd) -> list[str]:
    stranger = (sshd.folder / "stranger.pub").read_text()
    (sshd.folder / "swapped").write_text(f"[localhost]:{sshd.port} {stranger}")
    user.config = sshd.write_config("swap", known_hosts=sshd.folder / "swapped")
    return []


def _take_no_python(user: User, sshd: Sshd) -> list[str]:
    return ["--python", "/no/python"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_close_port, "localhost:1: it cannot be reached: run `ssh"),
        (_take_wrong_key, "it refused the login: run `ssh -p"),
        (_forget_host, "its host key is not known here: run `ssh -p"),
        (_swap_host_key, "its host key is not the one in known_hosts"),
        (_take_no_python, "/no/python is not there: install it, or name another"),
    ],
)
def test_a_machine_that_cannot_serve_is_one_clear_line(
    user: User, sshd: Sshd, change: Change, said: str
) -> None:
    words = change(user, sshd)
    user.start(*words, "wait.py")
    assert user.wait() == NOT_READY, user.said
    lines = [line for line in user.said.splitlines() if "localhost:" in line]
    assert len(lines) == 1 and said in lines[0], user.said
    assert "Traceback" not in user.said
    assert not user.run.attempt(0).go.exists(), "nothing was started"


def test_a_folder_that_is_not_shared_is_said_with_the_remedy(user: User, tmp_path: Path) -> None:
    """The other machine sees an empty disk in its place."""
    log = user.folder / "log"
    log.mkdir()
    hide = f"mount -t tmpfs none {log} && exec /bin/sh -s"
    command = f"unshare -rm /bin/sh -c '{hide}'"
    if subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("no mount of one's own may be made here (unshare -rm)")
    server = Sshd(tmp_path / "sshd", f"ForceCommand {command}")
    try:
        user.config = server.config
        (user.folder / "machines").write_text(f"127.0.0.1\n{server.machine}\n")
        user.start("wait.py")
        assert user.wait() == NOT_READY
    finally:
        server.stop()
    assert "it does not see the run folder" in user.said and "name one with log_folder" in user.said
