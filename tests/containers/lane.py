"""The whole container suite in one real runtime, as this user and as an ordinary one, and its page.

    python -m tests.containers.lane RUNTIME [--write] [--without-lab]

`make test-enroot` and `make test-containers RUNTIME=...` call it. Where the runtime is not on the
PATH it says so in one line and ends well. With `--write` the page of the runtime in
benchmarks/results is renewed, failures and all: docs/containers.md quotes its first lines.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests import ROOT
from tests.second_user import USERS, open_folder

VERSIONS = {
    "enroot": ("enroot", "version"),
    "podman": ("podman", "--version"),
    "apptainer": ("apptainer", "version"),
    "charliecloud": ("ch-run", "--version"),
    "pyxis": ("enroot", "version"),
}
PLACES = ("tests/containers", "tests/shelf/doctor", "tests/jobs/images")
LAB = "tests/cluster/test_containers.py"
RESULTS = ROOT / "benchmarks/results"
ROOT_USER, USER = "as root", "as an ordinary user"
ORDINARY = 65534
SITE_PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))


@dataclass(frozen=True)
class Shown:
    """Outcome of one test."""

    place: str
    name: str
    outcome: str
    """yes, FAILED, or why it was left out."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the suite; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runtime", choices=VERSIONS)
    parser.add_argument("--write", action="store_true", help="renew the page of this runtime")
    parser.add_argument("--without-lab", action="store_true", help="leave out the tests on Slurm")
    options = parser.parse_args(words)
    runtime: str = options.runtime
    if obstacle := find_obstacle(runtime):
        print(f"{runtime}: nothing was tried: {obstacle}")
        return 0
    facts = describe(runtime)
    print(facts, flush=True)
    found: dict[str, list[Shown]] = {}
    places = PLACES if options.without_lab else (*PLACES, LAB)
    if os.geteuid() == 0:
        found[ROOT_USER] = run_suite([sys.executable], runtime, places)
        if runtime == "podman" and not has_further_ids():
            print("as an ordinary user: nothing was tried: /etc/subuid gives it no further ids")
        else:
            with lend_interpreter() as command:
                if command is None:
                    print("as an ordinary user: nothing was tried: it can run no such Python")
                else:
                    found[USER] = run_suite(command, runtime, PLACES)
    else:
        found[USER] = run_suite([sys.executable], runtime, places)
    page = render(runtime, facts, found)
    print(page)
    if options.write:
        find_page(runtime).write_text(page)
    return int(any(item.outcome == "FAILED" for items in found.values() for item in items))


def find_page(runtime: str) -> Path:
    return RESULTS / f"container_{runtime}.md"


def find_obstacle(runtime: str) -> str | None:
    """Why the runtime cannot be tried here."""
    if shutil.which(program := VERSIONS[runtime][0]) is None:
        return f"{program} is not on the PATH"
    if runtime == "pyxis" and not os.environ.get("VJOB_LAB_PYXIS"):
        return "VJOB_LAB_PYXIS names no plugin that is built for this machine's Slurm"
    return None


def describe(runtime: str) -> str:
    """Versions of all that matters, and the date; nothing that names the machine."""
    said = subprocess.run(VERSIONS[runtime], capture_output=True, text=True, check=False)
    number = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
    tool = "enroot" if runtime == "pyxis" else runtime
    kernel = ".".join(platform.release().split(".")[:2])
    words = (
        f"{tool} {number[0] if number else '?'}",
        platform.freedesktop_os_release().get("PRETTY_NAME", "an unnamed system"),
        f"Linux {kernel}",
        f"Python {platform.python_version()}",
        platform.machine(),
    )
    return f"{', '.join(words)}, on {datetime.date.today():%Y-%m-%d}."


def has_further_ids() -> bool:
    """Whether the ordinary user has the ids that podman gives to the users of a container."""
    try:
        names = [line.partition(":")[0] for line in Path("/etc/subuid").read_text().splitlines()]
    except OSError:
        return False
    return "nobody" in names or str(ORDINARY) in names


