"""What a try leaves, as it ends: no job that goes on unseen, and no folder removed under one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.jobs.submit.test_submit import OLD, ONE, FakeSlurm

LOST = 'echo "Socket timed out on send/recv operation" >&2; exit 1'


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "tools")


@pytest.fixture
def vjob(slurm: FakeSlurm, tmp_path: Path) -> Vjob:
    vjob = Vjob(tmp_path, {"PATH": f"{slurm.folder}:{os.environ['PATH']}"})
    vjob.write(ONE)
    return vjob


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_folder_of_a_try_that_could_not_be_ended_is_kept(
    vjob: Vjob, slurm: FakeSlurm, number: signal.Signals
) -> None:
    slurm.say("scancel", LOST)
    with (vjob.folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "vjob", "try", "conf.yaml"],
            cwd=vjob.folder,
            env=vjob.env,
            stderr=said,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup ignores SIGHUP
        )
    try:
        wait_for(lambda: list(vjob.folder.glob("log/77/record.json")), 60)
        process.send_signal(number)
        assert process.wait(200) == 130
    finally:
        process.kill()
        process.wait()
    run = (vjob.folder / "log/77").resolve(strict=True)
    assert f"vjob cancel {run}" in (vjob.folder / "said").read_text()


def test_a_job_of_a_try_whose_submit_got_no_answer_is_cancelled(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    slurm.say("sbatch", LOST)
    row = OLD.format(word="$word", run="$(ls log | head -n 1)")
    ask = f'grep -q "^scancel .*99" {slurm.folder}/asked && word=CANCELLED || word=RUNNING'
    slurm.say("squeue", f"{ask}\ncat <<E\n{row}\nE")
    done = vjob("try", "conf.yaml", code=1)
    assert "may exist all the same" in done.stdout
    assert "scancel" in slurm.asked(), slurm.asked()
    assert "is kept" not in done.stderr
