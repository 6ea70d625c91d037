"""Every command on folders that nobody would make on purpose, on disks that fail.

    python -m benchmarks.hostile [--draws 2000] [--seed 1] [--only N ...] [--quick] [--write]

A draw takes the folder of a real run, changes it one to four times by size, count, kind, pattern
and value (draws.py), and in two of five draws makes calls of the file system fail (faults.c, built
here with cc): one, or all from the n-th on, as where a mount goes away. Then one command runs in a
process of its own. It must end within bounds of processor time and memory, without a traceback,
without control characters, and with a sentence where it fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import errno
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks import RESULTS
from benchmarks.hostile.draws import DRAWS, make_large

PAGE = RESULTS / "hostile.md"
MOST_CPU_S, MOST_S, MOST_MB = 10, 60, 500
FAULTS = {1: "open", 2: "read", 4: "write", 8: "stat", 16: "list", 32: "name", 64: "sync",
          128: "create", 255: "any"}  # fmt: skip
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS)
TRAIN = """import os
for step in range(1, 9):
    print(f"step {step}/8 loss {3 / step:.3f} 0.10 s", flush=True)
"""
CONF = """name: tiny
program: {script: train.py, args: [--password, "CANARY-kq8v-71zz"]}
env: {HF_TOKEN: "CANARY-kq8v-71zz"}
cluster: {scheduler: local, nodes: {ranks: 2}}
"""
CANARY = b"kq8v-71zz"
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status", "{run}", "--once"), ("status", "{run}", "--once", "--json"), ("status", "--once"),
    ("logs", "{run}", "-n", "3"), ("logs", "{run}", "--errors"),
    ("logs", "{run}", "--raw", "-n", "5"),
    ("logs", "{run}", "-n", "2", "--json", "--times"), ("report", "{run}", "--text"),
    ("report", "{run}", "-o", "{out}/page.html"), ("report", "{run}", "--json"),
    ("report", "{run}", "--export", "csv", "-o", "{out}/tables"),
    ("report", "{run}", "--export", "perfetto", "-o", "{out}/p.json.gz"),
    ("compare", "{run}", "{good}"), ("compare", "{good}", "{run}", "-o", "{out}/c.html"),
    ("share", "{run}", "--dry-run"), ("share", "{run}", "--show-what", "--json"),
    ("share", "{run}", "--group", "{group}", "--anyway"), ("share", "{run}", "--private"),
    ("prune", "{above}"), ("prune", "{above}", "--days", "0", "--delete"), ("list", "--all"),
    ("list", "--json"), ("cancel", "{run}"), ("watch", "{run}", "--once", "--quiet"),
    ("stacks", "{run}", "--wait", "1"), ("guard", "{run}", "pause"), ("grow", "{run}", "1"),
    ("shrink", "{run}", "1"), ("submit", "{run}/conf.yaml", "--dry-run"),
    ("submit", "{run}/resolved.yaml", "--dry-run"), ("init", "--from", "{run}"),
    ("init", "--from", "{run}/batch.sh"), ("plan", "{run}/conf.yaml"),
)  # fmt: skip


def prepare(top: Path) -> Path:
    """The folder of a run that really ran."""
    good = top / "good"
    if good.exists():
        return good
    (top / "here").mkdir(parents=True)
    (top / "here/train.py").write_text(TRAIN)
    (top / "here/conf.yaml").write_text(CONF)
    vjob = [sys.executable, "-m", "vjob"]
    home = {**os.environ, "HOME": str(top)}
    subprocess.run([*vjob, "submit", "conf.yaml"], cwd=top / "here", env=home, check=True)
    watch = [*vjob, "watch", "last", "--every", "1", "--quiet", "--for", "2"]
    subprocess.run(watch, cwd=top / "here", env=home, check=False)
    run = next(path for path in (top / "here/log").iterdir() if not path.is_symlink())
    trace = run / "attempt-0/trace"
    trace.mkdir(exist_ok=True)
    head = (
        '{"trace": 1, "rank": 0, "stages": [0], "origin": 1795904652.2, "columns": ["kind", "step",'
        ' "stage", "microbatch", "begin", "wait", "work", "bytes", "what"]}\n'
    )
    lines = "".join(
        f'["F", {n}, 0, 0, {n}000000000, 100, 90000000, 0, ""]\n{{"step": {n}, "begin": '
        f'{n}000000000, "took": 100000000, "sums": {{"F": [1, 100, 90000000]}}}}\n'
        for n in range(1, 6)
    )
    (trace / "node-0.jsonl").write_text('{"rank": 0}\n' + head + lines)
    run.rename(good)
    return good


def load_all() -> None:
    """Import what the commands import, once for all draws."""
    import vjob.shelf.commands as commands

    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"vjob.shelf.commands.{module.name}")
    for name in ("vjob.reports", "pandas", "plotly.graph_objects", "yaml"):
        importlib.import_module(name)


def run_command(words: Sequence[str], out: Path, fault: tuple[int, ...] | None, where: str) -> None:
    """In a child: the command as its entry point runs it; never returns."""
    code = 70
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for place, to in ((null, 0), (fd, 1), (fd, 2)):
            os.dup2(place, to)
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_CPU_S, 2 * MOST_CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["vjob", *words]
        if fault is not None:
            ctypes.CDLL(None).arm(where.encode(), *map(_long, fault))
        from vjob.shelf.commands.cli import main as run_cli

        run_cli()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        if fault is not None:
            ctypes.CDLL(None).arm(b"", 0, 0, 0, 0)
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
        os._exit(code)


def _long(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)


def judge(status: int, usage: resource.struct_rusage, took: float, said: bytes) -> str:
    """The first thing that is wrong, in few words; empty if nothing is."""
    cpu = usage.ru_utime + usage.ru_stime
    if b"Traceback (most recent call last)" in said and os.waitstatus_to_exitcode(status) == 70:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        ours = [line for line in places if "/site-packages/" not in line] or places
        place = ours[-1].split("/")[-1] if ours else ""
        return f"traceback {lines[-1][:60]} at {place}"
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    if took > MOST_S:
        return "hang"
    if cpu > MOST_CPU_S:
        return f"{cpu:.0f} s of processor"
    if usage.ru_maxrss >> 10 > MOST_MB:
        return f"{usage.ru_maxrss >> 10} MB"
    if b"\x1b" in said or b"\x07" in said:
        return "control characters"
    if os.waitstatus_to_exitcode(status) and not said.strip():
        return "no sentence"
    return ""


def draw_once(number: int, top: Path, good: Path, large: Path) -> tuple[str, str, str]:
    """(command, changes, finding)."""
    random = Random(f"hostile {number}")
    above = top / "drawn"
    _put_back(above / "run", large)
    shutil.rmtree(above, ignore_errors=True)
    run = above / "run"
    shutil.copytree(good, run, symlinks=True)
    told = []
    for change in random.choices(DRAWS, k=random.choice((1, 1, 2, 3, 4))):
        try:
            told.append(change(run, random, large))
        except (OSError, ValueError) as error:
            told.append(f"not made: {error}")
    template = random.choice(COMMANDS)
    out = top / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    places = {"run": run, "good": good, "out": out, "above": above, "group": "daemon"}
    words = [word.format(**places) for word in template]
    fault = None
    if random.random() < 0.4 and "LD_PRELOAD" in os.environ:
        kind, code = random.choice(list(FAULTS)), random.choice(CODES)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            kind = random.choice((4, 32, 64, 128))
        fault = (kind, int(random.expovariate(0.1)) + 1, random.choice((1, 1, 10**9)), code)
        what = f"{FAULTS[kind]} fails with {errno.errorcode[code]}"
        told.append(f"{what} from {fault[1]} x {fault[2]}")
    said = top / "said"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        run_command(words, said, fault, str(random.choice((run, run, top))))
    status, usage, took = _wait(child, began)
    finding = judge(status, usage, took, said.read_bytes()[-200_000:])
    if template[0] == "share" and "--group" in template:
        finding = finding or _find_canary(run)
    return " ".join(template), "; ".join(told), finding


def _wait(child: int, began: float) -> tuple[int, resource.struct_rusage, float]:
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        took = time.monotonic() - began
        if found:
            return status, usage, took
        if took > 4 * MOST_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002 if took < 1 else 0.05)


def _find_canary(run: Path) -> str:
    """The name of a shared file in which a secret of the run stands."""
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):
            is_shared = path.is_file() and path.stat().st_mode & 0o040
            if is_shared and path.stat().st_size < 10**8 and CANARY in path.read_bytes():
                return f"a secret is shared in {path.name}"
    return ""


def _put_back(run: Path, large: Path) -> None:
    """Move the large folders to where they were made."""
    deepest = sorted(PLACES, key=lambda name: -name.count(","))
    for name in deepest:
        place = run / name.partition("@")[2].replace(",", "/")
        if not (large / name).exists() and place.is_dir() and not place.is_symlink():
            place.rename(large / name)
    home = large / "attempts@"
    if home.exists() and len(os.listdir(home)) == 0 and run.is_dir():
        for path in run.glob("attempt-*"):
            if path.name != "attempt-0" and path.is_dir() and not path.is_symlink():
                path.rename(home / path.name)


PLACES: list[str] = []


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hostile folders under every command.")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="draws by number, with their output")
    parser.add_argument("--quick", action="store_true", help="1,000 files where 100,000 are")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(words)
    library = Path(tempfile.gettempdir()) / f"hostile-{os.getuid()}-{os.getpid()}.so"
    if "HOSTILE_TOP" not in os.environ:
        source = Path(__file__).with_name("faults.c")
        compiler = shutil.which("cc")
        env = {**os.environ, "HOSTILE_TOP": tempfile.mkdtemp(prefix="hostile-")}
        if compiler:
            subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
            env["LD_PRELOAD"] = str(library)
        else:
            print("no cc: no call of the file system fails in this run")
        args = list(words) if words is not None else sys.argv[1:]
        again = [sys.executable, "-m", "benchmarks.hostile", *args]
        done = subprocess.run(again, env=env, check=False)
        shutil.rmtree(env["HOSTILE_TOP"], ignore_errors=True)
        library.unlink(missing_ok=True)
        sys.exit(done.returncode)
    top = Path(os.environ["HOSTILE_TOP"])
    os.environ["HOME"] = str(top)
    os.environ["COLUMNS"] = "80"
    good, large = prepare(top), top / "large"
    make_large(large, given.quick)
    PLACES.extend(path.name for path in large.iterdir() if path.name != "attempts@")
    os.chdir(top / "here")
    load_all()
    found: dict[str, list[int]] = collections.defaultdict(list)
    examples: dict[str, tuple[str, str]] = {}
    first = given.seed * 1_000_000
    numbers = given.only or range(first, first + given.draws)
    began = time.monotonic()
    for number in numbers:
        command, changes, finding = draw_once(number, top, good, large)
        if given.only:
            print(command, "|", changes, "|", finding or "as it should", flush=True)
            print((top / "said").read_bytes()[-4000:].decode(errors="replace"))
        elif finding:
            key = f"{command.split()[0]}: {finding}"
            if key not in examples:
                print(f"{number} {key}\n    {command} | {changes}"[:600], flush=True)
            found[key].append(number)
            examples.setdefault(key, (command, changes))
    if given.only:
        return
    bad = sum(map(len, found.values()))
    print(f"{len(numbers)} draws in {time.monotonic() - began:.0f} s, {bad} bad")
    for key, which in sorted(found.items(), key=lambda item: -len(item[1])):
        print(len(which), key, which[:3])
    if given.write:
        PAGE.write_text(render(len(numbers), found, examples))


def render(num: int, found: dict[str, list[int]], examples: dict[str, tuple[str, str]]) -> str:
    lines = [
        "# Hostile folders and disks that fail",
        "",
        f"{num} draws, each of one to four changes of a real run's folder by size (to 1 TB), count "
        "(20,000 attempts, 100,000 files), kind (FIFOs, devices, links, sockets), pattern and "
        "value; in two of five, calls of the file system fail too (EIO, ENOSPC, EDQUOT, ESTALE, "
        f"EROFS: one, or all from the n-th on). Each runs one of {len(COMMANDS)} commands. Bounds: "
        f"{MOST_CPU_S} s of processor, {MOST_MB} MB, no traceback, no control characters, a "
        "sentence where it fails, no secret in what is shared.",
        "",
        "| finding | draws | one of them |",
        "|---|---|---|",
    ]
    for key, which in sorted(found.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {key.replace('|', '/')} | {len(which)} | {which[0]} |")
    if not found:
        lines.append("| none | 0 | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
