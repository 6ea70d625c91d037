"""Fixed runs on a list of machines: this one, and others over a real ssh that are it again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Vjob, read_out, wait_for
from tests.varuna_core.launch.sshd import SSHD, Sshd, find_step
from varuna_core.records.exits import NODE_LOST, NOT_READY
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.skipif(
    SSHD is None, reason="no sshd here: apt-get install openssh-server, `make packages` as root"
)

HERE = os.uname().nodename.partition(".")[0]
CONF = """
name: fate
program: {{script: {script}, args: {args}}}
cluster:
  machine_list: machines
  ssh_config: ssh_config
  grace_s: 2
  {more}
  nodes:
    - {{group: m, count: 1, ranks: 2}}
    - {{group: s, count: 1, ranks: 1}}
env: {{NOTE: x, MY_TOKEN: s3cret}}
setup: [cat, {setup}]
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture
def vjob(tmp_path: Path, sshd: Sshd) -> Iterator[Vjob]:
    config = tmp_path / "ssh_config"
    alias = f"Host gpu-1\n  HostName localhost\n  Port {sshd.port}\n"
    config.write_text(alias + sshd.config.read_text())
    config.chmod(0o600)
    (tmp_path / "machines").write_text("127.0.0.1\ngpu-1\ngpu-2  # not needed\n")
    made = Vjob(tmp_path)
    yield made
    made("cancel", "last", "--now", code=None)
    wait_for(lambda: not find_all(made), 60, lambda: f"still there: {find_all(made)}")


def make(*args: str, script: str = "fail_as_told.py", more: str = "", setup: str = "true") -> str:
    """A setup line reads its standard input, which is not the agents'."""
    return CONF.format(script=PROGRAMS / script, args=json.dumps(args), more=more, setup=setup)


def find_all(vjob: Vjob) -> list[str]:
    """Processes of any of the user's runs, on any machine."""
    mark, found = os.fsencode(vjob.folder / "log"), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if mark in words:
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def wait_for_ranks(vjob: Vjob, run: RunFolder) -> None:
    wait_for(lambda: read_out(run).count("ready") == 3, 60, lambda: vjob.explain(run))


def test_ranks_on_two_machines_run_and_meet(vjob: Vjob) -> None:
    run = vjob.submit(make(script="report_rank.py"))
    record = vjob.wait_over(run)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    rows = {row["rank"]: row for row in map(json.loads, read_out(run).splitlines())}
    assert [rows[r]["local_rank"] for r in range(3)] == [0, 1, 0]
    assert {row["world"] for row in rows.values()} == {3}
    assert all(row["leak"] is None for row in rows.values())
    table = run.attempts()[0].preflight.read_text()
    assert re.findall(r"^(\d) +(\S+) ", table, re.MULTILINE) == [("0", HERE), ("1", "gpu-1")]
    for path in run.path.rglob("*"):
        if path.is_file() and path != run.plan:
            assert b"s3cret" not in path.read_bytes(), path
    assert "COMPLETED" in vjob("list").stdout
    assert HERE in vjob("logs", "last").stdout
    assert "are the same machine" in run.scheduler_log().read_text()


def test_the_program_of_the_page_runs_with_the_conf_of_the_page(vjob: Vjob) -> None:
    page = (ROOT / "docs/launcher.md").read_text()
    for kind, name in (("python", "train.py"), ("yaml", "conf.yaml")):
        (text,) = re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        vjob.write(text, name)
    vjob.write("127.0.0.1\n", "machines")
    with (vjob.folder / "conf.yaml").open("a") as conf:
        conf.write(f"env: {{PYTHONPATH: {ROOT}}}\n")
    (command,) = re.findall(r"```sh\nvjob (.*?)\n```", page)
    losses = re.findall(r"loss (\S+)$", vjob(*command.split()).stdout, re.MULTILINE)
    assert len(set(losses)) == 1, "both ranks print the same"


