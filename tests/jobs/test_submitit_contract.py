"""The underscored hooks of submitit that `jobs/slurm_executor.py` builds on."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor as Submitit

from jobs import slurm_executor
from jobs.errors import VjobError


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_make_submission_file_text", ["self", "command", "uid"]),
        ("_make_submission_command", ["self", "submission_file_path"]),
        ("_get_job_id_from_submission_command", ["string"]),
        ("_num_tasks", ["self"]),
        ("affinity", []),
    ],
)
def test_the_hook_is_there_with_its_parameters(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(Submitit, name)).parameters) == parameters


def test_submit_command_calls_the_hooks_we_fill() -> None:
    source = inspect.getsource(core.PicklingExecutor._submit_command)
    for hook in ("_make_submission_file_text", "_make_submission_command", "_num_tasks"):
        assert hook in source
    assert issubclass(utils.FailedJobError, Exception)


def fake_sbatch(folder: Path, body: str) -> None:
    tool = folder / "sbatch"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


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
    job = slurm_executor._submit_text("#!/bin/sh\ntrue\n", folder=tmp_path, after="7")
    assert job == "12"
    assert (tmp_path / "got").read_text() == "#!/bin/sh\ntrue\n"
    environment = (tmp_path / "env").read_text()
    assert "SECRET_OF_THE_SHELL" not in environment and "SBATCH_" not in environment
    assert "--dependency=after:7" in (tmp_path / "args").read_text()


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
        slurm_executor._submit_text("x", folder=tmp_path, after=None)
