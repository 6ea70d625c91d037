"""Completion of keys and values of `--set`, nodes, queues, groups and actions."""

from __future__ import annotations

import grp
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from tests import ROOT
from tests.documents import get_commands
from tests.jobs.confs import HETJOB, make_conf, make_plan
from varuna_core.records.files import write_json
from varuna_core.records.plan import write_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.errors import ConfError
from vjob.shelf.commands import completing
from vjob.shelf.commands.cli import cli


def complete(*words: str) -> list[str]:
    """What is offered for the last word."""
    shell = completing.ZshWords(cli, {}, "vjob", "_VJOB_COMPLETE")
    return [str(item.value) for item in shell.get_completions([*words[:-1]], words[-1])]


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("parallel.sch", ["parallel.schedule="]),
        ("train.precision=", [f"train.precision={one}" for one in ("fp32", "fp16", "bf16", "fp8")]),
        ("train.precision=b", ["train.precision=bf16"]),
        ("morph.enabled=", ["morph.enabled=true", "morph.enabled=false"]),
        ("cluster.nodes[0].q", ["cluster.nodes[0].queue="]),
        ("program.snapshot=g", ["program.snapshot=git"]),
        ("program.scr", ["program.script="]),
        ("model=gpt2-s", ["model=gpt2-small"]),
        ("train.apex=", []),
        ("nothing.there=", []),
        ("train.optimizer.apex=", [f"train.optimizer.apex={x}" for x in ("true", "false", "auto")]),
    ],
)
def test_set_offers_keys_then_values(word: str, offered: list[str]) -> None:
    for command in ("submit", "plan", "try"):
        assert complete(command, "conf.yaml", "--set", word) == offered


def test_nothing_is_offered_after_a_word_of_another_tool() -> None:
    assert complete("launch", "x") == complete("nothing", "x") == []


def test_run_offers_files_and_its_options() -> None:
    shell = completing.ZshWords(cli, {}, "vjob", "_VJOB_COMPLETE")
    (offered,) = shell.get_completions(["run", "-n", "2"], "tr")
    assert (offered.value, offered.type) == ("tr", "file")
    assert complete("run", "--gp") == ["--gpus", "--gpus-per-node", "--gpus-per-task"]


def test_each_key_that_is_offered_is_one_of_the_conf() -> None:
    """A value that is none is refused, but never as an unknown key."""
    base = "name: x\nprogram: {script: a.py}\ncluster: {nodes: [{group: a}]}\n"
    words = [word for word in completing.list_keys() if not word.startswith("program.")]
    assert len(words) > 100
    for word in words:
        try:
            parse_conf(base, "conf.yaml", Path("/x"), [f"{word}{{zz: 1}}"], environ={})
        except ConfError as error:
            assert not any(
                one.key == word[:-1] and "unknown key" in one.message for one in error.problems
            ), word


def test_a_sweep_offers_keys() -> None:
    assert complete("submit", "conf.yaml", "--sweep", "train.se") == ["train.seed="]
    assert complete("submit", "conf.yaml", "--sweep", "train.precision=fp16,") == []


def test_nodes_are_those_of_the_job_before(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    write_plan(run.plan, make_plan(make_conf(HETJOB)))
    run.attempt(0).make()
    for number in range(3):
        write_json(run.attempt(0).node_report(number), {"host": f"n{number}"})
    assert complete("logs", str(run.path), "--node", "n") == ["n0", "n1", "n2"]
    assert complete("shrink", str(run.path), "--node", "n2") == ["n2"]
    assert complete("logs", str(tmp_path / "none"), "--node", "") == []


def test_queues_groups_and_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completing, "list_queues", lambda: ["gpu1", "gpu2", "cpu"])
    assert complete("grow", "last", "--queue", "g") == ["gpu1", "gpu2"]
    assert complete("submit", "c.yaml", "--set", "cluster.nodes[3].queue=c") == [
        "cluster.nodes[3].queue=cpu"
    ]
    own = grp.getgrgid(os.getegid()).gr_name
    assert own in complete("share", "last", "--group", own[:1])
    assert complete("watch", "last", "--on", "STALL") == ["STALLED="]
    assert "STALLED=requeue" in complete("watch", "last", "--on", "STALLED=")


