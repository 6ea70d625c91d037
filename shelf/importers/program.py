"""`program` and the keys that its arguments set: of Megatron-LM, DeepSpeed, Varuna and any script.

Options of Megatron-LM and DeepSpeed that are keys set `model`, `data`, `train` and `parallel`; all
others are passed on in `program.args`. Options of the launcher are keys, or are left out with the
reason.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vjob.jobs.conf.redact import is_secret_name, redact_string
from vjob.jobs.conf.slurm_words import to_number
from vjob.shelf.importers.draft import Draft
from vjob.shelf.importers.launchers import Launch, group_arguments
from vjob.shelf.importers.megatron_options import DEEPSPEED_KEYS, KEYS, OURS
from vjob.shelf.importers.shell import Word, parse_shell_conf
from vjob.shelf.importers.values import to_any_number, to_decimal

MODELS: Mapping[str, str] = {"small": "gpt2-small", "xl": "gpt2-xl"}
SHAPE: Mapping[str, str] = {
    "layers": "NUM_LAYERS",
    "hidden": "HIDDEN_SIZE",
    "heads": "NUM_ATTN_HEADS",
    "sequence": "SEQ_LENGTH",
}
MEGATRON_BETAS = [0.9, 0.999]
"""Of its Adam where no option says otherwise; since 2.0 vjob passes those of the conf."""
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


def build_old_program(draft: Draft) -> None:
    """A shell conf whose program stands elsewhere: a patched Megatron-LM's."""
    draft.values["program"] = {"megatron": ".", "args": []}
    draft.comments["program"] = "the checkout that the shell conf lay in"
    draft.note(
        "program.megatron is the folder of this file, where the shell conf lay; write the path "
        "of your Megatron-LM checkout if it is another, and in args what _01_run_inter.sh "
        "passed"
    )
    model = draft.take("MODEL", "model", lambda text: MODELS.get(text.lower()))
    if model is not None:
        draft.values["model"] = model
    if model == MODELS["small"]:
        draft.note(
            "MODEL=small is taken for gpt2-small, 12 layers of 768; compare it with NUM_LAYERS "
            "and HIDDEN_SIZE in an old job's output"
        )
    draft.values.update({"train.steps": 50, "train.precision": "fp16", "train.log_every": 10})
    for key, option in (("steps", "train-iters 50"), ("precision", "fp16")):
        draft.comments[f"train.{key}"] = f"_01_run_inter.sh passed --{option}"
    draft.comments["train.log_every"] = "_01_run_inter.sh passed --log-interval 10"
    _require_megatron(draft)


def _require_megatron(draft: Draft) -> None:
    """A model and data, which Megatron-LM cannot start without."""
    for key in ("DATA_PATH", "DATA_PREFIX", "DATASET"):
        if "data.synthetic" not in draft.values and key not in draft.used:
            draft.take_into(key, "data.prefix", draft.to_path)
    for key in ("CHECKPOINT_PATH", "SAVE_PATH"):
        if key not in draft.used:
            draft.take_into(key, "train.checkpoint.folder", draft.to_path)
    if "data.prefix" not in draft.values and not draft.values.get("data.synthetic"):
        named = {word.partition("=")[0] for word in draft.values["program"]["args"]}
        if not named & {"--data-path", "--train-data-path", "--data-args-path"}:
            draft.values["data.synthetic"] = True
            draft.comments["data.synthetic"] = "no data was named; write data.prefix instead"
            draft.note(
                "no data was named (DATA_PATH, --data-path): data.synthetic stands in; write "
                "data.prefix"
            )
    if "model" not in draft.values:
        for key, name in SHAPE.items():
            draft.take_into(name, f"model.{key}", to_number)
    shape = {key for key in draft.values if key.startswith("model.")}
    if "model" in draft.values or {"model.layers", "model.hidden", "model.heads"} <= shape:
        return
    for key in sorted(shape):
        draft.note(
            f"{key} = {draft.values.pop(key)} is left out: a model needs layers, hidden and heads"
        )
        draft.comments.pop(key, None)
    draft.values["model"] = "gpt2-small"
    draft.note("no model was named: gpt2-small stands in; write model")


