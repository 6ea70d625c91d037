"""`vjob --host`: a folder of a laptop, and a real sshd on loopback with another home as its login
node."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.varuna_core.launch.sshd import SSHD, Sshd
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.process import ENTRY
from vjob.shelf.host import here, there
from vjob.shelf.host.frames import write_line
from vjob.shelf.host.here import name_tree, take_page
from vjob.shelf.host.there import SENT
from vjob.shelf.web.serve import describe_address, name_login

pytestmark = pytest.mark.skipif(
    SSHD is None, reason="no sshd here: apt-get install openssh-server, `make packages` as root"
)
CONF = """
name: far
program: {script: src/train.py, args: ["{steps}"]}
cluster:
  scheduler: local
  walltime_min: 5
  grace_s: 2
  nodes: [{group: m, count: 1, ranks: 1}]
"""
TRAIN = """
import sys, time
from words import WORD
for step in range(int(sys.argv[1])):
    print(f"step {step + 1}/{sys.argv[1]} loss {1 / (step + 1):.4f} {WORD}", flush=True)
    time.sleep(0.1)
"""


class Laptop:
    """A working tree of git here, and a home with runs on the other side."""

    def __init__(self, folder: Path) -> None:
        self.home, self.folder = folder / "home", folder / "laptop"
        (self.folder / "src").mkdir(parents=True)
        self.home.mkdir()
        self.sshd = Sshd(folder / "sshd", f"SetEnv XDG_STATE_HOME={self.home}/state")
        self.there = self.home / "vjob" / name_tree(self.folder)
        ssh = f"ssh -F {self.sshd.config} -p {self.sshd.port}"
        command = f"HOME={self.home} {sys.executable} {ENTRY}"
        self.env = {"VJOB_SSH": ssh, "VJOB_HOST_COMMAND": command}
        self.vjob = Vjob(self.folder, self.env)
        self.write(4)
        (self.folder / "src/train.py").write_text(TRAIN)
        (self.folder / "src/words.py").write_text("WORD = 'first'\n")
        (self.folder / ".gitignore").write_text("*.bin\n")
        (self.folder / "data.bin").write_bytes(bytes(1000))
        subprocess.run(["git", "init", "-q"], cwd=self.folder, check=True)

    def write(self, steps: int) -> None:
        (self.folder / "conf.yaml").write_text(CONF.replace("{steps}", str(steps)))

    def __call__(self, *words: str, code: int | None = 0) -> str:
        return self.ask(*words, code=code).stdout

    def ask(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.vjob("--host", "localhost", *words, code=code)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "vjob", "--host", "localhost", *words],
            cwd=self.folder,
            env=self.vjob.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    made = Laptop(tmp_path)
    yield made
    made.sshd.stop()


def test_a_conf_and_its_code_are_run_there_and_all_answers_come_back(laptop: Laptop) -> None:
    run = json.loads(laptop("submit", "conf.yaml", "--json"))
    assert run["folder"].startswith(f"{laptop.there}/log/")
    wait_for(lambda: "DONE" in laptop("status", "last", code=None), 60)
    logs = laptop("logs", "last")
    assert "step 4/4 loss 0.2500 first" in logs
    said = laptop("report", "last")
    page = laptop.folder / "report-last.html"
    assert "<html" in page.read_text() and "report-last.html" in said
    assert str(laptop.home) not in said
    assert not (laptop.there / "data.bin").exists()  # git ignores it
    assert not (laptop.folder / "log").exists()


def test_the_folder_there_follows_the_one_here(laptop: Laptop) -> None:
    laptop("submit", "conf.yaml", "--dry-run")
    before = {path.name: path.stat().st_ino for path in (laptop.there / "src").iterdir()}
    (laptop.folder / "src/words.py").write_text("WORD = 'second'\n")
    (laptop.folder / "src/more.py").symlink_to("words.py")
    (laptop.folder / ".gitignore").unlink()
    (laptop.there / "of_the_user.txt").write_text("mine")
    laptop("submit", "conf.yaml", "--dry-run")
    after = {path.name: path.lstat().st_ino for path in (laptop.there / "src").iterdir()}
    assert before["train.py"] == after["train.py"]  # not sent again
    assert (laptop.there / "src/more.py").read_text() == "WORD = 'second'\n"
    assert not (laptop.there / ".gitignore").exists()
    assert (laptop.there / "of_the_user.txt").read_text() == "mine"
    assert "src/words.py" in json.loads((laptop.there / SENT).read_text())


def test_what_is_refused_there_is_refused_here(laptop: Laptop) -> None:
    (laptop.folder / "conf.yaml").write_text("name: far\nprogramm: {}\n")
    done = laptop.ask("submit", "conf.yaml", code=2)
    assert "conf.yaml:2: programm" in done.stderr


def test_ctrl_c_ends_the_following_and_not_the_run(laptop: Laptop) -> None:
    laptop.write(200)
    with laptop.start("submit", "conf.yaml", "--follow") as follows:
        assert follows.stdout is not None
        for line in follows.stdout:
            if "step 2/200" in line:
                break
        os.killpg(follows.pid, signal.SIGINT)
        follows.communicate(timeout=60)
    assert follows.returncode == 130
    assert "RUNNING" in laptop("list")
    laptop("cancel", "last", "--now")


def test_a_connection_that_breaks_is_told_and_the_run_goes_on(laptop: Laptop) -> None:
    laptop.write(60)
    with laptop.start("submit", "conf.yaml", "--follow") as follows:
        assert follows.stdout is not None and follows.stderr is not None
        assert any("step 3/60" in line for line in follows.stdout)
        cut_connections(laptop.sshd)
        err = follows.stderr.read()
    assert follows.returncode == 1 and "continues" in err
    wait_for(lambda: "DONE" in laptop("status", "last", code=None), 60)
    assert len(json.loads(laptop("list", "--json"))) == 1


def cut_connections(sshd: Sshd) -> None:
    """Kill the processes of sshd that serve a connection, not what they started."""
    children = Path(f"/proc/{sshd.pid}/task/{sshd.pid}/children").read_text().split()
    assert children
    for child in children:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("name", ["../x", "/etc/x", ""])
def test_no_file_leaves_the_folder_of_its_tree(name: str) -> None:
    with pytest.raises(InputError, match="not a request"):
        there.check_request({"name": "tree", "files": {name: (1, 0o600, "")}, "links": {}})


def test_a_tree_whose_connection_ends_is_not_called_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    said = io.BytesIO()
    write_line(said, name="tree", files={"conf.yaml": (7, 0o600, "")}, links={})
    said.seek(0)
    with pytest.raises(InputError, match="while files were being sent"):
        there.receive_tree(said, io.BytesIO())


def test_a_login_node_gets_no_file_that_was_not_offered(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "conf.yaml").write_text("name: a")
    files = {"conf.yaml": (7, 0o600, "")}
    for name in ("../secret", str(tmp_path / "secret")):
        sent = io.BytesIO()
        with pytest.raises(VjobError, match="not offered"):
            here.send_files("there", sent, tmp_path / "tree", files, ["conf.yaml", name])
        assert sent.getvalue() == b""


def test_without_a_vjob_there_it_is_said_what_to_do(laptop: Laptop) -> None:
    laptop.vjob.env["VJOB_HOST_COMMAND"] = "no-such-vjob"
    for words in (("submit", "conf.yaml"), ("status",)):
        assert "VJOB_HOST_COMMAND=" in laptop.ask(*words, code=1).stderr
    laptop.sshd.stop()
    done = laptop.ask("submit", "conf.yaml", code=1)
    assert "ssh localhost" in done.stderr


@pytest.mark.parametrize(
    ("words", "page", "rest"),
    [
        ("report last", "report-last.html", "report last"),
        ("report log/far-1/", "report-far-1.html", "report log/far-1/"),
        ("report last --text", None, "report last --text"),
        ("report last --text -o x.html", "x.html", "report last --text"),
        ("report last --output=x.html", "x.html", "report last"),
        ("report last --export csv -o x", None, "report last --export csv -o x"),
        ("compare 1 2", None, "compare 1 2"),
        ("compare 1 2 -oy.html", "y.html", "compare 1 2"),
    ],
)
def test_a_page_is_written_here(words: str, page: str | None, rest: str) -> None:
    assert take_page(words.split()) == (None if page is None else Path(page), False, rest.split())


def test_a_live_page_is_reached_by_the_name_that_the_user_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (told,) = [line for line in describe_address("u", 41823, "me@hpc") if line.startswith("ssh")]
    assert told == "ssh -NL 41823:127.0.0.1:41823 me@hpc" and len(told) <= 80
    calls: list[list[str]] = []
    monkeypatch.setattr(here.process, "hand_over", lambda words: calls.append(words) or 0)
    assert here.run_there("me@hpc", ["status", "last", "--web"]) == 0
    assert "export VJOB_LOGIN=me@hpc;" in calls[0][-1]
    assert name_login({"VJOB_LOGIN": "me@hpc"}) == "me@hpc"
    assert "@" in name_login({"SSH_CONNECTION": "1 2 3 4"}) and "@" not in name_login({})


def test_folders_of_two_trees_do_not_meet(tmp_path: Path) -> None:
    names = [name_tree(tmp_path / place / "code") for place in "ab"]
    assert names[0] != names[1] and all(name.startswith("code-") for name in names)


def test_a_folder_that_another_connection_fills_is_not_waited_for_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(there, "LOCK_S", 0.1)
    with (
        there._lock(tmp_path),
        pytest.raises(InputError, match="has been copying"),
        there._lock(tmp_path),
    ):
        pass
