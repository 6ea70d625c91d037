"""Every command on folders that nobody would make on purpose, on disks that fail.

    python -m benchmarks.hostile [--draws 5000] [--seed 1] [--folder DIR] [--only N ...] [--write]
    python -m benchmarks.hostile --defect NAME ... [--write]     in how many draws it is found
    python -m benchmarks.hostile --places [--write]              clocks and mounts in a run (root)

A draw takes the folder of a run, changes it one to four times by size, count, kind, pattern and
value (draws.py), and in two of five draws makes calls of the file system fail (faults.c, built
here with cc): one, or all from the n-th on, as where a mount goes away. Then one command runs in a
process of its own. It must end within bounds of processor time and memory, without a traceback,
without control characters, and with a sentence where it fails. A draw's clock is the processor's:
a command that neither works nor ends is a hang, and one that never got its processor is not known.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import errno
import http.client
import importlib
import json
import os
import pkgutil
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import RESULTS
from benchmarks.hostile import dry_runs, places
from benchmarks.hostile.draws import DRAWS, TABLES, Draw, many, numbers, table, take_back
from benchmarks.machine import read_processor

PAGE = RESULTS / "hostile.md"
KEPT = PAGE.with_suffix(".json")
MOST_CPU_S, MOST_MB, MOST_DRAWS = 10, 500, 500
LIMIT_S = 240
FAULTS = {1: "open", 2: "read", 4: "write", 8: "stat", 16: "list", 32: "name", 64: "sync",
          128: "create", 255: "any"}  # fmt: skip
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS)
TRAIN = """import os
for step in range(1, 9):
    print(f"step {step}/8 loss {3 / step:.3f} 0.10 s", flush=True)
