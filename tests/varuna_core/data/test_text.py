"""Documents do not depend on block cuts or compression; bad lines and torn files are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.data.errors import DataError
from varuna_core.data.text import (
    Format,
    TextPosition,
    guess_format,
    read_blocks,
    read_documents,
    split_sentences,
)

zstandard: Any = pytest.importorskip("zstandard")
PACK = {"plain": bytes, "gzip": gzip.compress, "zstd": lambda data: zstandard.compress(data)}


def read(path: Path, form: Format, block_bytes: int) -> tuple[list[str], list[tuple[int, str]]]:
    texts, bad = [], []
    for block in read_blocks(path, block_bytes=block_bytes):
        found = read_documents(block, form, "text")
        texts += found.texts
        bad += found.bad
    return texts, bad


@settings(deadline=None)
@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=8),
    block_bytes=st.integers(1, 40),
    end=st.sampled_from(["\n", "\r\n", ""]),
    pack=st.sampled_from(sorted(PACK)),
)
def test_documents_do_not_depend_on_cuts_or_compression(
    lines: list[str], block_bytes: int, end: str, pack: str
) -> None:
    text = (end or "\n").join(lines) + end
    with TemporaryDirectory() as name:
        path = Path(name) / "a.txt"
        path.write_bytes(PACK[pack](b"\xef\xbb\xbf" + text.encode()))
        texts, bad = read(path, "text", block_bytes)
    assert texts == [line for line in lines if line and not line.isspace()] and not bad


@settings(deadline=None)
@given(texts=st.lists(st.text(), max_size=6), cut=st.integers(1, 30), data=st.data())
def test_reading_on_from_any_block_gives_the_rest(
    texts: list[str], cut: int, data: st.DataObject
) -> None:
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pack = data.draw(st.sampled_from(sorted(PACK)))
    with TemporaryDirectory() as name:
        path = Path(name) / "a.jsonl"
        path.write_bytes(PACK[pack](raw))
        places = [TextPosition(), *(block.end for block in read_blocks(path, block_bytes=cut))]
        place = data.draw(st.sampled_from(places))
        found = []
        for block in read_blocks(path, place, block_bytes=7):
            documents = read_documents(block, "json", "text")
            assert not documents.bad
            found += documents.texts
    assert found == texts[place.line - 1 :]


def test_each_bad_line_is_named_with_its_number_and_fault(tmp_path: Path) -> None:
    lines = [
        b' {"text": "good"}\t\r',
        b"{",
        b'{"text": "a"} {"text": "b"}',
        b"[1]",
        b'{"body": "x"}',
        b'{"text": 5}',
        b"",
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"text": "also good \\ud83d\\ude00"}',
        b"[" * 100_000,
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    for block_bytes in (16, 4_000_000):
        texts, bad = read(path, "json", block_bytes)
        assert texts == ["good", "also good \U0001f600"]
        assert [number for number, _ in bad] == [2, 3, 4, 5, 6, 8, 9, 11]
        words = [
            "not JSON",
            "not JSON",
            "a list",
            'no "text"; there are body',
            "a number",
            "surrogate",
        ]
        for (_, reason), word in zip(bad, [*words, "not UTF-8", "nested too"], strict=True):
            assert word in reason


@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_every_torn_archive_is_refused(tmp_path: Path, pack: str) -> None:
    path = tmp_path / "a.txt.gz"
    whole = PACK[pack](b"a line of text\n" * 50)
    for size in range(5, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.txt\.gz is damaged or truncated"):
            read(path, "text", 100)


@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_archives_put_end_to_end_are_one(tmp_path: Path, pack: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(PACK[pack](b"one\ntw") + PACK[pack](b"o\nthree"))
    assert read(path, "text", 3) == (["one", "two", "three"], [])


def test_a_line_longer_than_the_limit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"short\n" + b"x" * 5000)
    with pytest.raises(DataError, match=r"a\.txt:2: .* is it text with one document per line"):
        list(read_blocks(path, block_bytes=100, max_line_bytes=1000))


def test_the_format_is_told_by_the_name() -> None:
    names = {"a.jsonl": "json", "a.json.gz": "json", "a.txt.zst": "text", "a": "text"}
    assert {name: guess_format(Path(name)) for name in names} == names


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ('He said "No." Then left.', ['He said "No."', "Then left."]),
        ("Dr. Smith met J. Doe at 5 p.m. sharp.", ["Dr. Smith met J. Doe at 5 p.m. sharp."]),
        ("It cost 3.50 in the U.S. Army.", ["It cost 3.50 in the U.S. Army."]),
        ("He said no. No. 5 it was.", ["He said no.", "No. 5 it was."]),
        ("1. First point. 2. Second.", ["1. First point.", "2. Second."]),
        ("What... Really?! Yes.", ["What...", "Really?!", "Yes."]),
        ("so did I. Then we left.", ["so did I.", "Then we left."]),
        ("一句。两句\uff01三句", ["一句。", "两句\uff01", "三句"]),
        ("Title\n\nText on. and on.", ["Title", "Text on. and on."]),
        ("  \n ", []),
        ("Él fue. Ético.", ["Él fue.", "Ético."]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_newlines_stay_at_the_end_of_their_sentence_when_asked() -> None:
    text = "One.\nTwo. Three\n\nFour"
    assert split_sentences(text, keep_newlines=True) == ["One.\n", "Two.", "Three\n\n", "Four"]


@given(st.text(st.sampled_from("aB.!? \n\t\"')。")))
def test_sentences_lose_nothing_but_space(text: str) -> None:
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() for sentence in found)
