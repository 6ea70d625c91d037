"""`make demo` on fresh machines: Debian roots with nothing but what README.md names.

    python -m benchmarks.suite.fresh --work FOLDER [--only TEXT] [--write] [--mirror URL]
                                     [--pythons FOLDER] [--carry PATH ...]

debootstrap makes a minimal root of each suite once, in FOLDER; a trial works in an overlay of it,
which is removed afterwards, on a fresh clone of the last commit. A trial sees this machine's PIP_*
variables and, read-only, what --carry names: certificates, pip.conf, wheels. A suite has one or two
versions of Python; --pythons names a folder of others, as pyenv's `versions` is one. It needs root
and debootstrap: a trial that cannot be had says why, and is a row of the page all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS, ROOT

RESULT = RESULTS / "fresh_machines.md"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("git", "make", "python3", "python3-venv")
LIMIT_S = 1500
HEAD = "| machine | Python | torch | `make demo` | minutes |\n|---|---|---|---|---|\n"
USER = "someone"
PAGE = """# Fresh machines

Made by `python -m benchmarks.suite.fresh --write`: the command as it stands, on a fresh clone, in a
root that debootstrap made of Debian with git, make, python3 and python3-venv; nothing else was
installed. Such a root is what an image holds; only the kernel is this machine's. torch is a wheel
of this machine where it says `+cpu`, else the index's. A Python for which a pinned version has no
wheel yet wants a compiler.

"""


class Obstacle(Exception):
    """Why a trial cannot be had here."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A machine, and what is typed on it in the clone."""

    name: str
    suite: str
    python: str | None = None
    """Of --pythons, as `3.10`; else the suite's python3."""
    packages: tuple[str, ...] = ()
    user: str = "root"
    read_only: bool = False
    """The clone is mounted read-only."""
    commands: tuple[str, ...] = ("make demo",)
    offline: tuple[str, ...] = ()
    """Typed afterwards with the loopback interface alone."""
    venv: str = ".venv"


