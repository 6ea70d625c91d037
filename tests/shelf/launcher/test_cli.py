"""The launcher's command line, its page, and what it refuses before it looks at any machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT
from tests.shelf.launcher.launcher_user import wait_until
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.runs.find import view_run
from vjob.jobs.submit import submit as submitting
from vjob.shelf.launcher.cli import build_parser, main

SIZES = ("--nstages", "1", "--chunk_size", "1", "--batch_size", "4")


def test_the_program_of_the_page_runs_with_the_command_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/launcher.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (machines,) = re.findall(r"```\n(127.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "machines").write_text(machines)
    (tmp_path / "varuna.env").write_text(f"PYTHONPATH='{ROOT}'\n")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (conf,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "conf.yaml").write_text(f"{conf}env: {{PYTHONPATH: {ROOT}}}\n")
    again = subprocess.run(
        [sys.executable, "-m", "vjob", "submit", "conf.yaml", "--follow"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    losses = set(re.findall(r"^\S+ \| \d: loss (\S+)$", done.stdout, re.MULTILINE))
    assert losses == set(re.findall(r"loss (\S+)$", again.stdout, re.MULTILINE))
    assert len(losses) == 1 and done.stdout.count(" loss ") == 2, "both ranks say the same"


def test_ctrl_c_while_it_is_submitted_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "available_machines.out").write_text("127.0.0.1\n")
    (tmp_path / "a.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    submit = submitting.submit

    def interrupted(*given: Any, **named: Any) -> None:
        submit(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(submitting, "submit", interrupted)
    words = ["--cpu", "--gpus_per_node", "1", "--no_morphing"]
    assert main([*words, *SIZES, "a.py"]) == 130
    (record,) = [path for path in tmp_path.glob("log/a-*/record.json")]
    wait_until(lambda: view_run(RunFolder(record.parent)).record.state == "ended", "the end")


def test_sigterm_while_it_is_submitted_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "available_machines.out").write_text("127.0.0.1\n")
    (tmp_path / "a.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    submit = submitting.submit

    def interrupted(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return submit(*given, **named)

    monkeypatch.setattr(submitting, "submit", interrupted)
    words = ["--cpu", "--gpus_per_node", "1", "--no_morphing"]
    before = signal.getsignal(signal.SIGTERM)
    assert main([*words, *SIZES, "a.py"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    (record,) = [path for path in tmp_path.glob("log/a-*/record.json")]
    wait_until(lambda: view_run(RunFolder(record.parent)).record.state == "ended", "the end")


def test_every_flag_of_the_page_is_a_flag_and_the_other_way_round() -> None:
    page = (ROOT / "docs/launcher.md").read_text().partition("## Flags")[2]
    table = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `--"))
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"--[\w-]+", table)) == known - {"-h", "--help"}


def test_help_teaches_and_imports_no_torch() -> None:
    code = (
        "import sys; from vjob.shelf.launcher.cli import build_parser\n"
        "print(build_parser().format_help())\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pandas')))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert "--kill" in done.stdout and "exit codes" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_size", "4", "a.py"], "--profile, a file that varuna_core.Profiler"),
        (["--batch_size", "4", "--profile", "none", "a.py"], "none holds no profile"),
        (["--batch_size", "4", "--profile", ".", "--chunk_size", "2", "a.py"], "give both, or"),
        (["--nstages", "1", "--batch_size", "4", "a.py"], "--nstages and --chunk_size are both"),
        (["--nstages", "1", "--chunk_size", "1", "a.py"], "--batch_size is needed"),
        ([*SIZES], "which training script"),
        ([*SIZES, "--machine_list", "none", "a.py"], "none: No such file"),
        ([*SIZES, "--env_file", "none", "a.py"], "none: No such file"),
        ([*SIZES, "--manager_ip", "192.0.2.77", "a.py"], "is no address of this machine"),
        ([*SIZES, "--gpus_per_node", "0", "a.py"], "--gpus_per_node 0: want 1 or more"),
        ([*SIZES, "b.py"], "b.py is not in --code_dir"),
        ([*SIZES, "--code_dir", "/no", "a.py"], "a.py is not in --code_dir /no"),
        (["--kill"], "no run is live in"),
        (["--resume"], "no run of the launcher is in"),
        (["--resume", "--run", "x"], "--run x: no run of the launcher"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(
    tmp_path: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "available_machines.out").write_text("127.0.0.1\n")
    (tmp_path / "a.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message.lower() in capsys.readouterr().err.lower()
    assert not (tmp_path / "log").exists()