"""
CONF = """name: tiny
program: {script: train.py, args: [--pw, "CANARY-kq8v-71zz"]}
env: {LDAP_BIND_PW: "CANARY-kq8v-71zz"}
cluster: {scheduler: WHERE, nodes: {ranks: 2}, walltime_min: 5}
"""
TOOL = """#!/bin/sh
exec cat "${0%/bin/*}/tables/${0##*/}"
"""
CANARY = b"kq8v-71zz"
TEMPORARY = re.compile(rb"/\.[^/\s]+\.part\b")
NOT_KNOWN = "not known: the machine was busy"
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
    ("init", "--from", "{run}/batch.sh"), ("plan", "{run}/conf.yaml"), ("web", "{run}"),
)  # fmt: skip


@dataclass(kw_only=True)
class Drawn:
    """One draw, and what came of it."""

    command: str
    kinds: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    fault: str = "none"
    finding: str = ""


def prepare(top: Path) -> dict[str, Path]:
    """The folders of a run that really ran, and of one of which Slurm has taken the job."""
    (top / "bin").mkdir()
    put_tables(top)
    for name in TABLES:
        (top / "bin" / name).write_text(TOOL)
        (top / "bin" / name).chmod(0o755)
    (top / "here/train.py").write_text(TRAIN)
    vjob = [sys.executable, "-m", "vjob"]
    good = {}
    for where in ("local", "slurm"):
        (top / "here/conf.yaml").write_text(CONF.replace("WHERE", where))
        subprocess.run([*vjob, "submit", "conf.yaml"], cwd=top / "here", check=True)
        run = next(path for path in (top / "here/log").iterdir() if not path.is_symlink())
        if where == "local":
            watch = [*vjob, "watch", "last", "--every", "1", "--quiet", "--for", "2"]
            subprocess.run(watch, cwd=top / "here", check=False)
            add_trace(run / "attempt-0/trace")
        good[where] = run.rename(top / where)
    attempt = good["local"] / "attempt-0"
    shutil.copytree(attempt, good["slurm"] / "attempt-0", symlinks=True)
    return good


def put_tables(top: Path) -> None:
    (top / "tables").mkdir(exist_ok=True)
    for name, text in TABLES.items():
        (top / "tables" / name).write_text(text)


def add_trace(trace: Path) -> None:
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


def load_all() -> None:
    """Import what the commands import, once for all draws."""
    import vjob.shelf.commands as commands

    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"vjob.shelf.commands.{module.name}")
    for name in ("vjob.reports", "pandas", "plotly.graph_objects", "yaml"):
        importlib.import_module(name)


def serve_the_owner() -> int:
    """A live page while strangers hold all its seats and trickle; 0 if its owner has it."""
    from vjob.shelf.web.server import MOST_CONNECTIONS, LivePage, Server, Site

    with Server(Site(LivePage(document=lambda: b"x" * 4000), token="mine")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        held = []
        for _ in range(MOST_CONNECTIONS + 20):
            with contextlib.suppress(OSError):
                link = socket.create_connection(("127.0.0.1", server.port), timeout=1)
                link.send(b"GET / HTTP/1.1\r\nX-A: b\r\n")
                held.append(link)
        for _ in range(5):
            link_of_owner = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException):
                link_of_owner.request("GET", "/mine/")
                if link_of_owner.getresponse().status == 200:
                    return 0
    print("Traceback (most recent call last): the owner is not served")
    return 70


def run_command(
    words: Sequence[str], out: Path, fault: tuple[int, ...] | None, where: str, defect: str
) -> None:
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
        if defect:
            from benchmarks.hostile.defects import DEFECTS

            DEFECTS[defect].patch()
        if fault is not None:
            ctypes.CDLL(None).arm(where.encode(), *map(ctypes.c_long, fault))
        if words[0] == "web":
            code = serve_the_owner()
        else:
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


def judge(status: int, usage: resource.struct_rusage, said: bytes, is_busy: bool) -> str:
    """The first thing that is wrong, in few words; empty if nothing is."""
    cpu = usage.ru_utime + usage.ru_stime
    if b"Traceback (most recent call last)" in said and os.waitstatus_to_exitcode(status) == 70:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        ours = [line for line in places if "/site-packages/" not in line] or places
        place = ours[-1].split("/")[-1] if ours else ""
        return f"traceback {lines[-1][:60]} at {place}"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        ends = {"SIGKILL": NOT_KNOWN if is_busy else "hang"}
        return ends.get(name, f"killed by {name} after {cpu:.0f} s of processor")
    if cpu > MOST_CPU_S:
        return f"{cpu:.0f} s of processor"
    if usage.ru_maxrss >> 10 > MOST_MB:
        return f"{usage.ru_maxrss >> 10} MB"
    if b"\x1b" in said or b"\x07" in said:
        return "control characters"
    if TEMPORARY.search(said):
        return "a temporary file is named"
    if os.waitstatus_to_exitcode(status) and not said.strip():
        return "no sentence"
    return ""


def choose(random: Random) -> tuple[str, tuple[str, ...], list[Draw]]:
    """Where the run ran, the command, and the changes."""
    where = random.choice(("local", "local", "slurm"))
    template = random.choice(COMMANDS)
    changes = random.choices(DRAWS, k=random.choice((1, 1, 2, 3, 4)))
    if numbers in changes and random.random() < 0.5:
        template = random.choice([words for words in COMMANDS if "{run}/conf.yaml" in words])
    if where == "slurm":
        changes.append(table)
    if random.random() < 0.08:  # last: its files are links of one another
        changes = [*changes[:1], many]
    return where, template, changes


def draw_once(number: int, top: Path, good: dict[str, Path], defect: str = "") -> Drawn:
    random = Random(f"hostile {number}")
    above, large, out, said = top / "drawn", top / "large", top / "out", output_of(top)
    take_back(above / "run", large)
    for old in (above, out):
        shutil.rmtree(old, ignore_errors=True)
    out.mkdir()
    run = above / "run"
    where, template, changes = choose(random)
    shutil.copytree(good[where], run, symlinks=True)
    put_tables(top)
    drawn = Drawn(command=template[0])
    for change in changes:
        drawn.kinds.append(change.__name__)
        try:
            drawn.changes.append(change(run, random, large))
        except (OSError, ValueError, shutil.Error) as error:
            drawn.changes.append(f"not made: {error}")
    places = {"run": run, "good": good["local"], "out": out, "above": above, "group": "daemon"}
    words = [word.format(**places) for word in template]
    fault = None
    if random.random() < 0.4 and "LD_PRELOAD" in os.environ:
        kind, code = random.choice(list(FAULTS)), random.choice(CODES)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            kind = random.choice((4, 32, 64, 128))
        late = int(random.expovariate(0.1)) + 1
        fault = (kind, random.choice((1, 2, late, late)), random.choice((1, 1, 10**9)), code)
        drawn.fault = f"{FAULTS[kind]} fails with {errno.errorcode[code]}"
        drawn.changes.append(f"{drawn.fault} from {fault[1]} x {fault[2]}")
    child = os.fork()
    if child == 0:
        os.setsid()
        run_command(words, said, fault, str(random.choice((run, run, top))), defect)
    status, usage, is_busy = wait(child)
    drawn.finding = judge(status, usage, said.read_bytes()[-200_000:], is_busy)
    if template[0] == "share" and "--group" in template:
        drawn.finding = drawn.finding or find_canary(run)
    drawn.changes.insert(0, " ".join(template))
    return drawn


def output_of(top: Path) -> Path:
    """The file of what the command prints, on a disk of its own that does not fail."""
    return top.with_name(f"said-{top.name}")


def wait(child: int) -> tuple[int, resource.struct_rusage, bool]:
    """Its status and use, and whether it still worked when it was ended for its time by the
    wall."""
    began, is_busy = time.monotonic(), False
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return status, usage, is_busy
        took = time.monotonic() - began
        if took > LIMIT_S:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            is_busy = state in "RD"
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002 if took < 1 else 0.05)


def find_canary(run: Path) -> str:
    """The name of a shared file in which a secret of the run stands."""
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):
            is_shared = path.is_file() and path.stat().st_mode & 0o040
            if is_shared and path.stat().st_size < 10**8 and CANARY in path.read_bytes():
                return f"a secret is shared in {path.name}"
    return ""


def find_defect(name: str, seed: int, top: Path, good: dict[str, Path]) -> dict[str, str]:
    """The first draw that shows it and says nothing without it; draws of other commands or changes
    are counted, and passed over."""
    from benchmarks.hostile.defects import DEFECTS

    defect = DEFECTS[name]
    for place in range(MOST_DRAWS):
        number = seed * 1_000_000 + place
        _, template, changes = choose(Random(f"hostile {number}"))
        kinds = {change.__name__ for change in changes}
        if template[0] not in defect.commands.split() or not kinds >= {*defect.change.split()}:
            continue
        shown = draw_once(number, top, good, name)
        is_own = shown.finding not in ("", NOT_KNOWN) and defect.says in shown.finding
        if is_own and not draw_once(number, top, good).finding:
            text = f"{shown.command}: {shown.finding}"
            return {"draw": str(place + 1), "as": text, "by": ", ".join(shown.kinds)}
    return {"draw": f"not in {MOST_DRAWS}", "as": "", "by": ""}


def start(words: Sequence[str]) -> int:
    """Run this module again, where calls of the file system can fail and a folder is home."""
    folder = tempfile.mkdtemp(prefix="hostile-")
    env = {**os.environ, "HOSTILE_TOP": folder, "HOME": folder, "COLUMNS": "80"}
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    Path(folder, "here").mkdir()
    library = Path(folder, "faults.so")
    command = [sys.executable, "-m", "benchmarks.hostile", *words]
    if compiler := shutil.which("cc"):
        source = Path(__file__).with_name("faults.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        env["LD_PRELOAD"] = str(library)
    else:
        print("no cc: no call of the file system fails in this run")
    try:
        if "--places" in words:
            return places.start(Path(folder), command, env)
        return subprocess.run(command, env=env, check=False).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        output_of(Path(folder)).unlink(missing_ok=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hostile folders under every command.")
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=600, help="no further draw after these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps the draws, so that calls add up")
    parser.add_argument("--only", type=int, nargs="+", help="draws by number, with their output")
    parser.add_argument("--defect", nargs="+", help="names of defects.py, or all: put back")
    parser.add_argument("--places", action="store_true", help="clocks and mounts in a run alone")
    parser.add_argument("--dry-runs", action="store_true", help="large confs alone")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(words)
    if "HOSTILE_TOP" not in os.environ:
        sys.exit(start(list(words) if words is not None else sys.argv[1:]))
    top = Path(os.environ["HOSTILE_TOP"])
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if given.places:
        kept["clocks"] = places.measure(top)
        write(kept, given.write)
        return
    good = prepare(top)
    os.chdir(top / "here")
    if given.dry_runs:
        kept["dry_runs"] = dry_runs.measure(top / "here")
    load_all()
    if given.only:
        for number in given.only:
            drawn = draw_once(number, top, good)
            print(*drawn.changes, drawn.finding or "as it should", sep=" | ", flush=True)
            print(output_of(top).read_bytes()[-4000:].decode(errors="replace"))
        return
    if given.defect:
        from benchmarks.hostile.defects import DEFECTS

        for name in DEFECTS if given.defect == ["all"] else given.defect:
            found = find_defect(name, given.seed, top, good)
            row = kept.setdefault("defects", {}).setdefault(name, {"what": DEFECTS[name].what})
            row.setdefault("draws", {})[str(given.seed)] = found.pop("draw")
            row.update(found if found["as"] or "as" not in row else {})
            print(name, row, flush=True)
    elif not given.dry_runs:
        folder = given.folder or top / "rows"
        kept["draws"] = run_draws(given.seed, given.draws, given.minutes, top, good, folder)
    write(kept, given.write)


def write(kept: dict[str, Any], is_asked: bool) -> None:
    if is_asked:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(render(kept))


def run_draws(
    seed: int, most: int, minutes: float, top: Path, good: dict[str, Path], folder: Path
) -> dict[str, Any]:
    """Draw on where the folder's rows end; return counts over all rows, and the findings."""
    path, began = folder / f"{seed}.jsonl", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    num = len(path.read_text().splitlines()) if path.exists() else 0
    while num < most and time.monotonic() - began < 60 * minutes:
        number, num = seed * 1_000_000 + num, num + 1
        drawn = draw_once(number, top, good)
        row = {"number": number, **dataclasses.asdict(drawn)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if drawn.finding:
            print(f"{number} {drawn.finding}\n    {' | '.join(drawn.changes)}"[:700], flush=True)
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    return count_draws([json.loads(line) for text in texts for line in text.splitlines()])


def count_draws(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[int]] = collections.defaultdict(list)
    for row in rows:
        if row["finding"]:
            found[f"{row['command']}: {row['finding']}"].append(row["number"])
    seeds = sorted({row["number"] // 1_000_000 for row in rows})
    facts = {"num": len(rows), "seeds": seeds, "processor": read_processor(), "found": found}
    return {**facts, **{name: count(rows, name) for name in ("command", "kinds", "fault")}}


def count(rows: Sequence[dict[str, Any]], name: str) -> list[list[object]]:
    """A row for each value: the value, its draws, and those with a finding."""
    drawn, bad = collections.Counter[str](), collections.Counter[str]()
    for row in rows:
        values = set(row[name]) if isinstance(row[name], list) else {row[name]}
        drawn.update(values)
        bad.update(values if row["finding"] not in ("", NOT_KNOWN) else ())
    return [[value, many, bad[value]] for value, many in sorted(drawn.items())]


def render(kept: dict[str, Any]) -> str:
    lines = ["# Hostile folders and disks that fail", ""]
    drawn = kept.get("draws")
    lines += render_draws(drawn) if drawn else ["The draws have not been run for this page.", ""]
    lines += [*kept.get("notes", ()), ""] if drawn else []
    if rows := kept.get("defects"):
        lines += ["## Known defects, put back", ""]
        lines += [
            f"Each must be found within {MOST_DRAWS} draws, by one that says nothing without it. "
            "Draws of commands or changes that a defect does not concern are counted and not run.",
            "",
        ]
        seeds = sorted({seed for row in rows.values() for seed in row["draws"]})
        head = ("defect", *(f"draw of seed {seed}" for seed in seeds), "as", "changes")
        lines += _render_table(
            head,
            [
                (row["what"], *(row["draws"].get(seed, "") for seed in seeds), row["as"], row["by"])
                for row in rows.values()
            ],
        )
    if rows := kept.get("programs"):
        lines += ["## Programs of a review", ""]
        lines += [
            "Each shows a defect of an earlier version; they are run by hand, and judged by "
            "processor time.",
            "",
        ]
        lines += _render_table(("program", "holds", "what it shows now"), rows)
    if rows := kept.get("places"):
        lines += ["## Places that fail in training", ""]
        lines += ["Staged by hand in a mount namespace, two ranks of a script.", ""]
        lines += _render_table(("place", "what is said now", "what was said before"), rows)
    if rows := kept.get("clocks"):
        lines += ["## Clocks and mounts in a run", ""]
        lines += [
            f"Two ranks of {places.NUM_STEPS} steps of {places.STEP_S} s; at step 20 the clock of "
            "all processes steps, with the times of their files, or the run folder is read-only "
            "for good. The clock steps on an hour again in a report and a status of the run's end.",
            "",
        ]
        names = ("place", "status said", "end", "s of the ranks", "duration, s", "a step, s",
                 "goodput", "wrong")  # fmt: skip
        lines += _render_table(names, [[*row[:-1], row[-1] or "nothing"] for row in rows])
    return "\n".join(lines + dry_runs.render(kept.get("dry_runs", [])))


def render_draws(drawn: dict[str, Any]) -> list[str]:
    found = [(key, len(which), which[0]) for key, which in drawn["found"].items()]
    seeds = ", ".join(map(str, drawn["seeds"]))
    lines = [
        f"{drawn['num']} draws (seeds {seeds}; {drawn['processor']}), each "
        "of one to four changes of a run's folder by size (to 1 TB), count (20,000 attempts, "
        "100,000 files), kind (FIFOs, devices, links, sockets), pattern, value, numbers of its "
        "conf, and of what Slurm prints where it is Slurm's; in two of five, calls of the file "
        "system fail too: one, or all from the n-th on. Each runs one of "
        f"{len(COMMANDS)} commands. Bounds: {MOST_CPU_S} s of processor, {MOST_MB} MB, no "
        "traceback, no control characters, a sentence where it fails, no secret in what is shared, "
        "and no temporary file named. Strangers hold all seats of a live page in the draws of "
        f"`web`. A command that still works after {LIMIT_S} s by the wall is not known.",
        "",
        *_render_table(("finding", "draws", "one of them"), found or [("none", 0, "")]),
    ]
    for name, head in (("command", "command"), ("kinds", "change"), ("fault", "fault")):
        lines += _render_table((head, "draws", "with a finding"), drawn[name])
    return lines


def _render_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return [
        *(f"| {' | '.join(str(x).replace('|', '/') for x in row)} |" for row in cells),
        "",
    ]


if __name__ == "__main__":
    main()
