"""Rows of all scopes: their names, their order with those of plug-ins, their words, their file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.varuna_core.facts.test_remedy import names_wrong_words
from varuna_core.facts.catalogue.known_line import KnownLine, Proof, Scope
from varuna_core.facts.catalogue.patterns import PatternError
from varuna_core.facts.catalogue.tables import (
    BUILT_IN,
    Catalogue,
    CatalogueError,
    dump_rows,
    merge_rows,
    parse_rows,
)
from varuna_core.facts.remedy import Context

ROWS = [row for scope in Scope for row in BUILT_IN.rows(scope)]
SITE = KnownLine("site disk", r"lustre on fire", Scope.RANK)


@pytest.mark.parametrize("context", Context)
def test_no_row_has_words_of_another_context(context: Context) -> None:
    wrong = [
        f"{row.scope.value}/{row.name}: {text}"
        for row in ROWS
        for text in [row.explain(context)]
        if context in (Context.CONF, Context.SBATCH) or row.scope in (Scope.RANK, Scope.CONTAINER)
        if names_wrong_words(text, context)
    ]
    assert wrong == []


def test_every_row_explains_itself() -> None:
    plain = ("python exception", "fatal error", "interrupted", "attempt ended", "no error")
    silent = [
        row.name for row in ROWS if not row.explain(Context.CONF) and row.proof is not Proof.IGNORE
    ]
    assert set(silent) <= set(plain)


def test_texts_are_clauses() -> None:
    for row in ROWS:
        for context in Context:
            text = row.explain(context)
            assert not text.endswith((".", ":", ",", ";")) and "\n" not in text, text
            assert "  " not in text and ": :" not in text and "; or" not in text, text
            assert len(row.meaning) < 130 and "." not in row.meaning[-1:], row.name


def test_rows_of_a_plug_in_precede_general_rows_or_the_row_that_they_name() -> None:
    rank, ssh = BUILT_IN.rows(Scope.RANK), BUILT_IN.rows(Scope.SSH)
    names = [row.name for row in merge_rows(rank, [SITE])]
    assert names.index("site disk") == names.index("python exception") - 1
    assert merge_rows(ssh, [SITE])[-1] == SITE
    before = replace(SITE, before="disk full")
    names = [row.name for row in merge_rows(rank, [before])]
    assert names.index("site disk") == names.index("disk full") - 1
    both = BUILT_IN.add([before, replace(SITE, scope=Scope.NODE)])
    assert both.find(Scope.NODE, "site disk") is not None
    assert both.match(Scope.RANK, "the lustre on fire: No space left on device") == before


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (replace(SITE, name="disk full"), CatalogueError),
        (replace(SITE, before="no such row"), CatalogueError),
        (replace(SITE, pattern=r"(a+)+b"), PatternError),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(row: KnownLine, error: type[Exception]) -> None:
    with pytest.raises(error):
        merge_rows(BUILT_IN.rows(Scope.RANK), [row])


def test_two_rows_of_a_scope_cannot_have_one_name() -> None:
    with pytest.raises(CatalogueError, match="site disk"):
        Catalogue({Scope.RANK: (SITE, SITE)})


def test_rows_come_back_from_their_file() -> None:
    for scope in Scope:
        rows = BUILT_IN.rows(scope)
        assert parse_rows(json.loads(json.dumps(dump_rows(rows)))) == rows


def test_a_row_of_a_later_version_is_left_out() -> None:
    rows = dump_rows([SITE])
    unknown = [{**rows[0], "scope": "moon"}, {**rows[0], "pattern": "(a+)+"}, 7, {}]
    later = {**rows[0], "colour": "red"}
    assert parse_rows([*unknown, later]) == (SITE,)
    assert parse_rows("nonsense") == ()


def test_what_says_most_comes_first_in_logs() -> None:
    names = [(row.scope, row.name) for row in BUILT_IN.log_rows()]
    assert len(names) == len(set(names))
    order = [
        (Scope.RANK, "attempt ended"),
        (Scope.CONTAINER, "quota"),
        (Scope.NODE, "ecc"),
        (Scope.RANK, "cuda out of memory"),
        (Scope.SCHEDULER, "time limit"),
        (Scope.RANK, "quota"),
        (Scope.RANK, "python exception"),
        (Scope.RANK, "logged error"),
    ]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
