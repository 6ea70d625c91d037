"""Read documents from files: JSON lines or plain text, uncompressed or with gzip or zstandard.

One process reads blocks of whole lines, others parse them: the documents do not depend on the
borders of blocks. A line that is not a document is reported with its file and number.

Sentences, for BERT, are found by rules, without a model to download. One ends at `.`, `!` or `?`
(and closing quotes or brackets) before white space and something that may begin a sentence; at
their full-width forms, with or without space; and at a line break. Abbreviations, initials and
numbered points do not end one. The rules are made for English: if a language's sentences do not
begin with a capital, only line breaks and `!` `?` before a space separate them.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from varuna_core.data.errors import DataError

Format = Literal["json", "text"]
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
BOM = b"\xef\xbb\xbf"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
_parse = json.JSONDecoder().raw_decode
"""Decoder for short lines, which takes half the time of json.loads."""
BLOCK_BYTES = 4_000_000
MAX_LINE_BYTES = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class TextPosition:
    """The position at which reading a file continues: the start of a line."""

    byte: int = 0
    """Offset in the uncompressed text."""
    line: int = 1


@dataclass(frozen=True, kw_only=True)
class Block:
    """A number of whole lines of a file."""

    path: Path
    start: TextPosition
    end: TextPosition
    data: bytes
    raw_bytes: int
    """Bytes read of the file as stored, maybe compressed."""


@dataclass(kw_only=True)
class Documents:
    """The documents of a block."""

    texts: list[str] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Line number and problem of each invalid line."""
    num_blank: int = 0


def guess_format(path: Path) -> Format:
    name = path.name
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return "json" if name.endswith(JSON_SUFFIXES) else "text"


def read_blocks(
    path: Path,
    start: TextPosition = TextPosition(),
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Block]:
    """Yield the lines of a file from `start` on; raise DataError if the file is unreadable."""
    line = start.line
    try:
        with open(path, "rb") as raw:
            stream = _decompress(raw, path)
            byte = _skip(stream, raw, start.byte)
            parts: list[bytes] = []
            size = 0
            while True:
                chunk = stream.read(block_bytes)
                cut = chunk.rfind(b"\n") + 1 if chunk else 0
                if chunk and not cut:
                    parts.append(chunk)
                    size += len(chunk)
                    if size > max_line_bytes:
                        raise DataError(
                            f"{path}:{line}: this line is longer than {max_line_bytes:,} bytes; "
                            "is it text with one document per line?"
                        )
                    continue
                data = b"".join((*parts, chunk[:cut]))
                if data:
                    start = TextPosition(byte=byte, line=line)
                    line += data.count(b"\n") + (not data.endswith(b"\n"))
                    byte += len(data)
                    yield Block(
                        path=path,
                        start=start,
                        end=TextPosition(byte=byte, line=line),
                        data=data.removeprefix(BOM) if start.byte == 0 else data,
                        raw_bytes=raw.tell(),
                    )
                if not chunk:
                    return
                parts = [chunk[cut:]]
                size = len(parts[0])
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is damaged or truncated after line {line - 1:,}: {error}"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def _skip(stream: IO[bytes], raw: IO[bytes], num_bytes: int) -> int:
    if stream is raw:
        raw.seek(num_bytes)
        return num_bytes
    left = num_bytes
    while left and (chunk := stream.read(min(left, BLOCK_BYTES))):
        left -= len(chunk)
    return num_bytes - left


def _decompress(raw: IO[bytes], path: Path) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)
    if magic == ZSTD:
        return _ZstdStream(raw, path)
    return raw


