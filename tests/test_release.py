"""The parts of a release beside the wheel: workflows, forms, and recipes of package managers.

They repeat facts of setup.cfg, which are compared here, and are held against the schemas and the
linters that PyPI has. What Spack, conda and EasyBuild make of theirs is not tried.
"""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import varuna_core
from tests import ROOT

RELEASE = ROOT / "release"
BIN = Path(sys.executable).parent
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "citation-file-format": "CITATION.cff",
}
NAMES_OF_OTHERS = {"arrow": "pyarrow", "plotly.py": "plotly", "py-py-spy": "py-spy"}
"""Names that a package manager has for a package of PyPI."""
BUNDLED = {
    "python-bundle-pypi": ("click", "jinja2"),
    "scipy-bundle": ("numpy", "pandas"),
}
"""EasyBuild's bundles and what of them we need."""


def read_requirements() -> Mapping[str, str]:
    """The dependencies of setup.cfg with their ranges: {"click": ">=8.1,<9"}."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    lines = (line for line in setup["options"]["install_requires"].split("\n") if line.strip())
    rows = (line.partition(";")[0].strip().partition(" ") for line in lines if "#" not in line)
    return {name: bounds.replace(" ", "") for name, _, bounds in rows}


def get_tool(name: str) -> str:
    found = BIN / name
    path = str(found) if found.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}, which comes with .[dev]")
    return path


def run(*words: str | Path) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("schema", "pattern"), SCHEMAS.items())
def test_a_file_follows_its_schema(schema: str, pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    run(get_tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *files)


def test_workflows_give_nothing_away() -> None:
    """zizmor's audits: rights, pinned actions, injected text, kept credentials."""
    run(get_tool("zizmor"), "--offline", "--no-progress", ROOT / ".github")


def test_commands_of_workflows_exist() -> None:
    """A `make` target or a file that is called must be there."""
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        for command in (step["run"] for job in jobs for step in job["steps"] if "run" in step):
            for target in re.findall(r"\bmake (\w+)", command):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
            for file in re.findall(r"(?:release/\S+\.py|\.ci/run)", command):
                assert (ROOT / file).exists(), command


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    conda = yaml.safe_load((RELEASE / "conda/recipe.yaml").read_text())
    easy = read_easyconfig()
    spack = re.findall(r'version\("([\d.]+)"', (RELEASE / "spack/package.py").read_text())
    stated = [citation["version"], conda["context"]["version"], easy["version"], *spack]
    assert set(stated) == {varuna_core.__version__}


def test_conda_has_the_requirements() -> None:
    recipe = yaml.safe_load((RELEASE / "conda/recipe.yaml").read_text())
    given = dict(line.split(" ") for line in recipe["requirements"]["run"])
    assert given.pop("python") == ">=3.10"
    assert given == read_requirements()


def test_spack_has_the_requirements() -> None:
    text = (RELEASE / "spack/package.py").read_text()
    ast.parse(text)
    rows = re.findall(
        r'depends_on\("([\w-]+)@([\d.]*):([\d.]*)"(?:, type=\("build", "run"\))?\)', text
    )
    given = {}
    for name, low, high in rows:
        if name != "python":
            own = NAMES_OF_OTHERS.get(name) or name.removeprefix("py-")
            given[own] = f">={low}" + (f",<{int(high) + 1}" if high else "")
    assert given == read_requirements()


def test_easybuild_has_the_requirements() -> None:
    easy = read_easyconfig()
    names = [name.lower() for name, _ in easy["dependencies"]]
    names += [name.lower() for name, *_ in easy["exts_list"]]
    known = {own for name in names for own in BUNDLED.get(name, (NAMES_OF_OTHERS.get(name, name),))}
    assert set(read_requirements()) <= known


def read_easyconfig() -> dict[str, object]:
    (path,) = (RELEASE / "easybuild").glob("*.eb")
    values: dict[str, object] = {}
    exec(compile(path.read_text(), path.name, "exec"), values)
    return values


def test_the_containerfile_passes_hadolint() -> None:
    run(get_tool("hadolint"), RELEASE / "Containerfile")


def test_one_placeholder_stands_for_the_address() -> None:
    """The owner replaces it by `make release URL=...`, in files that this knows."""
    sys.path.insert(0, str(RELEASE))
    try:
        import build
    finally:
        sys.path.remove(str(RELEASE))
    assert all(build.PLACEHOLDER in (ROOT / name).read_text() for name in build.NAMING)
