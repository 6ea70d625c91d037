"""The mutants of benchmarks/suite: what is changed, and that a sample keeps."""

import ast
import hashlib
from pathlib import Path

import pytest

from benchmarks.suite import mutants
from benchmarks.suite.mutants import Measured, Mutant, draw_mutants, list_mutants_of

TEXT = '''"""A module."""

LIMIT: int = 3


def is_near(one: float, other: float = 1) -> bool:
    """Says "ä", whose bytes are more than its letters."""
    name = "ä" if one < other else "b"; far = not one
    return far or name in (
        "ä",
    )
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "jobs/near.py"
    path.parent.mkdir()
    path.write_text(TEXT)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return path


def test_each_mutant_differs_at_one_place_and_keeps_its_lines(module: Path) -> None:
    found = {mutant.key: mutant for mutant in list_mutants_of(module)}
    place = "jobs/near.py, is_near:"
    assert found.keys() == {
        "jobs/near.py, the module: `3` -> `4`",
        f"{place} `1` -> `2`",
        f"{place} `one < other` -> `one <= other`",
        f"{place} `\"ä\" if one < other else \"b\"` -> `'ä' if not one < other else 'b'`",
        f"{place} `not one` -> `one`",
        f"{place} `far or name in ( \"ä\", )` -> `far and name in ('ä',)`",
        f"{place} `name in ( \"ä\", )` -> `name not in ('ä',)`",
        f'{place} `return far or name in ( "ä", )` -> `return None`',
    }
    changed = found[f"{place} `not one` -> `one`"]
    assert changed.render() == TEXT.replace("not one", "(one)")
    assert (changed.line, changed.lines) == (8, range(8, 9))
    assert found[f"{place} `name in ( \"ä\", )` -> `name not in ('ä',)`"].lines == range(9, 12)
    for mutant in found.values():
        assert ast.dump(ast.parse(mutant.render())) != ast.dump(ast.parse(TEXT))


def test_a_sample_stays_while_other_lines_change(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw() -> list[str]:
        monkeypatch.setattr(mutants, "list_mutants", lambda _: list(list_mutants_of(module)))
        return [mutant.key for mutant in draw_mutants(100, 1)]

    before = draw()
    module.write_text("import os\n\n" + TEXT + "\n\ndef other() -> int:\n    return 7\n")
    after = draw()
    assert [key for key in after if key in before] == before
    assert {key.partition(":")[0] for key in after if key not in before} == {"jobs/near.py, other"}


def test_the_tests_of_a_line_run_first_and_fastest_first(module: Path) -> None:
    mutant = next(m for m in list_mutants_of(module) if m.line == 8)
    room = mutants.find_room(mutant.file)
    slow, fast, far = f"{room}a.py::slow", f"{room}a.py::fast", "x.py::far"
    measured = Measured(
        seconds={slow: 2.0, fast: 0.1, far: 0.01, "x.py::beside": 0.01},
        lines={"jobs/near.py": {8: {slow, fast, far, "left out"}}},
        files={},
    )
    assert measured.list_phases(mutant) == [[fast, slow], [far]]


def test_what_an_import_runs_is_held_against_who_runs_the_file_or_imports_it(module: Path) -> None:
    (module.parent / "user.py").write_text("from vjob.jobs.near import LIMIT\n")
    (mutants.ROOT / "varuna_core").mkdir()
    mutants.find_importers.cache_clear()
    mutant = next(m for m in list_mutants_of(module) if m.line == 3)
    measured = Measured(
        seconds={"x.py::uses": 1.0, "y.py::runs": 1.0, "z.py::neither": 1.0},
        lines={"jobs/near.py": {3: {""}}},
        files={"jobs/near.py": {"y.py::runs", ""}, "jobs/user.py": {"x.py::uses"}},
    )
    assert {name for phase in measured.list_phases(mutant) for name in phase} == {
        "x.py::uses", "y.py::runs",
    }  # fmt: skip
    mutants.find_importers.cache_clear()


def test_results_of_a_module_that_changed_are_not_taken_up(module: Path, tmp_path: Path) -> None:
    drawn = list(list_mutants_of(module))
    kept = tmp_path / "results.jsonl"
    kept.write_text("".join(render_row(mutant) for mutant in drawn[:3]))
    assert mutants.read_results(kept, drawn) == {m.key: "caught" for m in drawn[:3]}
    module.write_text(f"{TEXT}\n")
    assert mutants.read_results(kept, list(list_mutants_of(module))) == {}


def render_row(mutant: Mutant) -> str:
    text = hashlib.sha256(mutant.render().encode()).hexdigest()[:16]
    return f'{{"mutant": {mutants.json.dumps(mutant.key)}, "text": "{text}", "said": "caught"}}\n'