class _ZstdStream:
    """Zstandard reader that detects a truncated last frame, as the library's own does not."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{path} needs zstandard: {error}: pip install '.[data]' in vjob's checkout"
            ) from None
        self._raw = raw
        self._make = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._error = zstandard.ZstdError
        self._frame = self._make()
        self._is_within = False
        self._left = b""
        self._ready: list[bytes] = []
        self._size = 0

    def read(self, num_bytes: int) -> bytes:
        while self._size < num_bytes:
            data = self._left or self._raw.read(131_072)
            self._left = b""
            if not data:
                if self._is_within:
                    raise EOFError("the last zstandard frame is incomplete")
                break
            try:
                text = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from None
            self._is_within = not self._frame.eof
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame = self._make()
            self._ready.append(text)
            self._size += len(text)
        whole = b"".join(self._ready)
        self._ready = [whole[num_bytes:]]
        self._size = len(self._ready[0])
        return whole[:num_bytes]


def read_documents(block: Block, form: Format, key: str) -> Documents:
    """Parse the documents in a block's lines."""
    found = Documents()
    for number, line in enumerate(_decode_lines(block.data), block.start.line):
        if isinstance(line, UnicodeDecodeError):
            found.bad.append((number, f"not UTF-8: {line.reason} at byte {line.start + 1}"))
        elif not line or line.isspace():
            found.num_blank += 1
        elif form == "text":
            found.texts.append(line.removesuffix("\r"))
        else:
            text = _parse_json(line, key)
            if isinstance(text, DataError):
                found.bad.append((number, str(text)))
            else:
                found.texts.append(text)
    return found


def _decode_lines(data: bytes) -> Iterator[str | UnicodeDecodeError]:
    data = data.removesuffix(b"\n")
    try:
        yield from data.decode("utf-8").split("\n")
        return
    except UnicodeDecodeError:
        pass
    for line in data.split(b"\n"):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield error


def _load(line: str) -> Any:
    try:
        value, end = _parse(line)
        if end == len(line):
            return value
    except ValueError:
        pass
    return json.loads(line)  # allows spaces around it, and has words for what is wrong


def _parse_json(line: str, key: str) -> str | DataError:
    try:
        value = _load(line)
    except ValueError as error:
        return DataError(f"not JSON: {error}")
    except RecursionError:
        return DataError("JSON nested too deeply")
    if not isinstance(value, dict):
        return DataError(f"not a JSON object but {_name_type(value)}")
    if key not in value:
        return DataError(f'has no "{key}"; there are {", ".join(list(value)[:8]) or "no keys"}')
    text = value[key]
    if not isinstance(text, str):
        return DataError(f'"{key}" is {_name_type(text)}, not text')
    if "\\u" in line:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return DataError(f'"{key}" has half of a surrogate pair (\\ud8..), which is not text')
    return text


def _name_type(value: object) -> str:
    names: dict[type, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


_WORDS = """
mr mrs ms dr prof st sr jr vs etc inc ltd co corp ed eds rev gen col lt sgt capt hon gov sen rep e.g
i.e cf al approx dept est jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k a.m p.m
"""
ABBREVIATIONS = frozenset(_WORDS.split())
BEFORE_NUMBERS = frozenset(("no", "nos", "vol", "fig", "figs", "eq", "ch", "sec", "p", "pp"))
# Each kind starts only where its run starts: a megabyte of spaces or dots is read once.
_END = re.compile(
    r"""
      (?<! [.!?] ) (?P<mark> [.!?]+ ) (?P<close> ["'\u2019\u201d)\]]* ) [ \t]+
          (?= ["'\u2018\u201c(\[]* [^\Wa-z_] )
    | (?<! [\u3002\uff01\uff1f] ) [\u3002\uff01\uff1f]+ [\u300d\u300f\u201d\u2019"')]* [ \t]*
    | (?<! [ \t] ) [ \t]* (?: \r?\n )+ \s*
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"[^\s(\[\"'\u2018\u201c]*\Z")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Split text into sentences without surrounding white space; line breaks can be kept."""
    found = []
    begin = 0
    for match in _END.finditer(text):
        if match["mark"] == "." and not match["close"] and _is_no_end(text, begin, match):
            continue
        found.append(text[begin : match.end()])
        begin = match.end()
    found.append(text[begin:])
    if keep_newlines:
        kept = [sentence.strip(" \t") for sentence in found]
        return [sentence for sentence in kept if sentence.strip()]
    return [sentence.strip() for sentence in found if sentence.strip()]


def _is_no_end(text: str, begin: int, match: re.Match[str]) -> bool:
    # The longest abbreviation has six letters: what stands further back is of no interest.
    before = text[max(begin, match.start() - 24) : match.start()]
    found = _LAST_WORD.search(before)
    word = found.group() if found else ""
    is_initial = len(word) == 1 and word.isalpha() and word.isupper() and word != "I"
    is_point = word.isdecimal() and word == text[begin : match.start()].strip()
    is_numbered = word.lower() in BEFORE_NUMBERS and text[match.end()].isdecimal()
    return is_initial or is_point or is_numbered or word.lower() in ABBREVIATIONS
