"""Find literals that a pattern's matches must contain: a cheap test before the pattern."""

from __future__ import annotations

import re
from typing import Tuple

_TOKEN = re.compile(
    r"\\(?P<escape>.)"
    r"|\[\^?\]?(?:\\.|[^\]\\]){0,200}\]"
    r"|(?P<look>\(\?(?:[=!]|<[=!]))"
    r"|(?P<open>\((?:\?(?::|[aimsx]+:|P<\w+>))?)"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<maybe>[?*]|\{0?,\d*\})\??"
    r"|(?P<more>\+|\{\d+(?:,\d*)?\})\??"
    r"|(?P<char>[^.^$])"
    r"|."
)


class _Part:
    """A pattern or group being parsed: its alternatives, each a row of required literals."""

    def __init__(self, is_look: bool = False, is_folded: bool = True) -> None:
        self.is_look, self.is_folded = is_look, is_folded
        self.alternatives: list[list[frozenset[str]]] = [[]]
        self.run = ""

    def add_char(self, char: str) -> None:
        self.run += char.lower() if self.is_folded else char

    def end_run(self) -> None:
        if self.run:
            self.alternatives[-1].append(frozenset({self.run}))
        self.run = ""

    def drop_last(self) -> None:
        """Drop the last literal, which a repeat in the pattern has made optional."""
        if self.run:
            self.run = self.run[:-1]
            self.end_run()
        elif self.alternatives[-1]:
            self.alternatives[-1].pop()

    def next_alternative(self) -> None:
        self.end_run()
        self.alternatives.append([])

    def required(self) -> frozenset[str]:
        """Return each alternative's longest literal; a match contains at least one of these."""
        self.end_run()
        none = frozenset({""})
        best = [
            max(row, key=lambda item: min(map(len, item)), default=none)
            for row in self.alternatives
        ]
        return frozenset().union(*best)


def find_literals(pattern: str, *, is_folded: bool = True) -> frozenset[str]:
    """Return literals of a pattern, one of which is in every text that it matches: a cheap test.

        (cp|tar): .*No space left|quota      "no space left", "quota"

    In lower case, unless `is_folded` is false, and without digits. The function supports the syntax
    that the tables of known lines use; for other patterns, the result holds the empty string.
    """
    stack = [_Part(is_folded=is_folded)]
    for match in _TOKEN.finditer(pattern):
        part = stack[-1]
        kind = match.lastgroup
        if kind == "char" and not match.group().isdecimal():
            part.add_char(match.group())
        elif kind == "escape" and not match["escape"].isalnum():
            part.add_char(match["escape"])
        elif kind in ("open", "look"):
            part.end_run()
            stack.append(_Part(kind == "look", is_folded))
        elif kind == "close":
            stack.pop()
            stack[-1].alternatives[-1].append(frozenset({""}) if part.is_look else part.required())
        elif kind == "bar":
            part.next_alternative()
        elif kind == "maybe":
            part.drop_last()
        else:
            # A set of characters, a digit, an anchor: nothing to look for, but something to drop.
            part.end_run()
            if kind != "more":
                part.alternatives[-1].append(frozenset({""}))
    return stack[0].required()


def find_marks(pattern: str) -> Tuple[bytes, ...]:
    """Return bytes, one of which is in each line that a user's pattern matches; none if unknown.

    The result has no digits, since lines are compared without their numbers.
    """
    if re.search(r"\(\?[a-zA-Z]*[ix]", pattern):
        return ()
    found = find_literals(pattern, is_folded=False)
    return () if "" in found else tuple(sorted(word.encode() for word in found))
