"""A run without Slurm, on a watched list of machines: this one, and others over a real ssh."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.jobs.elastic.test_morph import (
    CONF,
    WARM,
    kill_node,
    names_run,
    read_presence,
    wait_for_checkpoint,
)
from tests.jobs.elastic.test_morph import vjob as vjob
from tests.jobs.elastic.test_morph_grow import end_well, wait_for_morphs
from tests.small_training import list_morphs, read_losses
from tests.varuna_core.launch.sshd import SSHD, Sshd
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SSHD is None, reason="no sshd here: apt-get install openssh-server, `make packages` as root"
    ),
]

HERE = os.uname().nodename.partition(".")[0]
LONG = 20000
"""Steps of a run that is ended before them."""


class Machines:
    """This machine, and others of any name that are it again, by way of ssh."""

    def __init__(self, vjob: Vjob, sshd: Sshd) -> None:
        self.vjob, self.sshd = vjob, sshd
        self.file = vjob.folder / "available_machines.out"
        self.config = vjob.folder / "ssh_config"
        self.aliases: list[str] = []
        for name in ("gpu-1", "gpu-2"):
            self.add(name, sshd)

    def add(self, name: str, sshd: Sshd, port: int | None = None, **more: object) -> None:
        """An alias, whose own settings count before those of all."""
        lines = {"HostName": "localhost", "Port": port or sshd.port, **more}
        words = "".join(f"  {key} {value}\n" for key, value in lines.items())
        self.aliases.append(f"Host {name}\n{words}")
        self.config.write_text("".join(self.aliases) + self.sshd.config.read_text())
        self.config.chmod(0o600)

    def list(self, *names: str) -> None:
        self.file.write_text("# machines\n\n" + "".join(f"{name}\n" for name in names))

    def submit(self, *, nodes: int, of: str = CONF) -> RunFolder:
        return self.vjob.submit(self.make_conf(nodes=nodes, of=of))

    def make_conf(self, *, nodes: int, of: str = CONF) -> str:
        listed = "\n  ".join(
            ("machine_list: available_machines.out", "ssh_config: ssh_config", "join_s: 15")
        )
        text = of.replace("scheduler: local", listed).replace("  join_s: 30\n", "")
        text = text.replace("count: 4", f"count: {nodes}").replace("line: 4", "line: 1")
        text = text.replace("min_nodes: {min_nodes}", "min_nodes: {min_nodes}, max_nodes: 4")
        return text.format(steps=LONG, min_nodes=1)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture
def machines(vjob: Vjob, sshd: Sshd) -> Iterator[Machines]:
    yield Machines(vjob, sshd)
    vjob("cancel", "last", "--now", code=None)
    wait_for(lambda: not find_all(vjob), 60, lambda: f"still there: {find_all(vjob)}")


def find_all(vjob: Vjob) -> list[Path]:
    """Processes of any of the user's runs, on any machine."""
    mark = RunFolder(vjob.folder / "log")
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if names_run(path, mark)]


def wait_for_word(vjob: Vjob, run: RunFolder, text: str) -> None:
    log = run.scheduler_log()
    wait_for(lambda: text in log.read_text(), 60, lambda: f"no {text!r}\n{vjob.explain(run)}")


def list_seen(vjob: Vjob, run: RunFolder) -> list[int]:
    """Ranks of which `vjob stacks` shows where they are."""
    found = json.loads(vjob("stacks", str(run.path), "--json", code=None).stdout)
    return sorted(rank for group in found["groups"] for rank in group["ranks"])


def check_who_cannot_be_asked(vjob: Vjob, run: RunFolder) -> None:
    told = run.machines.read_text()
    run.machines.write_text(told.replace('"gpu-2"\n', '"gpu-2:1"\n'))  # nobody hears there
    found = json.loads(vjob("stacks", str(run.path), "--json").stdout)
    run.machines.write_text(told)
    assert "cannot be reached" in found["silent_nodes"]["gpu-2"], found


def check_losses(run: RunFolder) -> None:
    """Each step once, and to a little after the last change as if nothing had happened."""
    from tests.varuna_core.programs.reference_training import train_plainly

    found = read_losses(run)
    assert sorted(found) == list(range(1, max(found) + 1))
    *_, changed, _ = (event["iteration"] for event in read_events(run) if event["kind"] == "ended")
    losses, _ = train_plainly(read_training(run.training), last=changed + 5)
    assert {step: found[step] for step in losses} == pytest.approx(losses, rel=2e-5)


