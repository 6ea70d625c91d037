"""Convert shell scripts to conf.yaml, using bash itself to interpret them (`bash.recording`).

The program is the one that the scripts start, word for word. Scripts that start no program or
several different ones, or with arguments that are unknown before the job runs, are refused. An
option without a key is noted above the conf with the reason. A key that does not fit the rest, such
as a pipeline that the ranks cannot hold, is removed and the check's message noted, so that the conf
can be submitted as it is.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.agent.gpu.accelerator import list_variables
from varuna_core.plugins import list_plugins, load_plugin
from varuna_core.records.files import open_file
from varuna_core.records.secrets import is_secret, redact_string
from vjob.jobs.conf.loading.check import list_own_env
from vjob.jobs.conf.loading.check_cluster import EPHEMERAL
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.slurm_words import to_name, to_number
from vjob.jobs.errors import InputError
from vjob.jobs.programs.launchers import find_launcher
from vjob.shelf.importers.bash.recording import (
    A_COUNT,
    ALL_THERE,
    ARRAY_TASK,
    MAX_FILE,
    PLACEHOLDER,
    SEARCH_PATHS,
    SUFFIXES,
    Command,
    Recording,
    Word,
    list_arguments,
    make_word,
    read_script,
    read_text,
)
from vjob.shelf.importers.container import build_container
from vjob.shelf.importers.copies import list_inside
from vjob.shelf.importers.draft import Draft, place, render_page, spell
from vjob.shelf.importers.fit import find_absent, leave_out_misfits
from vjob.shelf.importers.launchers import Launch, Lines, sort_commands
from vjob.shelf.importers.nodes import AMOUNTS, COUNTED, NO_KEY, build_nodes, find_host_file
from vjob.shelf.importers.program import build_program
from vjob.shelf.importers.refusal import Refusal, ScriptRefusedError
from vjob.shelf.importers.script import ShellConf, collect
from vjob.shelf.importers.tree import find_entries

GROUP = "vjob.importers"
ACCEPTED = (
    "a script for bash, by its name (x.sh) or first line (#!/bin/bash), that starts a training, or "
    "a folder of such scripts"
)
MOST_SHOWN = 8
NODE_REFERENCES = {"${MASTER_ADDR}": "${master.address}", "${MASTER_PORT}": "${master.port}"}
"""References to values that exist only in ranks: `setup` runs before the nodes have met."""
_SYNTAX = re.compile(r"syntax error|unexpected (?:EOF|token|end of file)|here-document")
_UNBOUND = re.compile(r": (\$?\w+): (?:unbound variable|parameter (?:null or )?not set)")
_PREPARING = ("mkdir", "ulimit", "umask", "unset")
"""Commands that do in `setup` what they do in the script; `mkdir` only with -p, and `unset` only of
variables that vjob does not need."""
_SETUP = ("module", "ml", "conda", "mamba", "micromamba", "spack", "deactivate")
_CHOOSES = re.compile(rf"export PATH=|(?:eval|source|\.|{'|'.join(_SETUP)})(?!\w)")
"""Beginnings of lines of `setup` that may put another Python on PATH."""
_SETS_GPU = re.compile(
    r"-.*?(?<!\w)-?(pm|pl|ac|rac|lgc|rgc|lmc|rmc|c|r|mig|-(persistence|power-limit|compute|gpu-reset"
    r"|lock|reset|applications|auto-boost|set)\S*)(?![\w-])"
)
"""Options of a vendor's tool that change the device."""
_RC = (".bashrc", ".bash_profile", ".profile")
"""Files that may fail where no terminal is, which a script without `set -e` does not notice."""
_SILENT = ("ls", "which", "printenv", "df", "free", "ps", "lscpu", "env",
           "squeue", "sinfo", "stat", "du", "nvcc", "id", "lsof", "tput", "cd",
           "uname", "column", "jq", "diff", "sync", "less", "more", "stty",
           "gpustat", "nvtop", "dstat", "iostat", "mpstat", "sar", "vmstat",
           "hostname", "ip", "ifconfig", "lspci", "ibstat", "ibv_devinfo", "dcgmi")  # fmt: skip
