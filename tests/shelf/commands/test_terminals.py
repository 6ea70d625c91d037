"""Every command on terminals of 80 and 200 columns, dark, light, dumb and without colour, and in a
pipe: no line is wider than its terminal, and nothing is missing anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, wait_for
from tests.shelf.commands.terminal import ESCAPE, CommandOffice, Pane, Said, measure
from tests.test_docs import list_commands
from varuna_core.records.formatting import wrap_text
from vjob.shelf.commands.cli import cli

SCRIPT = PROGRAMS / "prints_steps.py"
CONF = """
name: {name}
program: {{script: {script}, args: [{how}]}}
cluster: {{scheduler: local, walltime_min: 9, grace_s: 2,
  nodes: [{{group: master, count: 1, ranks: 2}}]}}
"""
DONE, FAILED = "gpt2-xl-on-german-wikipedia", "llama-on-german-wikipedia"
WRONG = """
name: wrong
program: {script: train_that_is_not_there.py}
train: {stepz: 5}
parallel: {schedule: gpip}
cluster: {scheduler: local, nodes: [{group: m, count: 1, ranks: 1}]}
"""
GPT = """
name: tiny
program: pretrain_gpt
model: {layers: 2, hidden: 32, heads: 2, sequence: 32, vocab: 500}
data: {synthetic: true}
train: {steps: 4, global_batch_size: 4}
cluster: {scheduler: local, nodes: [{group: m, count: 1, ranks: 1}]}
"""
AS_IT_IS = "scripts, confs and data are copied into files, and come as they are"
LINES = "lines of the job, as it printed them"
TABLES = "a table has numbers for the names of jobs where they do not fit"
# A command with its exit code, and why its lines may be wider than the terminal.
CASES: dict[str, tuple[int, str]] = {
    f"status {DONE} --once": (0, ""),
    f"status {FAILED} --once --all": (10, ""),
    "status --once": (0, ""),
    "status nothing": (2, ""),
    f"status {DONE} --unknown": (2, ""),
    "list": (0, ""),
    "list --sweep lr": (2, ""),
    f"logs {FAILED}": (0, LINES),
    f"logs {FAILED} --errors": (0, LINES),
    f"logs {DONE} --since yesterday": (2, ""),
    f"watch {FAILED} --quiet": (10, ""),
    f"stacks {DONE}": (2, ""),
    f"shell {DONE}": (2, ""),
    f"report {FAILED} --text": (0, ""),
    f"report {DONE} -o page.html": (0, ""),
    f"compare {DONE} {FAILED}": (0, TABLES),
    "plan gpt.yaml": (2, ""),
    "profile gpt.yaml --dry-run": (0, AS_IT_IS),
    "submit wrong.yaml": (2, ""),
    "run wrong.yaml": (2, ""),
    "run --output x wrong.yaml": (2, ""),
    "submit gpt.yaml --dry-run": (0, AS_IT_IS),
    "try wrong.yaml": (2, ""),
    f"cancel {DONE}": (2, ""),
    f"cancel {DONE} {FAILED}": (2, ""),
    f"grow {DONE} --count 2": (2, ""),
    f"shrink {DONE} --count 2": (2, ""),
    f"tend {DONE}": (2, ""),
    f"guard {DONE} pause": (0, ""),
    "init --minimal": (0, ""),
    "init": (0, AS_IT_IS),
    "schema": (0, AS_IT_IS),
    "doctor": (-1, ""),
    "container list --cache images": (0, ""),
    "container clean nothing --scratch scratch": (2, ""),
    "container import a#b#c": (2, ""),
    "data prepare nothing.jsonl -o x --train 300": (2, ""),
    "completion bash": (0, AS_IT_IS),
    f"share {DONE} --group root --dry-run": (-1, ""),
    "prune": (0, ""),
    "prune --days 0 --checkpoints --all": (0, ""),
}
ONLY_TWICE = ("doctor", "report", "compare", "plan", "try", "watch")
"""They take longer: on two terminals, on all of them in the long tests."""
UNITS = ("s", "ms", "min", "h", "d", "KiB", "MiB", "ago", "now")


@dataclass(frozen=True)
class Kind:
    """A kind of terminal, or a pipe."""

    columns: int | None
    env: tuple[tuple[str, str], ...]
    has_colours: bool = False


XTERM = ("TERM", "xterm-256color")
KINDS = {
    "80 dark": Kind(80, (XTERM, ("COLORFGBG", "15;0")), has_colours=True),
    "pipe": Kind(None, (XTERM,)),
    "200 light": Kind(200, (XTERM, ("COLORFGBG", "0;15")), has_colours=True),
    "80 without colour": Kind(80, (XTERM, ("NO_COLOR", "1"))),
    "80 dumb": Kind(80, (("TERM", "dumb"),)),
}


@dataclass(frozen=True)
class Stage:
    vjob: Vjob
    office: CommandOffice

    def ask(self, words: str, kind: Kind) -> Said:
        return self.office.ask(*words.split(), columns=kind.columns, **dict(kind.env))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A run that ended well and one that failed; a process that runs commands."""
    folder = tmp_path_factory.mktemp("terminals")
    vjob = Vjob(folder)
    for name in ("COLUMNS", "NO_COLOR", "COLORTERM", "VJOB_HOST"):
        vjob.env.pop(name, None)
    vjob.env["LC_ALL"] = "C.UTF-8"
    office = CommandOffice(folder, vjob.env)
    try:
        for name, how in ((DONE, "well"), (FAILED, "fail")):
            conf = vjob.write(CONF.format(name=name, script=SCRIPT, how=how), f"{how}.yaml")
            assert office.ask("submit", conf, columns=80).code == 0
        vjob.write(WRONG, "wrong.yaml")
        vjob.write(GPT, "gpt.yaml")
        wait_for(lambda: count_over(office) == 2, 120)
        yield Stage(vjob, office)
    finally:
        office.close()


