"""The same conf means the same in every runtime that works on this machine, for real."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from tests.containers.real import REAL, Tools
from tests.varuna_core.agent.track.readers import read_prometheus, read_tensorboard
from varuna_core.agent.setup.ranks import STARTUP
from varuna_core.records.files import read_json
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from vjob.containers.registry import RUNTIMES
from vjob.containers.runtime import STAY

NOTE = "two\nlines $HOME `id` 'q' \"d\" \\ ünï  "


every_runtime = pytest.mark.parametrize(
    "runtime", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in REAL]
)

CONF = """
name: boxed
program: {{script: {script}, args: {args}}}
cluster: {{scheduler: local, grace_s: 2, nodes: [{{group: m, count: 2, ranks: 2}}]}}
container:
  runtime: {runtime}
  image: {image}
  scratch: {scratch}
{more}
"""


class Box:
    """Runs in one runtime."""

    def __init__(self, runtime: str, folder: Path, image: str, scratch: Path, path: str) -> None:
        self.vjob = Vjob(folder, {"MY_SECRET": "s3cret of the shell", "PATH": path})
        self.runtime, self.image, self.scratch = runtime, image, scratch

    def conf(self, script: Path, *args: str, more: str = "") -> str:
        return CONF.format(
            script=json.dumps(str(script)),
            args=json.dumps(args),
            runtime=self.runtime,
            image=json.dumps(self.image),
            scratch=json.dumps(str(self.scratch)),
            more=more,
        )

    def look(self, more: str = "", *args: str) -> list[dict[str, Any]]:
        """What `container_view.py` sees in every rank."""
        script = self.copy("container_view.py")
        run = self.vjob.submit(self.conf(script, *args, more=more))
        assert self.vjob.wait_over(run)["verdict"] == "COMPLETED", self.vjob.explain(run)
        rows = [json.loads(line) for line in read_out(run).splitlines()]
        return sorted(rows, key=lambda row: int(row["rank"]))

    def copy(self, name: str) -> Path:
        """A program beside the conf: that folder shows inside."""
        path = self.vjob.folder / name
        path.write_text((PROGRAMS / name).read_text())
        return path


@pytest.fixture
def box(runtime: str, tmp_path: Path, image: Path, scratch: Path, tools: Tools) -> Box:
    tools.need(runtime)
    given = tools.make_reference(runtime) if runtime == "docker" else str(image)
    return Box(runtime, tmp_path, given, scratch, tools.path)


@every_runtime
def test_environment_arguments_and_mounts_arrive_as_they_are(box: Box, tmp_path: Path) -> None:
    shared = tmp_path / "a b"
    shared.mkdir()
    (shared / "file").write_text("shared")
    more = f"""\
  mounts: [{json.dumps(f"{shared}:/data/x y")}]
