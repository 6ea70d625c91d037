"""Build the start of a conf's program, of any kind: command, environment, and files. Pure
functions.

File contents are passed in as an argument (`ProgramFiles`, read by `Starter.read_files`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from varuna_core.facts.catalogue.known_line import KnownLine, Scope
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action, Remedy, Target
from varuna_core.records.plan import escape_placeholders, fill_node_keys
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import render_training
from vjob.jobs.conf.parse import FUNCTION_REFUSED
from vjob.jobs.conf.schema import FUNCTION, JobConf, NodeGroup
from vjob.jobs.conf.world_size import get_replicas, get_world, require_number
from vjob.jobs.errors import InputError, KeyProblem
from vjob.jobs.programs import deepspeed, megatron
from vjob.jobs.programs.launchers import (
    find_in_script,
    find_launcher,
    is_python,
)
from vjob.jobs.programs.megatron import Checkout, find_checkout
from vjob.jobs.programs.training import build_training

MOST_SCRIPT = 100_000
"""Most bytes of a shell script that are read to find the launcher that it calls."""
PROFILE_OUTPUT = "%{folder}/attempt-%{attempt}/ranks/%{rank}"

RUNTIME: Mapping[str, str] = {"python": "3.10", "torch": "2.9", "numpy": "1.26"}
"""The oldest versions of packages with which varuna_core trains; setup.cfg requires the same
versions from pip."""
NO_APEX = (
    "train.optimizer.apex: true needs NVIDIA's apex with its compiled parts (PyPI's package of "
    "that name is a different one): set it to auto or false, or use an image that has it, such "
    "as that of containers/recipes/gpu.Dockerfile"
)
NO_TORCHAO = (
    "train.precision: fp8 needs torchao: pip install 'vjob[fp8]' in the ranks' Python, or set bf16"
)


@dataclass(frozen=True, kw_only=True)
class ProgramFiles:
    """Contents of the files on which the start of a program depends."""

    checkout: Checkout | None = None
    """The Megatron-LM checkout; None means the newest release's traits at the conf's path."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The user's ds_config."""
    interpreter: str = ""
    """The interpreter that an executable script's `#!` names, unless it is Python."""
    is_led: bool = False
    """True if PYTHONPATH leads to a module's copy, instead of the current folder."""
    launcher: str = ""
    """The launcher that a shell script calls to start ranks, and the calling line."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The way in which a run's processes are started (a value of `program.launch`), and the reason
    for this choice."""

    name: str
    why: str = ""
    """The reason; empty if it is obvious."""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" if self.why else self.name


class Starter:
    """The start of one kind of program; this base class has what most kinds share."""

    def read_files(self, conf: JobConf) -> ProgramFiles:
        """Read what the start depends on; raise InputError if the program cannot do as asked."""
        return ProgramFiles()

    def build_interpreter(self, conf: JobConf, found: ProgramFiles, python: str) -> tuple[str, ...]:
        """Return the words of the command line that precede the program's own words, such as the
        interpreter."""
        return (python, "-u")

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        """Return the script and its arguments."""
        return (conf.program.path or "", *conf.program.args)

    def build_rank_options(self, conf: JobConf, found: ProgramFiles) -> tuple[str, ...]:
        """Return arguments with placeholders, for words that differ by rank or attempt."""
        return ()

    def build_files(
        self, conf: JobConf, found: ProgramFiles, folder: str, replicas: int
    ) -> dict[str, str]:
        """Return files that the program reads, by name in the folder."""
        return {}

    def build_env(self, conf: JobConf) -> dict[str, str]:
        """Return variables that the program needs; the conf's own override them."""
        return {}

    def list_modules(self, conf: JobConf) -> tuple[tuple[str, str], ...]:
        """Return modules that a key of the conf requires, each with what to do if it is missing."""
        return ()

    def list_packages(self, conf: JobConf, found: ProgramFiles) -> Mapping[str, str]:
        """Return packages that the program needs in the ranks' Python, each with its oldest usable
        version, or empty for any; `python` stands for that Python."""
        return {}

    def build_group_env(self, group: NodeGroup) -> dict[str, str]:
        return {}

    def list_problems(self, conf: JobConf) -> Iterator[KeyProblem]:
        """Yield settings of the conf that the program does not support."""
        yield from ()

    def marks_steps(self, conf: JobConf, found: ProgramFiles) -> bool:
        """Return True if the program itself tells a profiler which steps to record."""
        return False