def count_over(office: CommandOffice) -> int:
    rows = json.loads(office.ask("list", "--json", columns=None).text)
    return sum(row["state"] in ("COMPLETED", "FAILED") for row in rows)


def read_words(said: Said) -> list[str]:
    """Without numbers and their units, which are others at the next look."""
    text = " ".join((*said.words, *said.errors.split())).replace("less than 1 s", "1 s")
    words = [re.sub(r"[\d.,:+-]+", "", word) for word in text.split()]
    return [word for word in words if word and word not in UNITS]


def is_copied(line: str) -> bool:
    """A path or a command alone on its line: it stays whole, or it could not be copied."""
    text = line.strip()
    return " " not in text or text.startswith("vjob ")


def takes_long(words: str) -> bool:
    return words.split()[0] in ONLY_TWICE


@pytest.mark.parametrize("words", CASES)
def test_a_command_prints_the_same_on_every_terminal(stage: Stage, words: str) -> None:
    compare_terminals(stage, words, list(KINDS.values())[: 2 if takes_long(words) else None])


@pytest.mark.long
@pytest.mark.parametrize("words", [words for words in CASES if takes_long(words)])
def test_a_slow_command_does_so_too(stage: Stage, words: str) -> None:
    compare_terminals(stage, words, list(KINDS.values()))


def compare_terminals(stage: Stage, words: str, kinds: Sequence[Kind]) -> None:
    code, reason = CASES[words]
    first: list[str] = []
    for kind in kinds:
        said = stage.ask(words, kind)
        where = f"{kind}: vjob {words}\n{said.text}{said.errors}"
        assert said.code == code or code < 0, f"{said.code} at {where}"
        assert "Traceback (most" not in said.text or reason == LINES, where
        if not kind.has_colours:
            assert not ESCAPE.search(said.text + said.errors), repr(where)
        if kind.columns is not None and reason not in (AS_IT_IS, LINES):
            wide = [line for line in said.lines if measure(line) > kind.columns]
            assert not [line for line in wide if not is_copied(line)], where
        if reason != AS_IT_IS and reason != TABLES:
            first = first or read_words(said)
            assert read_words(said) == first, where


def test_every_command_is_tried() -> None:
    groups = {"container", "data"}
    tried = {" ".join(words.split()[: 1 + (words.split()[0] in groups)]) for words in CASES}
    every = {" ".join(words) for words in list_commands(cli)} - {"", *groups}
    assert every - tried == set()


def test_a_narrow_comparison_has_every_name_and_figure(stage: Stage) -> None:
    narrow = stage.ask(f"compare {DONE} {FAILED}", KINDS["80 dark"])
    lines = narrow.lines
    assert lines[0] == "JOBS" and lines[1].startswith(f"1  {DONE}")
    assert any(line.split()[-2:] == ["1", "2"] for line in lines)
    assert "DIFFERENCES" in lines and "['fail']" in narrow.text
    assert max(map(measure, lines)) <= 80


def test_colours_of_ranks_are_seen_on_dark_and_on_light_ground() -> None:
    from vjob.shelf.commands.monitor import COLOURS

    for number in COLOURS:
        assert min(compare_light(number, 0.0), compare_light(number, 1.0)) >= 3.5, number


