"""The watch of a machine list as a process, with agents that only say that they are here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import ROOT
from tests.jobs.confs import MORPH, make_conf, make_plan
from tests.varuna_core.agent.local_run import wait_until
from tests.varuna_core.launch.sshd import SSHD, Sshd
from varuna_core.morph.orders import Orders, write_orders
from varuna_core.records.morphing import claim_epoch
from varuna_core.records.plan import write_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.submit.build_plan import reserve_spare_nodes

SESSION = "L1.0"
HERE = os.uname().nodename.partition(".")[0]
AGENT = """
echo "$VJOB_NODE_NAME $SLURM_NODEID $VJOB_SESSION" >> "$VJOB_RUN/started"
echo "I am here"
while true; do
  end=$VJOB_RUN/end-$VJOB_NODE_NAME
  if [ -e "$end" ]; then code=$(cat "$end"); rm "$end"; exit "$code"; fi
  read -r -t 0.1 _; code=$?
  if [ $code -eq 1 ]; then echo "$VJOB_NODE_NAME" >> "$VJOB_RUN/let-go"; exit 3; fi
done
"""
needs_sshd = pytest.mark.skipif(
    SSHD is None, reason="no sshd here: apt-get install openssh-server, `make packages` as root"
)


class Stage:
    """A run folder, a list, and the watch."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir()
        self.list, self.config = folder / "machines", folder / "ssh_config"
        text = MORPH.replace("scheduler: slurm", f"machine_list: {self.list}")
        text = text.replace("count: 4", "count: 2").replace("walltime", "grace_s: 5\n  walltime")
        text = text.replace("min_nodes: 2", "max_nodes: 3")
        text = text.replace("requeue", f"ssh_config: {self.config}\n  requeue")
        plan = reserve_spare_nodes(make_plan(make_conf(text), scheduler="ssh"))
        plan = replace(plan, workdir="/", command=(sys.executable, *plan.command[1:]))
        self.run.morph.make()
        write_plan(self.run.plan, plan)
        self.run.node_script.write_text(AGENT)
        self.watch: subprocess.Popen[bytes] | None = None

    def write(self, *names: str) -> None:
        self.list.write_text("".join(f"{name}\n" for name in names))

    def start(self, *names: str) -> None:
        self.write(*names)
        code = "import sys; from varuna_core.launch.watch import main; sys.exit(main())"
        env = {"PYTHONPATH": str(ROOT), "VJOB_RUN": str(self.run.path), "VJOB_SESSION": SESSION}
        with (self.run.path / "err").open("wb") as err:
            self.watch = subprocess.Popen(
                [sys.executable, "-c", code], env={**os.environ, **env}, stderr=err
            )

    @property
    def said(self) -> str:
        return (self.run.path / "err").read_text()

    def read(self, name: str) -> list[str]:
        path = self.run.path / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_starts(self, *expected: str) -> None:
        wait_until(lambda: sorted(self.read("started")) == sorted(expected), "the agents")

    def wait_for_word(self, text: str) -> None:
        wait_until(lambda: text in self.said, f"{text!r} in what the watch says")

    def end_agent(self, name: str, code: int) -> None:
        (self.run.path / f"end-{name}").write_text(str(code))

    def end_run(self) -> None:
        epoch = claim_epoch(self.run.morph, SESSION)
        write_orders(self.run.morph, Orders(SESSION, -1, (), (), end=True, epoch=epoch))

    def wait(self) -> int:
        assert self.watch is not None
        return self.watch.wait(timeout=60)

    def close(self) -> None:
        if self.watch is not None:
            self.watch.terminate()
            self.watch.wait(timeout=60)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


def add_alias(stage: Stage, name: str, sshd: Sshd, **settings: object) -> None:
    """A name for the server; its own settings count before those of all."""
    lines = {"HostName": "localhost", "Port": sshd.port, **settings}
    was = stage.config.read_text() if stage.config.exists() else sshd.config.read_text()
    alias = "".join(f"  {key} {value}\n" for key, value in lines.items())
    stage.config.write_text(f"Host {name}\n{alias}{was}")
    stage.config.chmod(0o600)


def test_who_is_listed_starts_and_who_is_not_any_more_is_asked_to_leave(stage: Stage) -> None:
    stage.start("127.0.0.1", "localhost")
    first, second = f"{HERE} 0 {SESSION}", f"{HERE}-2 1 {SESSION}"
    stage.wait_for_starts(first, second)
    stage.wait_for_word(f"{HERE}: I am here")
    stage.write("localhost")
    leave = stage.run.morph.leave(0)
    wait_until(leave.exists, "the asking")
    assert not stage.run.morph.leave(1).exists()
    stage.end_agent(HERE, 0)
    stage.write("localhost", "::1", "127.0.0.1")
    third = f"{HERE}-3 2 {SESSION}"
    stage.wait_for_starts(first, second, third, first)
    assert not leave.exists() and "dismissed" not in stage.said


