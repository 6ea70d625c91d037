"""A folder is a room: one purpose, few entries, imports that run one way (docs/spine.md).

`BELOW` is the order of rooms in each top folder: a room imports only rooms that stand before it,
late imports included. Imports for type checkers alone do not count.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

BELOW = {
    "containers": [
        "containers",
    ],
    "templates": [
        "templates",
    ],
    "reports": [
        "reports",
        "reports/load",
        "reports/analysis",
        "reports/page",
        "reports/export",
    ],
    "varuna_core": [
        "varuna_core/facts",
        "varuna_core/facts/catalogue",
        "varuna_core/records",
        "varuna_core/plugins",
        "varuna_core/checkpoint/format",
        "varuna_core/data",
        "varuna_core/planner/profile",
        "varuna_core/records/logs",
        "varuna_core/trace",
        "varuna_core/trace/startup",
        "varuna_core/runtime/comm",
        "varuna_core/schedule",
        "varuna_core/hang",
        "varuna_core/agent/processes",
        "varuna_core/agent/gpu",
        "varuna_core/functions",
        "varuna_core/checkpoint/store",
        "varuna_core/checkpoint/foreign",
        "varuna_core/planner/model",
        "varuna_core/runtime/split",
        "varuna_core/agent/setup",
        "varuna_core/checkpoint",
        "varuna_core/planner/search",
        "varuna_core/runtime/engine",
        "varuna_core/runtime/batch",
        "varuna_core/runtime/tensor_parallel",
        "varuna_core/agent/meeting",
        "varuna_core/planner",
        "varuna_core/planner/result",
        "varuna_core/runtime/optim",
        "varuna_core/agent/checks",
        "varuna_core/agent/track",
        "varuna_core/runtime/saving",
        "varuna_core/agent",
        "varuna_core/runtime",
        "varuna_core/morph",
        "varuna_core/profiling",
        "varuna_core",
        "varuna_core/launch",
        "varuna_core/programs",
    ],
    "jobs": [
        "jobs",
        "jobs/monitor",
        "jobs/monitor/model",
        "jobs/conf",
        "jobs/programs/code",
        "jobs/images",
        "jobs/programs",
        "jobs/schedulers",
        "jobs/schedulers/slurm",
        "jobs/schedulers/local",
        "jobs/schedulers/allocation",
        "jobs/conf/loading",
        "jobs/runs",
        "jobs/monitor/log_lines",
        "jobs/monitor/stacks",
        "jobs/monitor/rules",
        "jobs/planning",
        "jobs/monitor/readers",
        "jobs/reporting",
        "jobs/submit",
        "jobs/elastic",
        "jobs/api",
    ],
    "shelf": [
        "shelf",
        "shelf/importers/bash",
        "shelf/importers",
        "shelf/doctor",
        "shelf/trial",
        "shelf/elastic",
        "shelf/view",
        "shelf/screen",
        "shelf/watch",
        "shelf/web",
        "shelf/run",
        "shelf/host",
        "shelf/commands",
    ],
}
MOST_LEVELS = 10
MOST_FILE_LEVELS = 16
MOST_ENTRIES = 16
MORE_ENTRIES = {"varuna_core": "one room for each idea; facts is the one that all others rest on"}
"""Rooms that may hold more, and why."""


@cache
def list_files() -> dict[str, Path]:
    """Import name to file, of the installed packages' sources."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *(f"{top}/*.py" for top in BELOW)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    found = {}
    for text in listed:
        name = text.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        found[name if name.startswith("varuna_core") else f"vjob.{name}"] = Path(text)
    return found


@cache
def list_imports() -> dict[Path, frozenset[Path]]:
    """Each file's imports of our own files, wherever in it they stand."""
    files = list_files()
    found = {}
    for path in files.values():
        tree = ast.parse((ROOT / path).read_text())
        hidden = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
            for line in block.body
            for node in ast.walk(line)
        }
        names: list[str] = []
        for node in ast.walk(tree):
            if id(node) in hidden:
                continue
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        found[path] = frozenset(filter(None, map(find_file, names))) - {path}
    return found


def find_file(name: str) -> Path | None:
    """The module that an imported name is or lies in; None for foreign ones and for packages."""
    while name and name not in list_files():
        name = name.rpartition(".")[0]
    path = list_files().get(name)
    return None if path is None or path.name == "__init__.py" else path


def name_room(path: Path) -> str:
    return str(path.parent)


def list_rooms() -> list[str]:
    return sorted({name_room(path) for path in list_files().values()})


def count_levels(edges: dict[str, set[str]]) -> int:
    """Nodes on the longest way down."""

    @cache
    def measure(node: str) -> int:
        return 1 + max((measure(other) for other in edges[node]), default=0)

    return max(map(measure, list(edges)))


def test_every_room_stands_in_the_order() -> None:
    assert sorted(room for rooms in BELOW.values() for room in rooms) == list_rooms()


def test_a_room_imports_only_rooms_below_it() -> None:
    place = {room: index for rooms in BELOW.values() for index, room in enumerate(rooms)}
    up = []
    for path, imports in list_imports().items():
        for other in imports:
            ours, theirs = name_room(path), name_room(other)
            if ours.split("/")[0] == theirs.split("/")[0] and place[theirs] > place[ours]:
                up.append(f"{path} imports {other}")
    assert not up, up


def test_files_import_each_other_in_no_circle() -> None:
    state: dict[Path, bool] = {}

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, " -> ".join(map(str, (*way[way.index(path) :], path)))
        if path not in state:
            for other in list_imports()[path]:
                visit(other, (*way, path))
            state[path] = True

    for path in list_imports():
        visit(path, ())


@pytest.mark.parametrize("top", BELOW)
def test_levels_of_rooms_are_few(top: str) -> None:
    edges: dict[str, set[str]] = {room: set() for room in BELOW[top]}
    for path, imports in list_imports().items():
        for other in imports:
            ours, theirs = name_room(path), name_room(other)
            if ours != theirs and ours in edges and theirs in edges:
                edges[ours].add(theirs)
    is_below_all = int("varuna_core/facts" in edges)  # types that every room may speak of
    assert count_levels(edges) - is_below_all <= MOST_LEVELS


@pytest.mark.parametrize("top", BELOW)
def test_levels_of_files_are_few(top: str) -> None:
    edges = {
        str(path): {str(other) for other in imports if other.parts[0] == top}
        for path, imports in list_imports().items()
        if path.parts[0] == top
    }
    assert count_levels(edges) <= MOST_FILE_LEVELS


def test_a_room_holds_few_things() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--", *BELOW], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    entries: dict[str, set[str]] = defaultdict(set)
    for text in listed:
        path = Path(text)
        for parent in list(path.parents)[:-1]:
            entries[str(parent)].add(path.relative_to(parent).parts[0])
    full = {room: len(held) for room, held in entries.items() if len(held) > MOST_ENTRIES}
    assert full.keys() == MORE_ENTRIES.keys(), full


@pytest.mark.parametrize("room", list_rooms())
def test_a_room_says_what_it_is_for(room: str) -> None:
    """In its docstring; the functions that it names in backticks, as `module.name`, are there."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert text, room
    for module, name in re.findall(r"`(\w+)\.(\w+)`", text):
        path = ROOT / room / f"{module}.py"
        if path.exists():
            assert name in list_names(path), f"{room}: {module}.{name}"


def list_names(path: Path) -> set[str]:
    """Functions, classes and constants of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
