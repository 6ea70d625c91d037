"""Wheel and sdist: whole, and what the wheel installs works from / with no checkout in sight."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.pythons import list_pythons
from tests.second_user import make_colleague

FOLDERS = {name: f"vjob/{name}" for name in ("shelf", "jobs", "templates", "reports", "containers")}
FOLDERS["examples/recipes"] = "vjob/recipes"
"""Where a folder of the checkout lies when installed; the others keep their names."""
PACKAGES = ("vjob", "varuna_core", *FOLDERS)
EPOCH = "1795000000"
ADDRESS = "https://example.net/vjob"
LOCAL = """
name: small
program: {script: train.py}
cluster:
  scheduler: local
  walltime_min: 2
  nodes: [{group: all, count: 1, ranks: 2}]
"""
DIST = os.environ.get("VJOB_DIST")
"""A folder with a wheel and an sdist, which are tested in place of new ones."""
NO_SITE = "import sys; sys.path.insert(0, sys.argv[1]); "
"""Begins a program for `python -I -S`: the standard library and one folder."""
COMMANDS = (
    "cli",
    "closing",
    "meeting.opening",
    "node",
    "restarts",
    "shell",
    "stacks",
    "track.tracker",
)
AGENT = "".join(f", varuna_core.agent.{part}" for part in COMMANDS)
"""The agent, and what its commands import late."""


def call(*words: str | Path, cwd: Path = Path("/"), env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_files(root: Path) -> set[str]:
    """By their installed names; the links of a checkout are not followed."""
    return {
        f"{FOLDERS.get(package, package)}/{path.relative_to(root / package)}"
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(folder: Path) -> Path:
    """A folder with sdist, wheel and sums, made of a copy of the tree: a build writes beside it."""
    source = folder / "source"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored, symlinks=True)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    dist = folder / "dist"
    dist.mkdir()
    program = ROOT / "release/build.py"
    call(sys.executable, program, source, dist, "--epoch", EPOCH, "--no-bill", "--url", ADDRESS)
    return dist


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make release` has made, or one made here."""
    return Path(DIST) if DIST else build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """It is made of the sdist, which therefore is whole."""
    return next(dist.glob("*.whl"))


def test_the_same_tree_gives_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    if DIST:
        pytest.skip("a release has the time of its commit")
    assert (build(tmp_path) / "SHA256SUMS").read_text() == (dist / "SHA256SUMS").read_text()


