"""`--json`: an object of each command that prints facts, alone on standard output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.jobs.schedulers.slurm.test_commands import ESTIMATES
from tests.jobs.stub_programs import StubPrograms
from tests.shelf.elastic.test_autoscale import GROWS, Idle, make_training_run
from varuna_core.records.files import lock_file
from vjob.jobs.schedulers import choose as schedulers
from vjob.shelf.commands.cli import cli

SCRIPT = """
name: quick
program: {script: quick.py, args: ["0"]}
cluster: {scheduler: SCHEDULER, nodes: [{group: m, count: 1, ranks: 2}]}
env: {API_TOKEN: ghp_secretsecretsecretsecretsecretsecret}
"""


def read_values(text: str) -> list[Any]:
    """One value after the other; a text between them is an error."""
    decoder, text, found = json.JSONDecoder(), text.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def ask_one(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (found,) = read_values(done.stdout)
    assert found["format"] == 1
    return dict(found)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.py").write_text("print('step 1/1 loss 2.0')\n")
    (tmp_path / "conf.yaml").write_text(SCRIPT.replace("SCHEDULER", "local"))
    return tmp_path


def test_a_dry_run_shows_the_files_and_the_plan_without_secrets(here: Path) -> None:
    found = ask_one("submit", "conf.yaml", "--dry-run")
    assert {"batch.sh", "node.sh"} <= found["files"].keys()
    assert found["plan"]["groups"] and found["folder"].endswith(found["run"])
    assert found["scheduler"] == "local" and found["after"] == []
    assert "ghp_secret" not in json.dumps(found)
    assert not (here / "log").exists()


def test_a_dry_run_of_a_sweep_shows_its_runs(here: Path) -> None:
    found = ask_one("submit", "conf.yaml", "--dry-run", "--sweep", "program.args[0]=1,2")
    assert [run["swept"]["program.args[0]"] for run in found["runs"]] == ["1", "2"]
    assert found["first"]["run"] == found["runs"][0]["run"] and found["at_most"] is None


def test_slurms_estimate_has_its_start_and_nodes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = StubPrograms(here)
    tools.add("sbatch", f"print({ESTIMATES[0]!r}, file=sys.stderr)")
    monkeypatch.setenv("PATH", tools.path)
    (here / "conf.yaml").write_text(SCRIPT.replace("SCHEDULER", "slurm"))
    found = ask_one("submit", "conf.yaml", "--test-only")
    (job,) = found["jobs"]
    assert job["group"] is None and job["nodes"] == ["a1", "a2"] and job["num_cpus"] == 8
    assert job["text"] == ESTIMATES[0]


def test_what_tend_says_is_an_object_a_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Idle()
    monkeypatch.setattr(schedulers, "get_scheduler", lambda name, run=None: cluster)
    run = make_training_run(here, GROWS)
    with lock_file(run.morph.tend_lock):
        found = ask_one("tend", str(run.path))
    assert found["run"] == run.name and "is running for" in found["message"] and found["time"] > 0


def test_images_that_are_imported(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = StubPrograms(here)
    make = "open(sys.argv[{place}], 'wb').write(b'hsqs' + bytes(200))"
    tools.add("enroot", make.format(place="sys.argv.index('--output') + 1"))
    monkeypatch.setenv("PATH", tools.path)
    monkeypatch.setattr("vjob.jobs.images.fetch.explain_damage", lambda path: "")
    found = ask_one("container", "import", "docker://debian:12")
    assert found["image"] == "docker://debian:12" and Path(found["path"]).is_file()
    again = ask_one("container", "import", "debian:12", "-o", str(here / "own.sqsh"))
    assert again["image"] == again["path"] == str(here / "own.sqsh") and again["bytes"] == 204


def test_a_cleaned_node_says_what_went_and_what_stayed(here: Path) -> None:
    found = ask_one("container", "clean", "--all", "--scratch", str(here))
    assert (found["removed"], found["kept"], found["freed_bytes"]) == ([], [], 0)
    assert found["is_dry_run"] is False and found["node"] and str(here) in found["store"]


@pytest.mark.parametrize("words", [("--dry-run",), ("--test-only",)])
def test_wrong_input_has_the_same_exit_code(here: Path, words: Sequence[str]) -> None:
    (here / "conf.yaml").write_text("name: 3\n")
    done = CliRunner().invoke(cli, ["submit", "conf.yaml", *words, "--json"])
    assert done.exit_code == 2 and not done.stdout and done.stderr
