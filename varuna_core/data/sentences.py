"""Sentences of a text, for BERT: by rules, without a model to download.

A sentence ends at `.`, `!` or `?` (and closing quotes or brackets) before white space and something
that may begin a sentence; at their full-width forms, with or without space; and at a line break.
Abbreviations, initials and numbered points do not end one. English in the main: in a language whose
sentences do not begin with a capital, only line breaks and `!` `?` before a space part them.
"""

from __future__ import annotations

import re

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
    """The sentences; white space around them goes, but for line breaks that are to be kept."""
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