def test_a_machine_that_the_manager_sends_home_comes_back_once_it_was_off_the_list(
    stage: Stage,
) -> None:
    stage.start("127.0.0.1", "localhost")
    first, second = f"{HERE} 0 {SESSION}", f"{HERE}-2 1 {SESSION}"
    stage.wait_for_starts(first, second)
    stage.end_agent(f"{HERE}-2", 0)
    stage.wait_for_word(
        f"{HERE}-2 left the run as it was asked to; to use it again, remove its line"
    )
    stage.write("127.0.0.1", "::1")
    stage.wait_for_starts(first, second, f"{HERE}-2 1 {SESSION}")


def test_a_lost_agent_is_told_and_tried_again_later(stage: Stage) -> None:
    stage.start("127.0.0.1")
    stage.wait_for_starts(f"{HERE} 0 {SESSION}")
    stage.end_agent(HERE, 7)
    stage.wait_for_word(f"{HERE}: its agent exited with 7: I am here; trying again in 15 s if")


def test_with_the_end_of_the_run_it_ends_once_all_are_home(stage: Stage) -> None:
    stage.start("127.0.0.1", "localhost")
    stage.wait_for_starts(f"{HERE} 0 {SESSION}", f"{HERE}-2 1 {SESSION}")
    stage.end_run()
    stage.write("127.0.0.1", "localhost", "::1")
    for name in (HERE, f"{HERE}-2"):
        stage.end_agent(name, 0)
    assert stage.wait() == 0
    assert len(stage.read("started")) == 2 and stage.read("let-go") == []
    assert not list(stage.run.path.glob(".watch*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_or_killed_it_lets_go_of_all_agents(stage: Stage, number: signal.Signals) -> None:
    stage.start("127.0.0.1", "localhost")
    stage.wait_for_starts(f"{HERE} 0 {SESSION}", f"{HERE}-2 1 {SESSION}")
    assert stage.watch is not None
    stage.watch.send_signal(number)
    wait_until(lambda: sorted(stage.read("let-go")) == [HERE, f"{HERE}-2"], "the agents' ends")
    assert stage.wait() == (-9 if number == signal.SIGKILL else 0)


def test_more_machines_than_seats_wait(stage: Stage) -> None:
    stage.start("127.0.0.1", "localhost", "::1", "gpu-9")
    stage.wait_for_word("gpu-9: not used, since morph.max_nodes is 3")
    stage.wait_for_word(f"{HERE}-3 (::1): its agent starts, seat 2")
    assert "gpu-9 (gpu-9)" not in stage.said


@needs_sshd
def test_what_is_wrong_with_a_machine_is_told_with_the_remedy(
    stage: Stage, sshd: Sshd, tmp_path: Path
) -> None:
    add_alias(stage, "closed", sshd, Port=1)
    add_alias(stage, "stranger", sshd, PubkeyAuthentication="no")
    add_alias(stage, "unknown", sshd, UserKnownHostsFile=sshd.folder / "nobody")
    stage.start("closed", "stranger", "unknown")
    stage.wait_for_word("closed (closed): it cannot be reached: run `ssh closed` to see")
    stage.wait_for_word("stranger (stranger): it refused the login: run `ssh stranger`, which")
    stage.wait_for_word(
        "unknown (unknown): the machine's host key is not known here: run `ssh unknown` once"
    )
    assert stage.said.count("trying again in 15 s if it is still listed") == 3
    assert stage.read("started") == []


@needs_sshd
def test_a_machine_without_the_run_folder_or_the_python_is_told_what_to_do(
    stage: Stage, tmp_path: Path
) -> None:
    hide = f"mount -t tmpfs none {stage.run.path} && exec /bin/sh -s"
    command = f"unshare -rm /bin/sh -c '{hide}'"
    if subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("no mount of one's own may be made here (unshare -rm)")
    server = Sshd(tmp_path / "elsewhere", f"ForceCommand {command}")
    try:
        add_alias(stage, "apart", server)
        stage.start("127.0.0.1", "apart")
        stage.wait_for_word(
            f"apart (apart): the machine does not see the run folder {stage.run.path}"
        )
        stage.wait_for_word("set log_folder to one")
        stage.wait_for_starts(f"{HERE} 0 {SESSION}")
    finally:
        server.stop()


@needs_sshd
def test_an_agent_over_ssh_gets_its_name_and_seat_and_goes_with_the_watch(
    stage: Stage, sshd: Sshd
) -> None:
    add_alias(stage, "gpu-1.site.org", sshd)
    stage.start("127.0.0.1", "gpu-1.site.org")
    stage.wait_for_starts(f"{HERE} 0 {SESSION}", f"gpu-1 1 {SESSION}")
    stage.wait_for_word("gpu-1: I am here")
    assert stage.watch is not None
    stage.watch.kill()
    wait_until(lambda: sorted(stage.read("let-go")) == sorted([HERE, "gpu-1"]), "the agents' ends")


def test_a_manager_that_starts_anew_is_told_again_who_is_to_leave(stage: Stage) -> None:
    stage.start("127.0.0.1", "localhost")
    stage.wait_for_starts(f"{HERE} 0 {SESSION}", f"{HERE}-2 1 {SESSION}")
    stage.write("127.0.0.1")
    leave = stage.run.morph.leave(1)
    wait_until(leave.exists, "the asking")
    leave.unlink()
    wait_until(leave.exists, "the asking again")
