"""The corpus of secrets: none is seen, and one that is would be noticed."""

from __future__ import annotations

from benchmarks.secrets.__main__ import misses_ours
from benchmarks.secrets.corpus import Shape, draw_shapes


def test_shapes_of_the_corpus_are_hidden_in_every_artefact() -> None:
    shapes = list(draw_shapes(1))
    assert len({shape.name for shape in shapes}) > 120
    assert [(shape.name, shape.artefact) for shape in shapes if misses_ours(shape)] == []


def test_a_miss_of_the_corpus_is_noticed() -> None:
    assert misses_ours(Shape(name="a", artefact="code", text="x = wombatwombat", secret="wombatwo"))
