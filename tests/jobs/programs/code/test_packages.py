from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from vjob.jobs.programs.code.packages import find_editable, find_site_folders, list_packages


def test_packages_are_those_that_importlib_knows() -> None:
    found = list_packages(find_site_folders(sys.executable))
    named = {line.partition("==")[0].lower().replace("_", "-"): line for line in found}
    for name in ("click", "pytest"):
        assert named[name].partition("==")[2] == metadata.version(name)
    assert len(found) == len(named)


def test_versions_stand_in_folder_names_or_in_the_file(tmp_path: Path) -> None:
    for name in ("A_b-1.0.post1.dist-info", "zope.x-2-py3.9.egg-info", "own.egg-info", "x.py"):
        (tmp_path / name).mkdir()
    (tmp_path / "own.egg-info/PKG-INFO").write_text("Metadata-Version: 2\nName: own\nVersion: 3\n")
    (tmp_path / "bad.egg-info").write_text("nothing")
    assert list_packages([tmp_path]) == ["A_b==1.0.post1", "own==3", "zope.x==2"]


def test_the_first_of_two_folders_counts(tmp_path: Path) -> None:
    for folder, version in (("first", "2"), ("second", "1")):
        (tmp_path / folder / f"lib-{version}.dist-info").mkdir(parents=True)
    assert list_packages([tmp_path / "first", tmp_path / "second"]) == ["lib==2"]


def test_another_environment_is_read_by_its_layout_and_else_not_at_all(tmp_path: Path) -> None:
    site = tmp_path / "env/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    python = tmp_path / "env/bin/python"
    assert find_site_folders(str(python)) == []
    (tmp_path / "env/pyvenv.cfg").write_text("")
    assert find_site_folders(str(python)) == [site]


def test_folders_of_editable_packages_are_found_however_they_are_installed(tmp_path: Path) -> None:
    files = {
        "plain.pth": "/repo/src\nimport x\nrelative\n",
        "old.egg-link": "/repo/old\n.",
        "__editable___a_1_finder.py": "import os\nMAPPING: dict[str, str] = {'a': '/repo/lib/a', "
        "'b': '/repo/other'}\nNAMESPACES = {}\n",
        "__editable___b_1_finder.py": "MAPPING = {broken}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = find_editable([tmp_path, tmp_path / "missing"])
    assert sorted(map(str, found)) == ["/repo/lib", "/repo/old", "/repo/src"]
