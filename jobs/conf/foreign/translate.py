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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vjob.jobs.conf.document import render_value
from vjob.jobs.conf.foreign.launchers import (
    LINE,
    Launch,
    Lines,
    Options,
    group_arguments,
    sort_commands,
)
from vjob.jobs.conf.foreign.megatron_options import DEEPSPEED_KEYS, KEYS, OURS, to_decimal
from vjob.jobs.conf.foreign.shell import (
    Assignment,
    Command,
    JobBlock,
    ShellConf,
    Word,
    parse_shell_conf,
)
from vjob.jobs.conf.foreign.values import (
    GROUP_OPTIONS,
    PYXIS,
    TOP_OPTIONS,
    to_any_number,
    to_devices,
    to_flag,
    to_name,
    to_number,
    to_partition,
    to_zero,
)
from vjob.jobs.conf.loading.check import check_conf, find_missing_paths, list_own_env
from vjob.jobs.conf.loading.check_cluster import EPHEMERAL, OWN_SBATCH
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.redact import is_secret, is_secret_name, redact_string
from vjob.jobs.errors import ConfError, InputError, Problem

MODELS: Mapping[str, str] = {"small": "gpt2-small", "xl": "gpt2-xl"}
HEAD = """\
# Translated from {name}. `vjob submit --dry-run` shows what it makes.
"""
ACCEPTED = (
    "a shell conf (_00_conf.sh), a job script with #SBATCH lines, a script with a line of "
    "run_varuna, torch.distributed.launch, torchrun, deepspeed or python, or a folder of these"
)
SECTIONS = (
    "name", "program", "model", "data", "train", "parallel", "cluster", "container", "workdir",
    "setup", "profile", "env", "pass_env",
)  # fmt: skip
"""In the order in which `vjob init` has them."""
NODES = "cluster.nodes"
COUNTS = ("NNODES", "NUM_NODES", "DLWS_NUM_WORKER")
RANKS = ("NPROC_PER_NODE", "GPUS_PER_NODE", "NUM_GPUS_PER_NODE", "DLWS_NUM_GPU_PER_WORKER")
SHAPE: Mapping[str, str] = {
    "layers": "NUM_LAYERS",
    "hidden": "HIDDEN_SIZE",
    "heads": "NUM_ATTN_HEADS",
    "sequence": "SEQ_LENGTH",
}
NO_KEY: Mapping[str, str] = {
    "MASTER_ADDR": "is not needed: it is the first node of the first group",
    "NODE_RANK": "is not needed: nodes are counted by group",
    "RANK": "is not needed: each rank gets its own",
    "LOCAL_RANK": "is not needed: each rank gets its own",
    "CONTAINER_NAME": "is not needed: the unpacked image is named after the image",
    "CONTAINER_PATH": "is not needed: images are unpacked below container.scratch",
    "GRES": "is gpus of the group",
}
LAUNCHER_REASONS: Mapping[str, str] = {
    "node_rank": "nodes are counted by group",
    "master_addr": "it is the first node of the first group",
    "manager_ip": "it is the first node of the first group",
    "machine_list": "Slurm gives the nodes, by number, not by name",
    "no_morphing": "a script's run keeps its nodes",
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
SRUN_REASONS: Mapping[str, str] = {
    "container-name": "the unpacked image is named after the image",
    "jobid": "vjob starts the step in its own job",
    "label": "lines are kept by node and rank",
    "mpi": "ranks are started by vjob's agent, without MPI",
}
SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PYTHONPATH", "CPATH")
_LEADING_HOME = re.compile(r"(?:(?<=^)|(?<=[=:]))~(?=/|$)")


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
    found = ShellConf()
    for name in _order_scripts(texts):
        if name not in found.files:
            parse_shell_conf(texts[name], files, name=name, environ=environ, found=found)
    lines = sort_commands(found.commands)
    if not lines.launches:
        _read_variables(found, environ or {})
        lines = sort_commands(found.commands)
    if require_known and not is_known(found, lines):
        raise InputError(f"{title} is not what --from takes: {ACCEPTED}")
    translator = Translator(found, lines, files, environ or {})
    translator.build()
    _mend(translator)
    notes = [*translator.notes, *_find_absent(translator, base)]
    return _render_all(translator, title, notes), notes


def _read_variables(found: ShellConf, environ: Mapping[str, str]) -> None:
    """Command lines in variables that nobody here gives to `eval`."""
    for assignment in list(found.variables.values()):
        text = assignment.raw.strip("\"'")
        if LINE.match(text):
            inner = ShellConf(variables=dict(found.variables))
            parse_shell_conf(text, name=assignment.file, environ=environ, found=inner)
            found.decided.setdefault(assignment.name, "what is started")
            found.commands += [replace(entry, line=assignment.line) for entry in inner.commands]


def translate_source(path: Path, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """A file or a folder of scripts as conf.yaml; InputError where it is neither."""
    folder = path if path.is_dir() else path.parent
    files = _read_folder(folder)
    texts = {name: text for name, text in files.items() if name.endswith(SUFFIXES)}
    if not path.is_dir():
        if path.suffix in OTHER_SUFFIXES or "\0" in (text := _read_text(path)):
            raise InputError(f"{path} is not what --from takes: {ACCEPTED}")
        texts = {path.name: text}
    elif not texts:
        raise InputError(f"{path} has no shell scripts; --from takes {ACCEPTED}")
    known = {key: environ[key] for key in ("HOME", "USER", "LOGNAME") if key in environ}
    known["PWD"] = str(folder.absolute())
    title = path.name or str(path)
    return translate_scripts(
        texts, files=files, environ=known, title=title, require_known=True, base=folder.absolute()
    )


SUFFIXES = (".sh", ".sbatch", ".slurm", ".bash")
OTHER_SUFFIXES = (".py", ".ipynb", ".json", ".yaml", ".yml", ".toml", ".c", ".cpp", ".cu")
MAX_FILE = 1_000_000


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


def is_known(found: ShellConf, lines: Lines) -> bool:
    """True where the text is one of ACCEPTED."""
    names = {*COUNTS, *RANKS, "PIPELINE_MP_SIZE", "GLOBAL_BATCH_SIZE", "HOMOGENEOUS_CLUSTER",
             "TENSOR_MP_SIZE", "MICRO_BATCH_SIZE", "PARTITION", "CONTAINER_IMAGE_PATH"}  # fmt: skip
    wrapping = lines.wrapping
    wraps = wrapping.srun or wrapping.enroot or wrapping.docker or wrapping.images
    return bool(found.blocks or lines.launches or wraps or names & found.variables.keys())


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Nodes that a hostfile or an include names: of each, its GPUs and which of them."""

    slots: int | None
    devices: tuple[int, ...] | None


class Translator:
    """Takes what was found piece by piece; what nobody takes becomes a note."""

    def __init__(
        self,
        found: ShellConf,
        lines: Lines,
        files: Mapping[str, str],
        environ: Mapping[str, str],
    ) -> None:
        self.found = found
        self.lines = lines
        self.files = files
        self.environ = environ
        self.left = dict(found.variables)
        self.notes: list[str] = []
        self.taken: list[str] = []
        """What became which key."""
        self.comments: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        """By dotted key."""
        self.groups: list[dict[str, Any]] = []
        self.used: set[str] = set(found.decided)
        for line, text in found.not_understood:
            self.note(f"line {line}: not understood, left out: {redact_string(text)}")
        for reason in found.reasons:
            self.note(redact_string(reason))
        for command in lines.others:
            self.note(
                f"line {command.line}: not understood, left out: {redact_string(command.raw)}"
            )
        self.notes.sort(key=_get_line)

    def note(self, message: str) -> None:
        message = "".join(char if char.isprintable() else "?" for char in message)
        if message not in self.notes:
            self.notes.append(message)

    def say(self, what: str, key: str) -> None:
        """Record what became a key."""
        text = "".join(char if char.isprintable() else "?" for char in redact_string(what))
        line = f"{text} -> {key}"
        if line not in self.taken:
            self.taken.append(line)

    def put(self, key: str, value: Any, what: str) -> None:
        """Set a key that is not set yet."""
        if key in self.values and self.values[key] != value:
            self.note(f"{redact_string(what)} is not used: {key} is {self.values[key]} already")
            return
        self.values[key] = value
        self.say(what, key)

    def take(self, name: str, key: str, convert: Callable[[str], Any]) -> Any:
        """The variable's value, converted; None with a note where that is not possible."""
        assignment = self.left.get(name)
        if assignment is None or key in self.values:
            return None
        del self.left[name]
        value = None if assignment.value is None else convert(assignment.value.strip())
        if value is None:
            self.note(
                f"line {assignment.line}: {spell(assignment)} cannot be used for {key}; left out"
            )
        else:
            self.comments[key] = f"was {spell(assignment)}"
            self.say(spell(assignment), key)
        return value

    def take_into(self, name: str, key: str, convert: Callable[[str], Any]) -> None:
        value = self.take(name, key, convert)
        if value is not None:
            self.values[key] = value

    def take_number(self, name: str, key: str) -> int | None:
        value: int | None = self.take(name, key, to_number)
        return value

    def take_flag(self, name: str, key: str) -> bool | None:
        value: bool | None = self.take(name, key, to_flag)
        return value

    def shorten(self, path: str) -> str:
        """A path of a conf's key, its home folder as ~."""
        home = self.environ.get("HOME")
        if home and (path == home or path.startswith(home + "/")):
            return "~" + path.removeprefix(home)
        return path

    def expand(self, text: str) -> str:
        """A word of a command or environment, where nothing expands ~."""
        home = self.environ.get("HOME")
        text = _LEADING_HOME.sub(lambda _: str(home), text) if home else text
        return text.replace("${", "$${")  # the conf's own references are written so

    # The parts, in order: a later one finds the keys that earlier ones set.

    def build(self) -> None:
        launch = self._choose_launch()
        self._build_container()
        self._build_profile()
        if launch is None:
            self._build_old()
        else:
            self.used |= launch.command.uses
            self._build_launch(launch)
        self._build_layout()
        self._build_nodes(launch)
        self._build_port()
        self._build_rest(launch)
        self._build_env()
        self._list_left()

    def _choose_launch(self) -> Launch | None:
        order = ("deepspeed", "varuna", "torch", "python")
        launches = sorted(self.lines.launches, key=lambda launch: order.index(launch.kind))
        for other in launches[1:]:
            if other.command.words == launches[0].command.words:
                continue
            self.used |= other.command.uses
            self.note(
                f"line {other.command.line}: a conf starts one program; this one is left out: "
                f"{redact_string(other.command.raw)}"
            )
        return launches[0] if launches else None

    def _build_old(self) -> None:
        """A shell conf whose program stands elsewhere: a patched Megatron-LM's."""
        self.values["program"] = {"megatron": ".", "args": []}
        self.comments["program"] = "the checkout that the shell conf lay in"
        self.note(
            "program.megatron is the folder of this file, where the shell conf lay; write the path "
            "of your Megatron-LM checkout if it is another, and in args what _01_run_inter.sh "
            "passed"
        )
        model = self.take("MODEL", "model", lambda text: MODELS.get(text.lower()))
        if model is not None:
            self.values["model"] = model
        if model == MODELS["small"]:
            self.note(
                "MODEL=small is taken for gpt2-small, 12 layers of 768; compare it with NUM_LAYERS "
                "and HIDDEN_SIZE in an old job's output"
            )
        self.values.update({"train.steps": 50, "train.precision": "fp16", "train.log_every": 10})
        for key, option in (("steps", "train-iters 50"), ("precision", "fp16")):
            self.comments[f"train.{key}"] = f"_01_run_inter.sh passed --{option}"
        self.comments["train.log_every"] = "_01_run_inter.sh passed --log-interval 10"
        self._require_megatron()

    def _require_megatron(self) -> None:
        """A model and data, which Megatron-LM cannot start without."""
        for key in ("DATA_PATH", "DATA_PREFIX", "DATASET"):
            if "data.synthetic" not in self.values and key not in self.used:
                self.take_into(key, "data.prefix", self._to_path)
        for key in ("CHECKPOINT_PATH", "SAVE_PATH"):
            if key not in self.used:
                self.take_into(key, "train.checkpoint.folder", self._to_path)
        if "data.prefix" not in self.values and not self.values.get("data.synthetic"):
            named = {word.partition("=")[0] for word in self.values["program"]["args"]}
            if not named & {"--data-path", "--train-data-path", "--data-args-path"}:
                self.values["data.synthetic"] = True
                self.comments["data.synthetic"] = "no data was named; write data.prefix instead"
                self.note(
                    "no data was named (DATA_PATH, --data-path): data.synthetic stands in; write "
                    "data.prefix"
                )
        if "model" not in self.values:
            for key, name in SHAPE.items():
                self.take_into(name, f"model.{key}", to_number)
        shape = {key for key in self.values if key.startswith("model.")}
        if "model" in self.values or {"model.layers", "model.hidden", "model.heads"} <= shape:
            return
        for key in sorted(shape):
            self.note(f"{key} = {self.values.pop(key)} is left out: a model needs layers, hidden "
                      "and heads")  # fmt: skip
            self.comments.pop(key, None)
        self.values["model"] = "gpt2-small"
        self.note("no model was named: gpt2-small stands in; write model")

    def _to_path(self, text: str) -> str | None:
        return self.shorten(text) if text and text.isprintable() else None

    def _build_launch(self, launch: Launch) -> None:
        folder = self._find_folder(launch)
        script = self._place(launch.script.text, folder)
        where = f"line {launch.command.line}"
        if launch.script.is_open or not script or not script.isprintable():
            self.note(f"{where}: the script {launch.script.text} is not known; train.py stands in")
            script = "train.py"
        flags = {name for name, _ in group_arguments(launch.args)}
        is_megatron = {"--num-layers", "--hidden-size"} <= flags and launch.kind in (
            "torch",
            "python",
        )
        if launch.kind == "deepspeed":
            self._build_deepspeed(launch, script)
        elif is_megatron:
            args = self._take_megatron(launch)
            self.values["program"] = {"megatron": script, "args": args}
            self._require_megatron()
        else:
            self.values["program"] = {"script": script, "args": self._pass_on(launch.args, where)}
        kind = (
            "megatron" if is_megatron else "deepspeed" if launch.kind == "deepspeed" else "script"
        )
        self.say(f"{where}: {launch.script.text}", f"program.{kind}")
        if launch.kind == "varuna":
            self._build_varuna(launch)
        self._list_options(launch)

    def _place(self, path: str, folder: str) -> str:
        path = self.shorten(path)
        if not path or path.startswith(("/", "~")) or not folder or folder == ".":
            return path
        return posixpath.join(folder, path)

    def _find_folder(self, launch: Launch) -> str:
        """Where the script runs, by --code_dir or the last `cd` before it."""
        code = launch.options.get("code_dir")
        where = f"line {launch.command.line}: --code_dir"
        if code is not None and not code.is_open and code.text:
            folder = self.shorten(code.text)
            if folder != ".":
                self.put("workdir", folder, f"{where} {code.text}")
            return folder
        if code is not None:
            self.note(f"{where} {code.text} is not known; the conf's folder stands in")
        folder = ""
        for command in self.lines.folders:
            word = command.words[1]
            if command.line > launch.command.line and command.file == launch.command.file:
                continue
            if word.is_open or command.file != launch.command.file or word.text in (".", "-"):
                self.note(
                    f"line {command.line}: {redact_string(command.raw)} is left out: paths are "
                    "relative to the conf's folder"
                )
            else:
                self.used |= command.uses
                folder = self._place(word.text, folder) if folder else self.shorten(word.text)
                self.say(f"line {command.line}: {command.raw}", "workdir")
        if folder:
            self.values["workdir"] = folder
        return folder

    def _pass_on(self, args: Sequence[Word], where: str) -> list[str]:
        """Arguments as they are, but for those whose value only a shell knows."""
        kept: list[str] = []
        groups = group_arguments(args)
        for name, values in groups:
            spelled = " ".join([name, *(word.text for word in values)]).strip()
            is_joined = any(word.text.startswith(f"{name}=") for word in args) if name else False
            if any(word.is_open for word in values):
                self.note(f"{where}: {spelled} is left out of program.args: write its value there")
                continue
            if name and is_secret_name(name) and values:
                self.note(f"{where}: {name} looks secret and is left out of program.args: hand it "
                          "on by pass_env, or write it there")  # fmt: skip
                continue
            if is_joined and len(values) == 1:
                kept.append(f"{name}={self.expand(values[0].text)}")
            else:
                kept += [word for word in (name,) if word]
                kept += [self.expand(word.text) for word in values]
        return kept

    def _take_megatron(self, launch: Launch) -> list[str]:
        """Options that are keys of the conf; the others, as arguments."""
        where = f"line {launch.command.line}"
        kept: list[Word] = []
        groups = group_arguments(launch.args)
        texts = {name: " ".join(word.text for word in values) for name, values in groups}
        opens = {name for name, values in groups if any(word.is_open for word in values)}
        for name, values in groups:
            text, said = texts[name], f"{where}: {name} {texts[name]}".rstrip()
            if name in opens:
                self.note(f"{said} is left out: its value is not known; write it in the conf")
            elif self._take_special(name, text, texts, said):
                continue
            elif name in KEYS and (value := KEYS[name][1](text)) is not None:
                key = KEYS[name][0]
                if key in ("train.checkpoint.folder", "data.prefix"):
                    value = self.shorten(value)
                self.put(key, value, said)
            else:
                kept += [word for word in (Word(name),) if name]
                kept += values
                self.say(said, "program.args")
        if "--batch-size" in texts and "train.global_batch_size" not in self.values:
            self.say("--batch-size, of a replica", "train.micro_batch_size; no global one")
        if self.values.get("train.evaluate.steps") == 0:
            self.values["train.evaluate.every"] = 0
            del self.values["train.evaluate.steps"]
        return self._pass_on(kept, where)

    def _take_special(self, name: str, text: str, texts: Mapping[str, str], said: str) -> bool:
        """Options whose key depends on another one."""
        if OURS.get(name, ("", ""))[0] == text and name in OURS:
            self.note(f"{said} is left out: {OURS[name][1]}")
        elif name == "--load" and text == texts.get("--save"):
            self.say(said, "train.checkpoint.folder")
        elif name == "--max-position-embeddings" and text == texts.get("--seq-length"):
            self.say(said, "model.sequence")
        elif (
            name in ("--hidden-dropout", "--attention-dropout")
            and texts.get("--hidden-dropout") == texts.get("--attention-dropout")
            and to_decimal(text) is not None
        ):
            self.put("model.dropout", to_decimal(text), said)
        elif name == "--clip-grad" and to_decimal(text) == 0:
            self.put("train.clip_grad_norm", None, said)
        elif name in ("--warmup", "--lr-warmup-fraction"):
            of = texts.get("--lr-decay-iters") if name != "--warmup" else None
            steps, share = to_decimal(of or texts.get("--train-iters", "")), to_decimal(text)
            if steps is None or share is None or not 0 <= share <= 1:
                return False
            self.put("train.schedule.warmup_steps", round(steps * share), said)
        elif name in ("--adam-beta1", "--adam-beta2") and to_decimal(text) is not None:
            pair = [texts.get("--adam-beta1", "0.9"), texts.get("--adam-beta2", "0.999")]
            betas = [to_decimal(value) for value in pair]
            if None in betas:
                return False
            self.put("train.optimizer.betas", betas, said)
        else:
            return False
        return True

    def _build_deepspeed(self, launch: Launch, script: str) -> None:
        where = f"line {launch.command.line}"
        program: dict[str, Any] = {"deepspeed": script}
        kept: list[Word] = []
        for name, values in group_arguments(launch.args):
            text = " ".join(word.text for word in values)
            said = f"{where}: {name} {text}".rstrip()
            is_open = any(word.is_open for word in values)
            if name == "--deepspeed_config" and text and not is_open:
                program["config"] = self.shorten(text.removeprefix("./"))
                self.say(said, "program.config")
                continue
            kept += [word for word in (Word(name),) if name]
            kept += values
            key = DEEPSPEED_KEYS.get(name)
            if is_open:
                continue  # _pass_on tells
            if key is None:
                self.say(said, "program.args")
                continue
            convert = KEYS[name][1] if name in KEYS else to_any_number
            value = convert(text)
            if value is not None and not (name == "--clip-grad" and not value):
                self.put(key, value, said)
            self.say(said, "program.args")
        program["args"] = self._pass_on(kept, where)
        self.values["program"] = program

    def _build_varuna(self, launch: Launch) -> None:
        where = f"line {launch.command.line}"
        self.note(
            f"{where}: run_varuna passed --rank, --local_rank, --stage_to_rank_map, --chunk_size "
            "and --batch-size to the script; here they are variables (docs/script.md), and the "
            "script must not require them as arguments"
        )
        names = {
            "nstages": "parallel.pipeline",
            "chunk_size": "train.micro_batch_size",
            "batch_size": "train.global_batch_size",
        }
        for name, key in names.items():
            word = launch.options.get(name)
            value = to_number(word.text) if word is not None else None
            if value is not None and word is not None:
                self.put(key, value, f"{where}: --{name} {word.text}")
            elif word is not None:
                self.note(f"{where}: --{name} {word.text} is not known; write {key}")
        env_file = launch.options.get("env_file")
        if env_file is not None and posixpath.basename(env_file.text) in self.files:
            inner = parse_shell_conf(self.files[posixpath.basename(env_file.text)])
            for assignment in inner.variables.values():
                self.left.setdefault(assignment.name, replace(assignment, exported=True))
            self.say(f"{where}: --env_file {env_file.text}", "env")
        elif env_file is not None:
            self.note(f"{where}: --env_file {env_file.text} is left out: write its lines in env")

    def _list_options(self, launch: Launch) -> None:
        """Options of the launcher, each with its key or the reason that it has none."""
        where = f"line {launch.command.line}"
        done = {"nnodes", "nproc_per_node", "num_nodes", "num_gpus", "gpus_per_node", "nstages",
                "chunk_size", "batch_size", "code_dir", "env_file", "master_port"}  # fmt: skip
        for name, word in launch.options.items():
            said = f"{where}: --{name} {word.text}".rstrip()
            if name == "max_restarts" and to_number(word.text):
                self.put("cluster.restarts", to_number(word.text), said)
            elif name not in done:
                reason = LAUNCHER_REASONS.get(name, "it has no counterpart")
                self.note(f"{said} is left out: {reason}")

    def _build_layout(self) -> None:
        for name, key in (
            ("GLOBAL_BATCH_SIZE", "train.global_batch_size"),
            ("MICRO_BATCH_SIZE", "train.micro_batch_size"),
            ("PIPELINE_MP_SIZE", "parallel.pipeline"),
            ("DP_SIZE", "parallel.data"),
            ("TENSOR_MP_SIZE", "parallel.tensor"),
        ):
            if name not in self.used:
                self.take_into(name, key, to_number)
        if "ZERO" not in self.used:
            self.take_into("ZERO", "parallel.zero", to_zero)
        if "PARTITION" not in self.used:
            self.take_into("PARTITION", "parallel.partition", to_partition)

    def _find_counts(self, launch: Launch | None) -> tuple[int | None, int | None]:
        """Nodes and ranks of each, by the launcher, else by variables."""
        total = ranks = None
        options = launch.options if launch is not None else {}
        where = f"line {launch.command.line}" if launch is not None else ""
        for name in ("nnodes", "num_nodes"):
            word = options.get(name)
            if word is None:
                continue
            total = to_number(word.text.rpartition(":")[2])
            if ":" in word.text:
                self.note(f"{where}: --{name} {word.text}: the most are asked for; fewer need "
                          "morph.enabled")  # fmt: skip
            self._tell_count(f"{where}: --{name} {word.text}", total, f"{NODES}[0].count")
        for name in ("nproc_per_node", "num_gpus", "gpus_per_node"):
            word = options.get(name)
            if word is not None:
                ranks = to_number(word.text)
                self._tell_count(f"{where}: --{name} {word.text}", ranks, f"{NODES}[0].gpus")
        for name in COUNTS:
            if total is None or name not in self.used:
                total = self.take_number(name, NODES) if total is None else total
        for name in RANKS:
            if ranks is None or name not in self.used:
                ranks = self.take_number(name, NODES) if ranks is None else ranks
        return total, ranks

    def _tell_count(self, said: str, value: int | None, key: str) -> None:
        if value is None:
            self.note(f"{said} is not known; write {key}")
        else:
            self.say(said, key)

    def _find_hosts(self, launch: Launch | None) -> list[Hosts]:
        """Nodes by a hostfile, an include, or a machine list."""
        options = launch.options if launch is not None else {}
        hosts: dict[str, Hosts] = {}
        for name in ("hostfile", "machine_list"):
            word = options.get(name)
            if word is None:
                continue
            text = self.files.get(posixpath.basename(word.text))
            if text is None:
                continue
            for line in text.splitlines():
                words = line.partition("#")[0].split()
                said = re.fullmatch(r"slots=(\d{1,4})", words[1]) if len(words) > 1 else None
                if words:
                    hosts[words[0]] = Hosts(slots=int(said[1]) if said else None, devices=None)
            self.say(f"{word.text}: {len(hosts)} hosts", f"{NODES}[].count")
        include = options.get("include")
        if include is not None and include.text and not include.is_open:
            chosen: dict[str, Hosts] = {}
            for part in include.text.split("@"):
                host, _, listed = part.partition(":")
                devices = to_devices(listed)
                slots = hosts[host].slots if host in hosts else None
                chosen[host] = Hosts(slots=slots, devices=devices)
            hosts = chosen
            self.say(f"--include {include.text}", f"{NODES}[].devices")
        return list(hosts.values())

    def _build_nodes(self, launch: Launch | None) -> None:
        """Node groups: of a list of hosts, of a het job, or the master's and the slaves'."""
        hosts = self._find_hosts(launch)
        same = self.take_flag("HOMOGENEOUS_CLUSTER", NODES)
        total, ranks = self._find_counts(launch)
        if "WORLD_SIZE" in self.left and self.left["WORLD_SIZE"].value is None:
            world = None
        else:
            world = self.take_number("WORLD_SIZE", NODES)
        for key in NO_KEY:
            assignment = self.left.pop(key, None)
            if assignment is not None and key == "GRES":
                self.say(spell(assignment), f"{NODES}[].gpus")
            elif assignment is not None:
                self.note(f"line {assignment.line}: {spell(assignment)}: {key} {NO_KEY[key]}"
                          if key != "MASTER_ADDR" else f"{key} {NO_KEY[key]}")  # fmt: skip
                if key == "MASTER_ADDR":
                    self.say(spell(assignment), "no key: found when the run starts")
        self.comments.pop(NODES, None)
        devices = self._take_devices()
        blocks = self._join_srun()
        if hosts and not any("nodes" in block.options for block in blocks):
            self._build_host_groups(hosts, ranks)
            return
        names, counts, chosen = self._choose_blocks(blocks, same, total)
        for name, count, block in zip(names, counts, chosen, strict=True):
            group = self._build_group(block)
            if devices is not None:
                ranks = len(devices) if ranks is None or ranks > len(devices) else ranks
                devices = devices[:ranks]
            if "gpus" not in group and ranks is not None:
                group["gpus"] = max(devices) + 1 if devices else ranks
                self.note(f"no --gres was found for group {name}: it asks for {group['gpus']} GPUs "
                          "of any type")  # fmt: skip
            self.groups.append({"group": name, "count": count, **group, "ranks": ranks,
                                "devices": devices})  # fmt: skip
            asked = _get_count(block)
            if asked is not None and asked != count:
                self.note(f"--nodes={asked} of group {name} is not the {count} that NNODES leaves")
        have = sum(counts) * (ranks or 1)
        if world is not None and ranks is not None and world != have:
            self.note(f"WORLD_SIZE is {world}, but the nodes have {have} ranks")

    def _take_devices(self) -> list[int] | None:
        assignment = self.left.get("CUDA_VISIBLE_DEVICES")
        for launch in self.lines.launches:
            for given in launch.command.env:
                if given.name == "CUDA_VISIBLE_DEVICES":
                    assignment = self.left["CUDA_VISIBLE_DEVICES"] = given
        if assignment is None:
            return None
        found = self.take("CUDA_VISIBLE_DEVICES", f"{NODES}[].devices", to_devices)
        return list(found) if found is not None else None

    def _build_host_groups(self, hosts: list[Hosts], ranks: int | None) -> None:
        kinds: list[tuple[Hosts, int]] = []
        for host in hosts:
            if kinds and kinds[-1][0] == host:
                kinds[-1] = (host, kinds[-1][1] + 1)
            else:
                kinds.append((host, 1))
        for index, (host, count) in enumerate(kinds):
            devices = host.devices
            gpus = host.slots or (max(devices) + 1 if devices else ranks)
            num_ranks = len(devices) if devices else ranks or gpus
            self.groups.append({
                "group": "master" if index == 0 else f"nodes{index}", "count": count, "gpus": gpus,
                "ranks": num_ranks, "devices": list(devices) if devices else None,
            })  # fmt: skip

    def _choose_blocks(
        self, blocks: list[JobBlock], same: bool | None, total: int | None
    ) -> tuple[list[str], list[int], list[JobBlock | None]]:
        chosen: list[JobBlock | None]
        if any(block.is_het for block in blocks):
            chosen = list(blocks)
            names = ["master", *(f"group{index}" for index in range(1, len(blocks)))]
            return names, [_get_count(block) or 1 for block in blocks], chosen
        mixed = same is False or (same is None and len(blocks) > 1)
        if mixed and (total or 2) > 1:
            chosen = _choose_mixed(blocks, total)
            counts = [1, _count_slaves(chosen, total)]
            names = ["master", "slave"]
        else:
            chosen = [_choose_same(blocks, total)]
            counts = [total or _get_count(chosen[0]) or 1]
            names = ["master"]
        for block in blocks:
            if not any(block is other for other in chosen):
                shown = ", ".join(f"--{name}={value}" for name, (value, _) in block.options.items())
                shown = redact_string(shown) or f"GRES={block.gres}"
                self.note(f"a pasted job script is not used: {shown}")
        return names, counts, chosen

    def _join_srun(self) -> list[JobBlock]:
        """Job blocks, with what only srun's lines say."""
        blocks = [replace(block, options=dict(block.options)) for block in self.found.blocks]
        for options, command in self.lines.wrapping.srun:
            self.used |= command.uses
            own = [block for block in blocks if block.file == command.file] or blocks
            if not own:
                own = [JobBlock(file=command.file)]
                blocks += own
            for name, word in options.items():
                said = f"line {command.line}: srun --{name}={word.text}".rstrip("=")
                if name.startswith("container-") and name in PYXIS:
                    continue
                if word.is_open:
                    self.note(f"{said} is left out: its value is known in the job alone")
                elif name in GROUP_OPTIONS:
                    values = {block.options[name][0] for block in own if name in block.options}
                    if not values:
                        own[-1].options[name] = (word.text, command.line)
                        self.say(said, NODES)
                    elif word.text in values or (name == "gres" and word.text == own[-1].gres):
                        self.say(said, f"{NODES}, as #SBATCH says")
                    else:
                        self.note(f"{said} is not used: #SBATCH says {', '.join(sorted(values))}")
                elif name in ("ntasks", "ntasks-per-node"):
                    self.say(said, f"{NODES}[].ranks")
                else:
                    reason = SRUN_REASONS.get(name, OWN_SBATCH.get(name, "vjob starts the steps"))
                    self.note(f"{said} is left out: {reason}")
        return blocks

    def _build_group(self, block: JobBlock | None) -> dict[str, Any]:
        group: dict[str, Any] = {}
        if block is None:
            return group
        options = dict(block.options)
        if "gres" not in options and block.gres is not None:
            options["gres"] = (block.gres, 0)
        elif block.gres is not None and options["gres"][0] != block.gres:
            self.note(f"GRES={block.gres} is not used: --gres is {options['gres'][0]}")
        for name, (text, line) in options.items():
            place = f"line {line}: --" if line else ""
            said = f"{place}{name}={redact_string(text)}".rstrip("=")
            if name in ("nodes", "ntasks-per-node") or (name == "ntasks" and "nodes" in options):
                key = "count" if name == "nodes" else "ranks"
                self.say(said, f"{NODES}[].{key}")
            elif name in GROUP_OPTIONS or name in TOP_OPTIONS:
                key, convert = {**GROUP_OPTIONS, **TOP_OPTIONS}[name]
                value = convert(text)
                if value is None:
                    self.note(f"{said} cannot be used")
                elif name in GROUP_OPTIONS:
                    group.setdefault(key, value)
                    self.say(said, f"{NODES}[].{key}")
                else:
                    self.put(key, value, said)
            elif name in OWN_SBATCH:
                self.note(f"line {line}: --{name} is left out: {OWN_SBATCH[name]}")
            elif find_text_problem(text) or not text.isprintable():
                self.note(f"line {line}: --{name} is left out: its value is not printable")
            else:
                sbatch = self.values.setdefault("cluster.sbatch", {})
                sbatch.setdefault(name, text or True)
                self.say(said, "cluster.sbatch")
        return group

    def _build_port(self) -> None:
        """A port that the command line or MASTER_PORT names, if one may be held."""
        said = ""
        port: int | None = None
        for launch in self.lines.launches[:1]:
            word = launch.options.get("master_port")
            if word is not None:
                said = f"--master_port {word.text}"
                port = to_number(word.text)
                if port is None:
                    self.note(f"{said} is not known; port: auto picks a free one")
        if port is None:
            assignment = self.left.get("MASTER_PORT")
            port = self.take_number("MASTER_PORT", "cluster.port")
            said = spell(assignment) if assignment is not None else ""
        if port is None:
            return
        low, high = EPHEMERAL
        if 1024 <= port <= 65535 and not low <= port <= high:
            self.put("cluster.port", port, said)
            return
        self.note(
            f"{said} is not used: a port is 1024 to 65535, and outgoing connections may "
            f"take one of {low} to {high}; port: auto picks a free one"
        )
        self.comments.pop("cluster.port", None)
        self.taken = [line for line in self.taken if line != f"{said} -> cluster.port"]

    def _build_container(self) -> None:
        wrapping = self.lines.wrapping
        reuse = self.take_flag("RELOAD_CONTAINER", "container.reuse")
        if reuse is not None:
            self.values["container.reuse"] = not reuse
        if reuse:
            self.note(
                "RELOAD_CONTAINER=true is container.reuse: false: each run unpacks the image anew; "
                "auto does so only for an image that changed"
            )
        for name in ("CONTAINER_IMAGE_PATH", "CONTAINER_IMAGE"):
            self.take_into(name, "container.image", self._to_path)
        for image, command in wrapping.images:
            self.used |= command.uses
            said = f"line {command.line}: enroot create {image.text}"
            if image.is_open:
                self.note(f"{said} is left out: the image is not known; write container.image")
            else:
                self.put("container.image", self.shorten(image.text), said)
        mounts: list[str] = []
        for options, command in wrapping.enroot:
            self.used |= command.uses
            self.put("container.runtime", "enroot", f"line {command.line}: enroot start")
            for name in options:
                said = f"line {command.line}: enroot start --{name} {options[name].text}".rstrip()
                if name == "root":
                    self.put("container.remap_root", True, said)
                elif name == "rw":
                    self.put("container.writable", True, said)
                elif name not in ("mount", "env"):
                    self.note(f"{said} is left out: it has no counterpart")
            if "rw" not in options:
                self.put("container.writable", False, f"line {command.line}: enroot without --rw")
        for word, command in wrapping.mounts:
            self._add_mounts(word, f"line {command.line}: --mount {word.text}", mounts)
        for options, command in wrapping.srun:
            self._take_pyxis(options, command, mounts)
        for _, pairs, image, command in wrapping.docker:
            self._take_docker(pairs, image, command, mounts)
        for word, command in wrapping.env:
            self._add_env(word, command)
        if mounts:
            self.values["container.mounts"] = mounts

    def _add_mounts(self, word: Word, said: str, mounts: list[str]) -> None:
        if word.is_open:
            self.note(f"{said} is left out: its path is not known; write container.mounts")
            return
        for part in word.text.split(","):
            source, _, rest = part.partition(":")
            target, _, flags = rest.partition(":")
            target = target or source
            mount = f"{self.shorten(source)}:{target}" + (":ro" if "ro" in flags.split("+") else "")
            if not source or not target.startswith("/"):
                self.note(f"{said} is left out: a mount is source:target, the target absolute")
            elif mount not in mounts:
                mounts.append(mount)
                self.say(said, "container.mounts")

    def _take_pyxis(self, options: Options, command: Command, mounts: list[str]) -> None:
        for name, word in options.items():
            said = f"line {command.line}: srun --{name}={word.text}".rstrip("=")
            if name not in PYXIS:
                continue
            if name == "container-mounts":
                self._add_mounts(word, said, mounts)
            elif word.is_open:
                self.note(f"{said} is left out: its value is not known")
            elif PYXIS[name] is None:
                self.note(f"{said} is left out: {SRUN_REASONS.get(name, 'it is so already')}")
            else:
                key, value = PYXIS[name] or ("", None)
                self.put(key, self.shorten(word.text) if value is None else value, said)
                if name == "container-image":
                    self.put("container.runtime", "pyxis", said)

    def _take_docker(
        self, pairs: list[tuple[str, Word]], image: Word, command: Command, mounts: list[str]
    ) -> None:
        self.used |= command.uses
        said = f"line {command.line}: docker run"
        if image.is_open:
            self.note(f"{said} {image.text} is left out: the image is not known")
            return
        self.put("container.image", f"docker://{image.text}", f"{said} {image.text}")
        for name, word in pairs:
            option = f"{said} {'-' if len(name) < 3 else '--'}{name} {word.text}".rstrip()
            if name in ("v", "volume"):
                self._add_mounts(word, option, mounts)
            elif name in ("e", "env"):
                self._add_env(word, command)
            elif name in ("w", "workdir") and not word.is_open:
                self.put("container.workdir", word.text, option)
            elif name in ("net", "network", "ipc", "p", "publish", "shm-size"):
                self.note(f"{option} is left out: network and /dev/shm are the node's")
            else:
                self.note(f"{option} is left out: vjob starts the container")

    def _add_env(self, word: Word, command: Command) -> None:
        name, equals, value = word.text.partition("=")
        if word.is_open or not equals:
            self.note(f"line {command.line}: {redact_string(word.text)} is left out of env: its "
                      "value is not known; name it in pass_env")  # fmt: skip
            return
        self.left.setdefault(
            name,
            Assignment(name=name, value=value, raw=value, line=command.line, exported=True),
        )

    def _build_profile(self) -> None:
        for name, key in (("PROFILE", "timeline"), ("NSYS", "nsys"), ("NCU", "ncu")):
            if not (self.lines.launches and name in self.used):  # else its branch says it all
                self.take_into(name, f"profile.{key}", to_flag)
        for name, pairs, command in self.lines.wrapping.profilers:
            self.used |= command.uses
            said = f"line {command.line}: {name}"
            self.put(f"profile.{name}", True, said)
            options: list[str] = self.values.setdefault("profile.options", [])
            for option, word in pairs:
                dashes = "-" if len(option) == 1 else "--"
                joined = f"{dashes}{option}" + (
                    f"={word.text}" if word.text and dashes == "--" else "")  # fmt: skip
                if option in ("o", "output", "f", "force-overwrite"):
                    self.note(f"{said} {joined} {word.text} is left out: its file lies in the run "
                              "folder")  # fmt: skip
                elif word.is_open:
                    self.note(f"{said} {joined} is left out: its value is not known")
                else:
                    options.append(joined)
                    options += [word.text] if word.text and dashes == "-" else []
                    self.say(f"{said} {joined} {word.text}", "profile.options")
            if not options:
                self.values.pop("profile.options", None)

    def _build_rest(self, launch: Launch | None) -> None:
        setup = [command.raw for command in self.lines.setup]
        if setup:
            self.values["setup"] = list(dict.fromkeys(setup))
            for command in self.lines.setup:
                self.used |= command.uses
                self.say(f"line {command.line}: {command.raw}", "setup")
        if "name" in self.values:
            return
        model = self.values.get("model")
        script = launch.script.text if launch is not None and not launch.script.is_open else ""
        stem = posixpath.basename(script).removesuffix(".py")
        name = model if isinstance(model, str) else to_name(stem)
        self.values["name"] = name or "my-run"

    def _build_env(self) -> None:
        """Exported variables that we do not know go to every rank, secrets by name only."""
        env: dict[str, str] = {}
        pass_env: list[str] = []
        for launch in self.lines.launches[:1]:
            for assignment in launch.command.env:
                self.left.setdefault(assignment.name, assignment)
        for name, assignment in list(self.left.items()):
            value = assignment.value
            is_ours = name in list_own_env() or name.startswith("VJOB_")
            is_network = name.startswith(("NCCL_", "GLOO_"))
            if is_ours or not (assignment.exported or is_network):
                continue
            if value is None and name in SEARCH_PATHS and "$(" not in assignment.raw:
                line = f"export {name}={assignment.raw}"
                self.values.setdefault("setup", []).append(line)
                self.say(f"line {assignment.line}: {line}", "setup")
                del self.left[name]
                continue
            if value is None or find_text_problem(value):
                continue
            del self.left[name]
            if is_secret(name):
                pass_env.append(name)
                self.note(
                    f"line {assignment.line}: {name} looks secret: set it in your shell; pass_env "
                    "hands it on"
                )
            else:
                env[name] = self.expand(value)
                self.say(f"line {assignment.line}: {spell(assignment)}", f"env.{name}")
        if env:
            self.values["env"] = env
        if pass_env:
            self.values["pass_env"] = pass_env

    def _list_left(self) -> None:
        """Variables that no key took: those of the lines above, and those that have none."""
        for assignment in self.left.values():
            if assignment.name in self.used:
                decided = self.found.decided.get(assignment.name)
                self.say(
                    f"line {assignment.line}: {spell(assignment)}",
                    f"decides {decided}" if decided else "filled into the lines that use it",
                )
            else:
                self.note(
                    f"line {assignment.line}: {spell(assignment)} has no counterpart; left out"
                )
        for assignment in self.found.overwritten:
            self.note(f"line {assignment.line}: {spell(assignment)} is not used: a later line sets "
                      f"{assignment.name} again")  # fmt: skip


def _get_line(note: str) -> int:
    match = re.match(r"line (\d+):", note)
    return int(match[1]) if match else 0


def _mend(translator: Translator) -> None:
    """Leave out the keys that do not fit, each with the check's own words, until all fit."""
    for _ in range(40):
        problems = _check(translator)
        mended = False
        for problem in problems:
            mended = _drop(translator, problem) or mended
            if mended:
                break
        if not mended:
            for problem in problems:
                translator.note(f"to mend: {problem}")
            return


def _check(translator: Translator, base: Path | None = None) -> list[Problem]:
    text = HEAD.format(name="-") + _render(build_tree(translator), {})
    try:
        conf, lines = parse_conf_lines(text, "conf.yaml", base or Path("/"), (), translator.environ)
    except ConfError as error:
        return list(error.problems)
    return check_conf(conf, lines, require_paths=False)


def _drop(translator: Translator, problem: Problem) -> bool:
    """Leave out the key that a problem names; False where there is none to leave out."""
    group = re.match(r"cluster\.nodes\[(\d+)\]\.(\w+)", problem.key)
    if group is not None and int(group[1]) < len(translator.groups):
        value = translator.groups[int(group[1])].pop(group[2], None)
        if value is None:
            return False
        key = group[0]
    else:
        key = re.sub(r"\[.*", "", problem.key)
        while key and key not in translator.values:
            key = key.rpartition(".")[0]
        if not key or key in ("program", "name", "model"):
            return _stand_in(translator, problem)
        value = translator.values.pop(key)
        if key in ("env", "cluster.sbatch") and isinstance(value, dict):
            inner = problem.key.removeprefix(f"{key}.")
            rest = {name: item for name, item in value.items() if name != inner}
            value = value.get(inner)
            if rest and value is not None:
                translator.values[key] = rest
            key = f"{key}.{inner}"
    translator.comments.pop(key, None)
    shown = "<redacted>" if is_secret(key) else value
    translator.note(f"{key} = {shown} is left out: {problem.message}")
    return True


def _stand_in(translator: Translator, problem: Problem) -> bool:
    """A model or data for Megatron-LM in the place of those that could not be used."""
    values, section = translator.values, problem.key.partition(".")[0]
    missing = {"model": ("model", "gpt2-small"), "data": ("data.synthetic", True)}
    if section not in missing or missing[section][0] in values:
        return False
    for key in [key for key in values if key.startswith(f"{section}.")]:
        translator.note(f"{key} = {values.pop(key)} is left out: {problem.message}")
        translator.comments.pop(key, None)
    key, value = missing[section]
    values[key] = value
    translator.note(f"{key}: {value} stands in: {problem.key} {problem.message}")
    return True


def _find_absent(translator: Translator, base: Path | None) -> list[str]:
    """Files that a submit from the conf's folder would miss."""
    if base is None:
        return []
    text = _render(build_tree(translator), {})
    environ = {**os.environ, **translator.environ}
    try:
        conf = parse_conf_lines(text, "conf.yaml", base, (), environ)[0]
    except ConfError:
        return []
    return [
        f"not here: {key} = {redact_string(str(value))} {message}"
        for key, value, message in find_missing_paths(conf, base)
    ]


def build_tree(translator: Translator) -> dict[str, Any]:
    """The conf as nested mappings, sections in order."""
    tree: dict[str, Any] = {}
    for section in SECTIONS:
        for key, value in translator.values.items():
            first, *rest = key.split(".")
            if first != section:
                continue
            if not rest:
                tree[first] = value
                continue
            inner = tree.setdefault(first, {})
            for name in rest[:-1]:
                inner = inner.setdefault(name, {})
            inner[rest[-1]] = value
        if section == "cluster" and translator.groups:
            tree.setdefault("cluster", {})["nodes"] = translator.groups
    return tree


def _render_all(translator: Translator, title: str, notes: Sequence[str]) -> str:
    lines = [HEAD.format(name=title)]
    for head, items in (("Left out, or to be looked at", notes), ("Taken", translator.taken)):
        if items:
            lines.append(f"#\n# {head}:\n")
            lines += [f"#   {item}\n" for item in items]
    return "".join(lines) + _render(build_tree(translator), translator.comments)


def _render(conf: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    lines: list[str] = []
    for key, value in conf.items():
        if isinstance(value, dict) and key not in ("program", "env"):
            inner = {name: item for name, item in value.items() if item not in ({}, [])}
            if inner:
                lines.append(f"{key}:")
            for name, item in inner.items():
                lines += _render_key("  ", name, item, comments.get(f"{key}.{name}"))
        elif value not in (None, {}, []):
            lines += _render_key("", key, value, comments.get(key))
    return "\n".join(lines) + "\n"


def _render_key(indent: str, name: str, value: Any, comment: str | None) -> list[str]:
    if name == "nodes":
        groups = [{key: item for key, item in group.items() if item is not None} for group in value]
        return [f"{indent}nodes:", *(f"{indent}  - {render_value(group)}" for group in groups)]
    line = f"{indent}{name}: {render_value(value)}"
    return [f"{line:<34}  # {comment}" if comment else line]


def _get_count(block: JobBlock | None) -> int | None:
    value = block.options.get("nodes") if block is not None else None
    return to_number(value[0]) if value is not None else None


def _choose_same(blocks: list[JobBlock], total: int | None) -> JobBlock | None:
    fitting = [block for block in blocks if _get_count(block) == total]
    return next(iter(fitting or blocks), None)


def _choose_mixed(blocks: list[JobBlock], total: int | None) -> list[JobBlock | None]:
    """The master's job script, of one node, and the slaves'."""
    master = next((block for block in blocks if _get_count(block) == 1), None)
    others = [block for block in blocks if block is not master]
    if master is None and len(others) > 1:
        master, *others = others
    fitting = [block for block in others if total and _get_count(block) == total - 1]
    return [master, next(iter(fitting or others), None)]


def _count_slaves(chosen: list[JobBlock | None], total: int | None) -> int:
    return total - 1 if total is not None else _get_count(chosen[1]) or 1


def spell(assignment: Assignment) -> str:
    text = f"{assignment.name}={assignment.raw}"
    return "".join(char if char.isprintable() else "?" for char in redact_string(text))
