"""What sbatch is given, and what becomes of its answers; sbatch is a line of shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import UncertainError, VjobError
from vjob.jobs.schedulers import slurm
from vjob.jobs.schedulers.base import Submission
from vjob.jobs.schedulers.script_executor import ScriptExecutor
from vjob.jobs.schedulers.slurm_commands import NOTHING, After


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
        ("sbatch: fatal: Could not establish a configuration source", "scheduler: local"),
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
