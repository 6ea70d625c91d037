"""Judge one answer of `vjob init --from`: the conf that it prints against the list's truth."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml

from benchmarks.launch_scripts import LaunchScript, Start
from vjob.jobs.errors import InputError
from vjob.jobs.programs.deepspeed import CONFIG_WORD
from vjob.shelf.importers.refusal import Refusal, ScriptRefusedError
from vjob.shelf.importers.translate import Source, translate_source


class Verdict(Enum):
    """From the best to the worst."""

    RIGHT = "right program and words"
    REFUSED = "refused rightly"
    OTHER_REASON = "refused for another reason"
    WORDS = "right program, other words"
    WRONG = "wrong program"
    TAKEN = "taken, to be refused"
    REFUSED_WRONGLY = "refused wrongly"
    INVENTED = "invented"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One script's result."""

    name: str
    verdict: Verdict
    said: str
    """The kind and name of program that the conf has."""

    counts: str
    """right or wrong; empty where the script or the conf does not say them."""

    notes: int
    seconds: float


def score_script(script: LaunchScript, folder: Path) -> Row:
    began = time.perf_counter()
    done = run_vjob("init", "--from", str(script.locate(folder)))
    seconds = time.perf_counter() - began
    conf: Mapping[str, Any] = {}
    if done.returncode:
        is_honest = done.returncode == 2 and "Traceback" not in done.stderr  # a crash is none
        reasons = list_reasons(script.locate(folder)) if is_honest else frozenset()
        said = ", ".join(sorted(one.name.lower() for one in reasons)) or "an error"
        verdict = judge_refusal(script, reasons) if reasons else Verdict.REFUSED_WRONGLY
    else:
        conf = yaml.safe_load(done.stdout) or {}
        files = [script.locate(folder, path) for path in (script.path, *script.beside)]
        text = "\n".join(file.read_text(errors="replace") for file in files)
        verdict, said = judge_conf(script, conf, text)
    counts = judge_counts(script, conf)
    notes = len(re.findall(r"(?m)^note: ", done.stderr))
    return Row(
        name=script.name, verdict=verdict, said=said, counts=counts, notes=notes, seconds=seconds
    )


def list_reasons(path: Path) -> frozenset[Refusal]:
    """The kinds of reason for which a script is refused."""
    try:
        translate_source(Source(path=path), os.environ)
    except ScriptRefusedError as error:
        return error.reasons
    except InputError:
        return frozenset()
    return frozenset()


def judge_refusal(script: LaunchScript, reasons: Collection[Refusal]) -> Verdict:
    if script.refusal is None:
        return Verdict.REFUSED_WRONGLY
    is_true = Refusal[script.refusal.upper()] in reasons
    return Verdict.REFUSED if is_true else Verdict.OTHER_REASON


def run_vjob(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vjob", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def judge_conf(script: LaunchScript, conf: Mapping[str, Any], text: str) -> tuple[Verdict, str]:
    """The verdict on a conf, and the program that it has; `text` is the script's."""
    kind, words = read_program(conf)
    model = conf.get("model")
    name = words[0] if kind == "module" else PurePath(words[0]).name if words else ""
    said = f"{kind}: {name}" if name else f"{kind} of {model}" if kind else f"built-in {model}"
    if isinstance(model, str) and model not in text:
        return Verdict.INVENTED, said
    verdicts = [judge_start(start, conf, kind, words) for start in script.starts if name]
    best = min(verdicts, key=list(Verdict).index, default=Verdict.TAKEN)
    is_named = name and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)
    is_other = best in (Verdict.WRONG, Verdict.TAKEN)
    return (Verdict.INVENTED if is_other and not is_named else best), said


def read_program(conf: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The kind of program that a conf names, and its words; a built-in one has neither."""
    program = conf.get("program")
    if not isinstance(program, dict):
        return "", []
    args = [str(word).replace("$${", "${") for word in program.get("args", ())]
    if "command" in program:
        found = program["command"]
        words = shlex.split(found) if isinstance(found, str) else map(str, found)
        return "command", [*(word.replace("$${", "${") for word in words), *args]
    args = [word.replace(CONFIG_WORD, str(program.get("config"))) for word in args]
    kinds = [kind for kind in ("script", "module", "deepspeed", "megatron") if kind in program]
    return (kinds[0], [str(program[kinds[0]]), *args]) if kinds else ("", [])


def judge_start(start: Start, conf: Mapping[str, Any], kind: str, words: Sequence[str]) -> Verdict:
    """The verdict on one of the programs that are right. In a command it may stand anywhere."""
    if kind == "command":
        words = [part for word in words for part in split_line(word, start.program)]
    elif (kind == start.kind == "module") or (kind != "module" and start.kind == "script"):
        has_keys = kind == "script" and re.search(r"(?<!\$)\$\{[a-z]", str(conf["program"]))
        words = ask_dry_run(conf, words[0]) if kind == "megatron" or has_keys else words
    else:
        return Verdict.WRONG
    names = [word if start.kind == "module" else PurePath(word).name for word in words]
    if start.program not in (names if kind == "command" else names[:1]):
        return Verdict.WRONG
    rest = words[names.index(start.program) + 1 :]
    is_typed = kind == "megatron" and start.groups
    is_right = start.has_words(rest) or (is_typed and not start.count_lost(rest))
    return Verdict.RIGHT if is_right else Verdict.WORDS


def split_line(word: str, program: str) -> list[str]:
    """The words of a line that a shell gets as one word, if the program is in it."""
    is_line = program in word and re.search(r"\s", word)
    try:
        return shlex.split(word) if is_line else [word]
    except ValueError:
        return [word]


def ask_dry_run(conf: Mapping[str, Any], program: str) -> list[str]:
    """The program's words as `vjob submit --dry-run` makes them of a conf with typed keys; the
    program is an empty file. No more than its name where the dry run refuses the conf."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / PurePath(program).name
        stand_in.touch()
        program_kind = "megatron" if "megatron" in conf["program"] else "script"
        typed = {**conf, "program": {**conf["program"], program_kind: stand_in.name}}
        Path(folder, "conf.yaml").write_text(yaml.safe_dump(typed))
        said = run_vjob("submit", "conf.yaml", "--dry-run", cwd=Path(folder)).stdout
    listed = re.search(r'(?s)"command": (\[.*?\n#? *\])', said)
    words = json.loads(re.sub(r"(?m)^#", "", listed[1])) if listed else []
    places = [place for place, word in enumerate(words) if PurePath(word).name == stand_in.name]
    return words[places[0] :] if places else [program]


def judge_counts(script: LaunchScript, conf: Mapping[str, Any]) -> str:
    """Nodes, and ranks of each, of a conf against those that the script has."""
    groups = (conf.get("cluster") or {}).get("nodes") or []
    if not groups or (script.nodes, script.ranks) == (None, None):
        return ""
    nodes = sum(int(group.get("count", 1)) for group in groups)
    ranks = {group.get("ranks", group.get("gpus", 1)) for group in groups}
    is_right = script.nodes in (None, nodes) and (script.ranks is None or ranks == {script.ranks})
    return "right" if is_right else "wrong"
