"""The documents are true: their confs parse, their links lead somewhere, their commands exist."""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.documents import (
    PAGES,
    ROOT,
    find_anchors,
    find_blocks,
    find_commands,
    find_links,
    find_wrong_commands,
    get_commands,
    parse_command,
    read_prose,
)
from varuna_core.records.runfolder import RunFolder, may_share
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.monitor.model.snapshot import Health
from vjob.shelf.commands.cli import cli


@pytest.mark.parametrize(("page", "text"), find_blocks("yaml"))
def test_confs_in_the_documents_have_no_problems(page: str, text: str) -> None:
    """A fragment is only parsed: its other keys are not there to be checked against."""
    is_whole = text.startswith("name:")
    conf, lines = parse_conf_lines(text if is_whole else f"name: x\n{text}", page, ROOT, environ={})
    if is_whole:
        assert check_conf(conf, lines, base=ROOT, require_paths=False) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in find_links(page):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or anchor in find_anchors(path), target


def test_commands_in_the_documents_exist() -> None:
    for page, text in find_blocks("sh"):
        for words in find_commands(text):
            try:
                parse_command(words)
            except click.UsageError as error:
                pytest.fail(f"{page}: vjob {' '.join(words)}: {error.message}")
    text = "\n".join(block for _, block in find_blocks("sh"))
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)):
        assert f"\n{name}:" in makefile, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page: Path) -> None:
    """Commands under a heading "Not yet" need not exist."""
    prose = re.sub(r"\n## Not yet\n.*?(?=\n## |\Z)", "", read_prose(page), flags=re.DOTALL)
    assert find_wrong_commands(prose) == []


@pytest.mark.parametrize(
    ("page", "text"), [pair for language in ("python", "json") for pair in find_blocks(language)]
)
def test_code_in_the_documents_is_code(page: str, text: str) -> None:
    """Check that its imports of ours exist; whole programs are run by other tests."""
    if text.lstrip().startswith("{"):
        assert json.loads(text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("varuna_core"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), page


def list_commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in get_commands(group).items():
        if isinstance(command, click.Group):
            yield from list_commands(command, (*path, name))
        elif not command.hidden:
            yield (*path, name)


@pytest.mark.parametrize("path", [*list_commands(cli)], ids=lambda path: " ".join(path) or "vjob")
def test_help_teaches_by_an_example_that_parses(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*path, "--help"])
    assert done.exit_code == 0
    text = re.sub(r"\\\n", " ", done.output)
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.startswith(("vjob ", "srun "))]
    examples = [words for line in lines for words in find_commands(re.sub("  +.*", "", line))]
    for words in examples:
        parse_command(words)
    assert any(tuple(words[: len(path)]) == path for words in examples), "no example of its own"


def test_completion_in_bash_completes_commands_and_jobs(tmp_path: Path) -> None:
    vjob = tmp_path / "vjob"
    vjob.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vjob "$@"\n')
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
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    status, last, registered = done.stdout.splitlines()
    assert (status, last) == ("status", "last") and registered.endswith("vjob")