@pytest.mark.long
def test_two_machines_become_three_lose_one_and_train_on_with_the_same_loss(
    vjob: Vjob, machines: Machines
) -> None:
    machines.list("127.0.0.1", "gpu-1")
    run = machines.submit(nodes=2, of=WARM)
    wait_for_checkpoint(vjob, run, 10)
    machines.list("127.0.0.1", "gpu-1", "gpu-2")
    wait_for_morphs(vjob, run, 1)
    assert [read_presence(run, seat)["host"] for seat in range(3)] == [HERE, "gpu-1", "gpu-2"]
    wait_for(lambda: list_seen(vjob, run) == [0, 1, 2], 60)
    check_who_cannot_be_asked(vjob, run)
    kill_node(run, 1)
    machines.list("127.0.0.1", "gpu-2")  # or it would be back in a while
    wait_for_morphs(vjob, run, 2)
    wait_for_word(vjob, run, "gpu-1: its agent was killed there, or ssh ended without")
    end_well(vjob, run)
    first, second = list_morphs(run)[:2]
    assert (first["from"], first["nodes"]) == ("1 x 2", [0, 1, 2])
    assert second["nodes"] == [0, 2] and "gpu-1 was lost" in second["reason"]
    check_losses(run)


@pytest.mark.long
def test_who_is_taken_off_the_list_leaves_and_usr1_starts_anew_on_the_list_as_it_is(
    vjob: Vjob, machines: Machines
) -> None:
    machines.list("127.0.0.1", "gpu-1", "gpu-2")
    run = machines.submit(nodes=3)
    wait_for_checkpoint(vjob, run, 10)
    machines.list("gpu-1", "gpu-2")  # the machine of the manager is one like others
    wait_for_morphs(vjob, run, 1)
    (morph,) = list_morphs(run)
    assert (morph["nodes"], morph["to"]) == ([1, 2], "1 x 2")
    assert morph["reason"] == "node 0 is to leave"
    wait_for_checkpoint(vjob, run, morph["iteration"] + 10)
    machines.list("127.0.0.1", "gpu-2")
    os.kill(int(run.master_pid.read_text()), signal.SIGUSR1)
    wait_for(lambda: [e for e in read_events(run) if e["kind"] == "requeued"], 60)
    wait_for(lambda: len(run.attempts()) >= 3, 60, lambda: vjob.explain(run))
    last = run.attempts()[-1]
    wait_for(lambda: {p.name for p in last.path.glob("*.out")} == {f"{HERE}.out", "gpu-2.out"}, 60)
    wait_for_checkpoint(vjob, run, max(read_losses(run)) + 10)
    assert "saved and left" in vjob("cancel", run.name).stdout
    assert vjob.wait_over(run, 60)["verdict"] == "CANCELLED", vjob.explain(run)
    check_losses(run)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_ended_or_killed_the_master_takes_all_with_it(
    vjob: Vjob, machines: Machines, number: signal.Signals
) -> None:
    machines.list("127.0.0.1", "gpu-1")
    run = machines.submit(nodes=2, of=WARM)
    wait_for_checkpoint(vjob, run, 10)
    said = vjob("grow", run.name, "--count", "1", code=2).stderr
    assert f"runs on a list of machines: add hosts to {machines.file}" in said
    os.kill(int(run.master_pid.read_text()), number)
    expected = ("FAILED", "supervisor-died")
    if number == signal.SIGINT:
        expected = ("CANCELLED", "cancelled")
    record = vjob.wait_over(run, 60)
    assert (record["verdict"], record["end"]["cause"]) == expected, vjob.explain(run)
    wait_for(lambda: not find_all(vjob), 60, lambda: f"still there: {find_all(vjob)}")


def test_ctrl_c_to_who_follows_saves_and_ends_the_run(vjob: Vjob, machines: Machines) -> None:
    machines.list("127.0.0.1")
    conf = vjob.write(machines.make_conf(nodes=1))
    terminal = vjob.start("submit", conf, "--follow", start_new_session=True)
    wait_for((vjob.folder / "log" / "curve").exists, 60)
    run = RunFolder((vjob.folder / "log" / "curve").resolve())
    wait_for_checkpoint(vjob, run, 10)
    os.killpg(terminal.pid, signal.SIGINT)
    assert terminal.wait(90) == 130
    assert vjob.wait_over(run, 10)["verdict"] == "CANCELLED", vjob.explain(run)


@pytest.mark.long
def test_a_killed_watch_ends_its_agents_and_the_run_comes_back(
    vjob: Vjob, machines: Machines
) -> None:
    machines.list("127.0.0.1", "gpu-1")
    run = machines.submit(nodes=2)
    wait_for_checkpoint(vjob, run, 10)
    os.kill(find_watch(run), signal.SIGKILL)
    wait_for(lambda: [e for e in read_events(run) if e["kind"] == "requeued"], 90)
    wait_for(lambda: len(run.attempts()) >= 2, 60, lambda: vjob.explain(run))
    wait_for_checkpoint(vjob, run, max(read_losses(run)) + 20)


def find_watch(run: RunFolder) -> int:
    """The one that holds the agents' inputs."""
    parent = int(Path(f"/proc/{read_presence(run, 0)['pid']}/stat").read_text().split()[3])
    assert b"launch.watch" in Path(f"/proc/{parent}/cmdline").read_bytes()
    return parent