class Own(Starter):
    """A user's program that is not a script file; this class itself is for Python modules."""

    def build_interpreter(self, conf: JobConf, found: ProgramFiles, python: str) -> tuple[str, ...]:
        return (python, "-u", *(("-P",) if found.is_led else ()), "-m")

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        return (conf.program.module or "", *conf.program.args)

    def find_launcher(self, conf: JobConf, found: ProgramFiles) -> str:
        """Return the launcher that the program is or calls; empty if none is known."""
        return find_launcher(("python", "-m", *self.build_words(conf, found, "")))


class Command(Own):
    """A user's command, which runs unchanged."""

    def build_interpreter(self, conf: JobConf, found: ProgramFiles, python: str) -> tuple[str, ...]:
        return ()

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        return (*conf.program.command, *conf.program.args)

    def find_launcher(self, conf: JobConf, found: ProgramFiles) -> str:
        return find_launcher(self.build_words(conf, found, ""))


class Script(Own):
    """A user's script."""

    def read_files(self, conf: JobConf) -> ProgramFiles:
        return read_first_line(conf)

    def build_interpreter(self, conf: JobConf, found: ProgramFiles, python: str) -> tuple[str, ...]:
        return () if found.interpreter else (python, "-u")

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        return (conf.program.path or "", *conf.program.args)

    def find_launcher(self, conf: JobConf, found: ProgramFiles) -> str:
        return found.launcher

    def build_rank_options(self, conf: JobConf, found: ProgramFiles) -> tuple[str, ...]:
        if conf.program.arguments != "varuna":
            return ()
        return (
            "--rank=%{rank}",
            "--local_rank=%{local_rank}",
            "--stage_to_rank_map=%{stage_map}",
            f"--chunk_size={require_number(conf.train.micro_batch_size)}",
            "--batch-size=%{batch_share}",
        )

    def list_problems(self, conf: JobConf) -> Iterator[KeyProblem]:
        key, value = "program.arguments", conf.program.arguments
        batch = conf.train.global_batch_size
        if value != "varuna":
            return
        if batch is None:
            message = "needs train.global_batch_size: --batch-size is a replica's share of it"
            yield key, value, message
        if conf.morph.mode == "world":
            yield key, value, "conflicts with morph.mode: world, which has no stages"
        elif conf.morph.enabled and batch is not None:
            unit = (get_replicas(conf) or 1) * require_number(conf.train.micro_batch_size)
            if batch % unit:
                message = f"must be a multiple of {unit}: every replica is given the same share"
                yield "train.global_batch_size", batch, message


class BuiltIn(Starter):
    """pretrain_gpt and pretrain_bert: `program.pyz` with training.json, both in the run folder."""

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        run = RunFolder(Path(folder))
        return (str(run.program), str(run.training))

    def build_files(
        self, conf: JobConf, found: ProgramFiles, folder: str, replicas: int
    ) -> dict[str, str]:
        training = build_training(conf, replicas)
        assert training is not None, "a built-in program has training settings"
        return {RunFolder(Path(folder)).training.name: render_training(training)}

    def list_modules(self, conf: JobConf) -> tuple[tuple[str, str], ...]:
        asked: tuple[tuple[str, str], ...] = ()
        if conf.train.optimizer.apex is True:
            asked += (("amp_C", NO_APEX), ("apex", NO_APEX))
        if conf.train.precision == "fp8":
            asked += (("torchao", NO_TORCHAO),)
        return asked

    def list_packages(self, conf: JobConf, found: ProgramFiles) -> Mapping[str, str]:
        return RUNTIME


class Megatron(Starter):
    """Megatron-LM's own script, in the user's checkout."""

    def read_files(self, conf: JobConf) -> ProgramFiles:
        if conf.program.path is None:
            return ProgramFiles()
        found = ProgramFiles(checkout=find_checkout(conf.program.path))
        problems = list(megatron.find_unable(conf, _get_checkout(conf, found)))
        if problems:
            raise InputError("\n  ".join(f"{key}: {message}" for key, _, message in problems))
        return found

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        checkout = _get_checkout(conf, found)
        world, replicas = get_world(conf), get_replicas(conf) or 1
        args = megatron.build_arguments(conf, checkout, replicas=replicas, world=world)
        return (checkout.script, *args)

    def build_rank_options(self, conf: JobConf, found: ProgramFiles) -> tuple[str, ...]:
        if "--local_rank" in _get_checkout(conf, found).flags:
            return ("--local_rank=%{local_rank}",)  # torch.distributed.launch gave it in its time
        return ()

    def build_env(self, conf: JobConf) -> dict[str, str]:
        # Tensor parallelism orders its communication before its kernels by it.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def list_packages(self, conf: JobConf, found: ProgramFiles) -> Mapping[str, str]:
        # Core takes torch's optimizers where there is no apex; before, it was imported always.
        is_core = _get_checkout(conf, found).generation == "core"
        return {"torch": ""} if is_core else {"torch": "", "apex": ""}

    def list_problems(self, conf: JobConf) -> Iterator[KeyProblem]:
        yield from megatron.list_problems(conf)

    def marks_steps(self, conf: JobConf, found: ProgramFiles) -> bool:
        return _get_checkout(conf, found).generation == "core"