def test_make_docs_makes_what_is_made_from_the_doc_lines(tmp_path: Path) -> None:
    """In a tree that is nearly empty, with a venv that is up to date."""
    for name in ("docs/make", "tests/jobs/golden", ".venv"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("causes_page.py", "json_page.py", "varuna_page.py"):
        shutil.copy(ROOT / "docs/make" / name, tmp_path / "docs/make")
    stale = re.sub(r"(?<=### Gpu\n```text\n)index.*\n", "", (ROOT / "docs/json.md").read_text())
    (tmp_path / "docs/json.md").write_text(stale)
    for name in ("setup.cfg", "constraints.txt", ".venv/.installed"):
        (tmp_path / name).touch()
    makefile = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(makefile)
    command = ["make", "--old-file=.venv/.installed", "docs", f"BIN={Path(sys.executable).parent}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=300, check=True)
    pages = ["causes.md", "conf.md", "json.md", "varuna.md"]
    for name in (*(f"docs/{page}" for page in pages), "tests/jobs/golden/init.yaml"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), name
    assert sorted(path.name for path in (tmp_path / "docs").iterdir()) == sorted([*pages, "make"])


def test_the_page_of_files_spells_those_of_a_split_run_as_the_code_does() -> None:
    text = (ROOT / "docs/events.md").read_text()
    run = RunFolder(Path("log/<run>"))
    of_group = [run.batch_script("<group>"), run.scheduler_log("<group>"), run.events("<group>")]
    for path in (*of_group, run.vjob_events, run.plan, run.node_script):
        assert path.name in text, path.name
    assert "vjob share last --group" in text and "chmod" not in text
    assert not may_share(run.plan.name) and not may_share(run.node_script.name)


def test_every_dependency_has_its_reason() -> None:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    texts = [options["options"]["install_requires"], *options["options.extras_require"].values()]
    names = re.findall(r"^[A-Za-z][\w-]*", "\n".join(texts), re.MULTILINE)
    page = (ROOT / "docs/dependencies.md").read_text()
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", page)] == []


def test_every_verdict_has_something_to_do() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/trouble.md").read_text(), re.MULTILINE)
    words = {word for heading in headings for word in heading.split(", ")}
    assert {health.value for health in Health} <= words


def test_every_variable_of_an_old_shell_conf_is_in_the_table() -> None:
    text = (ROOT / "tests/jobs/legacy/00_conf.sh").read_text()
    page = (ROOT / "docs/from_scripts.md").read_text()
    names = re.findall(r"^([A-Z_]+)=", text, re.MULTILINE)
    assert names and [name for name in names if name not in page] == []


def test_every_part_of_the_old_scripts_is_in_the_table() -> None:
    """By the source map and the steps of their own README."""
    page = (ROOT / "docs/from_scripts.md").read_text()
    names = [
        "FASOP_1.5b.py",
        "FASOP_345m.py",
        "FASOP_pareto.py",
        "amp_utils",
        "estimate",
        "pipe",
        "stage",
        "known_cost",
        "main_logs",
        "image/",
        "log-ncu",
        "log-nsys",
        "log2",
        "_00_conf.sh",
        "_00_pretrain_gpt.py",
        "_01_run_inter.sh",
        "_02_hetero_master_job.sh",
        "_02_hetero_slave_job.sh",
        "_02_homo_job.sh",
        "_03_submit.sh",
        "_04_report.sh",
        "_05_report_visualization.py",
        "get_result.sh",
        "small/",
        "xl/",
        "indexmap",
        "num_iter",
        "nodeid",
        "out.html",
        "workdir",
        "GRES",
        "MASTER_ADDR",
        "sacct",
        "mkdir",
    ]
    assert [name for name in names if name not in page] == []


def test_each_decision_has_its_date_and_each_theme_its_row() -> None:
    pages = {page.name: page.read_text() for page in (ROOT / "docs/decisions").glob("*.md")}
    for name, text in pages.items():
        undated = re.findall(r"^## (.+)\n(?!\*\d{4}-\d\d-\d\d\.\* )", text, re.MULTILINE)
        assert not undated, f"{name}: each heading is followed by its *YYYY-MM-DD.*"
    rows = re.findall(r"\]\(decisions/(.+?)\)", (ROOT / "docs/decisions.md").read_text())
    assert sorted(rows) == sorted(pages)


HABITS = re.compile(
    r"\b(?:mend(?:s|ed|ing)?|anew|whereof|thereof|befall\w*|unasked|whoever|there no more"
    r"|who is away|go(?:es)? on with|(?:is|was|are|were|be|been|when|as) told)\b",
    re.IGNORECASE,
)
"""Words that are not those of an engineer's English: say fix, again, anybody, continue, asked."""
KEPT = {"told) to stop": "lines of older agents"}


def list_strings(path: Path) -> Iterator[tuple[int, str]]:
    """What a module can print: its strings, the docstrings of commands among them."""
    tree = ast.parse(path.read_text())
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            may_be_command = isinstance(node, ast.FunctionDef) and node.decorator_list
            for line in node.body[1 if may_be_command else 0 :]:
                if isinstance(line, ast.Expr):
                    inner.add(id(line.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def test_what_users_read_is_in_plain_words() -> None:
    found = []
    for folder in ("shelf", "jobs", "varuna_core", "containers", "reports", "templates"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py":
                texts = list(list_strings(path))
            elif path.suffix in (".j2", ".yaml", ".html", ".js", ".sh"):
                texts = list(enumerate(path.read_text().splitlines(), 1))
            else:
                continue
            name = path.relative_to(ROOT)
            found += [
                f"{name}:{line}: {text[max(0, match.start() - 30) : match.end() + 30]}"
                for line, text in texts
                for match in HABITS.finditer(text)
                if not any(kept in text for kept in KEPT)
            ]
    assert found == []


UNNAMED = ("Of", "As", "What", "Whether", "Where", "Who", "That")
"""First words of a docstring that does not name its thing."""
ROOMS = ("jobs", "shelf", "reports", "varuna_core", "containers")
WITHOUT_NAME = 0
"""Docstrings left that begin so; the number may only fall."""


def test_a_docstring_names_the_thing_first() -> None:
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if text.split(" ", 1)[0] in UNNAMED:
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert len(found) <= WITHOUT_NAME, "\n".join(found)
