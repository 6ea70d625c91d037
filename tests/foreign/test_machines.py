"""Programs of others, ported: trained on a list of machines over a real ssh, one of them lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Vjob
from tests.foreign.programs import PROGRAMS, disturb, train_plainly
from tests.foreign.story import begin
from tests.varuna_core.launch.sshd import SSHD, Sshd, find_step
from varuna_core.records.exits import NODE_LOST

pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        SSHD is None, reason="no sshd here: apt-get install openssh-server, `make packages` as root"
    ),
]

CLUSTER = """
cluster:
  machine_list: machines
  ssh_config: ssh_config
  grace_s: 20
  nodes: [{group: weak, ranks: 2}, {group: strong, ranks: 2}]
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.mark.long
@disturb("resnet")
def test_a_ported_program_on_a_list_of_machines_has_the_losses_of_the_original(
    name: str, tmp_path: Path, sshd: Sshd
) -> None:
    if name == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "machines").write_text(f"127.0.0.1\n{sshd.machine}\n")
    (tmp_path / "ssh_config").write_text(sshd.config.read_text())
    (tmp_path / "ssh_config").chmod(0o600)
    story = begin(PROGRAMS[name], Vjob(tmp_path), CLUSTER)
    plain = train_plainly(story.program, tmp_path)
    story.submit()
    story.wait_for_losses(3)
    story.look_while_it_runs()
    story.cancel_with_a_checkpoint()

    story.submit()
    story.wait_for_losses(2)
    os.kill(find_step(story.run), signal.SIGKILL)
    record = story.vjob.wait_over(story.run, 150, may_fail=True)
    assert record["outcome"]["code"] == NODE_LOST, story.vjob.explain(story.run)

    story.set_pause(0)
    story.submit()
    record = story.vjob.wait_over(story.run, 150)
    assert record["verdict"] == "COMPLETED", story.vjob.explain(story.run)
    story.check_losses(plain)
    story.check_report()