class DeepSpeed(Starter):
    """A user's script for DeepSpeed, with a ds_config completed by the conf."""

    def read_files(self, conf: JobConf) -> ProgramFiles:
        program = conf.program
        if program.config is None:
            return ProgramFiles()
        try:
            text = Path(program.config).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"program.config {program.config} cannot be read here: {error}; vjob completes "
                "it before the run, so a copy inside an image is not enough"
            ) from None
        return ProgramFiles(config=deepspeed.parse_config(text, program.config))

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        config = f"{folder}/{deepspeed.CONFIG_FILE}"
        return (conf.program.path or "", *deepspeed.build_arguments(conf, config))

    def build_rank_options(self, conf: JobConf, found: ProgramFiles) -> tuple[str, ...]:
        return ("--local_rank=%{local_rank}",)  # as DeepSpeed's own launcher calls scripts

    def build_files(
        self, conf: JobConf, found: ProgramFiles, folder: str, replicas: int
    ) -> dict[str, str]:
        config = deepspeed.build_config(conf, found.config, replicas=replicas)
        return {deepspeed.CONFIG_FILE: deepspeed.render_config(config)}

    def build_env(self, conf: JobConf) -> dict[str, str]:
        return deepspeed.build_env(conf.cluster.nodes)

    def build_group_env(self, group: NodeGroup) -> dict[str, str]:
        return deepspeed.build_group_env(group)

    def list_packages(self, conf: JobConf, found: ProgramFiles) -> Mapping[str, str]:
        return {"torch": "", "deepspeed": ""}

    def list_problems(self, conf: JobConf) -> Iterator[KeyProblem]:
        yield from deepspeed.list_problems(conf)


class Function(Starter):
    """A pickled function, called by `function.pyz` with the pickle in the run folder."""

    def build_words(self, conf: JobConf, found: ProgramFiles, folder: str) -> tuple[str, ...]:
        return (str(RunFolder(Path(folder)).function), folder)

    def build_env(self, conf: JobConf) -> dict[str, str]:
        # For submitit, whose ranks these are; and whether a checkpoint may ask for a requeue.
        may_requeue = {"VJOB_REQUEUE": "1"} if conf.cluster.requeue else {}
        return {"SUBMITIT_EXECUTOR": "vjob", **may_requeue}


PROGRAMS: dict[str, Starter] = {
    "script": Script(),
    "module": Own(),
    "command": Command(),
    "pretrain_gpt": BuiltIn(),
    "pretrain_bert": BuiltIn(),
    "megatron": Megatron(),
    "deepspeed": DeepSpeed(),
    FUNCTION: Function(),
}
"""Starters by the conf's kind of program (`ProgramKind` in jobs/conf/schema.py)."""


def get_starter(conf: JobConf) -> Starter:
    return PROGRAMS[conf.program.kind]


def refuse_function(conf: JobConf) -> None:
    """Refuse a function in a submit from a conf, which names it but does not contain it."""
    if conf.program.kind == FUNCTION:
        raise InputError(f"program.function: {FUNCTION_REFUSED}")


def build_command(conf: JobConf, found: ProgramFiles, folder: str, python: str) -> tuple[str, ...]:
    """Return each rank's command, with placeholders for words that differ by rank."""
    starter = get_starter(conf)
    before = map(escape_placeholders, starter.build_interpreter(conf, found, python))
    words = map(escape_placeholders, starter.build_words(conf, found, folder))
    script, *args = map(fill_node_keys, words)
    own = starter.build_rank_options(conf, found)
    return (*before, script, *own, *args)