def test_a_rank_that_fails_over_there_ends_the_run_with_its_code(vjob: Vjob) -> None:
    run = vjob.submit(make("2", "exit:9"))
    outcome = vjob.wait_over(run)["outcome"]
    assert (outcome["code"], outcome["culprit_rank"]) == (9, 2)
    assert "rank 2 on gpu-1" in outcome["reason"]
    assert json.loads((run.path / "local.json").read_text())["exit_code"] == "9:0"


def test_status_stacks_and_a_cancel_that_saves_first(vjob: Vjob) -> None:
    run = vjob.submit(make("-1", "hang", "catch"))
    wait_for_ranks(vjob, run)
    assert vjob.status("last")["state"] == "RUNNING"
    found = json.loads(vjob("stacks", "last", "--json", code=None).stdout)
    assert sorted(rank for group in found["groups"] for rank in group["ranks"]) == [0, 1, 2]
    assert "left after it was asked to save" in vjob("cancel", "last").stdout
    assert read_out(run).count("got SIGUSR1") == 3


def test_a_cancel_now_ends_all(vjob: Vjob) -> None:
    run = vjob.submit(make("-1", "hang"))
    wait_for_ranks(vjob, run)
    assert "is cancelled" in vjob("cancel", "last", "--now").stdout
    assert vjob.wait_over(run)["verdict"] == "CANCELLED"


def test_a_machine_whose_ssh_is_killed_is_lost_and_its_ranks_end(vjob: Vjob) -> None:
    run = vjob.submit(make("-1", "hang"))
    wait_for_ranks(vjob, run)
    os.kill(find_step(run), signal.SIGKILL)
    outcome = vjob.wait_over(run)["outcome"]
    assert outcome["code"] == NODE_LOST
    said = "gpu-1 was lost: the ssh to it was ended by SIGKILL"
    assert said in outcome["reason"] or "seen first on gpu-1" in outcome["reason"]
    assert said in run.scheduler_log().read_text()


def test_a_killed_step_takes_all_ranks_with_it(vjob: Vjob) -> None:
    run = vjob.submit(make("-1", "hang"))
    wait_for_ranks(vjob, run)
    os.kill(find_step(run, "step"), signal.SIGKILL)
    assert vjob.wait_over(run)["verdict"] != "COMPLETED"


def test_a_failed_attempt_is_restarted_on_the_machines(vjob: Vjob) -> None:
    run = vjob.submit(make("2", "exit:9", more="restarts: 1"))
    assert vjob.wait_over(run, may_fail=True)["outcome"]["code"] == 9, vjob.explain(run)
    assert [event["next"] for event in read_events(run) if event["kind"] == "restarted"] == [1]
    assert len(run.attempts()) == 2


def _take_config(vjob: Vjob, path: Path) -> None:
    alias = (vjob.folder / "ssh_config").read_text().partition("Host *")[0]
    (vjob.folder / "ssh_config").write_text(alias + path.read_text())


def _close_port(vjob: Vjob, sshd: Sshd) -> None:
    (vjob.folder / "machines").write_text("127.0.0.1\nroot@localhost:1\n")


def _take_wrong_key(vjob: Vjob, sshd: Sshd) -> None:
    _take_config(vjob, sshd.write_config("wrong_key", key="stranger"))


def _forget_host(vjob: Vjob, sshd: Sshd) -> None:
    _take_config(vjob, sshd.write_config("forgot", known_hosts=sshd.folder / "nobody"))


def _swap_host_key(vjob: Vjob, sshd: Sshd) -> None:
    stranger = (sshd.folder / "stranger.pub").read_text()
    (sshd.folder / "swapped").write_text(f"[localhost]:{sshd.port} {stranger}")
    _take_config(vjob, sshd.write_config("swap", known_hosts=sshd.folder / "swapped"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_close_port, "localhost:1: it cannot be reached: run `ssh"),
        (_take_wrong_key, "gpu-1: it refused the login: run `ssh"),
        (_forget_host, "gpu-1: the machine's host key is not known here: run `ssh"),
        (_swap_host_key, "gpu-1: the machine's host key is not the one in known_hosts"),
    ],
)
def test_a_machine_that_cannot_serve_is_one_clear_line(
    vjob: Vjob, sshd: Sshd, change: Callable[[Vjob, Sshd], None], said: str
) -> None:
    change(vjob, sshd)
    run = vjob.submit(make("-1", "hang"))
    outcome = vjob.wait_over(run)["outcome"]
    assert outcome["code"] == NOT_READY
    assert said in outcome["reason"]
    assert not run.attempt(0).go.exists(), "nothing was started"