@contextmanager
def lend_interpreter() -> Iterator[list[str] | None]:
    """A command that runs this Python's packages as an ordinary user, with a home of its own."""
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with open_folder() as folder:
        home, venv = folder / "home", folder / "venv"
        home.mkdir()
        os.chown(home, ORDINARY, ORDINARY)
        path = f"{venv}/bin{os.pathsep}{os.environ['PATH']}"
        become = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", f"--groups={USERS}"]
        become += ["env", f"HOME={home}", "USER=nobody", f"PATH={path}"]
        become += ["PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={ROOT}"]
        for python in (sys.executable, f"/usr/bin/{minor}"):
            if not can_run([*become, python, "-c", ""]):
                continue
            make_venv(Path(python), venv)
            command = [*become, str(venv / "bin/python")]
            if can_run([*command, "-c", "import click, pytest, yaml"]):
                yield command
                return
        yield None


def make_venv(python: Path, venv: Path) -> None:
    """One that finds our packages, for the programs that tests start by its interpreter."""
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python3*/site-packages"))
    (packages / "lent.pth").write_text(SITE_PACKAGES)
    spy = Path(sys.executable).parent / "py-spy"
    if spy.exists():
        (venv / "bin/py-spy").symlink_to(spy)


def can_run(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_suite(python: Sequence[str], runtime: str, places: Sequence[str]) -> list[Shown]:
    """Run the tests that are marked with the runtime's name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        report = folder / "report.xml"
        options = ("-m", runtime, "-p", "no:cacheprovider", f"--junitxml={report}")
        subprocess.run([*python, "-m", "pytest", *options, *places], cwd=ROOT, check=False)
        return parse_report(report.read_text()) if report.exists() else []


def parse_report(text: str) -> list[Shown]:
    """Outcomes out of pytest's JUnit report."""
    found = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        outcome = "yes"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "FAILED"
        elif (skipped := case.find("skipped")) is not None:
            outcome = re.sub(r"/\S+/\S*", "...", skipped.get("message", "left out"))
        place = "on Slurm" if "cluster" in case.get("classname", "") else "locally"
        found.append(Shown(place, explain(case.get("name", "")), outcome))
    return found


def explain(name: str) -> str:
    """A test's name as a sentence: `[a-b]` at its end are its cases, and pytest-xdist's `@group`
    after them is left out."""
    name = re.sub(r"@[^\]]*$", "", name)
    words, _, cases = name.removeprefix("test_").removesuffix("]").partition("[")
    return words.replace("_", " ") + (f" ({cases.replace('-', ', ')})" if cases else "")


def render(runtime: str, facts: str, found: dict[str, list[Shown]]) -> str:
    """The page: what was shown, by whom."""
    lines = [f"# {runtime}: the container suite", "", facts, ""]
    counts = [f"{count_shown(items)} of {len(items)} {user}" for user, items in found.items()]
    lines += [f"Shown: {'; '.join(counts)}.", ""]
    lines += [f"| behaviour | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    rows = {(item.place, item.name): None for items in found.values() for item in items}
    for place, name in rows:
        said = [find_outcome(items, place, name) for items in found.values()]
        lines.append(f"| {place}: {name} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def count_shown(items: Sequence[Shown]) -> int:
    return sum(item.outcome == "yes" for item in items)


def find_outcome(items: Sequence[Shown], place: str, name: str) -> str:
    for item in items:
        if (item.place, item.name) == (place, name):
            return item.outcome.replace("|", "/")
    return "not tried"


def render_quote(page: Path) -> str:
    """The page's row in docs/containers.md."""
    lines = page.read_text().splitlines()
    facts, shown = lines[2], lines[4].removeprefix("Shown: ").rstrip(".")
    version, date = facts.partition(",")[0], facts.rpartition(" on ")[2].rstrip(".")
    runtime = page.stem.removeprefix("container_")
    return f"| {runtime} | {version} | {date} | {shown} | `benchmarks/results/{page.name}` |"


if __name__ == "__main__":
    sys.exit(main())
