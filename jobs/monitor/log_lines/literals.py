"""What must stand in a text for a pattern to fit it: the cheap test before many patterns.

    (cp|tar): .*No space left|quota      "no space left", "quota"

Reads what the tables of known lines use of regular expressions, and gives up on the rest: an answer
with the empty string in it says that nothing must stand there.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"\\(?P<escape>.)"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]"
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
    """One pattern or group while it is read: its alternatives, each a row of things required."""

    def __init__(self, is_look: bool = False) -> None:
        self.is_look = is_look
        self.alternatives: list[list[frozenset[str]]] = [[]]
        self.run = ""

    def add_char(self, char: str) -> None:
        self.run += char.lower()

    def end_run(self) -> None:
        if self.run:
            self.alternatives[-1].append(frozenset({self.run}))
        self.run = ""

    def drop_last(self) -> None:
        """What came last need not be there at all."""
        if self.run:
            self.run = self.run[:-1]
            self.end_run()
        elif self.alternatives[-1]:
            self.alternatives[-1].pop()

    def next_alternative(self) -> None:
        self.end_run()
        self.alternatives.append([])

    def required(self) -> frozenset[str]:
        """One of these, whichever alternative fits; of a row the longest is taken."""
        self.end_run()
        none = frozenset({""})
        best = [
            max(row, key=lambda item: min(map(len, item)), default=none)
            for row in self.alternatives
        ]
        return frozenset().union(*best)


def find_literals(pattern: str) -> frozenset[str]:
    """In small letters and without digits; one of them is in every text that the pattern fits."""
    stack = [_Part()]
    for match in _TOKEN.finditer(pattern):
        part = stack[-1]
        kind = match.lastgroup
        if kind == "char" and not match.group().isdigit():
            part.add_char(match.group())
        elif kind == "escape" and not match["escape"].isalnum():
            part.add_char(match["escape"])
        elif kind in ("open", "look"):
            part.end_run()
            stack.append(_Part(is_look=kind == "look"))
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