def test_every_option_that_is_completed_names_a_function_that_is_there() -> None:
    def walk(group: click.Group) -> None:
        for command in get_commands(group).values():
            if isinstance(command, click.Group):
                walk(command)
                continue
            for param in command.params:
                context = click.Context(command, resilient_parsing=True)
                assert isinstance(param.shell_complete(context, "\0"), list)

    walk(cli)


@pytest.fixture
def shell_env(tmp_path: Path) -> dict[str, str]:
    """A home, and a `vjob` of this tree on the path."""
    vjob = tmp_path / "vjob"
    vjob.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vjob "$@"\n')
    vjob.chmod(0o755)
    (tmp_path / "gpt.yaml").write_text("name: x\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    base = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    return {**base, "PATH": path, "TERM": "xterm", "LC_ALL": "C.UTF-8", "ZDOTDIR": str(tmp_path)}


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here: apt-get install fish")
def test_fish_offers_words_and_whole_descriptions(
    shell_env: dict[str, str], tmp_path: Path
) -> None:
    script = """vjob completion fish | source
function ask; complete -C "$argv"; echo; end
ask vjob stat
ask vjob submit gp
ask vjob submit c.yaml --set train.prec
ask vjob submit c.yaml --set train.precision=b
ask vjob watch last --on STALLED=c"""
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=shell_env, cwd=tmp_path, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "status\tShow the status of JOB, or of all your runs.", "",
        "gpt.yaml", "",
        "train.precision=", "",
        "train.precision=bf16", "",
        "STALLED=cancel", "",
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here: apt-get install zsh")
def test_zsh_completes_a_key_and_then_its_value_as_it_is_typed(
    shell_env: dict[str, str], tmp_path: Path
) -> None:
    """On a terminal, by the Tab key: there is no space between a key and its value."""
    (tmp_path / ".zshrc").write_text(
        'autoload -Uz compinit; compinit -u -D; eval "$(vjob completion zsh)"; PROMPT="at-once> "\n'
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-o", "noglobalrcs", "-i"], shell_env)
    seen = b""

    def read_until(word: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while word not in seen:
            assert time.monotonic() < deadline, (word, seen)
            if select.select([terminal], [], [], 1.0)[0]:
                seen += os.read(terminal, 65536)
        seen = b""

    try:
        for typed, shown in (
            (b"", b"at-once> "),
            (b"vjob submit c.yaml --set train.prec\t", b"ision="),
            (b"b\t", b"bf16"),
            (b"--set train.precision=\t", b"train.precision=fp16"),
            (b"\x15vjob watch last --on STALLED=c\t", b"ancel"),
            (b"\x15vjob submit gp\t", b"t.yaml"),
        ):
            os.write(terminal, typed)
            read_until(shown)
    finally:
        os.close(terminal)  # which ends it, by a hangup
        os.waitpid(child, 0)


def test_bash_takes_a_key_and_its_value_as_one_word(tmp_path: Path) -> None:
    """bash gives `--set train.precision=b` as three words, and replaces the last alone."""
    vjob = tmp_path / "vjob"
    vjob.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vjob "$@"\n')
    vjob.chmod(0o755)
    script = """eval "$(vjob completion bash)"
ask() { COMPREPLY=(); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _vjob_completion vjob
        echo "${COMPREPLY[@]}"; }
ask vjob submit c.yaml --set train.prec
ask vjob submit c.yaml --set train.precision =
ask vjob submit c.yaml --set train.precision = b
ask vjob submit c.yaml --set train.steps = 5 --set train.precision = f
ask vjob watch last --on STALLED = c"""
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [
        "train.precision=",
        "fp32 fp16 bf16 fp8",
        "bf16",
        "fp32 fp16 fp8",
        "cancel",
    ]
