"""The documents are true: their confs parse, their links lead somewhere, their commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.conf_check import check_conf
from jobs.conf_read import parse_conf_lines
from varuna_core.records.runfolder import RunFolder

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, text) for page in PAGES for text in pattern.findall(page.read_text())]


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_confs_in_the_documents_have_no_problems(page: str, text: str) -> None:
    """A fragment is only parsed: its other keys are not there to be checked against."""
    is_whole = text.startswith("name:")
    conf, lines = parse_conf_lines(text if is_whole else f"name: x\n{text}", page, ROOT, environ={})
    if is_whole:
        assert check_conf(conf, lines, base=ROOT, require_paths=False) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_in_the_documents_exist() -> None:
    text = "\n".join(block for _, block in blocks("sh"))
    for name in set(re.findall(r"^vjob (\w+)", text, re.MULTILINE)):
        assert name in cli.commands, name
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"^make (\w+)", text, re.MULTILINE)):
        assert f"\n{name}:" in makefile, name


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_help_teaches(command: str) -> None:
    done = CliRunner().invoke(cli, [command, "--help"] if command else ["--help"])
    assert done.exit_code == 0 and len(done.output.splitlines()) > 5


def test_completion_in_bash_completes_commands_and_jobs(tmp_path: Path) -> None:
    vjob = tmp_path / "vjob"
    vjob.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jobs "$@"\n')
    vjob.chmod(0o755)
    text = (ROOT / "README.md").read_text()
    (line,) = re.findall(r'`(eval "\$\(vjob completion bash\)")`', text)
    script = f"""{line}
COMP_WORDS=(vjob stat); COMP_CWORD=1; _vjob_completion vjob; echo "${{COMPREPLY[@]}}"
COMPREPLY=(); COMP_WORDS=(vjob status la); COMP_CWORD=2; _vjob_completion vjob
echo "${{COMPREPLY[@]}}"
complete -p vjob"""
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    status, last, registered = done.stdout.splitlines()
    assert (status, last) == ("status", "last") and registered.endswith("vjob")


def test_make_docs_makes_what_is_made_from_the_doc_lines(tmp_path: Path) -> None:
    """In a tree that is nearly empty, with a venv that is up to date."""
    for name in ("docs", "tests/jobs/golden", ".venv"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("setup.cfg", "constraints.txt", ".venv/.installed"):
        (tmp_path / name).touch()
    makefile = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(makefile)
    command = ["make", "--old-file=.venv/.installed", "docs", f"BIN={Path(sys.executable).parent}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60, check=True)
    for name in ("docs/conf.md", "tests/jobs/golden/init.yaml"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), name
    assert sorted(path.name for path in (tmp_path / "docs").iterdir()) == ["conf.md"]


def test_the_readme_spells_the_files_of_a_split_run_as_the_code_does() -> None:
    text = (ROOT / "README.md").read_text()
    run = RunFolder(Path("log/<run>"))
    of_group = [run.batch_script("<group>"), run.scheduler_log("<group>"), run.events("<group>")]
    for path in (*of_group, run.vjob_events, run.plan, run.node_script):
        assert path.name in text, path.name
    (line,) = re.findall(r"chmod g-r (.*)", text)
    assert line.split() == [str(run.plan), str(run.node_script)]