env: {{NOTE: {json.dumps(NOTE)}, MY_TOKEN: t0ken, ENROOT_X: "1", LD_LIBRARY_PATH: /x:/y}}
"""
    args = ("a b", "$(touch owned)", "it's", "new\nline", "", "--rw")
    rows = box.look(more, *args)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["args"] == list(args)
        assert row["env"]["NOTE"] == NOTE, "ours over the image's own"
        assert row["env"]["FROM_IMAGE"] == "made of dough"
        assert row["env"]["ENROOT_X"] == "1" and row["env"]["MY_TOKEN"] == "t0ken"
        assert row["env"]["LD_LIBRARY_PATH"].startswith("/x:/y")
        assert not {"VJOB_ENTER", "LEAK_OF_THE_SHELL", "MY_SECRET", "OLDPWD"} & set(row["env"])
        assert not [name for name in row["env"] if name.startswith("SLURM_")]
        assert row["env"]["PYTHONPATH"].endswith(STARTUP) and ":" not in row["env"]["PYTHONPATH"]
        assert row["data"] == "shared"
        assert row["cwd"] == str(tmp_path)
        assert row["uid"] == os.getuid()
        assert row["host"] == os.uname().nodename and row["shm"], "network and /dev/shm of the node"
        assert row["home"] == "/tmp" or os.environ["HOME"].startswith("/tmp/"), "none is mounted"


@every_runtime
def test_a_run_is_tracked_from_inside_its_container(box: Box, tmp_path: Path) -> None:
    """The tracker runs where the ranks' packages are, and writes where the container shows it."""
    script = tmp_path / "steps.py"
    script.write_text("for step in range(1, 4): print(f'step {step}/3 loss 0.5', flush=True)\n")
    gauges = tmp_path / "box.prom"
    track = f"track: {{tensorboard: true, openmetrics: {json.dumps(str(gauges))}}}"
    more = f"  mounts: [{json.dumps(f'{tmp_path}:{tmp_path}')}]\n{track}\n"
    run = box.vjob.submit(box.conf(script, more=more))
    assert box.vjob.wait_over(run)["verdict"] == "COMPLETED", box.vjob.explain(run)
    said = [event for event in read_events(run) if event["kind"] == "tracking"]
    assert said == []
    assert read_tensorboard(run.tensorboard)["loss"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    found = read_prometheus(gauges.read_text())
    assert [*found["vjob_step"].values(), *found["vjob_run_up"].values()] == [3.0, 0.0]


@every_runtime
def test_exit_37_stays_37_and_a_killed_rank_is_named(box: Box) -> None:
    fate = box.copy("fail_as_told.py")
    run = box.vjob.submit(box.conf(fate, "2", "exit:37"))
    outcome = box.vjob.wait_over(run)["outcome"]
    assert (outcome["code"], outcome["culprit_rank"]) == (37, 2), box.vjob.explain(run)
    run = box.vjob.submit(box.conf(fate, "1", "kill"))
    outcome = box.vjob.wait_over(run)["outcome"]
    assert (outcome["code"], outcome["culprit_rank"]) == (137, 1), box.vjob.explain(run)
    assert outcome["culprit_signal"] == "SIGKILL"


@every_runtime
def test_usr1_reaches_the_program_once_and_cancel_finds_its_handler(box: Box) -> None:
    run = box.vjob.submit(box.conf(box.copy("fail_as_told.py"), "-1", "hang", "catch", "child"))
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    assert "left after it was asked to save" in box.vjob("cancel", "last").stdout
    assert read_out(run).count("got SIGUSR1") == 4
    assert read_out(run).count("child lives") == 4
    assert not find_processes(run)


@every_runtime
def test_stacks_are_seen_from_outside(box: Box) -> None:
    run = box.vjob.submit(box.conf(box.copy("stray_rank.py"), "2"))
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    beats = [run.attempt(0).beat(index) for index in (0, 1)]
    wait_for(lambda: all(len(read_json(beat).get("ranks", ())) == 2 for beat in beats), 30)
    found = json.loads(box.vjob("stacks", "last", "--json").stdout)
    assert [group["ranks"] for group in found["groups"]] == [[2], [0, 1, 3]], found
    assert found["groups"][0]["stacks"][0]["threads"][0]["frames"][0]["function"] == "load_data"
    box.vjob("cancel", "last", "--now")


@every_runtime
def test_ranks_without_a_handler_end_at_term_and_deaf_ones_at_kill(box: Box) -> None:
    for words in (["-1", "hang"], ["-1", "hang", "deaf"]):
        run = box.vjob.submit(box.conf(box.copy("fail_as_told.py"), *words))
        wait_for(lambda run=run: read_out(run).count("ready") == 4, 60)  # type: ignore[misc]
        assert "is cancelled" in box.vjob("cancel", "last").stdout
        assert not find_processes(run)


def find_processes(run: RunFolder) -> list[str]:
    """Whatever still runs with this run in its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"VJOB_RUN={run.path}\0".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@every_runtime
def test_a_killed_runtime_takes_its_rank_along(box: Box) -> None:
    run = box.vjob.submit(box.conf(box.copy("fail_as_told.py"), "-1", "hang", "deaf", "child"))
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    os.kill(find_starts(run)[0], signal.SIGKILL)
    outcome = box.vjob.wait_over(run)["outcome"]
    assert (outcome["code"], outcome["culprit_signal"]) == (137, "SIGKILL"), box.vjob.explain(run)
    assert not find_processes(run)
    logs = "".join(path.read_text() for path in run.path.glob("scheduler*.out"))
    assert "left behind" not in logs and "cleaning up" not in logs


def find_starts(run: RunFolder) -> list[int]:
    """What the run's agents started as ranks: those themselves, or clients that stay in between."""
    started = find_started(run)
    return [pid for pid in started if STAY[-1] not in started[pid]]


def find_holders(run: RunFolder) -> list[int]:
    """What holds the containers open that ranks enter, one a node."""
    started = find_started(run)
    return [pid for pid in started if STAY[-1] in started[pid]]


def find_agents(run: RunFolder) -> list[int]:
    """The agents of its nodes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(run.agent) in argv and "node" in argv:
            found.append(int(entry.name))
    return found


def find_started(run: RunFolder) -> dict[int, list[str]]:
    """The words of what the run's agents started in sessions of its own."""
    parents, words, leaders, agents = {}, {}, [], find_agents(run)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            words[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        parents[int(entry.name)] = int(stat[1])
        if stat[3] == entry.name:
            leaders.append(int(entry.name))
    found = {pid: words[pid] for pid in leaders if parents[pid] in agents}
    return {pid: argv for pid, argv in found.items() if "conmon" not in argv[0]}


@every_runtime
@pytest.mark.parametrize("writable", [True, False])
def test_the_root_can_be_written_or_not(box: Box, writable: bool) -> None:
    rows = box.look(f"  writable: {str(writable).lower()}\n  mounts: ['/usr/share:/new/place']\n")
    assert {row["writes_root"] for row in rows} == {writable}
    assert all(row["writes_tmp"] for row in rows)


@every_runtime
def test_remap_root_shows_root(box: Box) -> None:
    assert {row["uid"] for row in box.look("  remap_root: true\n")} == {0}


@every_runtime
def test_a_folder_is_used_in_place_and_a_working_directory_may_be_its_own(
    box: Box, image: Path
) -> None:
    if box.runtime == "docker":
        pytest.skip("docker runs what its daemon holds")
    box.image = str(image.parent / "root")
    folder = box.vjob.folder
    rows = box.look(f"  workdir: /home\n  mounts: ['{folder}:{folder}:ro']\n")
    assert {row["cwd"] for row in rows} == {"/home"}
    roots = list((box.scratch / f"vjob-{os.getuid()}" / "roots").glob("vjob-*"))
    assert not [path for path in roots if path.is_dir() and not path.is_symlink()], "no copy"


@every_runtime
def test_a_working_directory_may_have_any_name(box: Box, tmp_path: Path) -> None:
    """It is mounted at its own path, and each runtime has signs of its own between paths."""
    folder = tmp_path / '10:30, it\'s "a" $(touch owned)'
    folder.mkdir()
    script = box.copy("container_view.py").rename(folder / "container_view.py")
    conf = box.conf(script, more=f"workdir: {json.dumps(str(folder))}\n")
    if box.runtime == "charliecloud":
        said = box.vjob("submit", box.vjob.write(conf), code=2).stderr
        assert "charliecloud cannot mount" in said and "colon" in said
        return
    run = box.vjob.submit(conf)
    assert box.vjob.wait_over(run)["verdict"] == "COMPLETED", box.vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    assert {row["cwd"] for row in rows} == {str(folder)}


@every_runtime
def test_a_shell_has_what_ranks_have_or_says_why_there_is_none(box: Box) -> None:
    run = box.vjob.submit(
        box.conf(box.copy("fail_as_told.py"), "-1", "hang", more="env: {NOTE: x}\n")
    )
    wait_for(lambda: read_out(run).count("ready") == 4, 60, lambda: box.vjob.explain(run))
    words = ("--node", "1", "--", "sh", "-c", 'echo "$FROM_IMAGE, $NOTE, $VJOB_NODE, $PWD"')
    if box.runtime in ("podman", "docker"):
        said = box.vjob("shell", "last", *words, code=2).stderr
        assert f"{box.runtime} cannot start a second process" in said
    else:
        said = box.vjob("shell", "last", *words).stdout
        assert said == f"made of dough, x, local1, {box.vjob.folder}\n"
    box.vjob("cancel", "last", "--now")


def test_every_runtime_is_tried_or_known_to_need_more() -> None:
    assert set(RUNTIMES) == {*REAL, "pyxis"}
