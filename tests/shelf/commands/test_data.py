"""`vjob data` as a user runs it: files, words, Ctrl-C, a kill, a disk that is full."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import ROOT, Vjob, wait_for
from tests.corpus import make_documents
from varuna_core.data.gpt import open_gpt
from varuna_core.data.indexed import open_tokens
from varuna_core.data.vocabulary import VocabularyFiles, open_encoder

PREPARE = ("data", "prepare", "corpus.jsonl", "-o", "out/a", "--train", "500", "--append-eod")


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    found = Vjob(tmp_path)
    lines = [json.dumps({"text": text}) + "\n" for text in make_documents(200)]
    found.write("".join(lines), "corpus.jsonl")
    return found


def test_from_text_to_samples(vjob: Vjob) -> None:
    done = vjob(*PREPARE, "--processes", "2")
    assert "data: {prefix: out/a_text_document}" in done.stdout and "\r" not in done.stderr
    made = open_tokens(str(vjob.folder / "out/a_text_document"))
    assert made.num_documents == made.num_sequences == 200
    assert made.dtype.name == "uint16" and made.tokens.max() < 500
    names = [str(vjob.folder / f"out/a-{name}") for name in ("vocab.json", "merges.txt")]
    found = open_gpt(
        str(vjob.folder / "out/a_text_document"),
        split="1", num_samples={"train": 2}, sequence=16, seed=1, may_write=False,
    )  # fmt: skip
    encoder = open_encoder(VocabularyFiles(kind="bpe", vocab=Path(names[0]), merges=Path(names[1])))
    words = set(" ".join(make_documents(200)).split())
    assert set(encoder.decode(found["train"].read(0).tolist()).split()[1:-1]) & words
    assert not list(vjob.folder.glob("out/*.npy")), "looking leaves nothing"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("prepare", "corpus.jsonl", "-o", "a"), "either --vocab FILE or --train N"),
        (("prepare", "none.jsonl", "-o", "a", "--train", "500"), "none.jsonl: No such file"),
    ],
)
def test_what_cannot_be_is_input_error_2(vjob: Vjob, words: tuple[str, ...], says: str) -> None:
    done = vjob("data", *words, code=2)
    assert done.stderr.startswith("vjob: ") and says in done.stderr


@pytest.mark.parametrize("command", ["", "prepare"])
def test_help_shows_an_example_and_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "from vjob.shelf.commands.cli import cli\n"
        f"cli.main({['data', *command.split(), '--help']}, standalone_mode=False)\n"
        "bad = {'numpy', 'tokenizers', 'torch', 'zstandard'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert f"vjob data {command or 'prepare'} " in done.stdout


def test_without_the_packages_it_says_how_to_get_them(vjob: Vjob) -> None:
    (vjob.folder / "tokenizers.py").write_text("raise ModuleNotFoundError('no', name='tokenizers')")
    vjob.env["PYTHONPATH"] = f"{vjob.folder}:{ROOT}"
    assert "pip install '.[data]' in vjob's checkout" in vjob(*PREPARE, code=2).stderr


@pytest.fixture
def started(vjob: Vjob) -> Iterator[subprocess.Popen[bytes]]:
    """A prepare of many seconds, under way: its own session, two workers."""
    text = (vjob.folder / "corpus.jsonl").read_text()
    vjob.write(text * 600, "big.jsonl")
    words = ("data", "prepare", "big.jsonl", *PREPARE[3:], "-p", "2", "--train-mb", "1")
    process = vjob.start(*words, start_new_session=True)
    part = vjob.folder / "out/a_text_document.part"
    wait_for(lambda: (part / "vocab.json").exists() and count_group(process.pid) >= 4, 60)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count_group(group: int) -> int:
    """Processes of a process group that are not zombies."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        found += int(pgrp) == group and state != "Z"
    return found


def read_final(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir() if path.is_file())


def test_ctrl_c_ends_all_processes_and_the_same_command_goes_on(
    vjob: Vjob, started: subprocess.Popen[bytes]
) -> None:
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(60) == 130
    wait_for(lambda: count_group(started.pid) == 0, 30)
    assert read_final(vjob.folder) == []
    done = vjob("data", "prepare", "big.jsonl", *PREPARE[3:], "-p", "2", "--train-mb", "1")
    assert "120,000 documents" in done.stdout
    assert not (vjob.folder / "out/a_text_document.part").exists()


def test_workers_of_a_killed_prepare_leave(vjob: Vjob, started: subprocess.Popen[bytes]) -> None:
    started.kill()
    started.wait()
    wait_for(lambda: count_group(started.pid) == 0, 30)
    assert read_final(vjob.folder) == []


def test_a_disk_that_is_full_leaves_nothing_under_a_final_name(vjob: Vjob) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = vjob.folder / "out"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs may be mounted here")
    try:
        done = vjob(*PREPARE, code=2)
        assert "No space left on device" in done.stderr and read_final(vjob.folder) == []
        subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
        vjob(*PREPARE)
        assert "a_text_document.idx" in read_final(vjob.folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
