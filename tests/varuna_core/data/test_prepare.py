"""Preparing: the same bytes for any number of processes, cuts and interruptions."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus import make_documents, make_wordpiece_vocabulary
from varuna_core.data import prepare as preparing
from varuna_core.data.errors import DataError
from varuna_core.data.indexed import open_tokens
from varuna_core.data.prepare import PartFolder, Settings, prepare
from varuna_core.data.text import split_sentences
from varuna_core.data.vocabulary import train_whitespace

NUM_DOCUMENTS = 120


def make_corpus(folder: Path) -> tuple[Path, Path]:
    """Two inputs, JSON lines and text."""
    documents = list(make_documents(NUM_DOCUMENTS))
    first, second = folder / "a.jsonl", folder / "b.txt"
    first.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:70]))
    second.write_text("".join(text + "\n" for text in documents[70:]))
    return first, second


def make_settings(folder: Path, **changes: Any) -> Settings:
    inputs = make_corpus(folder) if not (folder / "a.jsonl").exists() else None
    inputs = inputs or (folder / "a.jsonl", folder / "b.txt")
    values: dict[str, Any] = {
        "inputs": inputs, "output": str(folder / "out"), "kind": "whitespace", "train": 400,
        "append_eod": True, "block_bytes": 3000,
    }  # fmt: skip
    return Settings(**(values | changes))


def run(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    return prepare(settings, said.append, lambda done, note: None), said


def read_pair(folder: Path, name: str = "out_text_document") -> tuple[bytes, bytes]:
    return (folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()


@pytest.fixture(scope="session")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """What one process makes in one go of the settings above."""
    folder = tmp_path_factory.mktemp("wanted")
    run(make_settings(folder, block_bytes=4_000_000))
    return read_pair(folder)


def test_documents_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    summary, _ = run(make_settings(tmp_path))
    words = json.loads((tmp_path / "out-vocab.json").read_text())
    tokens = open_tokens(tmp_path / "out_text_document")
    documents = list(make_documents(NUM_DOCUMENTS))
    assert tokens.num_documents == tokens.num_sequences == len(documents) == summary["documents"]
    for number, text in enumerate(documents):
        ids = [words.get(word, words["<unk>"]) for word in text.split()]
        assert tokens.read(number).tolist() == [*ids, words["<|endoftext|>"]]
    assert summary["tokens"] == tokens.lengths.sum() and summary["dtype"] == "uint16"


@pytest.mark.parametrize(
    ("num_processes", "block_bytes"), [(1, 500), (1, 7777), (2, 3000), (3, 1000)]
)
def test_bytes_do_not_depend_on_processes_or_cuts(
    tmp_path: Path, wanted: tuple[bytes, bytes], num_processes: int, block_bytes: int
) -> None:
    run(make_settings(tmp_path, num_processes=num_processes, block_bytes=block_bytes))
    assert read_pair(tmp_path) == wanted
    names = {"a.jsonl", "b.txt", "out-vocab.json", "out_text_document.bin", "out_text_document.idx"}
    assert {path.name for path in tmp_path.iterdir()} == names


class Stop(BaseException):
    """Stands for Ctrl-C at a chosen place."""


def stop_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> None:
    """The `calls`th call of a function raises instead of being made; later ones too."""
    real: Callable[..., Any] = getattr(owner, name)
    made = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made >= calls:
            raise Stop
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)


@settings(deadline=None, max_examples=40)
@given(
    calls=st.lists(st.integers(1, 20), max_size=3),
    names=st.lists(st.sampled_from(["append", "commit", "finish"]), min_size=3, max_size=3),
    every_s=st.sampled_from([0.0, 100.0]),
)
def test_interrupted_anywhere_and_gone_on_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: tuple[bytes, bytes],
    calls: list[int],
    names: list[str],
    every_s: float,
) -> None:
    folder = tmp_path_factory.mktemp("interrupted")
    for number, name in zip(calls, names, strict=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preparing, "COMMIT_EVERY_S", every_s)
            stop_after(patch, PartFolder, name, number)
            try:
                run(make_settings(folder))
                break
            except Stop:
                assert not list(folder.glob("out_text_document.[bi]*"))
                assert not (folder / "out-vocab.json").exists()
    else:
        run(make_settings(folder))
    assert read_pair(folder) == wanted
    assert not list(folder.glob("*.part"))


def test_what_was_torn_by_a_kill_is_cut_off(
    tmp_path: Path, wanted: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, PartFolder, "append", 9)
        with pytest.raises(Stop):
            run(make_settings(tmp_path))
    part = tmp_path / "out_text_document.part"
    for name in ("tokens.bin", "lengths.i4", "counts.i4"):
        with open(part / name, "ab") as file:
            file.write(b"torn off in the middle")
    _, said = run(make_settings(tmp_path))
    assert read_pair(tmp_path) == wanted
    assert any("going on from" in line for line in said)
    assert not any("training" in line for line in said)


def test_changed_input_or_options_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, PartFolder, "append", 9)
        with pytest.raises(Stop):
            run(make_settings(tmp_path))
    with open(tmp_path / "b.txt", "a") as file:
        file.write("one more document\n")
    _, said = run(make_settings(tmp_path))
    assert not any("going on" in line for line in said)
    assert open_tokens(tmp_path / "out_text_document").num_documents == NUM_DOCUMENTS + 1


def test_a_full_disk_midway_says_so_and_the_same_command_goes_on(
    tmp_path: Path, wanted: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PartFolder.append
    left = 6

    def append(self: PartFolder, *args: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            self._files[0].write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PartFolder, "append", append)
        with pytest.raises(DataError, match=r"No space left on device\. Free some space"):
            run(make_settings(tmp_path))
    assert not list(tmp_path.glob("out_text_document.[bi]*"))
    run(make_settings(tmp_path))
    assert read_pair(tmp_path) == wanted


def test_what_is_there_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    run(make_settings(tmp_path))
    before = read_pair(tmp_path)
    with pytest.raises(DataError, match="already exists; --again"):
        run(make_settings(tmp_path, append_eod=False))
    assert read_pair(tmp_path) == before
    run(make_settings(tmp_path, append_eod=False, again=True))
    assert read_pair(tmp_path) != before


def test_two_at_once_into_one_place_are_refused(tmp_path: Path) -> None:
    held = PartFolder(str(tmp_path / "out_text_document"), "key")
    with pytest.raises(DataError, match="in use: another `prepare`"):
        run(make_settings(tmp_path))
    held.close()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_bad_line_is_named_or_counted(tmp_path: Path, num_processes: int) -> None:
    first, _ = make_corpus(tmp_path)
    lines = first.read_text().splitlines()
    lines[40] = '{"text": '
    lines[60] = '{"body": "x"}'
    first.write_text("\n".join(lines))
    settings = make_settings(tmp_path, num_processes=num_processes)
    with pytest.raises(DataError, match=r"a\.jsonl:41: not JSON: .*--skip-bad"):
        run(settings)
    summary, said = run(make_settings(tmp_path, num_processes=num_processes, skip_bad=True))
    assert summary["bad_lines"] == 2 and summary["documents"] == NUM_DOCUMENTS - 2
    assert [line.partition(": ")[0][-2:] for line in said if "skipped" in line] == ["41", "61"]


def test_empty_files_blank_lines_and_empty_documents(tmp_path: Path) -> None:
    empty, blank = tmp_path / "empty.jsonl", tmp_path / "blank.jsonl"
    empty.touch()
    blank.write_text('\n{"text": ""}\n{"text": "  "}\n\n')
    with pytest.raises(DataError, match=r"no document in .*empty\.jsonl, .*blank\.jsonl"):
        run(make_settings(tmp_path, inputs=(empty, blank)))
    assert not list(tmp_path.glob("out*"))
    summary, _ = run(make_settings(tmp_path, inputs=(empty, blank, tmp_path / "b.txt")))
    assert summary["documents"] == 50
    assert summary["blank_lines"] == 2 and summary["empty_documents"] == 2


def test_a_line_of_many_megabytes_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"ba de " * 2_000_000 + b"\nki\n")
    vocab = train_whitespace(["ba de ki"], 10, tmp_path).vocab
    settings = make_settings(tmp_path, inputs=(path,), train=None, vocab=vocab, block_bytes=100_000)
    run(settings)
    tokens = open_tokens(tmp_path / "out_text_document")
    assert tokens.lengths.tolist() == [4_000_001, 2]


def test_sentences_are_sequences_of_their_document(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(make_wordpiece_vocabulary()) + "\n")
    changes = {"kind": "wordpiece-lower", "train": None, "vocab": vocab, "split_sentences": True}
    run(make_settings(tmp_path, append_eod=False, **changes))
    tokens = open_tokens(tmp_path / "out_text_sentence")
    counts = [len(split_sentences(text)) for text in make_documents(NUM_DOCUMENTS)]
    assert np.diff(tokens.documents).tolist() == counts and min(tokens.lengths) > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": None}, "either --vocab FILE or --train N"),
        ({"vocab": Path("x")}, "either --vocab FILE or --train N"),
        ({"kind": "wordpiece-lower"}, "wordpiece needs --vocab"),
        ({"keep_newlines": True}, "needs --split-sentences"),
        ({"inputs": ()}, "at least one input"),
        ({"inputs": (Path("/"),)}, "is a folder"),
        ({"inputs": (Path("/dev/null"),)}, "not a regular file"),
        ({"inputs": (Path("nowhere.txt"),)}, "nowhere.txt: No such file"),
        ({"kind": "bpe", "train": 100}, "at least 257"),
    ],
)
def test_settings_that_cannot_work_are_refused_and_leave_nothing(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        run(make_settings(tmp_path, **changes))
    assert not list(tmp_path.glob("out*"))