def choose_launch(conf: JobConf, found: ProgramFiles, written: Collection[str]) -> Launch:
    """Choose the launch of the conf's program; `written` are the keys that the user wrote."""
    starter, asked = get_starter(conf), conf.program.launch
    if not isinstance(starter, Own):
        return Launch(name="torchrun")
    if asked != "auto":
        return Launch(name=asked)
    launcher = starter.find_launcher(conf, found)
    if launcher:
        return Launch(name="node", why=f"{launcher} starts the ranks of its node")
    is_plain = conf.program.arguments == "none" and not conf.morph.enabled
    if get_world(conf) == 1 and is_plain and not list_layout_keys(written):
        return Launch(name="python", why="one rank, so it has no RANK and no MASTER_ADDR")
    if starter.build_interpreter(conf, found, ""):
        return Launch(name="torchrun")
    return Launch(name="torchrun", why=f"one process a rank, {get_world(conf)} in all")


def describe_launch(conf: JobConf, written: Collection[str]) -> Launch:
    """Read the program's files, and choose how its processes are launched."""
    return choose_launch(conf, get_starter(conf).read_files(conf), written)


def list_layout_keys(written: Collection[str]) -> list[str]:
    """Return those written keys that define how ranks share the model and the batch."""
    return [key for key in written if key.startswith("parallel.") and key != "parallel.profile"]


def read_first_line(conf: JobConf) -> ProgramFiles:
    """Read what the first line of a script says about its start; raise InputError if the script
    cannot be started by this line."""
    path = conf.program.path or ""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_SCRIPT).decode("utf-8", "replace")
        is_executable = os.access(path, os.X_OK)
    except OSError:  # in an image, or on the nodes: of Python, as far as is known
        return ProgramFiles()
    first = text.partition("\n")[0]
    words = first[2:].split() if first.startswith("#!") else []
    if words and PurePath(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    interpreter = PurePath(words[0]).name if words else ""
    if not interpreter or is_python(interpreter):
        return ProgramFiles()
    if not is_executable:
        raise InputError(
            f"program.script: {path} begins with {first} and is not executable: chmod +x {path}, "
            f"or write program: {{command: [{interpreter}, {path}]}}"
        )
    launcher, line = find_in_script(text)
    return ProgramFiles(
        interpreter=interpreter,
        launcher=f"{launcher} in line {line} of {PurePath(path).name}" if launcher else "",
    )


def build_files(conf: JobConf, found: ProgramFiles, folder: str) -> dict[str, str]:
    """Return files that the program reads, by name in the folder."""
    return get_starter(conf).build_files(conf, found, folder, get_replicas(conf) or 1)


def list_problems(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield settings of the conf that the program, or its profiler, does not support."""
    yield from get_starter(conf).list_problems(conf)
    if conf.profile.nsys and conf.profile.ncu:
        yield "profile.ncu", True, "conflicts with profile.nsys; a rank can have one profiler"


def describe_missing_module(python: str, *, in_container: bool) -> KnownLine:
    """Return the known line for a missing module, the most common failure of a first run."""
    where = "the image's python3" if in_container else python
    return KnownLine(
        "missing module",
        r"exited \d+: ModuleNotFoundError: ",
        Scope.CONTAINER,
        cause=EndCause.RANK_EXCEPTION,
        remedies=(
            Remedy(Action.INSTALL, value=f"it for {where}"),
            Remedy(Action.CHANGE, Target.PYTHON, detail="(`vjob run --python`)", instead=True),
            Remedy(
                Action.SET,
                Target.ENVIRONMENT,
                "PYTHONPATH",
                "to the folder of a module of your own",
                instead=True,
            ),
        ),
    )


def build_profiler_prefix(conf: JobConf, *, marks_steps: bool) -> tuple[str, ...]:
    """Return NVIDIA's profiler with its options, to precede a rank's command; empty if not asked
    for.

    Its output is beside the rank's own: `attempt-<n>/ranks/<rank>.nsys-rep` or `.ncu-rep`.
    Megatron-LM marks the steps to profile itself (`--profile`); a script is profiled whole, unless
    it calls torch.cuda.profiler.start() and `profile.options` says so.
    """
    profile = conf.profile
    if profile.nsys:
        capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        # No sampling of CPUs: it needs rights that clusters do not give.
        words = ["nsys", "profile", f"--output={PROFILE_OUTPUT}", "--force-overwrite=true"]
        words += ["--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    elif profile.ncu:
        capture = ["--profile-from-start=off"]
        words = ["ncu", f"--export={PROFILE_OUTPUT}", "--force-overwrite", "--target-processes=all"]
    else:
        return ()
    options = [word.replace("%{", "%{percent}{") for word in profile.options]
    return (*words, *(capture if marks_steps else ()), *options)


def _get_checkout(conf: JobConf, found: ProgramFiles) -> Checkout:
    path = conf.program.path or ""
    script = path if path.endswith(".py") else f"{path}/pretrain_gpt.py"
    return found.checkout or Checkout(script=script)