TRIALS: Sequence[Trial] = (
    Trial(name="Debian 12, minimal root", suite="bookworm"),
    Trial(name="Debian 13, minimal root", suite="trixie"),
    Trial(name="Debian testing, minimal root", suite="testing"),
    Trial(name="Debian 12, Python 3.10 built from source", suite="bookworm", python="3.10"),
    Trial(name="Debian 12, Python 3.12 built from source", suite="bookworm", python="3.12"),
    Trial(
        name="Debian unstable, its newest Python: `make demo PYTHON=python3.15`",
        suite="sid", packages=("python3.15-venv",), commands=("make demo PYTHON=python3.15",),
    ),
    Trial(
        name="Debian 12, an ordinary user; and again without network",
        suite="bookworm",
        user=USER,
        offline=("make demo",),
    ),
    Trial(
        name="Debian 12, an ordinary user on a read-only checkout: "
        "`make demo VENV=~/venv DEMO=~/demo`",
        suite="bookworm", user=USER, read_only=True,
        commands=("make demo VENV=~/venv DEMO=~/demo",), venv="~/venv",
    ),
    Trial(
        name="Debian 12, `pip install '.[train]'` and the commands after it",
        suite="bookworm", user=USER,
        commands=(
            "python3 -m venv .venv",
            ".venv/bin/pip install --quiet '.[train]'",
            "cd ~ && vjob/.venv/bin/vjob doctor",
            "cd ~ && vjob/.venv/bin/vjob init > conf.yaml",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What of this machine the trials may use."""

    work: Path
    pythons: Path | None
    carry: tuple[Path, ...]
    mirror: str

    def find_python(self, version: str) -> str:
        found = sorted(self.pythons.glob(f"{version}*/bin/python3")) if self.pythons else []
        if not found:
            raise Obstacle(f"no Python {version} here (--pythons)")
        return str(found[-1])

    def make_root(self, suite: str) -> Path:
        """The suite's minimal root; made once."""
        if os.geteuid() != 0 or not shutil.which("debootstrap"):
            raise Obstacle("needs root and debootstrap")
        root = self.work / suite
        if not (root / "made").exists():
            include = f"--include={','.join(PACKAGES)}"
            command = ["debootstrap", "--variant=minbase", include, suite, str(root), self.mirror]
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                raise Obstacle(f"debootstrap cannot make {suite} from this machine")
            (root / "made").touch()
        return root


def render_entry(
    bench: Bench, trial: Trial, root: Path, home: Path, commands: Sequence[str]
) -> str:
    """Shell of a process in namespaces of its own: mounts, then the commands in the root."""
    lines = ["set -e"]
    seen = [*bench.carry, *([bench.pythons] if trial.python and bench.pythons else [])]
    for path in seen:
        inside = root / str(path)[1:]
        make = f"mkdir -p {shlex.quote(str(inside))}"
        if path.is_file():
            make = f"mkdir -p {shlex.quote(str(inside.parent))}; touch {shlex.quote(str(inside))}"
        lines += [make, f"mount --bind -o ro {path} {shlex.quote(str(inside))}"]
    clone = shlex.quote(str(root) + str(home / "vjob"))
    if trial.read_only:
        lines += [f"mount --bind {clone} {clone}", f"mount -o remount,bind,ro {clone}"]
    lines += [
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        "ip link set lo up",
    ]
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    settings |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    typed = "\n".join(["set -e", *(f"(cd {home}/vjob && {command})" for command in commands)])
    enter = f"chroot --userspec={trial.user} {root} env -i {words} sh -c {shlex.quote(typed)}"
    return "\n".join([*lines, f"exec {enter}"])


def run_in(bench: Bench, trial: Trial, root: Path, home: Path, commands: Sequence[str],
           log: Path, has_network: bool = True) -> int:  # fmt: skip
    entry = render_entry(bench, trial, root, home, commands)
    net = [] if has_network else ["--net"]
    spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *net]
    with log.open("ab") as handle:
        try:
            return subprocess.run(
                [*spaces, "sh", "-c", entry], stdin=subprocess.DEVNULL, stdout=handle,
                stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124


def try_machine(bench: Bench, trial: Trial) -> str:
    """One row of the table."""
    began = time.monotonic()
    overlay = bench.work / "trial" / "now"
    shutil.rmtree(overlay, ignore_errors=True)
    commands = list(trial.commands)
    try:
        lower = bench.make_root(trial.suite)
        if trial.python:
            commands[0] = f"{commands[0]} PYTHON={bench.find_python(trial.python)}"
        for name in ("upper", "work", "root"):
            (overlay / name).mkdir(parents=True)
        layers = f"lowerdir={lower},upperdir={overlay}/upper,workdir={overlay}/work"
        root = overlay / "root"
        mount = ["mount", "-t", "overlay", "overlay", "-o", layers, str(root)]
        if subprocess.run(mount, check=False).returncode:
            raise Obstacle("no overlay mounts here")
        try:
            return run_trial(bench, trial, root, commands, began)
        finally:
            subprocess.run(["umount", str(root)], check=True)
            shutil.rmtree(overlay)
    except Obstacle as obstacle:
        return f"| {trial.name} | {trial.python or ''} | | not tried: {obstacle} | |\n"


def run_trial(bench: Bench, trial: Trial, root: Path, commands: Sequence[str], began: float) -> str:
    log = bench.work / f"{re.sub('[^a-z0-9]+', '-', trial.name.lower())}{trial.python or ''}.log"
    log.write_bytes(b"")
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    if trial.packages:
        # A mirror may hold a snapshot that is past its date.
        apt = "apt-get -q -y -o Acquire::Check-Valid-Until=false"
        words = f"{apt} update && {apt} install {' '.join(trial.packages)}"
        with log.open("ab") as handle:
            install = ["chroot", str(root), "sh", "-c", words]
            if subprocess.run(
                install, stdout=handle, stderr=subprocess.STDOUT, check=False
            ).returncode:
                raise Obstacle(f"apt-get cannot install {' '.join(trial.packages)}")
    home = Path("/root" if trial.user == "root" else f"/home/{trial.user}")
    if trial.user != "root":
        subprocess.run(["chroot", str(root), "useradd", "--create-home", trial.user], check=True)
    clone = f"{root}{home}/vjob"
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), clone], check=True)
    if trial.user != "root":
        subprocess.run(["chroot", str(root), "chown", "-R", f"{trial.user}:", f"{home}/vjob"],
                       check=True)  # fmt: skip
    code = run_in(bench, trial, root, home, commands, log)
    if not code and trial.offline:
        code = run_in(bench, trial, root, home, trial.offline, log, has_network=False)
    minutes = (time.monotonic() - began) / 60
    shown = bench.work / "versions"
    shown.write_bytes(b"")
    ask = "'import platform, torch; print(platform.python_version(), torch.__version__)'"
    run_in(bench, trial, root, home, [f"{trial.venv}/bin/python -c {ask}"], shown)
    found = (shown.read_text().splitlines() or [""])[-1].split()
    python, torch = found if len(found) == 2 else [trial.python or "", ""]
    said = "done" if code == 0 else f"exit {code}: {find_reason(log.read_text(errors='replace'))}"
    return f"| {trial.name} | {python} | {torch} | {said} | {minutes:.0f} |\n"


def find_reason(text: str) -> str:
    """The first error that is not only said to be one; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"\b(error|Error): (?!subprocess-)", line)
             or "ERROR: " in line]  # fmt: skip
    return (wrong[0] if wrong else (lines or ["nothing was printed"])[-1]).replace("|", "/")[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="roots and logs")
    parser.add_argument("--only", default="", help="trials with this text in their name or suite")
    parser.add_argument("--pythons", type=Path, help="a folder of Pythons, VERSION/bin/python3")
    parser.add_argument("--carry", type=Path, nargs="*", default=[], help="visible, read-only")
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        work=work, pythons=options.pythons, carry=tuple(options.carry), mirror=options.mirror
    )
    for trial in TRIALS:
        if options.only in f"{trial.name} {trial.suite} {trial.python}":
            row = try_machine(bench, trial)
            print(row, end="", flush=True)
            if options.write:
                kept = RESULT.read_text() if RESULT.exists() else ""
                RESULT.write_text(render_page(kept, trial, row))


def render_page(kept: str, trial: Trial, row: str) -> str:
    """The page with this row; those of the other trials stay as they are."""
    rows = {line.split(" | ")[0][2:]: f"{line}\n" for line in kept.splitlines() if line[:2] == "| "}
    rows[trial.name] = row
    return PAGE + HEAD + "".join(rows[t.name] for t in TRIALS if t.name in rows)


if __name__ == "__main__":
    main()
