"""Plug-ins are found by metadata, imported one by one, and left out with one line if they fail."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.toys import build_environment, install_toy, settle
from varuna_core.agent.bundle import write_bundle
from varuna_core.plugins import BuiltIn, Seam, installed, list_plugins, load_plugin
from varuna_core.plugins.seam import collect_for_nodes

GROUP = "vjob.trackers"
GOOD = "class Toy:\n    API = 1\n"
SEAM = Seam(GROUP, [BuiltIn("paper", "A notebook.", "json:dumps")])
PYTHON_3_8 = shutil.which("python3.8")


@pytest.fixture(autouse=True)
def remember_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(installed, "_by_state", {})
    monkeypatch.setattr(installed, "_warned", set())


def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str = GOOD, entry: str = ""
) -> str:
    """A toy of its own name, which no other test has imported; its module's name."""
    module = f"toy_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / "toys"
    install_toy(folder, GROUP, entry or f"toy = {module}:Toy", source)
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return module


def test_a_plugin_is_listed_without_being_imported_and_then_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install(tmp_path, monkeypatch)
    assert list_plugins(GROUP) == ["toy"]
    assert SEAM.list_names() == ["paper", "toy"]
    assert SEAM.get_help("paper") == "A notebook."
    assert SEAM.get_help("toy") == "A plug-in of toy-dist 1.0."
    assert module not in sys.modules
    assert load_plugin(GROUP, "toy").__name__ == "Toy"
    assert SEAM.load("paper") is json.dumps
    assert SEAM.load("none") is None


@pytest.mark.parametrize(
    ("source", "entry", "said"),
    [
        ("class Toy:\n    API = 2\n", "", "is for API 2; this vjob has API 1"),
        ("class Toy: pass\n", "", "has no API number; this vjob has API 1"),
        ("import not_there_at_all\n", "", "ModuleNotFoundError: No module named 'not_there"),
        ("raise SystemExit(3)\n", "", "cannot be imported: SystemExit: 3"),
        ("1 +\n", "", "cannot be imported: SyntaxError: invalid syntax"),
        ("", "", "cannot be imported: AttributeError: "),
        (GOOD, "a b = toy:Toy", "plug-in 'a b' of toy-dist 1.0 is ignored: invalid name"),
        (GOOD, "paper = toy:Toy", "plug-in paper of toy-dist 1.0 is ignored: vjob itself has"),
    ],
)
def test_a_plugin_that_fails_is_left_out_with_one_line_that_names_its_distribution(
    source: str,
    entry: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, monkeypatch, source, entry)
    with caplog.at_level(logging.WARNING, "vjob.plugins"):
        for _ in range(2):
            assert SEAM.list_names()[0] == "paper"
            assert SEAM.load("toy") is None
            assert SEAM.load("paper") is json.dumps
    (line,) = caplog.messages
    assert said in line and "toy-dist 1.0" in line and "\n" not in line


def test_of_two_with_one_name_the_first_on_the_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("second", "first"):
        folder = tmp_path / name
        install_toy(folder, GROUP, f"toy = toy_{name}:Toy", GOOD, distribution=f"{name}-dist")
        monkeypatch.syspath_prepend(folder)
    found = installed.find_plugin(GROUP, "toy")
    assert found is not None and found.target == "toy_first:Toy"
    assert caplog.messages == [
        "plug-in toy of second-dist 1.0 is ignored: first-dist 1.0 has a plug-in of that name"
    ]


def test_metadata_is_read_once_for_each_state_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    settle(tmp_path / "toys")
    monkeypatch.setattr(installed, "_SETTLED_S", -1e9)  # the other entries may be new
    assert list_plugins(GROUP) == ["toy"]
    installed.remember_help(GROUP, "toy", "Play.")
    installed._by_state.clear()  # as another process
    with monkeypatch.context() as patch:
        patch.setattr(installed, "_read_metadata", None)
        assert list_plugins(GROUP) == ["toy"]
        assert SEAM.get_help("toy") == "Play."
    path = tmp_path / "toys/toy_dist-1.0.dist-info/entry_points.txt"
    path.write_text(f"[{GROUP}]\ndoll = toy:Toy\n")  # the folder's own time stays
    assert list_plugins(GROUP) == ["doll"]


def test_a_folder_that_pip_may_still_write_to_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    assert list_plugins(GROUP) == ["toy"]
    assert not (tmp_path / "cache").exists()


def test_a_home_that_cannot_be_written_to_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    install(tmp_path, monkeypatch)
    settle(tmp_path / "toys")
    assert list_plugins(GROUP) == ["toy"]


def test_a_bundle_carries_the_plugins_that_its_nodes_need_and_has_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    code = (
        f"import sys; sys.path.insert(0, sys.argv[1])\n"
        f"from varuna_core.plugins import list_plugins, load_plugin\n"
        f"print(list_plugins({GROUP!r}), load_plugin({GROUP!r}, 'toy'))\n"
    )
    for plugins, said in ((None, "[] None"), ({GROUP: ["toy"]}, "['toy'] <class ")):
        write_bundle(tmp_path / "agent.pyz", plugins=plugins)
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, str(tmp_path / "agent.pyz")],
            env=build_environment(tmp_path, tmp_path / "toys"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.startswith(said), done.stderr


def test_a_plugin_of_several_files_is_not_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, entry="toy = toy_box:Toy")
    (tmp_path / "toys/toy_box.py").unlink()
    (tmp_path / "toys/toy_box").mkdir()
    (tmp_path / "toys/toy_box/__init__.py").write_text(GOOD)
    assert list(collect_for_nodes({GROUP: ["toy"]})) == ["varuna_core/plugins/carried.py"]
    assert "toy-dist 1.0 is not carried to the nodes: toy_box: the module is not" in caplog.text


@pytest.mark.parametrize("path", sorted((ROOT / "varuna_core/plugins").glob("*.py")))
def test_the_code_reads_as_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


@pytest.mark.skipif(PYTHON_3_8 is None, reason="needs python3.8")
def test_an_old_python_finds_plugins_too(tmp_path: Path) -> None:
    folder = install_toy(tmp_path / "toys", GROUP, "toy = toy_old:Toy", GOOD)
    code = (
        "from varuna_core.plugins import list_plugins, load_plugin; import sys\n"
        f"print(list_plugins({GROUP!r}), load_plugin({GROUP!r}, 'toy').API)\n"
    )
    done = subprocess.run(
        [str(PYTHON_3_8), "-c", code],
        env={**build_environment(tmp_path, folder), "PYENV_VERSION": "3.8.18"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['toy'] 1\n", done.stderr
