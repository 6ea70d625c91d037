"""Shell scripts as conf.yaml: `_00_conf.sh` and its job scripts, lines of run_varuna, torch's
launchers, deepspeed and Megatron-LM.

Nothing is executed, and nothing is dropped silently: each assignment, option and line is a key of
the conf, or stands above it with the reason. A key that does not fit the rest, such as a pipeline
that the ranks cannot hold, is left out with the check's own words, so that the conf can be
submitted as it is.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from varuna_core.plugins import list_plugins, load_plugin
from vjob.jobs.conf.loading.check import list_own_env
from vjob.jobs.conf.loading.check_cluster import EPHEMERAL
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.redact import is_secret, redact_string
from vjob.jobs.conf.slurm_words import to_name, to_number
from vjob.jobs.errors import InputError
from vjob.shelf.importers.container import build_container
from vjob.shelf.importers.draft import Draft, render_page, spell
from vjob.shelf.importers.fit import find_absent, leave_out_misfits
from vjob.shelf.importers.launchers import LINE, Launch, Lines, sort_commands
from vjob.shelf.importers.nodes import COUNTS, RANKS, build_nodes
from vjob.shelf.importers.program import build_program
from vjob.shelf.importers.shell import ShellConf, parse_shell_conf
from vjob.shelf.importers.values import (
    to_flag,
    to_partition,
    to_zero,
)

GROUP = "vjob.importers"
ACCEPTED = (
    "a shell conf (_00_conf.sh), a job script with #SBATCH lines, a script with a line of "
    "run_varuna, torch.distributed.launch, torchrun, deepspeed or python, or a folder of these"
)
SUFFIXES = (".sh", ".sbatch", ".slurm", ".bash")
OTHER_SUFFIXES = (".py", ".ipynb", ".json", ".yaml", ".yml", ".toml", ".c", ".cpp", ".cu")
MAX_FILE = 1_000_000
SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PYTHONPATH", "CPATH")


def translate_shell_conf(
    text: str, *, name: str = "", environ: Mapping[str, str] | None = None
) -> tuple[str, list[str]]:
    """Text of a conf.yaml, and notes on what was left out or should be looked at."""
    return translate_scripts({name: text}, environ=environ)


def translate_scripts(
    texts: Mapping[str, str],
    *,
    files: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    title: str = "an old shell conf",
    require_known: bool = False,
    base: Path | None = None,
) -> tuple[str, list[str]]:
    """The scripts as one conf; `files` are others of their folder, read where they are named."""
    files = {**(files or {}), **texts}
    found, lines = _read_scripts(texts, files, environ or {})
    if require_known and not is_known(found, lines):
        raise InputError(f"{title} is not what --from takes: {ACCEPTED}")
    launch, *others = _choose_launch(lines, title)
    draft = Draft(found, lines, files, environ or {})
    _note_others(draft, launch, others)
    _build(draft, launch)
    leave_out_misfits(draft)
    notes = [*draft.notes, *find_absent(draft, base)]
    return render_page(draft, title, notes), notes


def _read_scripts(
    texts: Mapping[str, str], files: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[ShellConf, Lines]:
    found = ShellConf()
    for name in _order_scripts(texts):
        if name not in found.files:
            parse_shell_conf(texts[name], files, name=name, environ=environ, found=found)
    lines = sort_commands(found.commands)
    if not lines.launches:
        _read_variables(found, environ)
        lines = sort_commands(found.commands)
    return found, lines


def import_source(path: Path, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """A conf.yaml of shell scripts, or of what a plug-in of GROUP knows; InputError else."""
    try:
        return translate_source(path, environ)
    except InputError:
        for name in list_plugins(GROUP):
            take = load_plugin(GROUP, name)
            text = None if take is None else take(path)
            if text is not None:
                return str(text), []
        raise


def translate_source(path: Path, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """A file or a folder of scripts as conf.yaml; InputError where it is neither."""
    texts, files, known = _find_scripts(path, environ)
    title, base = path.name or str(path), Path(known["PWD"])
    return translate_scripts(
        texts, files=files, environ=known, title=title, require_known=True, base=base
    )


def _find_scripts(
    path: Path, environ: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Texts of the scripts to read, of all files beside them, and the variables that are set."""
    folder = path if path.is_dir() else path.parent
    files = _read_folder(folder)
    texts = {name: text for name, text in files.items() if name.endswith(SUFFIXES)}
    if not path.is_dir():
        if path.suffix in OTHER_SUFFIXES or "\0" in (text := _read_text(path)):
            raise InputError(f"{path} is not what --from takes: {ACCEPTED}")
        # A file of settings alone is read with the scripts beside it that read it.
        if any(path.name in other for name, other in texts.items() if name != path.name):
            lines = sort_commands(parse_shell_conf(text, files, name=path.name).commands)
            texts = {path.name: text} if lines.launches else texts
        else:
            texts = {path.name: text}
    elif not texts:
        raise InputError(f"{path} has no shell scripts; --from takes {ACCEPTED}")
    known = {key: environ[key] for key in ("HOME", "USER", "LOGNAME") if key in environ}
    known |= {"PWD": str(folder.absolute()), "UID": str(os.getuid())}
    return texts, files, known


