"""Shell text to words: quotes, expansions, redirections and here-documents.

A word is the parts that it is written in; `shell` fills in what they stand for. Text that is no
simple command, such as a subshell or a quote without its end, raises UnreadableError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PLACEHOLDER = re.compile(r"<(?:\.{3})?[A-Za-z][^<>\n|;&]*(?<=\S)>(?=\s|$)")
_REDIRECTION = re.compile(r"(?:&>>?|\d*(?:<<-?|<<<|>>|>&|<&|>\||>|<))[ \t]*")


class UnreadableError(Exception):
    """Text that is no simple command."""


@dataclass(frozen=True)
class Part:
    kind: str
    """text, name, sum or command."""
    text: str
    quoted: bool


@dataclass(frozen=True)
class RawWord:
    parts: tuple[Part, ...]
    text: str
    """As it was written."""

    @property
    def plain(self) -> str | None:
        """Its text where nothing is quoted or expanded."""
        is_plain = all(part.kind == "text" and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if is_plain else None


class Scanner:
    """Words of one command at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line = 1
        self.waiting: list[str] = []
        """Ends of the here-documents whose lines come next."""
        self.skipped: list[tuple[int, str]] = []

    def move(self, end: int) -> None:
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def read_words(self) -> list[RawWord]:
        """Words up to the next `;`, `&`, `|` or end of line, which is taken too."""
        words: list[RawWord] = []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "\n":
                self.move(self.position + 1)
                self._skip_documents()
                return words
            if self.text.startswith("\\\n", self.position):
                self.move(self.position + 2)
            elif char.isspace():
                self.move(self.position + 1)
            elif char == "#":
                end = self.text.find("\n", self.position)
                self.move(len(self.text) if end < 0 else end)
            elif place := PLACEHOLDER.match(self.text, self.position):
                words.append(RawWord((Part("text", place[0], True),), place[0]))
                self.move(place.end())
            elif redirection := _REDIRECTION.match(self.text, self.position):
                self._take_redirection(redirection)
            elif char in ";&|":
                if char == "&" and self.text[self.position + 1 : self.position + 2] != "&":
                    words.append(RawWord((Part("text", "&", True),), "&"))
                self.move(self.position + 1)
                if words:
                    return words
            elif char in "()":
                raise UnreadableError
            else:
                words.append(self._read_word())
        return words

    def _take_redirection(self, match: re.Match[str]) -> None:
        self.move(match.end())
        if self.position < len(self.text) and self.text[self.position] in ";&|()\n#":
            raise UnreadableError
        if self.position < len(self.text):
            target = self._read_word()
            if match[0].strip().endswith(("<<", "<<-")):
                self.waiting.append("".join(part.text for part in target.parts))

    def _skip_documents(self) -> None:
        for end in self.waiting:
            while self.position < len(self.text):
                stop = self.text.find("\n", self.position)
                stop = len(self.text) if stop < 0 else stop + 1
                line = self.text[self.position : stop].strip()
                if line != end:
                    self.skipped.append((self.line, line))
                self.move(stop)
                if line == end:
                    break
        self.waiting = []

    def _read_word(self) -> RawWord:
        start, parts = self.position, list[Part]()
        while self.position < len(self.text):
            char = self.text[self.position]
            if char.isspace() or char in ";&|<>":
                break
            if char in "()":
                raise UnreadableError
            if char == "'":
                end = self._find("'", self.position + 1)
                parts.append(Part("text", self.text[self.position + 1 : end], True))
                self.move(end + 1)
            elif char == '"':
                self.move(self.position + 1)
                parts += self._read_double()
            elif self.text.startswith("\\\n", self.position):
                self.move(self.position + 2)
            elif char == "\\":
                parts.append(Part("text", self.text[self.position + 1 : self.position + 2], True))
                self.move(min(self.position + 2, len(self.text)))
            elif char in "$`":
                parts.append(self._read_dollar(quoted=False))
            else:
                parts.append(Part("text", char, False))
                self.move(self.position + 1)
        return RawWord(tuple(parts), self.text[start : self.position])

    def _find(self, what: str, start: int) -> int:
        end = self.text.find(what, start)
        if end < 0:
            raise UnreadableError
        return end

    def _read_double(self) -> list[Part]:
        parts: list[Part] = [Part("text", "", True)]
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == '"':
                self.move(self.position + 1)
                return parts
            if char == "\\" and self.text[self.position + 1 : self.position + 2] in tuple('"\\$`'):
                parts.append(Part("text", self.text[self.position + 1], True))
                self.move(self.position + 2)
            elif self.text.startswith("\\\n", self.position):
                self.move(self.position + 2)
            elif char in "$`":
                parts.append(self._read_dollar(quoted=True))
            else:
                parts.append(Part("text", char, True))
                self.move(self.position + 1)
        raise UnreadableError

    def read_document(self) -> list[Part]:
        """The whole text as the lines of a here-document: quotes are text."""
        parts: list[Part] = []
        while self.position < len(self.text):
            char, after = self.text[self.position], self.text[self.position + 1 : self.position + 2]
            if char == "\\" and after in tuple("\\$`\n"):
                parts.append(Part("text", "" if after == "\n" else after, True))
                self.move(self.position + 2)
            elif char in "$`":
                parts.append(self._read_dollar(quoted=True))
            else:
                parts.append(Part("text", char, True))
                self.move(self.position + 1)
        return parts

    def _read_dollar(self, *, quoted: bool) -> Part:
        start = self.position
        if self.text[start] == "`":
            end = self._find("`", start + 1)
            self.move(end + 1)
            return Part("command", self.text[start + 1 : end], quoted)
        if self.text.startswith("$((", start):
            end = self.find_close("(", ")", start + 1)
            if self.text[end - 1] == ")":
                self.move(end + 1)
                return Part("sum", self.text[start + 3 : end - 1], quoted)
        for opening, closing, kind in (("(", ")", "command"), ("{", "}", "name")):
            if self.text.startswith(f"${opening}", start):
                end = self.find_close(opening, closing, start + 1)
                self.move(end + 1)
                inner = self.text[start + 2 : end]
                is_list = kind == "name" and inner.endswith("[@]")  # its words stay apart
                return Part(kind, inner.removesuffix("[@]"), quoted and not is_list)
        name = NAME.match(self.text, start + 1)
        if name is not None:
            self.move(name.end())
            return Part("name", name[0], quoted)
        if self.text[start + 1 : start + 2] in tuple("@*#?$!0123456789"):
            self.move(start + 2)
            return Part("name", self.text[start + 1], quoted)
        self.move(start + 1)
        return Part("text", "$", True)

    def find_close(self, opening: str, closing: str, start: int) -> int:
        depth = 0
        for position in range(start, len(self.text)):
            char = self.text[position]
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return position
        raise UnreadableError
