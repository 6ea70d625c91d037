"""`program` and the keys that its arguments set: of Megatron-LM, DeepSpeed, Varuna and any script.

A script's words are passed on in `program.args` as they are. Where a key of the conf spells a word
of Megatron-LM's, the key has the value and the word is a reference to it; DeepSpeed's script gets
both. Options of the launcher are keys, or are left out with the reason.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vjob.jobs.conf.redact import is_secret_name, redact_string
from vjob.jobs.conf.references import spell_value
from vjob.jobs.conf.slurm_words import to_number
from vjob.shelf.importers.draft import Draft
from vjob.shelf.importers.launchers import Launch, group_arguments, split_groups
from vjob.shelf.importers.megatron_options import DEEPSPEED_KEYS, KEYS, LAYOUT, MODEL
from vjob.shelf.importers.shell import Word, parse_shell_conf
from vjob.shelf.importers.values import to_whole

LAUNCHER_REASONS: Mapping[str, str] = {
    "node_rank": "nodes are counted by group",
    "master_addr": "it is the first node of the first group",
    "manager_ip": "it is the first node of the first group",
    "machine_list": "Slurm gives the nodes, by number; without Slurm it is cluster.machine_list",
    "no_morphing": "a run keeps its nodes without morph.enabled",
    "rdzv_backend": "nodes find each other by the run folder",
    "rdzv_endpoint": "nodes find each other by the run folder",
    "rdzv_id": "nodes find each other by the run folder",
    "rdzv_conf": "nodes find each other by the run folder",
    "standalone": "nodes find each other by the run folder",
    "use_env": "ranks find LOCAL_RANK in their environment always",
    "hostfile": "Slurm gives the nodes, by number, not by name; their slots are gpus",
    "include": "Slurm gives the nodes, by number, not by name; their GPUs are devices",
    "launcher": "vjob starts the ranks itself",
    "no_ssh": "vjob starts the ranks itself",
    "resume": "a run that ended is submitted again",
    "log_dir": "use log_folder",
}


def build_program(draft: Draft, launch: Launch) -> None:
    folder = _find_folder(draft, launch)
    script = _place(draft, launch.script.text, folder)
    where = f"line {launch.command.line}"
    if launch.script.is_open or not script or not script.isprintable():
        draft.note(f"{where}: the script {launch.script.text} is not known; train.py stands in")
        script = "train.py"
    flags = {name for name, _ in group_arguments(launch.args)}
    is_megatron = bool(flags & LAYOUT) and launch.kind in ("torch", "python")
    if launch.kind == "deepspeed":
        _build_deepspeed(draft, launch, script)
    elif is_megatron:
        draft.values["program"] = {"script": script, "args": _refer(draft, launch)}
    else:
        draft.values["program"] = {"script": script, "args": _pass_on(draft, launch.args, where)}
    kind = "deepspeed" if launch.kind == "deepspeed" else "script"
    draft.record(f"{where}: {launch.script.text}", f"program.{kind}")
    if launch.kind == "varuna":
        _build_varuna(draft, launch)
    _list_options(draft, launch)


def _place(draft: Draft, path: str, folder: str) -> str:
    path = draft.shorten(path)
    if not path or path.startswith(("/", "~")) or not folder or folder == ".":
        return path
    return posixpath.join(folder, path)


def _find_folder(draft: Draft, launch: Launch) -> str:
    """Where the script runs, by --code_dir or the last `cd` before it."""
    code = launch.options.get("code_dir")
    where = f"line {launch.command.line}: --code_dir"
    if code is not None and not code.is_open and code.text:
        folder = draft.shorten(code.text)
        if folder != ".":
            draft.put("workdir", folder, f"{where} {code.text}")
        return folder
    if code is not None:
        draft.note(f"{where} {code.text} is not known; the conf's folder stands in")
    folder = ""
    for command in draft.lines.folders:
        word = command.words[1]
        if command.line > launch.command.line and command.file == launch.command.file:
            continue
        if word.is_open or command.file != launch.command.file or word.text in (".", "-"):
            draft.note(
                f"line {command.line}: {redact_string(command.raw)} is left out: paths are "
                "relative to the conf's folder"
            )
        else:
            draft.used |= command.uses
            folder = _place(draft, word.text, folder) if folder else draft.shorten(word.text)
            draft.record(f"line {command.line}: {command.raw}", "workdir")
    if folder:
        draft.values["workdir"] = folder
    return folder


def _pass_on(draft: Draft, args: Sequence[Word], where: str) -> list[str]:
    """Arguments as they are, but for those whose value only a shell knows."""
    kept: list[str] = []
    groups = group_arguments(args)
    for name, values in groups:
        spelled = " ".join([name, *(word.text for word in values)]).strip()
        is_joined = any(word.text.startswith(f"{name}=") for word in args) if name else False
        if any(word.is_open for word in values):
            draft.note(f"{where}: {spelled} is left out of program.args: write its value there")
            continue
        if name and is_secret_name(name) and values:
            draft.note(
                f"{where}: {name} looks secret and is left out of program.args: hand it "
                "on by pass_env, or write it there"
            )
            continue
        if is_joined and len(values) == 1:
            kept.append(f"{name}={draft.expand(values[0].text)}")
        else:
            kept += [word for word in (name,) if word]
            kept += [draft.expand(word.text) for word in values]
    return kept


def _refer(draft: Draft, launch: Launch) -> list[str]:
    """Megatron-LM's arguments, word for word: where a key spells a word, by reference to the key.

    A word that its key would spell otherwise stays as it is, and so does an option's second one.
    """
    where = f"line {launch.command.line}"
    known = {name for name, values in group_arguments(launch.args) if len(values) == 1}
    has_model = {KEYS[name][0] for name in known & KEYS.keys()} >= MODEL
    args: list[str] = []
    for words in split_groups(launch.args):
        [(name, values)] = group_arguments(words)
        said = f"{where}: {name} {' '.join(word.text for word in values)}".strip()
        key, convert = KEYS.get(name, ("", to_whole))
        text = values[0].text if len(values) == 1 and not values[0].is_open else ""
        value = convert(text) if key and text else None
        is_model = not key.startswith("model.") or has_model
        if value is None or not is_model or key in draft.values or spell_value(value) != text:
            args += _pass_on(draft, words, where)
            draft.record(said, "program.args")
        else:
            draft.put(key, value, said)
            args += [f"{name}=${{{key}}}"] if len(words) == 1 else [name, f"${{{key}}}"]
    return args


def _build_deepspeed(draft: Draft, launch: Launch, script: str) -> None:
    where = f"line {launch.command.line}"
    program: dict[str, Any] = {"deepspeed": script}
    kept: list[Word] = []
    for name, values in group_arguments(launch.args):
        text = " ".join(word.text for word in values)
        said = f"{where}: {name} {text}".rstrip()
        is_open = any(word.is_open for word in values)
        if name == "--deepspeed_config" and text and not is_open:
            program["config"] = draft.shorten(text.removeprefix("./"))
            draft.record(said, "program.config")
            continue
        kept += [word for word in (Word(name),) if name]
        kept += values
        if is_open:
            continue  # _pass_on notes it
        key, convert = DEEPSPEED_KEYS.get(name, ("", to_whole))
        value = convert(text) if key else None
        if value is not None and not (name == "--clip-grad" and not value):
            draft.put(key, value, said)
        draft.record(said, "program.args")
    program["args"] = _pass_on(draft, kept, where)
    draft.values["program"] = program


def _build_varuna(draft: Draft, launch: Launch) -> None:
    where = f"line {launch.command.line}"
    names = {
        "nstages": "parallel.pipeline",
        "chunk_size": "train.micro_batch_size",
        "batch_size": "train.global_batch_size",
    }
    for name, key in names.items():
        word = launch.options.get(name)
        value = to_number(word.text) if word is not None else None
        if value is not None and word is not None:
            draft.put(key, value, f"{where}: --{name} {word.text}")
        elif word is not None:
            draft.note(f"{where}: --{name} {word.text} is not known; write {key}")
    own = "--rank, --local_rank, --stage_to_rank_map, --chunk_size and --batch-size"
    if "train.global_batch_size" in draft.values:
        draft.values["program"]["arguments"] = "varuna"
        draft.record(f"{where}: run_varuna, which passes {own} to the script", "program.arguments")
    else:
        draft.note(
            f"{where}: run_varuna passed {own} to the script; with train.global_batch_size, "
            "program.arguments: varuna does the same"
        )
    if "no_morphing" not in launch.options:
        draft.note(
            f"{where}: run_varuna went on with other machines; write morph: {{enabled: true}} for "
            "that (docs/morphing.md)"
        )
    env_file = launch.options.get("env_file")
    if env_file is not None and posixpath.basename(env_file.text) in draft.files:
        inner = parse_shell_conf(draft.files[posixpath.basename(env_file.text)])
        for assignment in inner.variables.values():
            draft.left.setdefault(assignment.name, replace(assignment, exported=True))
        draft.record(f"{where}: --env_file {env_file.text}", "env")
    elif env_file is not None:
        draft.note(f"{where}: --env_file {env_file.text} is left out: write its lines in env")


def _list_options(draft: Draft, launch: Launch) -> None:
    """Options of the launcher, each with its key or the reason that it has none."""
    where = f"line {launch.command.line}"
    done = {"nnodes", "nproc_per_node", "num_nodes", "num_gpus", "gpus_per_node", "nstages",
            "chunk_size", "batch_size", "code_dir", "env_file", "master_port"}  # fmt: skip
    for name, word in launch.options.items():
        said = f"{where}: --{name} {word.text}".rstrip()
        if name == "max_restarts" and to_number(word.text):
            draft.put("cluster.restarts", to_number(word.text), said)
        elif name not in done:
            reason = LAUNCHER_REASONS.get(name, "it has no counterpart")
            draft.note(f"{said} is left out: {reason}")