def compare_light(number: int, ground: float) -> float:
    """The contrast of a colour of xterm's cube and a ground, as WCAG has it."""
    levels = (0, 95, 135, 175, 215, 255)
    parts = [levels[(number - 16) // size % 6] / 255 for size in (36, 6, 1)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    light = sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    high, low = max(light, ground), min(light, ground)
    return (high + 0.05) / (low + 0.05)


def test_the_ranks_of_a_log_have_colours_where_there_are_some(stage: Stage) -> None:
    found = {name: stage.ask(f"logs {FAILED}", kind) for name, kind in KINDS.items()}
    assert "\x1b[38;5;" in found["80 dark"].text
    few = stage.ask(f"logs {FAILED}", Kind(80, (("TERM", "linux"),), has_colours=True))
    assert "\x1b[38;5;" not in few.text and ESCAPE.search(few.text)


def test_text_breaks_between_words_and_goes_on_below_its_begin() -> None:
    text = (
        "  1. a point that is long\nrow  cell  a last cell that goes on\n    /a/path/that/is/whole"
    )
    assert wrap_text(text, 20).split("\n") == [
        "  1. a point that is",
        "     long",
        "row  cell  a last",
        "     cell that goes",
        "     on",
        "    /a/path/that/is/whole",
    ]
    assert wrap_text(text, None) == text
    assert wrap_text("`last`, or a run folder; `vjob list` shows it", 20).split("\n") == [
        "`last`, or a run",
        "  folder;",
        "  `vjob list` shows",
        "  it",
    ]
    said = "next: vjob logs a-run --errors; vjob report a-run; then `vjob submit b.yaml` again"
    assert wrap_text(said, 34).split("\n") == [
        "next: vjob logs a-run --errors;",
        "  vjob report a-run; then",
        "  `vjob submit b.yaml` again",
    ]


HAS_TMUX = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux: apt-get install tmux")
NORMAL = "0 1 0"
"""The screen of before, with its cursor, and no mouse."""
MOST_IDLE_BYTES = 500
"""Of a look at which nothing changed, but an age."""


@contextmanager
def open_screen(stage: Stage, words: str, folder: Path) -> Iterator[Pane]:
    """`vjob` in a terminal emulator at the end of a line of 1 kB/s."""
    slow = f"{sys.executable} -m tests.shelf.commands.terminal {folder}/log"
    command = (
        f"stty -a > {folder}/before; {slow} {sys.executable} -m vjob {words}; "
        f"echo ended $?; stty -a > {folder}/after; sleep 300"
    )
    env = {**stage.vjob.env, "TERM": "xterm-256color"}
    pane = Pane(folder, env, f"cd {stage.vjob.folder}; {command}", "80x24")
    try:
        yield pane
    finally:
        pane.close()


def count_bytes(folder: Path) -> int:
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return sum(int(size) for word, size in lines if word not in ("pid", "code"))


def wait_shown(pane: Pane, *words: str) -> None:
    wait_for(lambda: all(word in pane.read() for word in words), 120, pane.read)


def expect_restored(pane: Pane, folder: Path, code: int) -> None:
    wait_for((folder / "after").exists, 120, pane.read)
    wait_shown(pane, f"ended {code}")
    wait_for(lambda: pane.ask("#{alternate_on} #{cursor_flag} #{mouse_any_flag}") == NORMAL, 30)
    assert (folder / "after").read_text() == (folder / "before").read_text()


@pytest.mark.long
@HAS_TMUX
def test_the_list_answers_keys_on_a_slow_line(stage: Stage, tmp_path: Path) -> None:
    with open_screen(stage, "status", tmp_path) as pane:
        wait_shown(pane, DONE[:20], FAILED[:20], "q quit")
        before = count_bytes(tmp_path)
        pane.press("j")
        wait_shown(pane, "the job ended well")
        lines = pane.read().splitlines()
        assert any(line.startswith("›") and DONE[:20] in line for line in lines)  # noqa: RUF001
        assert max(map(measure, lines)) <= 80
        assert count_bytes(tmp_path) - before < 8 * MOST_IDLE_BYTES, "a key draws what it changes"
        before = count_bytes(tmp_path)
        time.sleep(6.0)  # two or three looks
        assert count_bytes(tmp_path) - before < 3 * MOST_IDLE_BYTES
        pane.press("q")
        expect_restored(pane, tmp_path, 0)


@HAS_TMUX
@pytest.mark.parametrize("signal_name", ["INT", pytest.param("TERM", marks=pytest.mark.long)])
def test_the_screen_of_a_job_leaves_the_terminal_as_it_was(
    stage: Stage, tmp_path: Path, signal_name: str
) -> None:
    words = f"status {FAILED}" if signal_name == "INT" else "status"
    with open_screen(stage, words, tmp_path) as pane:
        wait_shown(pane, "q quit")
        assert pane.ask("#{alternate_on}") == "1"
        if signal_name == "INT":
            wait_shown(pane, "DEAD", "no word")
            pane.press("C-c")
            expect_restored(pane, tmp_path, 10)
        else:
            word, pid = (tmp_path / "log").read_text().splitlines()[0].split()
            assert word == "pid"
            os.kill(int(pid), signal.SIGTERM)
            expect_restored(pane, tmp_path, 256 - signal.SIGTERM)  # a code below 0, of one byte


def test_a_pipe_has_whole_lines_wherever_a_shell_exports_its_width(stage: Stage) -> None:
    said = stage.ask("status nothing", Kind(None, (("COLUMNS", "40"),)))
    assert said.errors.count("\n") == 1
    shown = stage.ask("status nothing", Kind(None, (("VJOB_WIDTH", "40"),)))
    assert max(map(len, shown.errors.splitlines())) <= 40


def test_an_error_that_cannot_be_written_is_an_exit_code() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "vjob", "status", "nothing"]
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 2
