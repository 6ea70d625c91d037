"""agent.pyz: one file, the same bytes each time, and commands that teach."""

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.varuna_core.agent.local_run import make_plan
from varuna_core.agent.bundle import ENTRIES, compile_sources, render_bundle, write_bundle
from varuna_core.records.plan import MorphPlan, TrackPlan

MODULE = """
from typing import NamedTuple

COLOURS = ("red", "green", "blue")


class Place(NamedTuple):
    rank: int
    host: str = "n0"


def find(word: str, *, among: int = 3) -> bool:
    \"\"\"Among others.\"\"\"
    return word in {"red", "green", "blue", "n0"} and among in (1, 2, 3) and bool(word[1:])


def fail() -> None:
    raise RuntimeError("in a bundle")
"""
MAIN = b"""
import traceback

import place

try:
    place.fail()
except RuntimeError:
    traceback.print_exc()
"""
IMPORT = re.compile(r"^\s*(?:from|import) (varuna_core[\w.]*)", re.M)
SOURCES = {"__main__.py": MAIN, "place.py": MODULE.encode()}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "agent.pyz"
    write_bundle(path)
    return path


def call(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # -S -E: no site packages and no PYTHONPATH, as on a bare node.
    return subprocess.run(
        [sys.executable, "-S", "-E", *words], capture_output=True, text=True, timeout=20, env=env
    )


def test_the_same_sources_give_the_same_bytes(bundle: Path) -> None:
    again = bundle.with_name("again.pyz")
    write_bundle(again)
    os.utime(again, (0, 0))
    assert again.read_bytes() == bundle.read_bytes()


def test_the_bytes_are_the_same_whatever_the_hashes_and_whoever_holds_the_names() -> None:
    code = (
        "import sys; from tests.varuna_core.agent.test_bundle import SOURCES; "
        "from varuna_core.agent.bundle import *; held = [sys.intern('among'), sys.argv]; "
        "data = render_bundle({**SOURCES, **compile_sources('x.pyz', SOURCES)}); "
        "import hashlib; print(hashlib.sha256(data).hexdigest())"
    )
    found = set()
    for seed in ("0", "1", "2", "3"):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        words = [sys.executable, "-c", code, *"abc"[: int(seed)]]
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def write_small(folder: Path, **changes: bytes) -> Path:
    path = folder / "x.pyz"
    compiled = compile_sources("x.pyz", SOURCES)
    assert list(compiled) == ["place.pyc"]
    path.write_bytes(render_bundle({**SOURCES, **compiled, **changes}))
    return path


def test_a_module_is_taken_as_it_was_compiled_and_its_errors_show_the_source(
    tmp_path: Path,
) -> None:
    other = compile_sources("x.pyz", {"place.py": SOURCES["place.py"].replace(b"in a", b"of a")})
    result = call(str(write_small(tmp_path, **other)))
    assert "RuntimeError: of a bundle" in result.stderr, "not the source's"
    assert 'File "x.pyz/place.py", line ' in result.stderr
    assert 'raise RuntimeError("in a bundle")' in result.stderr


def test_another_python_compiles_the_source(tmp_path: Path) -> None:
    """As of another version: the number in front of what was compiled is not its own."""
    compiled = compile_sources("x.pyz", SOURCES)["place.pyc"]
    foreign = b"\0\0\r\n" + compiled[4:16] + b"not for us"
    result = call(str(write_small(tmp_path, **{"place.pyc": foreign})))
    assert "RuntimeError: in a bundle" in result.stderr
    assert f'File "{tmp_path}/x.pyz/place.py", line ' in result.stderr


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_bundle(tmp_path / "first.pyz")
    monkeypatch.setattr("varuna_core.agent.bundle.compile_sources", None)
    write_bundle(tmp_path / "second.pyz")
    assert (tmp_path / "first.pyz").read_bytes() == (tmp_path / "second.pyz").read_bytes()


def test_a_home_that_cannot_be_written_to_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_bundle(tmp_path / "agent.pyz")
    assert "varuna_core/records/plan.pyc" in zipfile.ZipFile(tmp_path / "agent.pyz").namelist()
    write_bundle(tmp_path / "agent.pyz", compiled=False)
    names = zipfile.ZipFile(tmp_path / "agent.pyz").namelist()
    assert not [name for name in names if name.endswith(".pyc")]


PLAN = make_plan()
PLANS = {
    "": PLAN,
    "morph": replace(PLAN, morphing=MorphPlan(1, 1, requeue=False, save_s=1)),
    "agent/track": replace(PLAN, track=TrackPlan(id="a", python="python3", config={})),
    "trace/hook": replace(PLAN, timeline=True),
}


@pytest.mark.parametrize("part", PLANS)
def test_it_holds_all_that_a_run_can_import_and_little_else(part: str, tmp_path: Path) -> None:
    """A module that a node lacks would end the run: every import statement is looked at."""
    write_bundle(tmp_path / "agent.pyz", plan=PLANS[part])
    with zipfile.ZipFile(tmp_path / "agent.pyz") as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        sources = {name: archive.read(name).decode() for name in names}
    modules = {re.sub(r"(/__init__)?\.py$", "", name).replace("/", ".") for name in sources}
    entries = {f"varuna_core.{name}" for name in ENTRIES}
    for name, source in sources.items():
        missing = set(IMPORT.findall(source)) - modules
        assert missing <= entries or name == "varuna_core/__init__.py", name
    for one in ("morph", "agent/track", "trace/hook"):
        found = [name for name in names if name.startswith(f"varuna_core/{one}")]
        assert (len(found) > 2 or found == ["varuna_core/trace/hook.py"]) == (one == part), found
    assert not modules & {"varuna_core.agent.bundle", "varuna_core.planner", "varuna_core.runtime"}
    inside = sorted(name for name in modules if not name.endswith(("__main__", "sitecustomize")))
    code = "import importlib, sys; sys.path.insert(0, sys.argv[1]); "
    code += "print(*(importlib.import_module(name).__file__ for name in sys.argv[2:]))"
    result = call("-c", code, str(tmp_path / "agent.pyz"), *inside)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"{tmp_path}/agent.pyz/") == len(inside)


def test_help_shows_the_order_of_the_commands(bundle: Path) -> None:
    result = call(str(bundle), "--help")
    assert result.returncode == 0, result.stderr
    for command in ("open", "node", "close", "stop"):
        assert f"agent.pyz {command}" in result.stdout
        assert call(str(bundle), command, "--help").returncode == 0


def test_the_module_is_the_same_program() -> None:
    root = ROOT
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-m", "varuna_core.agent", "node", "--help"],
        capture_output=True,
        text=True,
        env=env,
        timeout=20,
    )
    assert "SLURM_NODEID" in result.stdout


def test_wrong_input_is_2_with_a_sentence(bundle: Path, tmp_path: Path) -> None:
    result = call(str(bundle), "open", "--run", str(tmp_path / "none"), "--attempt", "0")
    assert (result.returncode, "there is no such run folder" in result.stderr) == (2, True)
    result = call(str(bundle), "node", "--run", str(tmp_path), "--attempt", "0")
    assert (result.returncode, "missing, incomplete" in result.stderr) == (2, True)
