"""What is done to a module when it is imported: once, whoever imports it, and never to its harm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from varuna_core.trace.imports import watch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, modules = list(sys.meta_path), set(sys.modules)
    (tmp_path / "outer_one").mkdir()
    (tmp_path / "outer_one/__init__.py").write_text("from outer_one.inner import answer\n")
    (tmp_path / "outer_one/inner.py").write_text("def answer(): return 41\n")
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def add_one(module: ModuleType) -> None:
    inner: Callable[[], int] = module.answer
    module.answer = lambda: inner() + 1  # type: ignore[attr-defined]


def test_whoever_imports_it_gets_what_was_changed(folder: Path) -> None:
    watch({"outer_one.inner": add_one})
    import outer_one  # type: ignore[import-not-found]

    assert outer_one.answer() == 42
    assert sys.modules["outer_one.inner"].__file__ == str(folder / "outer_one/inner.py")


def test_a_module_that_is_there_already_is_changed_at_once(folder: Path) -> None:
    import outer_one.inner  # type: ignore[import-not-found]

    watch({"outer_one.inner": add_one, "no_such_module": add_one})
    assert outer_one.inner.answer() == 42
    with pytest.raises(ModuleNotFoundError):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401


def test_names_of_another_release_cost_one_line_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def expect_more(module: ModuleType) -> None:
        raise LookupError("it has no question")

    watch({"outer_one.inner": expect_more})
    import outer_one  # type: ignore[import-not-found]

    assert outer_one.answer() == 41
    assert capsys.readouterr().err.splitlines() == [
        "varuna_core.trace: no timeline of outer_one.inner: LookupError: it has no question"
    ]


def test_a_module_that_fails_fails_as_it_would(folder: Path) -> None:
    (folder / "broken_one.py").write_text("raise ValueError('own')")
    watch({"broken_one": add_one})
    with pytest.raises(ValueError, match="own"):
        import broken_one  # type: ignore[import-not-found]  # noqa: F401
