"""What sbatch is given, and what becomes of its answers; sbatch is a line of shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import UncertainError, VjobError
from vjob.jobs.schedulers.base import Submission
from vjob.jobs.schedulers.job import NOTHING, After
from vjob.jobs.schedulers.script_executor import ScriptExecutor
from vjob.jobs.schedulers.slurm import scheduler as slurm

CANARY = "eyJ-CANARY-in-argv"
WATCHER = """
import os, select, sys
print("ready", flush=True)
while not select.select([0], [], [], 0)[0]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                words = open(f"/proc/{name}/cmdline", "rb").read()
            except OSError:
                continue
            if sys.argv[1].encode() in words:
                sys.exit(print(words))
"""
"""Reads every command line of the machine until its own input ends."""


def fake_sbatch(folder: Path, body: str) -> None:
    tool = folder / "sbatch"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


def submit(folder: Path, text: str = "x", after: After = NOTHING) -> str:
    run = RunFolder(folder)
    run.batch_script().write_text(text)
    return ScriptExecutor(folder).submit_script(Submission(run=run, after=after), "slurm")


def test_our_text_is_submitted_in_a_cleaned_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(
        tmp_path,
        f'env > "{tmp_path}/env"; echo "$@" > "{tmp_path}/args"; '
        f'for f; do :; done; cat "$f" > "{tmp_path}/got"; echo "12;c"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SECRET_OF_THE_SHELL", "x")
    monkeypatch.setenv("SBATCH_PARTITION", "wrong")
    assert submit(tmp_path, "#!/bin/sh\ntrue\n", after=After(started=("7",))) == "12"
    assert (tmp_path / "got").read_text() == "#!/bin/sh\ntrue\n"
    environment = (tmp_path / "env").read_text()
    assert "SECRET_OF_THE_SHELL" not in environment and "SBATCH_" not in environment
    words = (tmp_path / "args").read_text().split()
    assert words[-1] == str(tmp_path / "batch.sh"), "which `scontrol show job` tells for good"
    assert {"--dependency=after:7", f"--chdir={tmp_path}"} < set(words)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("sbatch: error: invalid partition specified: gpux", "sinfo"),
        ("sbatch: fatal: Could not establish a configuration source", "cluster.scheduler to local"),
    ],
)
def test_a_refusal_comes_with_slurms_words_and_a_remedy(
    said: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(tmp_path, f'echo "{said}" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(VjobError, match=f"(?s){said}.*{remedy}"):
        submit(tmp_path)


@pytest.mark.parametrize(
    "body",
    ["exec sleep 30", "echo sbatch: error: Socket timed out on send/recv >&2; exit 1", "echo hm"],
)
def test_without_an_answer_the_job_may_exist(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "SUBMIT_S", 0.5)
    with pytest.raises(UncertainError, match="`vjob list` adopts"):
        submit(tmp_path)


def test_no_value_of_the_environment_stands_in_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While sbatch runs, the command lines of all that was started for it are everybody's."""
    fake_sbatch(tmp_path, f'cat /proc/[0-9]*/cmdline > "{tmp_path}/seen" 2>/dev/null; echo 12')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JWT", f"{CANARY} of {tmp_path}")
    assert submit(tmp_path) == "12"
    assert f"{CANARY} of {tmp_path}".encode() not in (tmp_path / "seen").read_bytes()


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
def test_another_user_who_reads_all_command_lines_finds_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(tmp_path, "echo 12")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    token = f"{CANARY} by another user"
    who = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    watcher = subprocess.Popen(
        [*who, "-I", "-c", WATCHER, token],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stdin is not None and watcher.stdout is not None
    with watcher, watcher.stdout as said:
        if said.readline() != "ready\n":
            pytest.skip("another user cannot start /usr/bin/python3")
        monkeypatch.setenv("SLURM_JWT", token)
        for _ in range(10):
            submit(tmp_path)
        watcher.stdin.close()
        assert said.read() == ""


def test_ctrl_c_does_not_reach_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the whole foreground group: sbatch must not die of it once its job is made."""
    fake_sbatch(tmp_path, "kill -INT $$; echo 12")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert submit(tmp_path) == "12"
