"""A loop that cannot end by itself is distinguished from one that works."""

import dis
import textwrap

import pytest

from varuna_core.trace.startup.reporter import find_spin

SPINS = {
    "nothing": "while True: pass",
    "a count": "n = 0\nwhile True:\n    n += 1",
    "a flag of another thread": "while not ready:\n    pass",
    "an attribute": "while model.ready is False or model.stopped:\n    continue",
    "an item": "while state['ready'] != 1: pass",
    "within a function's work": "x = load()\nfor item in x:\n    work(item)\nwhile True: pass",
}
WORKS = {
    "a sum": "total = 0\nfor one in values:\n    total += one",
    "a count with an end": "n = 0\nwhile n < 10 ** 12:\n    n += 1",
    "a call": "while not solver.step():\n    pass",
    "a main loop": "while True:\n    train()",
    "a loop that ends by an exception": "n = 0\ntry:\n    while True:\n        x = values[n]\n"
    "        n += 1\nexcept IndexError:\n    pass",
    "an edit distance": "for i in range(n):\n    for j in range(m):\n"
    "        row[j] = min(row[j], row[j - 1], old[j]) + (a[i] != b[j])",
    "a sieve": "while i < n:\n    sieve[i] = 0\n    i += step",
    "a collatz": "while n != 1:\n    if n % 2:\n        n = 3 * n + 1\n    else:\n        n //= 2",
    "a queue": "while heap:\n    del heap[-1]",
    "a generator": "while True:\n    yield 1",
    "an inner loop of an endless one": "while True:\n    for x in y:\n        z = x",
    "no loop": "x = 1",
}


def list_spins(text):
    code = compile("def work():\n" + textwrap.indent(text, "    "), "train.py", "exec").co_consts[0]
    return {find_spin(code, one.offset) for one in dis.get_instructions(code)} - {0}


@pytest.mark.parametrize("name", SPINS)
def test_a_loop_that_nothing_within_ends(name):
    text = SPINS[name]
    line = 2 + next(at for at, one in enumerate(text.splitlines()) if one.startswith("while"))
    assert list_spins(text) <= {line, line + 1} != set()


@pytest.mark.parametrize("name", WORKS)
def test_a_loop_that_works(name):
    assert list_spins(WORKS[name]) == set()