def _read_text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE:
        raise InputError(f"{path} is over 1 MB, which no shell script is; --from takes {ACCEPTED}")
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _read_folder(folder: Path) -> dict[str, str]:
    """Scripts, hostfiles and machine lists by name."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        is_list = re.fullmatch(r"(\w*hosts?(file)?|\w*machines?)(\.\w+)?|\w+\.env", path.name)
        is_taken = (is_list or path.name.endswith(SUFFIXES)) and path.is_file()
        if is_taken and path.stat().st_size <= MAX_FILE:
            found[path.name] = _read_text(path)
    return found


def _order_scripts(texts: Mapping[str, str]) -> list[str]:
    """Scripts that no other one names first: they start the others."""

    def is_named(name: str) -> bool:
        return bool(name) and any(name in text for other, text in texts.items() if other != name)

    return sorted(texts, key=lambda name: (is_named(name) and "conf" not in name, name))


def _read_variables(found: ShellConf, environ: Mapping[str, str]) -> None:
    """Add the command lines that stand in variables, which no `eval` here runs."""
    for assignment in list(found.variables.values()):
        text = assignment.raw.strip("\"'")
        if LINE.match(text):
            inner = ShellConf(variables=dict(found.variables))
            parse_shell_conf(text, name=assignment.file, environ=environ, found=inner)
            found.decided.setdefault(assignment.name, "what is started")
            found.commands += [replace(entry, line=assignment.line) for entry in inner.commands]


def is_known(found: ShellConf, lines: Lines) -> bool:
    """True where the text is one of ACCEPTED."""
    names = {*COUNTS, *RANKS, "PIPELINE_MP_SIZE", "GLOBAL_BATCH_SIZE", "HOMOGENEOUS_CLUSTER",
             "TENSOR_MP_SIZE", "MICRO_BATCH_SIZE", "PARTITION", "CONTAINER_IMAGE_PATH"}  # fmt: skip
    wrapping = lines.wrapping
    wraps = wrapping.srun or wrapping.enroot or wrapping.docker or wrapping.images
    return bool(found.blocks or lines.launches or wraps or names & found.variables.keys())


def _build(draft: Draft, launch: Launch) -> None:
    """All sections, in order: a later one finds the keys that earlier ones set."""
    build_container(draft)
    _build_profile(draft)
    draft.used |= launch.command.uses
    build_program(draft, launch)
    _build_layout(draft)
    build_nodes(draft, launch)
    _build_port(draft)
    _build_setup(draft)
    _build_name(draft, launch)
    _build_env(draft)
    _list_left(draft)


def _choose_launch(lines: Lines, title: str) -> list[Launch]:
    """The launch that becomes the program, then the others."""
    if not lines.launches:
        raise InputError(
            f"{title} starts no program; give --from the script that does, or its folder"
        )
    order = ("deepspeed", "varuna", "torch", "python")
    return sorted(lines.launches, key=lambda launch: order.index(launch.kind))


def _note_others(draft: Draft, launch: Launch, others: Sequence[Launch]) -> None:
    for other in others:
        if other.command.words == launch.command.words:
            continue
        draft.used |= other.command.uses
        draft.note(
            f"line {other.command.line}: a conf starts one program; this one is left out: "
            f"{redact_string(other.command.raw)}"
        )


def _build_profile(draft: Draft) -> None:
    for name, key in (("PROFILE", "timeline"), ("NSYS", "nsys"), ("NCU", "ncu")):
        if not (draft.lines.launches and name in draft.used):  # else its branch says it all
            draft.take_into(name, f"profile.{key}", to_flag)
    for name, pairs, command in draft.lines.wrapping.profilers:
        draft.used |= command.uses
        said = f"line {command.line}: {name}"
        draft.put(f"profile.{name}", True, said)
        options: list[str] = draft.values.setdefault("profile.options", [])
        for option, word in pairs:
            dashes = "-" if len(option) == 1 else "--"
            joined = f"{dashes}{option}" + (f"={word.text}" if word.text and dashes == "--" else "")
            if option in ("o", "output", "f", "force-overwrite"):
                draft.note(
                    f"{said} {joined} {word.text} is left out: its file lies in the run folder"
                )
            elif word.is_open:
                draft.note(f"{said} {joined} is left out: its value is not known")
            else:
                options.append(joined)
                options += [word.text] if word.text and dashes == "-" else []
                draft.record(f"{said} {joined} {word.text}", "profile.options")
        if not options:
            draft.values.pop("profile.options", None)


def _build_layout(draft: Draft) -> None:
    for name, key in (
        ("GLOBAL_BATCH_SIZE", "train.global_batch_size"),
        ("MICRO_BATCH_SIZE", "train.micro_batch_size"),
        ("PIPELINE_MP_SIZE", "parallel.pipeline"),
        ("DP_SIZE", "parallel.data"),
        ("TENSOR_MP_SIZE", "parallel.tensor"),
    ):
        if name not in draft.used:
            draft.take_into(name, key, to_number)
    if "ZERO" not in draft.used:
        draft.take_into("ZERO", "parallel.zero", to_zero)
    if "PARTITION" not in draft.used:
        draft.take_into("PARTITION", "parallel.partition", to_partition)


def _build_port(draft: Draft) -> None:
    """A port that the command line or MASTER_PORT names, if one may be held."""
    said = ""
    port: int | None = None
    for launch in draft.lines.launches[:1]:
        word = launch.options.get("master_port")
        if word is not None:
            said = f"--master_port {word.text}"
            port = to_number(word.text)
            if port is None:
                draft.note(f"{said} is not known; port: auto picks a free one")
    if port is None:
        assignment = draft.left.get("MASTER_PORT")
        port = draft.take_number("MASTER_PORT", "cluster.port")
        said = spell(assignment) if assignment is not None else ""
    if port is None:
        return
    low, high = EPHEMERAL
    if 1024 <= port <= 65535 and not low <= port <= high:
        draft.put("cluster.port", port, said)
        return
    draft.note(
        f"{said} is not used: a port is 1024 to 65535, and outgoing connections may "
        f"take one of {low} to {high}; port: auto picks a free one"
    )
    draft.comments.pop("cluster.port", None)
    draft.taken = [line for line in draft.taken if line != f"{said} -> cluster.port"]


def _build_setup(draft: Draft) -> None:
    setup = [command.raw for command in draft.lines.setup]
    if setup:
        draft.values["setup"] = list(dict.fromkeys(setup))
        for command in draft.lines.setup:
            draft.used |= command.uses
            draft.record(f"line {command.line}: {command.raw}", "setup")


def _build_name(draft: Draft, launch: Launch) -> None:
    """The run's name, where `--job-name` gave none: the script's."""
    if "name" in draft.values:
        return
    script = "" if launch.script.is_open else launch.script.text
    stem = posixpath.basename(script).removesuffix(".py")
    name = to_name(stem) or to_name(stem.lstrip("_0123456789"))
    draft.values["name"] = name or "my-run"


def _build_env(draft: Draft) -> None:
    """Exported variables that we do not know go to every rank, secrets by name only."""
    env: dict[str, str] = {}
    pass_env: list[str] = []
    for launch in draft.lines.launches[:1]:
        for assignment in launch.command.env:
            draft.left.setdefault(assignment.name, assignment)
    for name, assignment in list(draft.left.items()):
        value = assignment.value
        is_ours = name in list_own_env() or name.startswith("VJOB_")
        is_network = name.startswith(("NCCL_", "GLOO_"))
        if is_ours or not (assignment.exported or is_network):
            continue
        if value is None and name in SEARCH_PATHS and "$(" not in assignment.raw:
            line = f"export {name}={assignment.raw}"
            draft.values.setdefault("setup", []).append(line)
            draft.record(f"line {assignment.line}: {line}", "setup")
            del draft.left[name]
            continue
        if value is None or find_text_problem(value):
            continue
        del draft.left[name]
        if is_secret(name):
            pass_env.append(name)
            draft.note(
                f"line {assignment.line}: {name} looks secret: set it in your shell; pass_env "
                "hands it on"
            )
        else:
            env[name] = draft.expand(value)
            draft.record(f"line {assignment.line}: {spell(assignment)}", f"env.{name}")
    if env:
        draft.values["env"] = env
    if pass_env:
        draft.values["pass_env"] = pass_env


def _list_left(draft: Draft) -> None:
    """Variables that no key took: those of the lines above, and those that have none."""
    for assignment in draft.left.values():
        if assignment.name in draft.used:
            decided = draft.found.decided.get(assignment.name)
            draft.record(
                f"line {assignment.line}: {spell(assignment)}",
                f"decides {decided}" if decided else "filled into the lines that use it",
            )
        else:
            draft.note(f"line {assignment.line}: {spell(assignment)} has no counterpart; left out")
    for assignment in draft.found.overwritten:
        draft.note(
            f"line {assignment.line}: {spell(assignment)} is not used: a later line sets "
            f"{assignment.name} again"
        )