def test_a_folder_that_is_not_shared_is_said_with_the_remedy(vjob: Vjob, tmp_path: Path) -> None:
    """The other machine sees an empty disk in its place."""
    log = vjob.folder / "log"
    log.mkdir(exist_ok=True)
    hide = f"mount -t tmpfs none {log} && exec /bin/sh -s"
    command = f"unshare -rm /bin/sh -c '{hide}'"
    if subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("no mount of one's own may be made here (unshare -rm)")
    server = Sshd(tmp_path / "sshd", f"ForceCommand {command}")
    try:
        (vjob.folder / "ssh_config").write_text(server.config.read_text())
        (vjob.folder / "machines").write_text(f"127.0.0.1\n{server.machine}\n")
        reason = vjob.wait_over(vjob.submit(make("-1", "hang")))["outcome"]["reason"]
    finally:
        server.stop()
    assert "the machine does not see the run folder" in reason and "set log_folder to one" in reason


@pytest.mark.charliecloud
def test_ranks_on_two_machines_run_in_containers(vjob: Vjob, tmp_path: Path, image: Path) -> None:
    if shutil.which("ch-run") is None:
        pytest.skip("charliecloud is not installed")
    script, scratch = vjob.folder / "container_view.py", tmp_path / "scratch"
    script.write_text((PROGRAMS / script.name).read_text())
    scratch.mkdir()
    boxed = {"runtime": "charliecloud", "image": str(image), "scratch": str(scratch)}
    text = make().replace(str(PROGRAMS / "fail_as_told.py"), script.name)
    run = vjob.submit(f"{text}container: {json.dumps(boxed)}\n")
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    assert sorted(row["rank"] for row in rows) == [0, 1, 2]
    assert all(row["env"]["FROM_IMAGE"] == "made of dough" for row in rows)


def test_a_report_is_made_of_such_a_run(vjob: Vjob) -> None:
    pytest.importorskip("plotly", reason="vjob report needs pandas and plotly")
    run = vjob.submit(make("20", script="traced_steps.py"))
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    vjob("report", "last")
    assert "<html" in run.report.read_text()


def test_a_setup_line_that_fails_on_a_machine_is_told(vjob: Vjob) -> None:
    run = vjob.submit(make("-1", "hang", setup="'[ \"$VJOB_NODE_NAME\" != gpu-1 ]'"))
    outcome = vjob.wait_over(run)["outcome"]
    assert outcome["code"] == NOT_READY
    assert "a setup line failed on gpu-1" in outcome["reason"]


def test_a_node_that_ends_long_after_the_first_is_ended(vjob: Vjob) -> None:
    (vjob.folder / "late.py").write_text(
        "import os, time\nprint('ready', flush=True)\n"
        "time.sleep(120 if os.environ['RANK'] == '2' else 0)\n"
    )
    text = make("x", more="finish_s: 1").replace(str(PROGRAMS / "fail_as_told.py"), "late.py")
    run = vjob.submit(text)
    outcome = vjob.wait_over(run)["outcome"]
    assert "gpu-1 did not end within 1 s of the first node (cluster.finish_s)" in outcome["reason"]


def test_too_few_machines_are_refused_at_submit(vjob: Vjob) -> None:
    (vjob.folder / "machines").write_text("127.0.0.1\n")
    said = vjob("submit", vjob.write(make("-1", "hang")), code=2).stderr
    assert "lists 1 of the 2 machines of cluster.nodes" in said