"""Commands that only show something: ignored without a note."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The scripts to read, and how bash reads them."""

    path: Path
    args: Sequence[str] = ()
    """Arguments of the script."""
    line: int | None = None
    """Line of the launch to take, if there are several."""
    trust: bool = False
    """True if the script may be read without a jail."""


def import_source(source: Source, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return a conf.yaml and notes, from shell scripts or from a plug-in of the entry points of
    GROUP. Raise InputError if none of them can read the source."""
    try:
        return translate_source(source, environ)
    except InputError:
        for name in list_plugins(GROUP):
            take = load_plugin(GROUP, name)
            text = None if take is None else take(source.path)
            if text is not None:
                return str(text), []
        raise


def translate_source(source: Source, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the text of a conf.yaml, and notes on ignored parts and on what to check."""
    title = source.path.name or str(source.path)
    found, files, unread = read_source(source, environ)
    lines = sort_commands(found.commands)
    launch, others = choose_launch(found, lines, title, source.line)
    draft = Draft(found, lines, files, environ)
    for name in launch.command.absent:
        draft.note(f"{launch.command.where}: {name} is not set, so no word stands for it")
    for sentence in found.replaced:
        draft.note(redact_string(sentence))
    if unread:
        draft.note(f"not read, because they need arguments: {', '.join(unread)}")
    for other in others[:MOST_SHOWN]:
        draft.note(
            f"{other.command.where}: left out, because a conf starts one program: "
            f"{redact_string(_shorten(other.command.raw))}"
        )
    if len(others) > MOST_SHOWN:
        draft.note(f"also left out: {len(others) - MOST_SHOWN} other commands")
    for recording in found.recordings:
        if shell := re.match(r"#!.*\b(zsh|ksh|t?csh|fish)\b", draft.read_line(recording.file, 1)):
            draft.note(
                f"{recording.file}:1: the script is for {shell[1]}, but bash read it: "
                "what the two do differently is not seen"
            )
        for text, where in recording.waits.items():
            draft.note(f"{where}: not done: {text}")
        started = [one.raw for one in recording.launches if not one.only]
        for one in recording.launches:
            if started.count(one.raw) > 1:
                draft.note(
                    f"{one.where}: the script starts this {started.count(one.raw)} times; a conf "
                    f"starts it once: {redact_string(_shorten(one.raw))}"
                )
        for text, where in recording.loops.items():
            draft.note(
                f"{where}: the script repeats a program that a conf starts once, unless it "
                f"sets cluster.restarts: {redact_string(_shorten(text))}"
            )
        if recording.late:
            more = f", as it does {len(recording.late) - 1} more" if len(recording.late) > 1 else ""
            draft.note(
                f"{recording.file}:{recording.late[0]}: sbatch ignores this #SBATCH line, which is "
                f"behind the script's first command{more}; the conf does not have it either",
                is_first=True,
            )
        if recording.submit_dir:
            draft.note(
                f"{recording.submit_dir}: SLURM_SUBMIT_DIR is taken to be the script's folder, "
                f"{draft.shorten(found.folder)}; in a run of vjob it is the run folder"
            )
        for name in recording.arguments if source.args else ():
            draft.note(f"{recording.file}: {name} was not given, so no word stands for it")
        if recording.task:
            where, number = recording.task
            draft.note(f"{where}: the conf has the values for {ARRAY_TASK} {number}")
        for problem in recording.problems:
            if problem.endswith("No such file or directory"):
                draft.note(f"{recording.file}: bash says {problem}")
    _build(draft, launch)
    leave_out_misfits(draft)
    _list_drawn(draft)
    notes = [*draft.notes, *find_absent(draft, Path(found.folder))]
    return render_page(draft, title, notes), notes


def read_source(
    source: Source, environ: Mapping[str, str]
) -> tuple[ShellConf, dict[str, str], list[str]]:
    """Let bash read the scripts; return the result, texts in the folder, and names of unread
    scripts.

    In a folder, only scripts that no other script names are read, since they start the others. Of
    these, scripts that take arguments are read only if no other script starts a program without
    arguments.
    """
    path = source.path
    folder = (path if path.is_dir() else path.parent).absolute()
    files = _read_folder(folder)
    if not path.is_dir() and not is_script(path):
        raise InputError(f"{path} is not supported by --from, which takes {ACCEPTED}")
    paths = find_entries(path)
    asking = [one for one in paths if path.is_dir() and list_arguments(files.get(one.name, ""))]
    found: list[Recording] = []
    for group in ([one for one in paths if one not in asking], asking):
        found += [
            read_script(one, args=source.args, environ=environ, trust=source.trust) for one in group
        ]
        starting = [one for one in found if any(one.walk())]
        complete = [one for one in starting if not one.unset]
        if complete:
            unread = [one.name for one in asking if group is not asking]
            return collect(complete, str(folder)), files, unread
    return collect(starting or found, str(folder)), files, []


def is_script(path: Path) -> bool:
    """Return True if a file is a shell script, by its name or its first lines."""
    with open_file(path) as file:
        head = file.read(4096).decode(errors="replace")
    if path.name.endswith(SUFFIXES):
        return "\0" not in head.rstrip("\0")  # Slurm writes one behind a job's script
    return bool(re.match(r"#!.*sh\b", head) or re.search(r"(?m)^#SBATCH", head))


def _read_folder(folder: Path) -> dict[str, str]:
    """Read scripts, hostfiles and machine lists; return the texts by name."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        is_list = re.fullmatch(r"(\w*hosts?(file)?|\w*machines?)(\.\w+)?|\w+\.env", path.name)
        is_taken = (is_list or path.name.endswith(SUFFIXES)) and path.is_file()
        if is_taken and path.stat().st_size <= MAX_FILE:
            found[path.name] = read_text(path)
    return found


def choose_launch(
    found: ShellConf, lines: Lines, title: str, line: int | None = None
) -> tuple[Launch, list[Launch]]:
    """Return the launch that becomes the program, and the others; raise InputError if undecided.

    Launches with the same words count as one. Of different ones, the only one with a launcher is
    chosen; else the only one that is a step of srun's, since the others prepare.
    """
    launches = [one for one in lines.launches if one.command.line == line or line is None]
    if not launches:
        raise _explain_none(found, title, line)
    kinds: dict[tuple[str, ...], list[Launch]] = {}
    for one in launches:
        kinds.setdefault(_list_words(one), []).append(one)
    if len(kinds) > 1:
        for is_main in (has_launcher, is_spread):
            strong = [words for words, ones in kinds.items() if any(map(is_main, ones))]
            if len(strong) == 1:
                break
        else:
            raise ScriptRefusedError(_explain_several(kinds, title), Refusal.SEVERAL)
        first = kinds[strong[0]][0]
    else:
        first = launches[0]
    if "--multi-prog" in first.command.texts:
        raise ScriptRefusedError(
            f"{first.command.where}: srun --multi-prog starts the programs that "
            f"{first.script.text} names for each task, but a conf starts one",
            Refusal.SEVERAL,
        )
    refuse_open(first, found)
    words = _list_words(first)
    return first, [one for one in lines.launches if _list_words(one) != words]


def _list_words(launch: Launch) -> tuple[str, ...]:
    return (launch.script.text, *(word.text for word in launch.args))


def has_launcher(launch: Launch) -> bool:
    texts = [word.text for word in (launch.script, *launch.args)]
    return launch.kind in ("torch", "deepspeed", "varuna") or bool(find_launcher(texts))


def is_spread(launch: Launch) -> bool:
    """Return True for a launch of several processes: a step of srun's, or with a launcher."""
    return launch.command.is_step or has_launcher(launch)


def refuse_open(launch: Launch, found: ShellConf) -> None:
    """Raise ScriptRefusedError if a word is unknown and a shell in the job cannot expand it."""
    words = (launch.script, *launch.args)
    line = " ".join("" if word.unknown else word.text for word in words)
    if placeholder := PLACEHOLDER.search(line):  # it may be of several words
        raise ScriptRefusedError(
            f"{launch.command.where}: {placeholder[0]} must be replaced first",
            Refusal.PLACEHOLDERS,
        )
    for block in found.blocks:
        for name, (text, number) in block.options.items():
            if name in AMOUNTS and not re.search(r"\d", text):
                raise ScriptRefusedError(
                    f"{block.file}:{number}: --{name}={text} must be replaced first",
                    Refusal.PLACEHOLDERS,
                )
    asked = [word for word in words if word.is_open and not word.shell]
    counts = [launch.options[name] for name in COUNTED if name in launch.options]
    asked += [
        word for word in counts
        if any(re.match(r"\$(?!\{SLURM_)[{\d]", name) for name in word.unknown)
    ]  # fmt: skip
    if not asked:
        return
    names = sorted({name for word in asked for name in word.unknown})
    names += [name for name in _list_unbound(found) if name not in names]
    shown = ", ".join(redact_string(word.text) for word in asked[:MOST_SHOWN])
    remedies: dict[Refusal, str] = {}
    if any(re.fullmatch(r"\$[\d@]", name) for name in names):
        remedies[Refusal.ARGUMENTS] = (
            "give the script's arguments after --: vjob init --from FILE -- ARGUMENTS"
        )
    if unset := [name[2:-1] for name in names if re.fullmatch(r"\$\{\w+\}", name)]:
        remedies[Refusal.VARIABLES] = f"set {', '.join(unset)} in your shell before vjob init"
    if A_COUNT in names:
        remedies[Refusal.COUNTS] = (
            "give the counts in #SBATCH lines (--nodes, --ntasks-per-node, --gres)"
        )
    if any(name.startswith("$(") for name in names):
        remedies[Refusal.OUTPUTS] = "replace these commands in the script by their output"
        if unread := [said for one in found.recordings for said in one.unread]:
            remedies[Refusal.FILES] = f"bash says {'; '.join(dict.fromkeys(unread[:3]))}"
    if any("*" in name for name in names):
        remedies[Refusal.FILES] = "read the script on a machine that has the pattern's files"
    said = f"bash says {'; '.join(_list_problems(found)[:3])}"
    remedies |= dict.fromkeys(_explain_errors(found), said)  # such a file sets nothing
    raise ScriptRefusedError(
        f"{launch.command.where}: the program's arguments are known only at run time: {shown}; "
        + "; ".join(dict.fromkeys(remedies.values())),
        *remedies,
    )


def _list_problems(found: ShellConf) -> list[str]:
    return [problem for one in found.recordings for problem in one.problems]


def _list_unbound(found: ShellConf) -> list[str]:
    """Return the unset names at which bash stopped: variables, or `$1`."""
    return [name[1] for name in map(_UNBOUND.search, _list_problems(found)) if name]


def _explain_errors(found: ShellConf) -> list[Refusal]:
    """Return the reasons for syntax errors, one of which may be a placeholder."""
    said = _list_problems(found)
    if not any(map(_SYNTAX.search, said)):
        return []
    has_placeholder = any(map(PLACEHOLDER.search, said))
    return [Refusal.SYNTAX, *([Refusal.PLACEHOLDERS] if has_placeholder else [])]


def _explain_none(found: ShellConf, title: str, line: int | None) -> ScriptRefusedError:
    if line is not None:
        return ScriptRefusedError(f"{title}: line {line} starts no program", Refusal.NOTHING)
    said = _list_problems(found)
    reasons = {Refusal.NOTHING, *_explain_errors(found)}
    reasons |= {Refusal.ENDLESS} if any(one.is_endless for one in found.recordings) else set()
    needs = [name for one in found.recordings for name in (*one.unset, *one.arguments)]
    needs += _list_unbound(found)
    why = f": bash says {'; '.join(said[:3])}" if said else ""
    if needs:
        why += f"; it needs {', '.join(dict.fromkeys(needs[:MOST_SHOWN]))}"
        reasons |= {Refusal.ARGUMENTS if re.match(r"\$[\d@]", name) else Refusal.VARIABLES
                    for name in needs}  # fmt: skip
    tested = [f"{text} ({place})" for one in found.recordings for text, place in one.tested.items()]
    if not why and tested:
        why = f"; it asks for {', '.join(tested[:3])}"
    return ScriptRefusedError(
        f"{title} is not supported by --from: it starts no program{why}. --from takes "
        f"{ACCEPTED}; give arguments of the script after --",
        *reasons,
    )


def _explain_several(kinds: Mapping[tuple[str, ...], Sequence[Launch]], title: str) -> str:
    shown = []
    for ones in list(kinds.values())[:MOST_SHOWN]:
        raw = redact_string(" ".join(ones[0].command.raw.split()))
        raw = raw if len(raw) < 100 else raw[:97] + "..."
        when = f" (if {ones[0].command.only})" if ones[0].command.only else ""
        shown.append(f"  {ones[0].command.where}{when}: {raw}")
    more = f"\n  and {len(kinds) - MOST_SHOWN} more" if len(kinds) > MOST_SHOWN else ""
    is_parted = len({ones[0].command.where for ones in kinds.values()}) == len(kinds)
    remedy = "choose it with --line" if is_parted else "leave only that one in a copy of the script"
    return (
        f"{title} starts {len(kinds)} different programs, but a conf starts one; {remedy}:\n"
        + "\n".join(shown)
        + more
    )


def _build(draft: Draft, launch: Launch) -> None:
    """Build all sections, in this order, since later ones use keys that earlier ones set."""
    build_container(draft)
    _build_profile(draft)
    build_program(draft, launch)
    build_nodes(draft, launch)
    _build_port(draft, launch)
    _build_setup(draft, launch)
    _list_written(draft, launch)
    _build_name(draft, launch)
    _build_env(draft, launch)
    _build_interpreter(draft, launch)
    _list_tested(draft, launch)


def _build_profile(draft: Draft) -> None:
    for name, pairs, command in draft.lines.wrapping.profilers:
        said = f"{command.where}: {name}"
        draft.put(f"profile.{name}", True, said)
        options: list[str] = draft.values.setdefault("profile.options", [])
        for option, word in pairs:
            dashes = "-" if len(option) == 1 else "--"
            joined = f"{dashes}{option}" + (f"={word.text}" if word.text and dashes == "--" else "")
            if option in ("o", "output", "f", "force-overwrite"):
                draft.note(
                    f"{said} {joined} {word.text} is left out: its file is in the run folder"
                )
            elif word.is_open:
                draft.note(f"{said} {joined} is left out: its value is not known")
            else:
                options.append(joined)
                options += [word.text] if word.text and dashes == "-" else []
                draft.record(f"{said} {joined} {word.text}", "profile.options")
        if not options:
            draft.values.pop("profile.options", None)


def _build_port(draft: Draft, launch: Launch) -> None:
    """Set a fixed port from the command line or MASTER_PORT, if it can be reserved."""
    word = launch.options.get("master_port")
    given = launch.command.env.get("MASTER_PORT")
    said = f"{launch.command.where}: --master_port {word.text}" if word is not None else ""
    port = None
    if word is not None and not word.is_open:
        port = to_number(word.text)
    elif word is None and given is not None and not given.is_open:
        where = _locate(draft, "MASTER_PORT", given, launch)
        said, port = f"{where}: MASTER_PORT={given.text}", to_number(given.text)
    if port is None:
        return
    once = {where for one in draft.found.recordings for where in one.once.values()}
    drawn = {one.value for one in draft.found.variables.values() if place(one) in once}
    if str(port) in drawn:
        draft.note(f"{said} is not used: each run chooses a new port, as with port: auto")
        return
    low, high = EPHEMERAL
    if 1024 <= port <= 65535 and not low <= port <= high:
        draft.put("cluster.port", port, said)
        return
    draft.note(
        f"{said} is not used: a port must be 1024 to 65535, and {low} to {high} are for "
        "outgoing connections; port: auto picks a free one"
    )


def _build_setup(draft: Draft, launch: Launch) -> None:
    """Add `module load` and the like to `setup`; note other preparations."""
    setup: list[str] = draft.values.get("setup", [])
    ending: list[str] = []
    inside = {one.where for recording in draft.found.recordings for one in list_inside(recording)}
    for whole in draft.found.setup:
        command = replace(whole, words=whole.program or whole.words)
        texts = command.texts
        name = posixpath.basename(texts[0])
        said = f"{command.where}: {command.raw}"
        is_before = launch.command.where not in command.after and command.where not in inside
        is_setup = name in _SETUP or (name in (".", "source") and len(texts) > 1)
        is_after = launch.command.where in command.after
        if is_after and name in ("conda", "deactivate", "module", "ml"):
            continue  # only the shell, which ends, would notice
        if (is_setup and not is_after) or (is_before and _is_preparing(command, launch)):
            line = _spell_setup(draft, command)
            may_fail = _may_fail(draft, command)
            if line and may_fail:
                line += " || true"
            if line is None:
                draft.note(f"{said} is left out: its words are not known")
            elif line and line not in setup:
                setup.append(line)
                if not may_fail and not _ends_script(draft, command):
                    ending.append(f"{command.where}: {redact_string(_shorten(line))}")
                draft.record(f"{command.where}: {line}", "setup")
                if name in (".", "source") and not texts[1].endswith("activate"):
                    draft.note(f"{command.where}: not read, but run in setup: {line}")
        elif command.where in inside and name == "cp":
            continue  # container.py tells
        elif _has_effect(command):
            why = "do it beforehand, or in setup"
            if is_after:
                why = "it follows the program, and a run ends with its program"
            elif name == "trap":
                why = "the batch script is vjob's own"
            draft.note(
                f"{command.where}: not done: {redact_string(_shorten(shlex.join(texts)))}; {why}"
            )
    if ending:
        more = f" (and {len(ending) - 1} more)" if len(ending) > 1 else ""
        draft.note(
            f"{ending[0]}{more}: the script goes on if it fails; the run would end and name the "
            "line, unless you append `|| true` to it in setup"
        )
    if setup:
        draft.values["setup"] = setup


def _ends_script(draft: Draft, command: Command) -> bool:
    """Return True if the script ends when the command fails: after `set -e`, or by its first
    line."""
    first = draft.read_line(command.file, 1)
    return command.ends_script or bool(re.match(r"#!.*sh\s+-[a-z]*e", first))


def _has_effect(command: Command) -> bool:
    """Return True for a command that does more than to show or to ask something."""
    name, rest = posixpath.basename(command.texts[0]), command.texts[1:]
    if name == "find":
        return any(re.fullmatch(r"-(delete|exec(dir)?|ok(dir)?|fprint\w*)", word) for word in rest)
    return name not in _SILENT and name[:1] not in ("@", "$") and not is_question(command)


def _may_fail(draft: Draft, command: Command) -> bool:
    """Return True for a command of which the script survives a failure, as by `|| true`: a line of
    `setup` that fails ends the run."""
    name, file = (posixpath.basename(text) for text in (*command.texts, "")[:2])
    if name == "deactivate" or file in _RC:
        return True  # there may be nothing to leave, and no terminal
    if name == "ulimit" and not _ends_script(draft, command):
        return True  # nodes differ in their hard limits
    after = draft.read_line(command.file, command.line).partition("||")[2]
    return bool(after) and not re.search(r"\b(exit|return|kill)\b", after)


def _is_preparing(command: Command, launch: Launch) -> bool:
    """Return True for a command that does the same in `setup`, which runs in the program's
    folder."""
    name, rest = posixpath.basename(command.texts[0]), command.texts[1:]
    if name == "mkdir":
        is_same = all(word.startswith(("-", "/")) for word in rest)
        return is_same or command.cwd == launch.command.cwd
    if name == "unset" and (rest[0].startswith("SLURM") or rest[0] in list_own_env()):
        return False
    return name in _PREPARING and not is_question(command)


def _list_written(draft: Draft, launch: Launch) -> None:
    """Note the files that the script writes, except scripts that it runs and its list of hosts."""
    hosts = posixpath.basename(find_host_file(launch))
    recordings = draft.found.recordings
    launches = [launch for one in recordings for launch in one.launches]
    tokens = [f"@OUT:{posixpath.basename(launch.texts[0])}@" for launch in launches]
    for one in recordings:
        for path, where in one.wrote.items():
            name = posixpath.basename(path)
            if any(name == other.file for other in recordings) or name == hosts:
                continue
            file, _, line = where.rpartition(":")
            is_output = any(token in one.written.get(name, "") for token in tokens)
            is_output = is_output or any(where == launch.where for launch in launches)
            is_redirected = re.match(r"\s*exec\s+\d?&?>", draft.read_line(file, int(line)))
            why = "write it beforehand, or in setup"
            if is_output or is_redirected:
                why = "all lines are in the run folder"
            elif file == launch.command.file and int(line) > launch.command.line:
                why = "it follows the program, and a run ends with its program"
            draft.note(f"{where}: {redact_string(path)} is not written: {why}")


def _list_drawn(draft: Draft) -> None:
    """Note the commands, such as `date`, whose output of this reading is in a value of the conf."""
    values = "\n".join(_list_texts([draft.values, draft.groups]))
    for recording in draft.found.recordings:
        for text, where in recording.once.items():
            parts = {draft.shorten(part) for one in draft.found.recordings
                     for part in one.drawn.get(text, ())}  # fmt: skip
            if any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", values) for part in parts if part):
                draft.note(f"{where}: {text} was evaluated once, and the conf has this value")


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _list_texts(one)
    else:
        yield str(value)


def _spell_setup(draft: Draft, command: Command) -> str | None:
    """Return a line for `setup` that does the same as a command of the script; empty for a command
    of which only the output is used, and None if one of its words is not known."""
    texts = [word.text for word in command.words]
    if posixpath.basename(texts[0]) in _SETUP:
        if "hook" in texts[1:]:  # of conda, for `eval`
            return f'eval "$({shlex.join(texts)})"'
        if texts[1:2] == ["info"]:
            return ""
    words = [_spell_word(draft, word, command.where) for word in command.words]
    if None in words:
        return None
    if texts[0] == "mkdir" and not any(re.fullmatch(r"-\w*p\w*|--parents", t) for t in texts):
        words.insert(1, "-p")  # the script goes on where the folder exists; setup would end the run
    return " ".join(map(str, words))


def _spell_word(draft: Draft, word: Word, where: str) -> str | None:
    """Return a word in the syntax of the shell; None if its value is not known.

    The output of a command in the same line is spelled as that command: `$(conda info --base)`.
    """
    if not word.is_open:
        home = draft.shorten(word.text)
        return "~/" + shlex.quote(home[2:]) if home[:2] == "~/" else shlex.quote(word.text)
    for asked in draft.found.setup:
        texts = [one.text for one in asked.words]
        name = f"$({posixpath.basename(texts[0])})"
        if asked.where == where and word.unknown == {name}:
            return '"' + word.text.replace(name, f"$({shlex.join(texts)})") + '"'
    return word.shell or None


def is_question(command: Command) -> bool:
    """Return True for a command of which only the output is used, such as `$(python -c ...)`."""
    texts = command.texts
    name, rest = posixpath.basename(texts[0]), texts[1:]
    asks = {
        "scontrol": rest[:1] == ["show"],
        "trap": not rest or rest[0] in ("-", "-p", "-l"),
        "ulimit": all(word.startswith("-") for word in rest),
        "umask": all(word.startswith("-") for word in rest),
    }
    if name in asks:
        return asks[name]
    is_python = name in ("python", "python3") and command.is_asked
    return (
        is_python
        or name in ("srun", "enroot")
        or (name.endswith("-smi") and not _SETS_GPU.match(" ".join(rest)))
        or rest[-1:] == ["--version"]
    )


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 80 else text[:77] + "..."


def _build_name(draft: Draft, launch: Launch) -> None:
    """Name the run after its script, unless `--job-name` was given."""
    if "name" in draft.values:
        return
    is_file = launch.kind != "command" and not launch.script.is_open
    stem = posixpath.basename(launch.script.text if is_file else launch.command.file)
    stem = stem.partition(".")[0] if not launch.is_module else stem
    if launch.is_module:
        stem = stem.rpartition(".")[2]
    name = to_name(stem) or to_name(stem.lstrip("_0123456789"))
    draft.values["name"] = name or "my-run"


def _build_env(draft: Draft, launch: Launch) -> None:
    """Set the variables that the script exports for every rank; secrets only by name."""
    env: dict[str, str] = {}
    pass_env: list[str] = []
    own = {name: (word, _locate(draft, name, word, launch))
           for name, word in launch.command.env.items()}  # fmt: skip
    for name, (word, where) in {**own, **draft.added}.items():
        value, said = _find_env_value(draft, word), spell(name, word.text)
        if name in list_variables() and not any(one.get("devices") for one in draft.groups):
            draft.note(
                f"{where}: {said} is left out: each rank sees all GPUs of the job on its node, and "
                "LOCAL_RANK says which is its own"
            )
            continue
        if name in list_own_env() or name in NO_KEY:
            key = f"no key of the conf, as {NO_KEY.get(name, 'vjob sets it for each rank')}"
            if name in list_variables():
                key = "cluster.nodes[].devices"
            if name != "MASTER_PORT" or word.is_open:  # else _build_port tells
                draft.record(f"{where}: {said}", key)
            continue
        if name.startswith(("VJOB_", "BASH_FUNC_")):
            continue
        if name in ("PATH", *SEARCH_PATHS) and (value is not None or word.shell):
            text = f'"{word.text}"' if value is not None else word.shell
            _export_in_setup(draft, where, f"{name}={text}")
            continue
        if is_secret(name):
            pass_env.append(name)
            draft.note(f"{where}: {name} looks secret: set it in your shell; pass_env passes it on")
        elif value is None and word.shell and not word.unknown & NODE_REFERENCES.keys():
            _export_in_setup(draft, where, f"{name}={word.shell}")
        elif value is None:
            draft.note(f"{where}: {said} is left out: {_explain_open(word)}")
        elif problem := find_text_problem(value):
            draft.note(f"{where}: {said} is left out: {problem}")
        else:
            env[name] = value
            draft.record(f"{where}: {said}", f"env.{name}")
    for name, one in draft.found.variables.items():
        if name.startswith("SLURM_"):
            said = redact_string(f"{name}={one.value}")
            draft.note(f"{place(one)}: {said} is left out: vjob gives srun its options")
    if env:
        draft.values["env"] = env
    if pass_env:
        draft.values["pass_env"] = pass_env


def _build_interpreter(draft: Draft, launch: Launch) -> None:
    """Set `program.python` to the script's, if a path, a version or a line of `setup` chooses it:
    ranks would run under the interpreter that runs vjob."""
    word, program = launch.interpreter, draft.values["program"]
    if word is None or "command" in program:
        return
    where = launch.command.where
    if word.is_open:
        draft.note(f"{where}: its interpreter {word.text} is not known; set program.python")
    elif "/" in word.text:
        path = posixpath.normpath(posixpath.join(launch.command.cwd, word.text))
        program["python"] = draft.shorten(path)
        draft.record(f"{where}: {word.text}", "program.python")
    elif "container.image" in draft.values:
        return  # the image has its own
    elif re.search(r"\d\.\d", word.text) or any(map(_CHOOSES.match, draft.values.get("setup", []))):
        program["python"] = word.text
        draft.record(f"{where}: {word.text}, as found on PATH after setup", "program.python")
    else:
        draft.record(
            f"{where}: {word.text}", "the interpreter that runs vjob, as no line chooses one"
        )


def _locate(draft: Draft, name: str, word: Word, launch: Launch) -> str:
    """Return the place where a variable got its value; that of the launch if it is not known."""
    one = draft.found.variables.get(name)
    is_same = one is not None and (
        A_COUNT in word.unknown or make_word(one.value, one.value).text == word.text
    )
    return place(one) if one is not None and is_same else launch.command.where


def _find_env_value(draft: Draft, word: Word) -> str | None:
    """The value of a variable in `env`, with references to the address and port of rank 0; None if
    it has other unknown parts."""
    if word.unknown - NODE_REFERENCES.keys() or PLACEHOLDER.fullmatch(word.text):
        return None
    pattern = "|".join(map(re.escape, word.unknown)) or "(?!)"
    pieces = re.split(f"({pattern})", word.text)
    return "".join(
        NODE_REFERENCES[piece] if piece in word.unknown else draft.expand(piece) for piece in pieces
    )


def _explain_open(word: Word) -> str:
    """Explain why no value is known for a variable."""
    if not word.shell:
        return "its value is not known"
    names = sorted(word.unknown - NODE_REFERENCES.keys())
    return (
        f"{', '.join(names)} is known only in setup, and the address and port of rank 0 only in "
        "env: combine them in the program"
    )


def _export_in_setup(draft: Draft, where: str, assignment: str) -> None:
    line = f"export {assignment}"
    draft.values.setdefault("setup", []).append(line)
    draft.record(f"{where}: {line}", "setup")


def _list_tested(draft: Draft, launch: Launch) -> None:
    """Note files that the script tests and that do not exist here."""
    is_there = launch.command.only == ALL_THERE
    taken = ", but is assumed to exist" if is_there else "; the script goes on without this file"
    for recording in draft.found.recordings:
        for text, where in recording.tested.items():
            draft.note(f"{where}: {text} is not here{taken}")
