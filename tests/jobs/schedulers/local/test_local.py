"""Runs on this machine: the rendered scripts, real processes, real files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, read_out, read_rank, wait_for
from tests.varuna_core.agent.local_run import make_plan
from varuna_core.records.files import write_atomic
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import RunView
from vjob.jobs.schedulers.local import supervisor as local_supervisor
from vjob.jobs.schedulers.local.scheduler import START_S
from vjob.jobs.schedulers.local.supervisor import LocalJob

WHO = """
name: who
program: {{script: {who}, args: {args}}}
cluster:
  scheduler: local
  hetero: {hetero}
  walltime_min: 2
  nodes:
    - {{group: m, count: 1, ranks: 2}}
    - {{group: s, count: 2, ranks: 1}}
env: {{NOTE: {note}, MY_TOKEN: s3cret}}
"""

FATE = """
name: fate
program: {{script: {fate}, args: {args}}}
cluster:
  scheduler: local
  walltime_min: 2
  grace_s: 2
  nodes: [{{group: m, count: 2, ranks: 2}}]
"""

TRICKY = ["a b", "$(touch owned)", 'it\'s "quoted"', "new\nline", "ünïcode", "", ":", "`id`", "\\"]


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def who(hetero: str = "auto", args: list[str] | None = None, note: str = "x") -> str:
    return WHO.format(
        who=PROGRAMS / "report_rank.py",
        hetero=hetero,
        args=json.dumps(args or []),
        note=json.dumps(note),
    )


def fate(*args: str) -> str:
    return FATE.format(fate=PROGRAMS / "fail_as_told.py", args=json.dumps(list(args)))


@pytest.mark.parametrize("hetero", ["hetjob", "split"])
def test_all_ranks_run_and_meet(vjob: Vjob, hetero: str) -> None:
    run = vjob.submit(who(hetero))
    record = vjob.wait_over(run)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    rows = {row["rank"]: row for row in map(json.loads, read_out(run).splitlines())}
    assert sorted(rows) == [0, 1, 2, 3]
    assert [rows[r]["local_rank"] for r in range(4)] == [0, 1, 0, 0]
    assert [rows[r]["local_world"] for r in range(4)] == [2, 2, 1, 1]
    assert {row["world"] for row in rows.values()} == {4}
    assert len(record["jobs"]) == (2 if hetero == "split" else 1)


def test_arguments_and_values_reach_the_program_unchanged(vjob: Vjob) -> None:
    note = "two\nlines $HOME 'q' \"d\" ünï"
    run = vjob.submit(who(args=TRICKY, note=note))
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    assert all(row["args"] == TRICKY and row["note"] == note for row in rows)
    assert all(row["leak"] is None for row in rows)
    assert not list(vjob.folder.rglob("owned"))


VARUNA = """
name: varuna
program: {script: show.py, args: [--lr, "1e-4", "a b;$(c)", "%{rank}"], arguments: varuna}
parallel: {pipeline: 2}
train: {global_batch_size: 8, micro_batch_size: 2}
cluster: {scheduler: local, nodes: [{group: all, count: 2, ranks: 2}]}
"""


def test_a_script_for_varunas_launcher_gets_its_arguments_before_its_own(vjob: Vjob) -> None:
    (vjob.folder / "show.py").write_text("import sys; print(sys.argv[1:])")
    run = vjob.submit(VARUNA)
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    own = "'--stage_to_rank_map=0,1;2,3;', '--chunk_size=2', '--batch-size=4'"
    theirs = "'--lr', '1e-4', 'a b;$(c)', '%{rank}'"
    for rank in range(4):
        words = f"['--rank={rank}', '--local_rank={rank % 2}', {own}, {theirs}]"
        assert read_rank(run, rank).strip() == words
    said = vjob("submit", vjob.write(VARUNA.replace("global_batch_size: 8, ", "")), code=2).stderr
    assert "program.arguments = varuna: needs train.global_batch_size" in said


def test_secrets_stay_in_the_plan_and_files_are_private(vjob: Vjob) -> None:
    run = vjob.submit(who())
    vjob.wait_over(run)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    for path in run.path.iterdir():
        if path.is_file() and b"s3cret" in path.read_bytes():
            assert path == run.plan
    assert stat.S_IMODE(run.plan.stat().st_mode) == 0o600
    vjob.write(who(args=["--api-key", "s3cret"]))
    assert "s3cret" not in vjob("submit", "conf.yaml", "--dry-run").stdout


def test_the_rank_that_exits_9_is_the_culprit_and_the_exit_code(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    record = vjob.wait_over(run)
    assert record["verdict"] == "FAILED"
    outcome = record["outcome"]
    assert (outcome["code"], outcome["culprit_rank"]) == (9, 2)
    assert "ValueError: this is the end" in outcome["reason"]
    assert json.loads((run.path / "local.json").read_text())["exit_code"] == "9:0"
    said = vjob("status", "last", code=10).stdout
    assert said.splitlines()[1].strip() == record["message"]
    assert "attempt 0, 4 ranks: 1 failed, 3 stopped\n" in said


def test_a_killed_rank_is_named_with_its_signal(vjob: Vjob) -> None:
    run = vjob.submit(fate("1", "kill"))
    outcome = vjob.wait_over(run)["outcome"]
    assert (outcome["culprit_rank"], outcome["culprit_signal"]) == (1, "SIGKILL")


def test_deaf_ranks_are_killed_after_the_grace(vjob: Vjob) -> None:
    run = vjob.submit(fate("0", "exit:3", "deaf"))
    assert vjob.wait_over(run, timeout_s=30)["outcome"]["code"] == 3


def test_cancel_asks_ranks_that_catch_usr1_to_checkpoint_first(vjob: Vjob) -> None:
    run = vjob.submit(fate("-1", "hang", "catch"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    said = vjob("cancel", "last").stdout
    assert "left after it was asked to save" in said
    assert read_out(run).count("got SIGUSR1") == 4
    said = vjob("status", "last", code=16).stdout
    assert "cancelled with vjob cancel: all 4 ranks exited 0" in said
    assert "the job ended well" not in said
    state = json.loads((run.path / "local.json").read_text())
    assert (state["state"], state["exit_code"]) == ("CANCELLED", "143:0")


def test_a_checkpoint_that_is_done_as_its_time_is_up_is_called_one(
    vjob: Vjob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = vjob.submit(fate("-1", "hang", "catch"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    answers = [True, False]

    def wait(views: Sequence[RunView], wait_s: int, cancelled: float = 0.0) -> list[RunView]:
        vjob.wait_over(run)
        return list(views) if answers.pop(0) else []

    monkeypatch.setattr("vjob.jobs.runs.cancel._wait_all", wait)
    monkeypatch.setenv("XDG_STATE_HOME", vjob.env["XDG_STATE_HOME"])
    said = cancel_run(run, now=False, wait_s=30, say=str)
    assert said.startswith(f"{run.name} left after it was asked to save") and answers == []


def test_a_checkpoint_that_fails_is_not_called_one(vjob: Vjob) -> None:
    run = vjob.submit(fate("-1", "hang", "catch:3"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    said = vjob("cancel", "last", code=1).stderr
    assert "in another way than asked: FAILED: rank" in said and "exited 3" in said


def test_cancel_ends_a_run_whose_folder_cannot_be_written(
    vjob: Vjob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = vjob.submit(fate("-1", "hang", "catch"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))

    def refuse(*args: object, **facts: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vjob.jobs.runs.cancel.append_event", refuse)
    monkeypatch.setenv("XDG_STATE_HOME", vjob.env["XDG_STATE_HOME"])
    said: list[object] = []
    assert "is cancelled" in cancel_run(run, now=False, wait_s=30, say=said.append)
    assert "No space left on device; ranks are not asked to checkpoint" in str(said)


def test_cancel_of_ranks_without_a_handler_ends_them(vjob: Vjob) -> None:
    run = vjob.submit(fate("-1", "hang"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    done = vjob("cancel", run.name)
    assert "is cancelled" in done.stdout
    assert "no rank is asked to save" in done.stdout + done.stderr  # nothing was said of it
    found = vjob.status("last")
    assert (found["state"], found["message"]) == ("CANCELLED", "cancelled with vjob cancel")
    assert "over already" in vjob("cancel", "last", code=2).stderr


def test_a_requeue_starts_a_new_attempt(vjob: Vjob) -> None:
    run = vjob.submit(fate("-1", "hang", "signals"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    (run.path / "local-requeue.L1").touch()
    pids = find_ranks(run.path)
    assert len(pids) == 4
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: read_out(run, 1).count("attempt 1") == 4, 60, lambda: vjob.explain(run))
    said = vjob("status", "last").stdout
    assert "attempt 1, 4 ranks\n  attempt 0 ended: rank" in said and "SIGKILL" in said
    vjob("cancel", "last", "--now")


def find_ranks(run: Path) -> list[int]:
    """Pids of the ranks of a run, by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                env = (entry / "environ").read_bytes()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if (
                f"VJOB_RUN={run}\0".encode() in env
                and b"fail_as_told.py" in words
                and b"RANK=" in env
            ):
                found.append(int(entry.name))
    return sorted(found)