def build_program(draft: Draft, launch: Launch) -> None:
    folder = _find_folder(draft, launch)
    script = _place(draft, launch.script.text, folder)
    where = f"line {launch.command.line}"
    if launch.script.is_open or not script or not script.isprintable():
        draft.note(f"{where}: the script {launch.script.text} is not known; train.py stands in")
        script = "train.py"
    flags = {name for name, _ in group_arguments(launch.args)}
    is_megatron = {"--num-layers", "--hidden-size"} <= flags and launch.kind in (
        "torch",
        "python",
    )
    if launch.kind == "deepspeed":
        _build_deepspeed(draft, launch, script)
    elif is_megatron:
        args = _take_megatron(draft, launch)
        draft.values["program"] = {"megatron": script, "args": args}
        _require_megatron(draft)
    else:
        draft.values["program"] = {"script": script, "args": _pass_on(draft, launch.args, where)}
    kind = "megatron" if is_megatron else "deepspeed" if launch.kind == "deepspeed" else "script"
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


def _take_megatron(draft: Draft, launch: Launch) -> list[str]:
    """Options that are keys of the conf; the others, as arguments."""
    where = f"line {launch.command.line}"
    kept: list[Word] = []
    groups = group_arguments(launch.args)
    texts = {name: " ".join(word.text for word in values) for name, values in groups}
    opens = {name for name, values in groups if any(word.is_open for word in values)}
    for name, values in groups:
        text, said = texts[name], f"{where}: {name} {texts[name]}".rstrip()
        if name in opens:
            draft.note(f"{said} is left out: its value is not known; write it in the conf")
        elif _take_special(draft, name, text, texts, said):
            continue
        elif name in KEYS and (value := KEYS[name][1](text)) is not None:
            key = KEYS[name][0]
            if key == "data.prefix":
                value = draft.find_copied(value, key, launch.command)
            if key in ("train.checkpoint.folder", "data.prefix"):
                value = draft.shorten(value)
            draft.put(key, value, said)
        else:
            kept += [word for word in (Word(name),) if name]
            kept += values
            draft.record(said, "program.args")
    if "--model-parallel-size" not in texts and "train.optimizer.betas" not in draft.values:
        draft.values["train.optimizer.betas"] = MEGATRON_BETAS
        draft.comments["train.optimizer"] = "betas: Megatron-LM's own"
    if "--batch-size" in texts and "train.global_batch_size" not in draft.values:
        draft.record("--batch-size, of a replica", "train.micro_batch_size; no global one")
    if draft.values.get("train.evaluate.steps") == 0:
        draft.values["train.evaluate.every"] = 0
        del draft.values["train.evaluate.steps"]
    return _pass_on(draft, kept, where)


def _take_special(draft: Draft, name: str, text: str, texts: Mapping[str, str], said: str) -> bool:
    """Options whose key depends on another one."""
    if OURS.get(name, ("", ""))[0] == text and name in OURS:
        draft.note(f"{said} is left out: {OURS[name][1]}")
    elif name == "--load" and text == texts.get("--save"):
        draft.record(said, "train.checkpoint.folder")
    elif name == "--max-position-embeddings" and text == texts.get("--seq-length"):
        draft.record(said, "model.sequence")
    elif (
        name in ("--hidden-dropout", "--attention-dropout")
        and texts.get("--hidden-dropout") == texts.get("--attention-dropout")
        and to_decimal(text) is not None
    ):
        draft.put("model.dropout", to_decimal(text), said)
    elif name == "--clip-grad" and to_decimal(text) == 0:
        draft.put("train.clip_grad_norm", None, said)
    elif name in ("--warmup", "--lr-warmup-fraction"):
        of = texts.get("--lr-decay-iters") if name != "--warmup" else None
        steps, share = to_decimal(of or texts.get("--train-iters", "")), to_decimal(text)
        if steps is None or share is None or not 0 <= share <= 1:
            return False
        draft.put("train.schedule.warmup_steps", round(steps * share), said)
    elif name in ("--adam-beta1", "--adam-beta2") and to_decimal(text) is not None:
        pair = [texts.get("--adam-beta1", "0.9"), texts.get("--adam-beta2", "0.999")]
        betas = [to_decimal(value) for value in pair]
        if None in betas:
            return False
        draft.put("train.optimizer.betas", betas, said)
    else:
        return False
    return True


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
        key = DEEPSPEED_KEYS.get(name)
        if is_open:
            continue  # _pass_on notes it
        if key is None:
            draft.record(said, "program.args")
            continue
        convert = KEYS[name][1] if name in KEYS else to_any_number
        value = convert(text)
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