def test_the_release_names_its_address(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        text = packed.read(name).decode()
    if not DIST:
        assert f"Project-URL: Issues, {ADDRESS}/issues" in text and "example.org" not in text
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        assert f"Classifier: Programming Language :: Python :: {version}\n" in text


def test_a_checkout_that_cannot_be_written_is_installed_from_a_copy() -> None:
    """`make demo VENV=... DEMO=...` of a checkout that is root's."""
    with make_colleague() as someone:
        venv = someone.folder / "venv"
        made = ("PYTHON=true", "PIP=echo", f"VENV={venv}", f"{venv}/.installed")
        done = someone.run("make", "-C", str(ROOT), *made)
        assert f"echo -e {venv}/source\n" in done.stdout, done.stderr
        assert list_files(venv / "source") == list_files(ROOT)
        assert (venv / "source/vjob/jobs").is_symlink() and (venv / "source/setup.cfg").exists()


def install(wheel: Path, venv: Path, base: str) -> Path:
    """The Python of a venv with the wheel, and what it depends on as the tests have it: no index is
    asked. What of that is compiled for the Python at hand is lost on another one."""
    call(base, "-m", "venv", "--without-pip", venv)
    found = venv / "bin/python"
    words = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    call(sys.executable, "-m", "pip", "--python", found, *words, wheel)
    # A folder that a .pth file names is searched last, and its own .pth files do not count: an
    # editable install of this checkout stays out.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("venv"), sys.executable)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        (top,) = (name for name in packed.namelist() if name.endswith("top_level.txt"))
        assert packed.read(top).decode().split() == ["varuna_core", "vjob"]
    assert names == list_files(ROOT)
    assert {"vjob/py.typed", "varuna_core/py.typed"} <= names


def test_the_command_works_from_anywhere(python: Path, env: dict[str, str], tmp_path: Path) -> None:
    check_command(python, env, tmp_path)


@pytest.mark.parametrize(
    "version",
    [version for version in sorted(list_pythons()) if version != sys.version_info[:2]],
    ids=lambda version: ".".join(map(str, version)),
)
def test_the_wheel_works_on_every_python_that_is_here(
    wheel: Path, env: dict[str, str], tmp_path: Path, version: tuple[int, int]
) -> None:
    """A job of two ranks from the first command to its end; older Pythons are for nodes alone."""
    base = list_pythons()[version]
    if version < (3, 10):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(tmp_path)
        code = NO_SITE + "import varuna_core.morph.cli" + AGENT
        call(base, "-I", "-S", "-B", "-c", code, tmp_path)
        return
    check_command(install(wheel, tmp_path / "venv", base), env, tmp_path)


def check_command(python: Path, env: dict[str, str], folder: Path) -> None:
    where = "import vjob.jobs, vjob.templates as t; print(vjob.jobs.__file__, t.__file__)"
    assert str(ROOT) not in call(python, "-c", where, env=env)
    entry = Path(call(python, "-c", "from vjob.jobs.process import ENTRY; print(ENTRY, end='')"))
    assert entry.parts[-3:] == ("site-packages", "vjob", "__main__.py") and entry.is_file()
    vjob = python.with_name("vjob")
    assert "submit" in call(vjob, "--help", env=env)
    conf = folder / "conf.yaml"
    conf.write_text(call(vjob, "init", env=env))
    (folder / "train.py").write_text("import sys; print('trained on', sys.version_info[:2])\n")
    shown = call(vjob, "submit", conf, "--dry-run", env=env)
    assert "# ---- batch.sh" in shown and "# ---- node.sh" in shown
    conf.write_text(LOCAL)
    call(vjob, "submit", conf, "--follow", cwd=folder, env=env)
    status = json.loads(call(vjob, "status", "last", "--json", cwd=folder, env=env))
    assert status["verdict"]["health"] == "DONE"
    version = call(python, "-c", "import sys; print(sys.version_info[:2])")
    said = call(vjob, "logs", "last", cwd=folder, env=env)
    assert said.count(f"trained on {version.strip()}") >= 1, said


def test_foreign_packages_of_the_same_names_do_no_harm(
    python: Path, env: dict[str, str], tmp_path: Path
) -> None:
    """People have packages called jobs or templates, and put them first on PYTHONPATH."""
    for name in FOLDERS:
        (tmp_path / "foreign" / name).mkdir(parents=True)
        (tmp_path / "foreign" / name / "__init__.py").write_text("raise SystemExit('foreign')\n")
    env["PYTHONPATH"] = str(tmp_path / "foreign")
    check_command(python, env, tmp_path)
    call(python, "-c", "import vjob", env=env)
    if importlib.util.find_spec("pandas") is None:
        pytest.skip("the report needs pandas")
    page = tmp_path / "page.html"
    call(python.with_name("vjob"), "report", "last", "-o", page, env=env, cwd=tmp_path)
    assert "<html" in page.read_text()


def test_the_report_has_its_template_and_scripts(
    python: Path, env: dict[str, str], tmp_path: Path
) -> None:
    for name in ("pandas", "plotly"):
        pytest.importorskip(name)
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = [
        f" iteration {step:8}/      20 | consumed samples: {16 * step:12} | elapsed time per "
        f"iteration (ms): 1{step}.5 | learning rate: 1.0E-04 | global batch size:    16 | lm loss: "
        f"6.{step}E+00 | loss scale: 1.0 | grad norm: 0.9 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
        for step in (10, 20)
    ]
    (logs / "n060.out").write_text("".join(lines))
    call(python.with_name("vjob"), "report", logs, "-o", tmp_path / "page.html", env=env)
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page and "</style>" in page and "<script" in page


def test_varuna_core_is_a_package_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """In an image: without the rest of vjob, torch, numpy, or any other wheel."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path, [x for x in packed.namelist() if x.startswith("varuna_core/")])
    parts = ("launch.step", "morph.cli", "records.plan", "schedule.registry")
    code = NO_SITE + "import varuna_core" + AGENT + "".join(f", varuna_core.{x}" for x in parts)
    call(sys.executable, "-I", "-S", "-c", code, tmp_path)
    call(sys.executable, "-I", "-S", "-c", NO_SITE + "import varuna_core.checkpoint.cli", tmp_path)
