"""`vjob share`: a colleague of the group sees how a run goes, and none of its secrets."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import HOST, PROGRAMS, Vjob
from tests.second_user import Colleague, make_colleague, open_folder
from tests.varuna_core.agent.local_run import TIMING, make_group, make_plan
from varuna_core.records.files import write_atomic
from varuna_core.records.plan import read_plan, write_plan
from varuna_core.records.record import RunRecord, write_record
from varuna_core.records.runfolder import RunFolder, may_share, may_share_folder
from vjob.shelf import share
from vjob.shelf.share import Secrets, share_run

CONF = """
name: quick
program: {{script: {script}, args: ["0", "exit:0", "--api-key", "hunter-2-hunter"]}}
env: {{HF_TOKEN: hf_TOPSECRETTOPSECRET, SERVICE_PASSWORD: correct-horse}}
pass_env: [PLAIN_NAME]
setup: ["export WANDB_API_KEY=abcdefgh"]
cluster: {{scheduler: local, walltime_min: 7}}
"""
Ended = tuple[Vjob, RunFolder]
SECRETS = (b"TOPSECRET", b"hunter-2", b"correct-horse", b"abcdefgh", b"Zq83kdPw72mmXc01")


@pytest.fixture(scope="module")
def colleague() -> Iterator[Colleague]:
    with make_colleague() as colleague:
        yield colleague


@pytest.fixture(scope="module")
def ended(colleague: Colleague) -> Iterator[Ended]:
    with open_folder() as folder:
        vjob = Vjob(folder, {"PLAIN_NAME": "Zq83kdPw72mmXc01"})
        run = vjob.submit(CONF.format(script=PROGRAMS / "fail_as_told.py"))
        vjob.wait_over(run)
        yield vjob, run


@pytest.fixture
def shared(ended: Ended) -> Iterator[Ended]:
    vjob, run = ended
    vjob("share", str(run.path), "--group", "users")
    yield ended
    vjob("share", str(run.path), "--private")


def test_a_colleague_sees_a_shared_run_and_no_secret(shared: Ended, colleague: Colleague) -> None:
    _, run = shared
    said = colleague.vjob("status", str(run.path), "--json")
    snapshot = json.loads(said.stdout)
    assert snapshot["verdict"]["health"] == "DONE" and snapshot["walltime_s"] == 420
    assert snapshot["world"] == 1 and snapshot["attempt_started"] is not None
    logs = colleague.vjob("logs", str(run.path))
    assert "rank 0 ready" in logs.stdout, logs.stderr
    table = colleague.vjob("report", str(run.path), "--text")
    assert "the one rank exited 0" in table.stdout, table.stderr
    both = colleague.vjob("compare", str(run.path), str(run.path))
    assert "FIGURES" in both.stdout, both.stderr
    read = colleague.read_everything(run.path)
    assert b"rank 0 ready" in read
    assert not [secret for secret in SECRETS if secret in read]


def test_a_closed_run_is_the_owners_alone(ended: Ended, colleague: Colleague) -> None:
    vjob, run = ended
    vjob("share", str(run.path), "--group", "users")
    vjob("share", str(run.path), "--private")
    for path in [run.path, *run.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list(run.path.rglob("*.shared.json"))
    assert run.path.parent.stat().st_mode & 0o777 == 0o700
    assert colleague.read_everything(run.path) == b""


def test_a_dry_run_changes_nothing(ended: Ended) -> None:
    vjob, run = ended
    paths = [run.path.parent, run.path, *run.path.rglob("*")]
    before = {path: (path.stat().st_mode, path.stat().st_gid) for path in paths}
    said = json.loads(vjob("share", str(run.path), "--group=users", "--dry-run", "--json").stdout)
    assert "node.sh" in said["private"]
    assert any(name.startswith("attempt-0/") and name.endswith(".out") for name in said["shared"])
    assert {path: (path.stat().st_mode, path.stat().st_gid) for path in paths} == before


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("the password is correct-horse\n", "the value of SERVICE_PASSWORD"),
        ("logged in with Zq83kdPw72mmXc01\n", "the value of PLAIN_NAME"),
        (f"cloning with ghp_{'Q7z' * 12}\n", "something that looks like a secret"),
    ],
)
def test_a_log_with_a_secret_is_kept_back_and_named(
    line: str, what: str, ended: Ended, colleague: Colleague
) -> None:
    vjob, run = ended
    log = run.attempt(0).path / f"{HOST}.out"
    text = log.read_text()
    log.write_text(text + line)
    try:
        said = vjob("share", str(run.path), "--group", "users").stdout
        assert f"{HOST}.out: line 2 holds {what}" in said
        assert line.split()[-1].encode() not in colleague.read_everything(run.path)
        vjob("share", str(run.path), "--group", "users", "--anyway")
        assert line.split()[-1].encode() in colleague.read_everything(run.path)
    finally:
        log.write_text(text)
        vjob("share", str(run.path), "--private")


def test_a_file_that_is_not_known_stays_closed(ended: Ended, colleague: Colleague) -> None:
    vjob, run = ended
    (run.path / "notes.txt").write_text("unknown words\n")
    (run.path / "deep").mkdir(mode=0o755)
    (run.path / "deep" / "record.json").write_text("unknown words\n")
    (run.path / "report.html").symlink_to("/etc/hostname")
    mode = Path("/etc/hostname").stat().st_mode
    vjob("share", str(run.path), "--group", "users")
    assert b"unknown words" not in colleague.read_everything(run.path)
    assert Path("/etc/hostname").stat().st_mode == mode
    (run.path / "report.html").unlink()
    vjob("share", str(run.path), "--private")


CLOSED = [
    "plan.json", "node.sh", "batch.sh", "machines.json", "function/submitted.pkl",
    "attempt-3/plan.json", "attempt-3/state/go.json", "code/train.py", "morph/orders.json",
    "attempt-0/../plan.json", "tensorboard/events.out", "attempt-0/state/link.json",
    "morph/link.json", "morph/epochs/1.orders.json",
]  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_what_may_hold_secrets_is_not_on_the_list(name: str) -> None:
    assert not may_share(name)


def test_what_readers_need_is_on_the_list() -> None:
    run = RunFolder(Path("/run"))
    attempt, morph = run.attempt(1), run.morph
    needed = [
        run.conf, run.resolved, run.record, run.training, run.report, run.scheduler_log("a"),
        run.events("a"), run.vjob_events, run.morph_events, run.code_diff, run.packages,
        attempt.preflight, attempt.training, attempt.outcome, attempt.stop, attempt.signal,
        attempt.next, attempt.skipped, attempt.node_log("n-1.x", "gpu.jsonl"),
        attempt.node_log("n", "times"), attempt.node_report(1), attempt.beat(1), attempt.exit(1),
        attempt.rank_log(1, "out"), attempt.trace(1), attempt.node_trace(1), morph.claim(1),
        morph.manager(1), morph.node(1), morph.leave(1), morph.join(1), morph.join_job(1),
    ]  # fmt: skip
    names = [str(path.relative_to(run.path)) for path in needed]
    assert [name for name in names if not may_share(name)] == []
    parents = {str(path.parent.relative_to(run.path)) for path in needed} - {"."}
    assert [name for name in parents if not may_share_folder(name)] == []


def test_a_run_that_may_morph_shows_no_values_of_its_environment(colleague: Colleague) -> None:
    """Each attempt has a plan of its own; a chmod of the folder opened it."""
    with open_folder() as folder:
        run = RunFolder(folder / "log" / "run")
        run.path.mkdir(mode=0o700, parents=True)
        plan = make_plan(
            make_group("all", 3, 1), command=("true", "hf_TOPSECRETTOPSECRET"), timing=TIMING,
            morph=True, env={"HF_TOKEN": "hf_TOPSECRETTOPSECRET"},
        )  # fmt: skip
        write_plan(run.plan, plan)
        run.attempt(0).make()
        write_plan(run.attempt(0).plan, plan)
        write_record(run, RunRecord(
            run="run", name="run", state="ended", scheduler="local", layout="single", num_jobs=1,
            jobs=(), submitted=1.0, user="u", host="h", conf="c", version="v", pid=1,
            pid_start=None,
        ))  # fmt: skip
        shared = share_run(run, "users", is_preview=False, anyway=False)
        assert "attempt-0/plan.json" in shared.sharing.copies
        read = colleague.read_everything(run.path)
        assert b"plan.shared.json" in read and b"HF_TOKEN" in read and b"TOPSECRET" not in read
        copy = read_plan(run.attempt(0).path / "plan.shared.json")
        assert copy is not None and copy.world == 3 and copy.env == {"HF_TOKEN": "<redacted>"}


def test_of_a_file_that_is_too_large_nothing_is_copied_and_the_start_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "MOST_READ", 1000)
    texts: list[str] = []
    find = share.find_secrets
    monkeypatch.setattr(share, "find_secrets", lambda text: texts.append(text) or find(text))
    plan = RunFolder(tmp_path).plan
    plan.write_text(json.dumps({"progress": "a" * 5000}))
    assert Secrets(RunFolder(tmp_path)).hide(plan) is None
    assert sum(map(len, texts)) <= 1000


def test_a_file_that_is_written_again_stays_shared(tmp_path: Path) -> None:
    file = tmp_path / "shared" / "record.json"
    file.parent.mkdir()
    file.parent.chmod(0o2750)
    write_atomic(file, "old")
    file.chmod(0o640)
    write_atomic(file, "new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    file.chmod(0o600)
    write_atomic(file, "newer")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_group_that_is_not_ones_own_is_refused(ended: Ended) -> None:
    vjob, run = ended
    done = vjob("share", str(run.path), "--group", "nobody-has-this", code=2)
    assert "there is no such group; your groups are" in done.stderr
    assert "give either --group" in vjob("share", str(run.path), code=2).stderr