def test_the_supervisor_gone_is_the_end_and_not_a_run_for_ever(vjob: Vjob) -> None:
    run = vjob.submit(fate("-1", "hang"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    state = json.loads((run.path / "local.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    record = vjob.wait_over(run)
    assert (record["verdict"], record["end"]["cause"]) == ("FAILED", "supervisor-died")
    wait_for(lambda: not find_ranks(run.path), 30)


def test_no_rank_outlives_a_batch_script_that_was_killed(vjob: Vjob) -> None:
    run = vjob.submit(fate("-1", "hang"))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    supervisor = json.loads((run.path / "local.json").read_text())["pid"]
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert vjob.wait_over(run)["verdict"] == "FAILED"
    assert not find_ranks(run.path)


def test_a_cancel_right_after_the_submit_counts(vjob: Vjob) -> None:
    vjob.submit(fate("-1", "hang"))
    assert "is cancelled" in vjob("cancel", "last", "--now").stdout
    assert vjob.status("last")["state"] == "CANCELLED"


def test_logs_can_be_narrowed_to_a_rank_and_a_pattern(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    said = vjob("logs", "last", "--rank", "2", "--grep", "Value").stdout
    assert said == "rank 2 err | ValueError: this is the end\n"
    assert "local1 err | 2: ValueError" in vjob("logs", "fate", "--err").stdout
    assert "local1 | 2: rank 2 ready" in vjob("logs", "last", "--node", "local1").stdout


def test_logs_tell_what_all_ranks_print_once_and_raw_as_it_is(vjob: Vjob) -> None:
    script = vjob.folder / "say.py"
    script.write_text("import os\nprint('loading')\nprint('rank', os.environ['RANK'])\n")
    text = fate("-1", "hang").replace(str(PROGRAMS / "fail_as_told.py"), str(script))
    followed = vjob("submit", vjob.write(text), "--follow").stdout  # from before there was a rank
    assert "loading" in followed  # once, where all came at the same moment
    said = vjob("logs", "last").stdout.splitlines()
    assert said[0] == "x4 all ranks | loading"
    assert sorted(said[1:]) == [f"local{rank // 2} | {rank}: rank {rank}" for rank in range(4)]
    raw = vjob("logs", "last", "--raw").stdout.splitlines()
    assert len(raw) == 8 and raw.count("local0 | 0: loading") == 1
    assert vjob("logs", "last", "-f").stdout.count("loading") == 1


def test_logs_of_a_rank_or_node_that_is_none_name_those_that_are(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    for options in ((), ("-f",)):
        said = vjob("logs", "last", "--rank", "0", "--rank", "99", *options, code=2)
        assert said.stderr == f"vjob: {run.name} has no rank 99, only 0 to 3\n"
        said = vjob("logs", "last", "--node", "zz", "--node", "local0", *options, code=2)
        assert said.stderr == f"vjob: {run.name} has no node zz; it has local0, local1\n"


def test_list_shows_each_run_and_two_submits_at_once_get_two_folders(vjob: Vjob) -> None:
    text = who()
    runs = [vjob.submit(text), vjob.submit(text)]
    for run in runs:
        vjob.wait_over(run)
    rows = json.loads(vjob("list", "--json").stdout)
    assert [row["run"] for row in rows] == [run.name for run in runs]
    assert len({run.name for run in runs}) == 2
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert (runs[0].path.parent / "who").resolve() == runs[1].path


def test_job_may_be_a_path_a_name_an_id_or_last(vjob: Vjob) -> None:
    run = vjob.submit(who())
    vjob.wait_over(run)
    for job in ("last", "who", "L1", run.name, str(run.path), str(run.path.parent / "L1")):
        assert vjob.status(job)["run"] == run.name
    assert "no run '../../etc'" in vjob("status", "../../etc", code=2).stderr


def test_a_job_with_the_same_id_in_another_index_is_another_job(vjob: Vjob, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Vjob(tmp_path / "other")
    ended = other.submit(who())
    going = vjob.submit(fate("-1", "hang"))
    jobs = other.wait_over(ended)["jobs"]
    assert jobs == json.loads(going.record.read_text())["jobs"]
    assert other.status(str(going.path))["state"] != "COMPLETED"
    assert "is cancelled" in other("cancel", str(going.path), "--now").stdout
    assert vjob.status("last")["state"] == "CANCELLED"


def test_a_node_that_misses_a_path_is_named_before_any_rank_starts(vjob: Vjob) -> None:
    """The plan is what nodes go by: one that names a missing path stands for a node without it."""
    from varuna_core.records.plan import read_plan, write_plan

    done = vjob.submit(who())
    vjob.wait_over(done)
    plan = read_plan(done.plan)
    assert plan is not None
    write_plan(done.plan, replace(plan, must_exist=(*plan.must_exist, "/no/such/place")))
    again = subprocess.run(
        ["bash", str(done.batch_script())],
        env={**vjob.env, "PATH": fake_tools(vjob, done), "SLURM_JOB_ID": "L9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 112
    assert "/no/such/place" in again.stdout + again.stderr


def fake_tools(vjob: Vjob, run: RunFolder) -> str:
    """PATH with the stand-in srun first, as the supervisor makes it."""
    folder = vjob.folder / "bin"
    folder.mkdir()
    tool = folder / "srun"
    tool.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m vjob.jobs.schedulers.local.srun srun "$@"\n'
    )
    tool.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_run_outlives_its_terminal(vjob: Vjob) -> None:
    """`submit --follow` in a terminal that is closed: the follower dies of it, the run does not."""
    name = vjob.write(fate("-1", "hang"))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(vjob.folder)
        command = [sys.executable, "-m", "vjob", "submit", name, "--follow"]
        os.execve(sys.executable, command, vjob.env)
    log = vjob.folder / "log" / "fate"
    wait_for(log.exists, 30)
    run = RunFolder(log.resolve())
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    os.close(terminal)
    os.waitpid(child, 0)
    assert vjob.status("last")["state"] == "RUNNING"
    assert len(find_ranks(run.path)) == 4
    vjob("cancel", "last", "--now")


def test_a_full_disk_refuses_the_submit_and_leaves_nothing(vjob: Vjob) -> None:
    """A tiny file system of its own, filled to the last block."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = vjob.folder / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
    try:
        with contextlib.suppress(OSError):
            (folder / "filler").write_bytes(b"x" * 64 * 1024)
        said = vjob("submit", vjob.write(who() + f"log_folder: {folder}/log\n"), code=1).stderr
        assert "No space left" in said and "nothing was submitted" in said
        assert not list(folder.glob("log/who*"))
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_log_folder_without_executables_has_its_stand_ins_elsewhere(vjob: Vjob) -> None:
    """The batch script found the real srun of the machine instead."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = vjob.folder / "data"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,noexec", "none", folder], check=True)
    try:
        run = vjob.submit(who() + f"log_folder: {folder}/log\n")
        vjob.wait_over(run)
        assert vjob.status("last")["state"] == "COMPLETED"
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_supervisor_waits_for_room_in_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the moment of the start, or of the end, which was a lost run or a dead one."""
    job, tries = LocalJob(RunFolder(tmp_path), "L1", None, make_plan()), list[object]()

    def write_json(path: Path, value: object) -> None:
        tries.append(value)
        if len(tries) in (1, 2, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, json.dumps(value))

    monkeypatch.setattr(local_supervisor, "write_json", write_json)
    monkeypatch.setattr(local_supervisor, "WAIT_S", 0.01)
    job.write_state("RUNNING")
    assert json.loads((tmp_path / "local.json").read_text())["state"] == "RUNNING"
    job.write_state("COMPLETED", "0:0")
    assert json.loads((tmp_path / "local.json").read_text())["state"] == "COMPLETED"


def test_a_supervisor_keeps_room_for_the_end_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk stays full, the run was called dead ten minutes after it had ended well."""
    job = LocalJob(RunFolder(tmp_path), "L1", None, make_plan())
    job.write_state("RUNNING")

    def write_json(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_supervisor, "write_json", write_json)
    job.write_state("COMPLETED", "0:0")
    assert json.loads((tmp_path / "local.json").read_text())["state"] == "COMPLETED"
    assert [path.name for path in tmp_path.iterdir()] == ["local.json"]


def test_a_supervisor_that_finds_no_room_at_its_start_never_starts_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_supervisor.ROOM_S < START_S  # by then the job counts as one that never starts

    def write_json(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_supervisor, "write_json", write_json)
    monkeypatch.setattr(local_supervisor, "WAIT_S", 0.01)
    monkeypatch.setattr(local_supervisor, "ROOM_S", 0.05)
    with pytest.raises(OSError, match="No space left"):
        LocalJob(RunFolder(tmp_path), "L1", None, make_plan()).write_state("RUNNING")


def test_submits_at_the_same_moment_get_folders_and_ids_of_their_own(vjob: Vjob) -> None:
    name = vjob.write(who())
    children = [vjob.start("submit", name) for _ in range(4)]
    assert {child.wait(timeout=60) for child in children} == {0}
    rows = json.loads(vjob("list", "--json").stdout)
    assert len({row["run"] for row in rows}) == len({row["jobs"][0] for row in rows}) == 4
    for row in rows:
        vjob.wait_over(RunFolder(Path(row["folder"])))


def test_the_node_and_the_setup_line_that_failed_are_named(vjob: Vjob) -> None:
    """The verdict said `a setup line failed on local2: see the scheduler's log`."""
    lmod = 'Lmod has detected the following error: The following module(s) are unknown: "cuda/9"'
    function = f"module() {{ if true; then echo {shlex.quote(lmod)} >&2; false; fi; return 1; }}"
    line = '[ "$VJOB_NODE_NAME" != local2 ] || module load cuda/9 --token=hf_abcdefghijklmno'
    run = vjob.submit(who() + f"setup: {json.dumps([function, 'true', line])}\n")
    record = vjob.wait_over(run)
    shown = line.replace("hf_abcdefghijklmno", "<redacted>")
    assert record["message"] == f"a setup line failed on local2 with exit status 1: {shown}"
    assert (record["outcome"]["code"], record["outcome"]["culprit_node"]) == (112, "local2")
    assert record["end"]["cause"] == "setup-failed"
    said = vjob("status", "last", code=10).stdout
    assert f"({lmod})" in said and "append `|| true` if the run can do without it" in said
    said = vjob("logs", "last", "--errors").stdout
    assert f"> {lmod}" in said and "not the cause" not in said


@pytest.mark.parametrize(
    "line",
    ["exit 3", "(exit 3)", "source sourced.sh", "cat <<X\na\nX\n(exit 3)", "false || (exit 3)"],
)
def test_a_setup_line_is_named_however_it_fails(line: str, vjob: Vjob) -> None:
    (vjob.folder / "sourced.sh").write_text("true\n\n(exit 3)\n")
    record = vjob.wait_over(vjob.submit(who() + f"setup: {json.dumps(['true', line, 'true'])}\n"))
    last = line.splitlines()[-1]
    assert record["message"].endswith(f" with exit status 3: {last}")


def test_a_log_folder_that_cannot_be_written_is_refused_with_what_to_do(vjob: Vjob) -> None:
    blocker = vjob.folder / "file"
    blocker.write_text("")
    said = vjob("submit", vjob.write(who() + f"log_folder: {blocker}/log\n"), code=1)
    assert "nothing was submitted" in said.stderr and "log_folder" in said.stderr


def test_logs_show_the_first_error_with_its_traceback(vjob: Vjob) -> None:
    script = vjob.folder / "break.py"
    script.write_text(
        "import os, sys, time, warnings\n"
        "warnings.warn('SomethingError: odd')\n"
        "print('reading', flush=True)\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise KeyError('tokens')\n"
        "time.sleep(60)\n"
    )
    run = vjob.submit(fate("-1", "hang").replace(str(PROGRAMS / "fail_as_told.py"), str(script)))
    vjob.wait_over(run)
    said = vjob("logs", "last", "--errors").stdout.splitlines()
    assert said[0] == "DEAD: rank 2 on local1 exited 1: KeyError: 'tokens'"
    at = said.index("rank 2 on local1, local1.err")
    assert said[at + 1] == "  Traceback (most recent call last):"
    assert "> KeyError: 'tokens'" in said
    assert "no line is known" in vjob("logs", "last", "--errors", "--rank", "0").stdout


SILENT = """
import json, os, time
rank = int(os.environ["RANK"])
if rank != 2:
    time.sleep(60)
error = {"message": "shard.LostError: \\x1b[1m7", "extraInfo": {"py_callstack": "Traceback\\n  a"}}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": error}, file)
os._exit(3)
"""


def test_an_exception_in_an_error_file_is_known_though_nothing_was_printed(
    vjob: Vjob,
) -> None:
    script = vjob.folder / "silent.py"
    script.write_text(SILENT)
    run = vjob.submit(fate("-1", "hang").replace(str(PROGRAMS / "fail_as_told.py"), str(script)))
    record = vjob.wait_over(run)
    assert record["end"]["cause"] == "rank-exception"
    assert "rank 2 on local1 exited 3: shard.LostError: " in record["message"]
    found = json.loads(vjob("status", "last", "--json", code=10).stdout)
    assert found["verdict"]["end"]["cause"] == "rank-exception"
    said = vjob("logs", "last", "--errors").stdout.splitlines()
    at = said.index("rank 2 on local1, ranks/2.error.json")
    assert said[at + 1] == "  Traceback" and said[at + 3].startswith("> shard.LostError: ")
    assert "\x1b" not in "".join(said)
    assert "no line is known" in vjob("logs", "last", "--errors", "--rank", "0").stdout


LAUNCHER = """
import os, sys, time
if os.environ["RANK"] != "2":
    time.sleep(60)
print('Traceback (most recent call last):\\n  File "t.py", line 3\\nValueError: no data',
      file=sys.stderr, flush=True)
class ChildFailedError(Exception):
    pass
raise ChildFailedError("=====")
"""


def test_of_a_launcher_the_exception_of_its_process_counts(vjob: Vjob) -> None:
    """A run under torchrun ended with a ChildFailedError, whose message is a ruler."""
    script = vjob.folder / "launcher.py"
    script.write_text(LAUNCHER)
    run = vjob.submit(fate("-1", "hang").replace(str(PROGRAMS / "fail_as_told.py"), str(script)))
    assert vjob.wait_over(run)["message"] == "rank 2 on local1 exited 1: ValueError: no data"
