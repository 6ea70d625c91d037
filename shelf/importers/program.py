"""Build the section `program` and the keys that its arguments set, for any kind of script.

A script's words are passed on unchanged in `program.args`. If a key of the conf has the same text
as a value of Megatron-LM's, the key is set and the value becomes a reference to the key; for
DeepSpeed both are set. Launcher options become keys, or are ignored with a note that says why.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from varuna_core.records.secrets import is_secret_name
from vjob.jobs.conf.references import spell_value
from vjob.jobs.conf.slurm_words import to_number
from vjob.jobs.programs.deepspeed import CONFIG_WORD
from vjob.jobs.programs.launchers import find_launcher
from vjob.shelf.importers.bash.recording import Word, make_word
from vjob.shelf.importers.draft import Draft
from vjob.shelf.importers.launchers import Launch, group_arguments, split_groups
from vjob.shelf.importers.megatron_options import DEEPSPEED_KEYS, KEYS, LAYOUT, MODEL
from vjob.shelf.importers.values import to_whole

LAUNCHER_REASONS: Mapping[str, str] = {
    "node_rank": "nodes are counted by group",
    "master_addr": "rank 0 is on the first node of the first group",
    "manager_ip": "the manager is on the first node of the first group",
    "machine_list": "Slurm chooses the nodes; without Slurm use cluster.machine_list",
    "no_morphing": "a run keeps its nodes without morph.enabled",
    "rdzv_backend": "nodes find each other through the run folder",
    "rdzv_endpoint": "nodes find each other through the run folder",
    "rdzv_id": "nodes find each other through the run folder",
    "rdzv_conf": "nodes find each other through the run folder",
    "standalone": "nodes find each other through the run folder",
    "use_env": "ranks always find LOCAL_RANK in their environment",
    "hostfile": "Slurm gives the nodes, by number, not by name; their slots are gpus",
    "include": "Slurm gives the nodes, by number, not by name; their GPUs are devices",
    "exclude": "Slurm gives the nodes, by number, not by name; the GPUs left are devices",
    **dict.fromkeys(
        ("launcher", "launcher_args", "no_ssh", "no_ssh_check", "ssh_port", "force_multi"),
        "vjob starts the ranks itself",
    ),
    **dict.fromkeys(
        ("bind_cores_to_rank", "bind_core_list"),
        "a rank may use all processors of its node",
    ),
    "no_local_rank": "ranks always find LOCAL_RANK in their environment",
    "enable_each_rank_log": "lines are stored separately for each node and rank",
    "elastic_training": "a run continues with fewer nodes with morph.enabled",
    "min_elastic_nodes": "set morph.min_nodes",
    "max_elastic_nodes": "the limit is the number of nodes in cluster.nodes",
    "venv_script": "copy the lines of that script to setup",
    "quiet": "the option concerns only the launcher's own output",
    "log_level": "the option concerns only the launcher's own output",
    "save_pid": "the run folder lists the processes",
    "resume": "to resume a run, submit it again",
    "log_dir": "use log_folder",
}


def build_program(draft: Draft, launch: Launch) -> None:
    where = launch.command.where
    folder = _infer_folder(draft, launch)
    flags = {name for name, _ in group_arguments(launch.args)}
    text = launch.script.text
    script = text if launch.is_module else _place(draft, text, folder)
    if launch.kind == "command" or any(word.is_open for word in (launch.script, *launch.args)):
        kind = "command"
        draft.values["program"] = _build_command(draft, launch)
    elif launch.kind == "deepspeed":
        kind = "deepspeed"
        _build_deepspeed(draft, launch, script)
    else:
        kind = "module" if launch.is_module else "script"
        is_megatron = bool(flags & LAYOUT) and launch.kind in ("torch", "python")
        args = _refer(draft, launch) if is_megatron else _pass_on(draft, launch.args, where)
        draft.values["program"] = {kind: script, "args": args}
    draft.record(f"{where}: {text}", f"program.{kind}")
    if launch.kind == "varuna":
        _build_varuna(draft, launch)
    _list_options(draft, launch)


def _build_command(draft: Draft, launch: Launch) -> dict[str, Any]:
    """Build a command with unchanged words; if only the job knows some, its shell expands them."""
    words = [launch.script, *launch.args]
    if launch.kind in ("torch", "varuna", "python"):
        head = [launch.interpreter or Word("python"), *([Word("-m")] if launch.is_module else [])]
        is_file = launch.script.text.endswith(".py") or launch.is_module
        words = [*(head if is_file else []), *words]
    elif launch.kind == "deepspeed":
        words = list(launch.command.words)
    program: dict[str, Any] = {}
    if any(word.is_open for word in words):
        line = " ".join(word.shell or shlex.quote(word.text) for word in words)
        program["command"] = ["bash", "-c", draft.expand(f"exec {line}")]
        draft.note(
            f"{launch.command.where}: the job's shell expands "
            f"{', '.join(sorted({name for word in words for name in word.unknown}))} at run time"
        )
        if find_launcher([word.text for word in words]):
            program["launch"] = "node"
    else:
        program["command"] = _pass_on(draft, words, launch.command.where)
    return program


def _place(draft: Draft, path: str, folder: str) -> str:
    path = draft.shorten(path)
    if not path or path.startswith(("/", "~")) or not folder or folder == ".":
        return path
    return posixpath.join(folder, path)


def _infer_folder(draft: Draft, launch: Launch) -> str:
    """Return the folder in which the script runs, from --code_dir or the last `cd` before it."""
    code = launch.options.get("code_dir")
    where = f"{launch.command.where}: --code_dir"
    if code is not None and not code.is_open and code.text:
        folder = draft.shorten(code.text)
        if folder != ".":
            draft.put("workdir", folder, f"{where} {code.text}")
        return folder
    if code is not None:
        draft.note(f"{where} {code.text} is not known; the conf's folder is used")
    here, folder = draft.found.folder, launch.command.cwd
    if not folder or folder == here:
        return ""
    word = make_word(folder, folder)
    if word.is_open:
        draft.note(
            f"{launch.command.where}: the script starts it in {word.text}, which only the job "
            "knows; the conf starts it in the conf's folder",
            is_first=True,
        )
        return ""
    folder = posixpath.relpath(folder, here) if folder.startswith(f"{here}/") else folder
    folder = draft.shorten(folder)
    draft.put("workdir", folder, f"{launch.command.where}: cd")
    return folder


def _pass_on(draft: Draft, args: Sequence[Word], where: str) -> list[str]:
    """Return the words of the arguments as they are, without options whose value looks secret,
    which are noted."""
    kept: list[str] = []
    for words in split_groups(args):
        name = words[0].text.partition("=")[0]
        has_value = len(words) > 1 or "=" in words[0].text
        value = words[0].text.partition("=")[2] or " ".join(word.text for word in words[1:])
        if name.startswith("-") and has_value and _is_secret(name, value):
            draft.note(
                f"{where}: {name} looks secret, so program.args does not have it: pass it "
                "by pass_env, or add it to program.args"
            )
        else:
            kept += [draft.expand(word.text) for word in words]
    return kept


def _is_secret(name: str, value: str) -> bool:
    """Tell if an option gets a secret: `--max-tokens 1024` and `--key column` do not."""
    is_plain = re.fullmatch(r"[\d.,eE+-]*|True|False|None|[a-z_]+", value)
    is_always = re.search(r"(?i)passw|secret|api", name)
    return is_secret_name(name) and (not is_plain or bool(is_always))


def _refer(draft: Draft, launch: Launch) -> list[str]:
    """Return Megatron-LM's arguments, with a reference in place of each value that a key can hold.

    A value stays as it is if its key would print another text, or if the key is already set.
    """
    where = launch.command.where
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
    where = launch.command.where
    program: dict[str, Any] = {"deepspeed": script}
    kept: list[Word] = []
    for name, values in group_arguments(launch.args):
        text = " ".join(word.text for word in values)
        said = f"{where}: {name} {text}".rstrip()
        is_open = any(word.is_open for word in values)
        if name == "--deepspeed_config" and text and not is_open:
            program["config"] = draft.shorten(text.removeprefix("./"))
            draft.record(said, "program.config")
            kept += [Word(name), Word(CONFIG_WORD)]
            continue
        kept += [word for word in (Word(name),) if name]
        kept += values
        key, convert = DEEPSPEED_KEYS.get(name, ("", to_whole))
        value = convert(text) if key else None
        if value is not None and not (name == "--clip-grad" and not value):
            draft.put(key, value, said)
        draft.record(said, "program.args")
    program["args"] = _pass_on(draft, kept, where)
    draft.values["program"] = program


def _build_varuna(draft: Draft, launch: Launch) -> None:
    where = launch.command.where
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
            draft.note(f"{where}: --{name} {word.text} is not known; set {key}")
    own = "--rank, --local_rank, --stage_to_rank_map, --chunk_size and --batch-size"
    if "train.global_batch_size" in draft.values:
        draft.values["program"]["arguments"] = "varuna"
        draft.record(f"{where}: run_varuna, which passes {own} to the script", "program.arguments")
    else:
        draft.note(
            f"{where}: run_varuna passed {own} to the script; to do the same, set "
            "train.global_batch_size and program.arguments: varuna"
        )
    if "no_morphing" not in launch.options:
        draft.note(
            f"{where}: run_varuna continued with other machines; set morph: {{enabled: true}} "
            "for that (docs/morphing.md)"
        )
    env_file = launch.options.get("env_file")
    if env_file is not None and posixpath.basename(env_file.text) in draft.files:
        for number, line in enumerate(
            draft.files[posixpath.basename(env_file.text)].split("\n"), 1
        ):
            key, equals, text = line.strip().removeprefix("export ").partition("=")
            if equals and key.isidentifier():
                draft.add(key, text, f"{posixpath.basename(env_file.text)}:{number}")
        draft.record(f"{where}: --env_file {env_file.text}", "env")
    elif env_file is not None:
        draft.note(f"{where}: --env_file {env_file.text} is left out: copy its lines to env")


def _list_options(draft: Draft, launch: Launch) -> None:
    """Note for each launcher option why it has no key; max_restarts sets cluster.restarts."""
    where = launch.command.where
    done = {"nnodes", "nproc_per_node", "num_nodes", "num_gpus", "gpus_per_node", "nstages",
            "chunk_size", "batch_size", "code_dir", "env_file", "master_port"}  # fmt: skip
    for name, word in launch.options.items():
        said = f"{where}: --{name} {word.text}".rstrip()
        if name == "max_restarts" and to_number(word.text):
            draft.put("cluster.restarts", to_number(word.text), said)
        elif name not in done:
            reason = LAUNCHER_REASONS.get(name, "vjob has no counterpart")
            draft.note(f"{said} is left out: {reason}")
