"""Changes of a run folder, each a function of a folder and a random generator that names itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

TB = 1 << 40
NAMES = ("a\nb", "caf\udce9", "-n", "x" * 250, "\x1b[2J", "node'$(id)", " ", "0" * 40, "\xb2")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**200, 1e308, float("nan"), float("inf"), "", "x" * 10**6, [], {},
    "\x1b[2J\x07", "9" * 5000, [[]] * 1000, {"a": {"a": {}}}, "\ud800", "1e999", "../../etc",
    10**18,
)  # fmt: skip
RAW = (
    b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"{}", b"null", b"\0" * 4096,
    b"\xff\xfe" * 100,
    b"1" * 4_000_000, b"&a [*a, *a]\n", b"a: &a [x]\nb: [*a, *a]\n", 
    b"!!python/object:os.system x\n",
)  # fmt: skip
PATTERNS = (
    (r"(?P<step>\d+) (a|aa)+$", "0: 5 " + "a" * 60 + "!"),
    (r"(?P<step>\d+)(x+x+)+y", "0: 5" + "x" * 60),
    (r"(?P<step>\d+)(?:(?:a?){50}){50}b", "0: 5" + "a" * 300), (r"(?P<step>\d{1,4294967294})", ""),
    ("(" * 200, ""), (r"(?P<step>.*)*x", "0: " + "5" * 60), (r"\1(?P<step>x)", ""),
    (r"(?P<step>\d+)\b(?=(x+x+)+y)", ""), ("a" * 10**5, ""),
)  # fmt: skip
"""Patterns, each with a line that is made for it or empty."""
LINES = (
    "0: 5 " + "a" * 60 + "!", "a" * 300_000, "0: step " + "9" * 5000 + " loss " + "9" * 5000,
    "\x1b[2J\x1b]0;x\x07",
    "\r".join(f"{n}%|# | {n}/100 [00:01<00:09, 1.2it/s]" for n in range(9999)),
    "0: Traceback (most recent call last):\n" * 2000, "0: " + "[" * 100_000, "0: {" * 5000,
    "0: {'loss': 1e999, 'step': -5, 'epoch': nan}", "0: loss " + "1e" * 40_000, "\0" * 5000,
    "0: " + "step 5 " * 50_000, "0: " + "RuntimeError: " * 9000, "0: " + "=" * 200_000 + " x",
    "0: " + ": ".join("ab" for _ in range(40_000)), "0: " + "1/" * 60_000, "0: " + "\t" * 90_000,
    "99999999999999999999: step 1 loss 2", "0: step \uff12 loss \xb2", "0: " + "0x" + "f" * 100_000,
)  # fmt: skip
Draw = Callable[[Path, Random, Path], str]
"""Changes the folder; the last is a folder of large things that are moved in, not copied."""


def list_files(run: Path) -> list[Path]:
    found = (path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in found if path.suffix != ".pyz" and path.stat().st_size < 10**7]


def _pick(run: Path, random: Random) -> Path:
    """A file of a kind, each as likely as the others: there are many of .json and one of .times."""
    files = list_files(run) or [run / "none"]
    kind = random.choice(sorted({path.suffix for path in files}))
    return random.choice([path for path in files if path.suffix == kind])


def sparse(run: Path, random: Random, large: Path) -> str:
    """A file of very many bytes; more often than not one that grows as a run goes on."""
    kind = random.choice((".out", ".times", ".jsonl"))
    grows = [path for path in list_files(run) if path.suffix == kind]
    path = random.choice(grows) if grows and random.random() < 0.7 else _pick(run, random)
    size = random.choice((3 << 28, 10 << 30, TB))
    with contextlib.suppress(OSError):
        os.truncate(path, size)
        if random.random() < 0.5:
            with path.open("ab") as file:
                file.write(b"\n0: step 6 loss 0.5\n")
    return f"{path.relative_to(run)} is {size >> 20} MB of nothing"


def one_line(run: Path, random: Random, large: Path) -> str:
    path = _pick(run, random)
    with path.open("ab") as file:
        mark = random.choice((b" ", b"a", b"1", b"[", b"\r", b"\n", b"{}\n", b"0 0 0\n"))
        file.write(mark * (48_000_000 // len(mark)))
    return f"{path.relative_to(run)} goes on with 48 MB of {mark!r}"


def empty(run: Path, random: Random, large: Path) -> str:
    path = _pick(run, random)
    os.truncate(path, random.choice((0, 0, 1, path.stat().st_size // 2)))
    return f"{path.relative_to(run)} is cut"


LARGE = {
    "outs": ("attempt-0", "{}.out", "0: step 1 loss 2\n"),
    "traces": ("attempt-0/trace", "node-{}.jsonl", '{"rank": 3}\n'),
    "exits": ("attempt-0/exit", "node-{}.json", "{}"),
    "ended": ("attempt-0/ranks", "{}.ended", "{}"),
    "nodes": ("attempt-0/nodes", "{}.json", "{}"),
    "beats": ("attempt-0/beat", "{}.json", "{}"),
    "hangs": ("attempt-0/hang", "{}.json", "{}"),
    "foreign": ("attempt-0/lightning_logs", "x{}", ""),
}
"""Place, name and content of the files of a large folder."""
MOST_LINKS = 30_000
"""Of one file, on any file system."""


def many(run: Path, random: Random, large: Path) -> str:
    """A folder of very many names, made when it is first drawn, and moved in."""
    kind = random.choice(("attempts", random.choice(list(LARGE))))
    made = large / kind
    make_large(made)
    if kind == "attempts":
        for path in made.iterdir():
            with contextlib.suppress(OSError):
                path.rename(run / path.name)
        return "20,000 attempts"
    target = run / LARGE[kind][0]
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        made.rename(target)
    return f"100,000 {kind}"


def make_large(made: Path) -> None:
    """Fill the folder; a folder that lost names to a command is made again."""
    num = NUM_ATTEMPTS if made.name == "attempts" else NUM_FILES
    if made.is_dir() and len(os.listdir(made)) >= num - 1:
        return
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for number in range(num):
        if made.name == "attempts":
            if number:
                (made / f"attempt-{number}").mkdir()
            continue
        _, name, text = LARGE[made.name]
        if number % MOST_LINKS == 0:
            first = made / name.format(number)
            first.write_text(text)
        else:
            os.link(first, made / name.format(number))


def take_back(run: Path, large: Path) -> None:
    """Move the large folders out of a run that is done with."""
    for kind, (place, name, _) in LARGE.items():
        target = run / place
        if not (large / kind).exists() and (target / name.format(NUM_FILES - 1)).exists():
            target.rename(large / kind)
    if (large / "attempts").is_dir() and (run / f"attempt-{NUM_ATTEMPTS - 1}").is_dir():
        for path in run.glob("attempt-*"):
            if path.name != "attempt-0" and path.is_dir() and not path.is_symlink():
                path.rename(large / "attempts" / path.name)


def odd(run: Path, random: Random, large: Path) -> str:
    """Something that is no file in the place of one."""
    path = _pick(run, random)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = random.choice(("fifo", "zero", "loop", "dangling", "folder", "socket", "root", "tty"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        link = socket.socket(socket.AF_UNIX)
        with contextlib.closing(link), contextlib.suppress(OSError):
            link.bind(str(path))
    else:
        links = {"zero": "/dev/zero", "loop": path.name, "dangling": "/none/x", "tty": "/dev/tty"}
        path.symlink_to(links.get(kind, "/"))
    return f"{path.relative_to(run)} is a {kind}"


def folder_is_file(run: Path, random: Random, large: Path) -> str:
    folders = [path for path in sorted(run.rglob("*")) if path.is_dir() and not path.is_symlink()]
    if not folders:
        return "nothing"
    path = random.choice(folders)
    shutil.rmtree(path)
    if random.random() < 0.3:
        path.symlink_to(random.choice(("/", "..", path.name, "/proc/self")))
    elif random.random() < 0.5:
        path.write_text("x")
    return f"{path.relative_to(run)} is no folder"


def name(run: Path, random: Random, large: Path) -> str:
    path = _pick(run, random)
    new = path.with_name(random.choice(NAMES) + path.suffix)
    with contextlib.suppress(OSError, ValueError):
        shutil.copyfile(path, new)
    return f"{path.relative_to(run)} also as {new.name[:20]!r}"


def _change(value: Any, random: Random, depth: int = 0) -> Any:
    if isinstance(value, dict) and value and (depth == 0 or random.random() < 0.8):
        key = random.choice(list(value))
        return {**value, key: _change(value[key], random, depth + 1)}
    if isinstance(value, list) and value and (depth == 0 or random.random() < 0.7):
        place = random.randrange(len(value))
        return [*value[:place], _change(value[place], random, depth + 1), *value[place + 1 :]]
    return random.choice(VALUES)


def value(run: Path, random: Random, large: Path) -> str:
    kinds = (".json", ".jsonl", ".yaml", ".ended")
    files = [path for path in list_files(run) if path.suffix in kinds]
    if not files:
        return "nothing"
    path = random.choice(files)
    text = path.read_text(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        if path.suffix == ".jsonl":
            lines = text.splitlines() or ["{}"]
            place = random.randrange(len(lines))
            lines[place] = json.dumps(_change(json.loads(lines[place]), random))
            path.write_text("\n".join(lines) + "\n")
        elif path.suffix in (".json", ".ended"):
            path.write_text(json.dumps(_change(json.loads(text), random)))
        else:
            lines = text.splitlines() or [""]
            place = random.randrange(len(lines))
            key = lines[place].partition(":")[0]
            lines[place] = f"{key}: {json.dumps(random.choice(VALUES))}"
            path.write_text("\n".join(lines) + "\n")
    return f"{path.relative_to(run)} has another value"


def raw(run: Path, random: Random, large: Path) -> str:
    path = _pick(run, random)
    data = random.choice(RAW)
    if random.random() < 0.5:
        path.write_bytes(data)
    else:
        with path.open("ab") as file:
            file.write(data + b"\n")
    return f"{path.relative_to(run)} has {data[:12]!r}..."


def pattern(run: Path, random: Random, large: Path) -> str:
    text, line = random.choice(PATTERNS)
    path = run / random.choice(("plan.json", "plan.json", "known_lines.json"))
    errors = (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError)
    with contextlib.suppress(*errors):
        value = json.loads(path.read_text() if path.is_file() else "null")
        if path.name == "plan.json":
            value["progress"] = text
            value["remedies"] = [[text, "x"]] * random.choice((1, 1, 1000))
        else:
            value["rows"] = [{**row, "pattern": text} for row in value["rows"]]
        path.write_text(json.dumps(value))
    for place in (path for path in list_files(run) if line and path.suffix == ".out"):
        with place.open("a") as file:
            file.write(line + "\n")
    return f"a pattern {text[:30]}"


def log(run: Path, random: Random, large: Path) -> str:
    logs = [path for path in list_files(run) if path.suffix == ".out"]
    if not logs:
        return "nothing"
    path, line = random.choice(logs), random.choice(LINES)
    with path.open("a", errors="surrogateescape") as file:
        file.write((line + "\n") * random.choice((1, 1, 3, 20)))
    return f"{path.relative_to(run)} has lines {line[:24]!r}"


NUMBERS = (
    0, -1, 1, 64, 2000, 4096, 5000, 100_000, 10**9, 10**30, "9" * 5000, "1e999", "0x" + "f" * 99,
)  # fmt: skip
LARGE_NUMBERS = (2000, 4096, 5000, 100_000)
"""Each is valid by itself; their product is more than anybody has."""


def numbers(run: Path, random: Random, large: Path) -> str:
    """Numbers of a conf, and lists of it, that nobody has."""
    count, ranks, minutes = (random.choice(NUMBERS) for _ in range(3))
    if random.random() < 0.5:
        count, ranks = random.choice(LARGE_NUMBERS), random.choice(LARGE_NUMBERS[:2])
    group = f"{{group: a, count: {count}, ranks: {ranks}}}"
    times_more = random.choice((0, 0, 0, 1, 1, 1999, 9000))
    groups = [group, *(f"{{group: b{n}, count: {count}}}" for n in range(times_more))]
    where = random.choice(("slurm", "slurm", "local"))
    for name in ("conf.yaml", "train.py"):  # it may be a FIFO, which nobody reads
        (run / name).unlink(missing_ok=True)
    (run / "train.py").write_text("")
    (run / "conf.yaml").write_text(
        "name: tiny\nprogram: {script: train.py}\n"
        f"cluster: {{scheduler: {where}, walltime_min: {random.choice((5, 5, minutes))}, "
        f"nodes: [{', '.join(groups)}]}}\n"
    )
    return f"conf.yaml: count {str(count)[:12]}, ranks {str(ranks)[:12]}, {len(groups)} groups"


TABLES = {
    "squeue": "123|0|0|RUNNING|n[1-2]|None|0|2026-11-28T01:00:00|vjob:tiny|1:00:00|2:00:00|"
    "2026-11-29T09:00:00|N/A|(null)|0|\n",
    "sacct": "123|FAILED|n[1-2]|None|1:0|2026-11-28T01:00:00|2026-11-28T02:00:00|01:00:00|x\n",
    "scontrol": "JobId=123 JobName=tiny UserId=root(0) JobState=RUNNING Reason=None Restarts=0 "
    "RunTime=00:01:00 TimeLimit=01:00:00 StartTime=2026-11-28T01:00:00 EndTime=Unknown "
    "NodeList=n[1-2] ExitCode=0:9 NumNodes=2\nNodeName=n1 State=IDLE Reason=x [root@2026-11-28]\n"
    "SLURM_VERSION = 25.05.1\nKillWait = 30\nAuthInfo = cred_expire=120\n",
    "sinfo": "n1|gpu*|idle|gpu:a100:4(S:0-1)|64|512000|\n",
    "sbatch": "123\n",
    "scancel": "",
}
WORDS = (
    "", "0", "-1", "9" * 400, "9" * 5000, "nan", "1e999", "N/A", "(null)", "UNLIMITED", "\0",
    "\x1b[31m", "\u0663", "\xb2", "n[0-999999999]", "n[1-99999999999]", "n[1-", "n[1-3,7-",
    "n[001-100000]", "[1-9][1-9][1-9][1-9][1-9][1-9][1-9]", "1-", "25:61:61", "|", "|||", "=",
    "node" * 9000, "gpu:a100:99999999999999999999", "CANCELLED by 99999999999999999999999",
    "123_[1-99999999]", "123+99999999999", "2026-13-45T99:99:99", "9999-12-31T23:59:59",
    "x" * 10**6,
)  # fmt: skip

NODES = (
    "n[0-999999999]", "n[1-99999999999]", "[1-9][1-9][1-9][1-9][1-9][1-9][1-9]", "n[1-3,7-",
    f"n[1-{'9' * 5000}]",
)  # fmt: skip


def table(run: Path, random: Random, large: Path) -> str:
    """What the commands of Slurm print."""
    name = random.choice(("squeue", "squeue", "sacct", "scontrol", "sinfo", "sbatch"))
    words = re.findall(r"[^\s|=:]+|.|\n", TABLES[name])
    for _ in range(random.choice((1, 1, 2, 4))):
        words[random.randrange(len(words))] = random.choice(WORDS)
    if "n[1-2]" in words and random.random() < 0.5:
        words[words.index("n[1-2]")] = random.choice(NODES)
    text = "".join(words)
    text *= random.choice((1, 1, 1, min(30_000, 1 + 20_000_000 // (1 + len(text)))))
    place = large.parent / "tables"
    place.mkdir(exist_ok=True)
    (place / name).write_text(text, errors="replace")
    return f"{name} prints {text[:40]!r}"


DRAWS: tuple[Draw, ...] = (
    sparse, sparse, one_line, empty, odd, folder_is_file, name, value, value, value, raw, pattern,
    pattern, log, log, numbers,
)  # fmt: skip
NUM_ATTEMPTS, NUM_FILES = 20_000, 100_000
