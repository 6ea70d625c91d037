"""`make gpu`: its parts go on after a cut, its page says what was shown, and what was not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Outcome, Part, State, load_state, render, run_parts
from tests import ROOT

FACTS = {"device": "NVIDIA H100, 80 GiB", "driver": "550.54.15", "torch": "2.13.0"}
FIGURES = """\
print('''| what | bound | median |
|---|---|---|
| one stage | at least 0.98 | 0.99 |
| a message | 1.3 | 1.7 |''')
"""
TESTS = """
import pytest

def test_it_trains(): pass
@pytest.mark.skipif(True, reason="nsys is not on the PATH")
def test_nsys(): pass
def test_it_fails(): assert False
"""


def make_part(name: str, code: str) -> Part:
    return Part(name=name, title=f"What {name} is", words=("-c", code))


def make_state() -> State:
    return State(facts=FACTS, date="2026-11-25", machine="2 cores.")


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    """One with figures, one that fails, and tests; each leaves a line in a file."""
    test = tmp_path / "test_fake.py"
    test.write_text(TESTS)
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write('{{}} ')\n"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test))
    return [
        make_part("figures", note.format("figures") + FIGURES),
        make_part("failing", note.format("failing") + "raise SystemExit('CUDA error: a bus')"),
        Part(name="tests", title="Tests", words=words, is_tests=True),
    ]


def test_a_part_that_fails_is_written_down_and_the_others_go_on(
    parts: list[Part], tmp_path: Path
) -> None:
    state, page = make_state(), tmp_path / "page.md"
    run_parts(parts, state, tmp_path / "state/state.json", page)
    text = page.read_text()
    assert text.startswith("# On a GPU, 2026-11-25\n")
    assert "device NVIDIA H100, 80 GiB, driver 550.54.15, torch 2.13.0" in text
    assert re.search(r"\| figures \|.*\| 1 of 2 figures within their bounds \| \d+ \|", text)
    assert re.search(r"\| failing \|.*\| \*\*failed\*\*: exit 1: CUDA error: a bus \| \d+ \|", text)
    assert re.search(r"\| tests \|.*\| 1 of 3 tests shown, \*\*1 failed\*\* \| \d+ \|", text)
    missed = text.partition("## What missed")[2].partition("\n## ")[0].split("\n- ")[1:]
    assert [line.strip() for line in missed] == [
        "figures: a message: 1.7, and the bound is at most 1.3",
        "failing: exit 1: CUDA error: a bus",
        "tests: it fails: failed",
        "tests: 1 left out: nsys is not on the PATH",
    ]
    assert "| it trains | yes |" in text and "| it fails | FAILED |" in text
    assert [state.outcomes[part.name].has_failed for part in parts] == [False, True, True]


def test_what_ended_before_a_cut_is_not_run_again(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, page, ran = tmp_path / "state/state.json", tmp_path / "page.md", tmp_path / "ran"
    run_part = gpu.run_part

    def cut_off(part: Part) -> Outcome:
        if part.name == "failing":
            raise KeyboardInterrupt
        return run_part(part)

    monkeypatch.setattr(gpu, "run_part", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_parts(parts, make_state(), path, page)
    assert "| failing | What failing is | not run yet | |" in page.read_text()
    assert "- failing: not run yet\n- tests: not run yet" in page.read_text()
    monkeypatch.setattr(gpu, "run_part", run_part)
    before = load_state(path, FACTS).outcomes["figures"]
    state = load_state(path, FACTS)
    run_parts(parts, state, path, page)
    assert ran.read_text() == "figures failing "
    assert state.outcomes["figures"] == before and "not run yet" not in page.read_text()
    run_parts(parts, load_state(path, FACTS), path, page, ["failing"])
    assert ran.read_text() == "figures failing failing "


@pytest.mark.parametrize("kept", [None, "{", '{"facts": {}}', "[1]"])
def test_a_state_of_something_else_begins_anew(tmp_path: Path, kept: str | None) -> None:
    path = tmp_path / "state.json"
    if kept is None:
        state = make_state()
        state.outcomes["wire"] = Outcome(text="old", tests=[("a", "yes")])
        state.save(path)
        assert load_state(path, FACTS) == state
    else:
        path.write_text(kept)
    assert load_state(path, {**FACTS, "driver": "570"}).outcomes == {}


def test_a_part_ends_with_its_limit(tmp_path: Path) -> None:
    part = make_part("hanging", "import signal; signal.pause()")
    assert gpu.run_part(part, 0.5).short == "**failed**: it took longer than 0 s"


def test_without_a_gpu_it_says_so_and_writes_no_page_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "find_facts", lambda: None)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "make gpu: not run: no GPU here\n"
    assert not list(tmp_path.iterdir())
    assert gpu.main(["--write"]) == 0
    (page,) = tmp_path.iterdir()
    assert page.name.endswith("-gpu.md") and "\nNot run: no GPU here.\n" in page.read_text()
    assert page.read_text().count("| not run |") == len(gpu.PARTS)
    assert gpu.main(["--several", "--write"]) == 0
    text = next(tmp_path.glob("*-gpu8.md")).read_text()
    assert text.startswith("# On several GPUs, ") and "| layouts |" in text
    assert all(part.belief for part in (*gpu.PARTS, *gpu.SEVERAL))


def test_each_part_names_what_is_there() -> None:
    for part in (*gpu.PARTS, *gpu.SEVERAL):
        if part.is_tests:
            assert all((ROOT / word).exists() for word in part.words if word.startswith("tests/"))
        else:
            path = ROOT / part.words[1].replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    listed = {word for part in gpu.PARTS for word in part.words if word.startswith("tests/")}
    found = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert listed == found
    assert render(make_state(), gpu.PARTS).count("not run yet") == 2 * len(gpu.PARTS)
