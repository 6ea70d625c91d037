"""Check a whole conf: keys against each other, names, and files that must exist.

Each check yields a KeyProblem; `locate` adds the places that the reader found. Facts known only on
a node, such as the existence of a mount's source, are left to the agent's preflight.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import dropwhile
from pathlib import Path, PurePath

from varuna_core.agent.gpu.accelerator import list_variables
from varuna_core.agent.setup.world import TORCHRUN_NAMES
from varuna_core.plugins import list_plugins
from vjob.containers.reference import BadReference, parse_reference
from vjob.containers.registry import RUNTIMES
from vjob.jobs.conf import references
from vjob.jobs.conf.fates import check_effect
from vjob.jobs.conf.loading.check_bounds import check_numbers, locate
from vjob.jobs.conf.loading.check_cluster import check_cluster, check_groups
from vjob.jobs.conf.loading.check_layout import check_layout, check_partition, check_ranks
from vjob.jobs.conf.paths import split_blend
from vjob.jobs.conf.schema import (
    BUILT_IN,
    FUNCTION,
    OWN,
    Container,
    JobConf,
    Mlflow,
    Parallel,
)
from vjob.jobs.conf.world_size import close_layout, get_world
from vjob.jobs.errors import KeyProblem, Problem
from vjob.jobs.programs import start
from vjob.jobs.programs.code.modules import find_module
from vjob.jobs.programs.launchers import is_python, split_module
from vjob.jobs.programs.megatron import SCRIPTS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STORES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
"""URL schemes of MLflow tracking servers and stores."""
_MODULE = re.compile(r"(?!.*\.py$)[^\W\d]\w*(\.[^\W\d]\w*)*")
_SPLIT = re.compile(r"[0-9.]+(,[0-9.]+){2}")
# What the agent sets for each rank, and the key that decides it.
_OWN_ENV: Mapping[str, str] = {
    "RANK": "follows from cluster.nodes",
    "LOCAL_RANK": "follows from cluster.nodes",
    "WORLD_SIZE": "follows from cluster.nodes",
    "LOCAL_WORLD_SIZE": "follows from cluster.nodes",
    "MASTER_ADDR": "is the address of the first node of the first group",
    "MASTER_PORT": "is cluster.port",
}


def check_conf(
    conf: JobConf,
    lines: Mapping[str, str],
    *,
    base: Path | None = None,
    require_paths: bool = True,
    environ: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Return all problems; `lines` maps keys to places, `base` is the conf's folder.

    `environ` is the submitting shell's environment; without it, `pass_env` is not checked.
    """
    problems = [*check_numbers(conf), *check_groups(conf)]
    # A layout of impossible numbers would only repeat what is wrong with them.
    if all(key.startswith("prices.") for key, _, _ in problems):
        problems += [*check_layout(conf), *check_partition(conf), *check_ranks(conf)]
        launch = start.choose_launch(conf, start.ProgramFiles(), lines)
        problems += find_launch_problems(close_layout(conf), launch.name, lines)
    closed = close_layout(conf)
    problems += [
        *check_names(conf),
        *check_program(closed),
        *check_train(conf),
        *check_cluster(conf),
    ]
    problems += [*check_container(conf), *check_morph(conf), *check_others(conf)]
    problems += check_track(conf)
    problems += [*check_effect(conf, lines), *references.list_problems(conf)]
    if environ is not None:
        problems += find_unset(conf, environ)
    if require_paths:
        problems += find_missing_paths(conf, base)
    return locate(problems, lines)


def list_own_env() -> tuple[str, ...]:
    """Return the variables that the agent sets for each rank."""
    return (*TORCHRUN_NAMES, *list_variables())


def check_names(conf: JobConf) -> Iterator[KeyProblem]:
    if not _NAME.fullmatch(conf.name):
        allowed = "letters, digits, -, _ and ., starting with a letter or digit, at most 64"
        yield "name", conf.name, f"names a folder: {allowed}"
    elif re.fullmatch(r"last|L?\d+", conf.name):
        yield "name", conf.name, "would be read as a job: `last` and job ids cannot be names"
    environments = [("env", conf.env)]
    for index, group in enumerate(conf.cluster.nodes):
        environments.append((f"cluster.nodes[{index}].env", group.env))
    for parent, env in environments:
        for name, value in env.items():
            yield from _check_env_name(f"{parent}.{name}", name, value)
    for index, name in enumerate(conf.pass_env):
        yield from _check_env_name(f"pass_env[{index}]", name, name)


def _check_env_name(key: str, name: str, value: str) -> Iterator[KeyProblem]:
    if not _ENV_NAME.fullmatch(name):
        yield key, value, "a name has letters, digits and _, and does not begin with a digit"
    elif name in _OWN_ENV:
        yield key, value, f"{name} is set by vjob: it {_OWN_ENV[name]}"
    elif name in TORCHRUN_NAMES:
        yield key, value, f"{name} is set by vjob for each rank, as torchrun sets it"
    elif name in list_variables():
        yield key, value, f"{name} is set by vjob to the value of cluster.nodes[].devices"
    elif name.startswith("VJOB_"):
        yield key, value, "names that begin with VJOB_ are reserved for vjob"


def find_unset(conf: JobConf, environ: Mapping[str, str]) -> Iterator[KeyProblem]:
    """Yield variables in `pass_env` that the submitting shell does not have."""
    for index, name in enumerate(conf.pass_env):
        if name not in environ and _ENV_NAME.fullmatch(name):
            yield f"pass_env[{index}]", name, "is not set in this shell; set it, or remove it here"


def check_program(conf: JobConf) -> Iterator[KeyProblem]:
    kind = conf.program.kind
    if conf.program.path == "":
        yield f"program.{kind}", "", "must name a file or folder"
    if conf.program.python == "":
        yield "program.python", "", "must name an interpreter; leave it out for the default"
    yield from start.list_problems(conf)
    if kind == "module" and not _MODULE.fullmatch(conf.program.module or ""):
        message = "must be a module's name, such as pkg.train; a file is program.script"
        yield "program.module", conf.program.module, message
    if kind == "command" and not any(conf.program.command):
        yield "program.command", "", "must not be empty: it names the program to run"
    if conf.train.precision == "fp8" and kind in ("megatron", "deepspeed"):
        message = f"is for the built-in programs; use bf16 and {kind}'s own options for float8"
        yield "train.precision", "fp8", message
    if not kind.startswith("pretrain_"):
        return
    if conf.model is None:
        yield "model", None, f"is required by {kind}; give a name such as gpt2-small, or a mapping"
    if conf.data is None:
        yield "data", None, f"is required by {kind}; give {{prefix: ...}} or {{synthetic: true}}"
    elif kind == "pretrain_bert" and conf.data.prefix and not conf.data.synthetic:
        if conf.data.vocab is None:
            yield "data.vocab", None, "is required by pretrain_bert; give the data's vocab.txt"
        if len(split_blend(conf.data.prefix)) > 1:
            message = "pretrain_bert reads one data set; merge the texts with `vjob data prepare`"
            yield "data.prefix", conf.data.prefix, message
    if conf.parallel.zero == 3 and conf.train.compile:
        yield "parallel.zero", 3, "conflicts with train.compile; use 1 or 2"
    if conf.parallel.zero > 1 and conf.train.cuda_graphs:
        yield "parallel.zero", conf.parallel.zero, "conflicts with train.cuda_graphs; use 0 or 1"
    if conf.parallel.zero == 3 and conf.train.optimizer.name == "lamb":
        message = "splits tensors, but train.optimizer.name lamb needs whole ones; use 1 or 2"
        yield "parallel.zero", 3, message
    if conf.parallel.recompute == "selective" and conf.train.compile:
        message = "conflicts with train.compile, which fuses operations; use full"
        yield "parallel.recompute", "selective", message
    if conf.parallel.recompute == "offload":
        yield from _check_offload(conf.parallel)
    if conf.parallel.zero == 3 and conf.parallel.tensor > 1:
        message = "3 is not supported with parallel.tensor above 1; use 1 or 2"
        yield "parallel.zero", 3, message


def find_launch_problems(
    conf: JobConf, launch: str, written: Collection[str]
) -> Iterator[KeyProblem]:
    """Yield settings of the conf that this launch does not allow."""
    key, world = "program.launch", get_world(conf)
    layout = start.list_layout_keys(written)
    if launch == "python":
        if world > 1:
            message = (
                f"runs one process, but cluster.nodes has {world} ranks: use torchrun, or one rank"
            )
            yield key, launch, message
        if conf.morph.enabled:
            yield key, launch, "conflicts with morph.enabled, whose ranks communicate: use torchrun"
    if launch == "node" and conf.morph.enabled and conf.morph.mode != "world":
        message = "must be 'world' with program.launch: node, whose program places its own ranks"
        yield "morph.mode", conf.morph.mode, message
    if launch == "node" and conf.profile.ranks != "all":
        message = "is for single ranks, but program.launch: node uses a launcher: remove it"
        yield "profile.ranks", conf.profile.ranks, message
    if launch in ("python", "node") and layout and not (launch == "python" and world > 1):
        referenced = references.list_referenced(conf)
        for name in layout:
            if name not in referenced:
                message = (
                    f"has no effect with program.launch: {launch}: remove it, or pass it as "
                    f"${{{name}}} in program.args, or use launch: torchrun"
                )
                yield name, references.find_value(conf, name), message


def suggest_program(text: str) -> str:
    """Suggest how to write a command that was given as a script; empty for a single word."""
    try:
        first, *rest = shlex.split(text)
    except ValueError:
        return ""
    if not rest:
        return ""
    kind, words = "command", [first, *rest]
    if is_python(PurePath(first).name):
        module, given = split_module(rest)
        if module:
            kind, words = "module", [module, *given]
        else:
            files = [*dropwhile(lambda word: word.startswith("-"), rest)]
            kind, words = ("script", files) if files else (kind, words)
    elif first.endswith(".py"):
        kind = "script"
    named = json.dumps(shlex.join(words)) if kind == "command" else words[0]
    args = words[1:] if kind != "command" else []
    shown = f", args: {json.dumps(shlex.join(args))}" if args else ""
    return f"; write program: {{{kind}: {named}{shown}}}"


def _check_offload(parallel: Parallel) -> Iterator[KeyProblem]:
    from varuna_core.schedule.registry import SCHEDULES

    if parallel.zero == 3:
        yield "parallel.zero", 3, "conflicts with parallel.recompute: offload; use 1 or 2"
    if parallel.schedule != "auto" and SCHEDULES[parallel.schedule].recomputes:
        message = f"conflicts with parallel.schedule: {parallel.schedule}, which recomputes"
        yield "parallel.recompute", "offload", message


def check_train(conf: JobConf) -> Iterator[KeyProblem]:
    train, data = conf.train, conf.data
    if train.schedule.min_lr > train.optimizer.lr:
        message = f"must be at most train.optimizer.lr, {train.optimizer.lr}"
        yield "train.schedule.min_lr", train.schedule.min_lr, message
    if train.optimizer.offload and train.optimizer.apex is True:
        message = "conflicts with train.optimizer.apex, whose kernels run on GPUs; remove one"
        yield "train.optimizer.offload", True, message
    warmup, decay = train.schedule.warmup_steps, train.schedule.decay_steps
    if decay is not None and decay < warmup:
        message = f"must be at least train.schedule.warmup_steps, {warmup}"
        yield "train.schedule.decay_steps", decay, message
    local = train.checkpoint.local
    if local is not None and not local.startswith("/"):
        yield "train.checkpoint.local", local, "must be an absolute path of a folder on the node"
    if local is not None and train.checkpoint.folder is None:
        yield "train.checkpoint.local", local, "needs train.checkpoint.folder to copy to"
    if data is None:
        return
    if data.prefix is None and not data.synthetic:
        yield "data", {}, "must have prefix, or synthetic: true"
    if data.prefix is not None and data.synthetic:
        yield "data.synthetic", True, "conflicts with data.prefix; remove one"
    if not _SPLIT.fullmatch(data.split) or _sum_split(data.split) <= 0:
        yield (
            "data.split",
            data.split,
            'must be three shares with a sum above 0, such as "969,30,1"',
        )


def _sum_split(split: str) -> float:
    try:
        return sum(map(float, split.split(",")))
    except ValueError:
        return 0


def check_container(conf: JobConf) -> Iterator[KeyProblem]:
    container = conf.container
    known = ("auto", "none", *RUNTIMES, *list_plugins("vjob.container_runtimes"))
    if container.image == "":
        yield "container.image", "", "must name an image; null runs without a container"
    if container.image is None:
        if container.runtime not in ("auto", "none"):
            yield "container.runtime", container.runtime, "needs container.image"
        if container.mounts:
            yield "container.mounts", container.mounts, "needs container.image"
    elif container.runtime not in known:
        message = f"is not supported by this version of vjob; use {', '.join(RUNTIMES)} or none"
        yield "container.runtime", container.runtime, message
    for index, mount in enumerate(container.mounts):
        source, colon, target = mount.removesuffix(":ro").partition(":")
        if not (source and colon and target) or ":" in target:
            message = "must be source:target or source:target:ro, such as data:/data"
            yield f"container.mounts[{index}]", mount, message
        elif not target.startswith("/"):
            yield f"container.mounts[{index}]", mount, f"the target {target} must be absolute"
    if container.workdir is not None and not container.workdir.startswith("/"):
        message = "must be an absolute path of a folder in the container"
        yield "container.workdir", container.workdir, message


def check_morph(conf: JobConf) -> Iterator[KeyProblem]:
    morph, nodes = conf.morph, sum(group.count for group in conf.cluster.nodes)
    low, high = morph.min_nodes, morph.max_nodes
    if low is not None and high is not None and low > high:
        yield "morph.min_nodes", low, f"must be at most morph.max_nodes, {high}"
    elif morph.enabled and low is not None and low > nodes:
        yield "morph.min_nodes", low, f"must be at most the {nodes} nodes of cluster.nodes"
    elif morph.enabled and high is not None and high < nodes:
        yield "morph.max_nodes", high, f"must be at least the {nodes} nodes of cluster.nodes"
    elif morph.enabled and morph.grow == "auto" and high is None:
        message = f"needs morph.max_nodes, the limit to grow to (cluster.nodes has {nodes})"
        yield "morph.grow", "auto", message
    for key, value in (("grow", morph.grow == "auto"), ("leave_slow", morph.leave_slow)):
        if value and not morph.enabled:
            yield f"morph.{key}", getattr(morph, key), "needs morph.enabled: true"
    if morph.enabled and morph.leave_slow and not conf.profile.timeline:
        message = "needs profile.timeline: true, for the times of each rank"
        yield "morph.leave_slow", True, message
    if morph.enabled:
        yield from _check_morph_program(conf)


def check_others(conf: JobConf) -> Iterator[KeyProblem]:
    mail, webhook = conf.notify.mail, conf.notify.webhook
    if mail is not None and ("@" not in mail or not mail.isprintable() or " " in mail):
        yield "notify.mail", mail, "must be an email address"
    if webhook is not None and not webhook.startswith(("https://", "http://")):
        yield "notify.webhook", webhook, "must be a URL that begins with https:// or http://"
    if conf.progress is not None:
        # The patterns of all programs, which most confs need not pay for.
        from varuna_core.records.logs.progress import PatternError, compile_pattern

        try:
            compile_pattern(conf.progress)
        except PatternError as error:
            yield "progress", conf.progress, str(error)
    for key in ("workdir", "log_folder", "train.checkpoint.folder", "program.path", "data.prefix"):
        path = references.find_value(conf, key)
        if isinstance(path, str) and not path.isprintable():
            yield key, path, "a path must not contain line breaks or control characters"


def check_track(conf: JobConf) -> Iterator[KeyProblem]:
    wandb, mlflow, metrics = conf.track.wandb, conf.track.mlflow, conf.track.openmetrics
    if wandb is not None and not re.fullmatch(r"[^/\\#?%:\s]{1,128}", wandb.project):
        message = "must have at most 128 characters, and no spaces or any of / \\ # ? % :"
        yield "track.wandb.project", wandb.project, message
    if mlflow is not None:
        yield from _check_mlflow(mlflow)
    for name in conf.track.plugins:
        if name not in list_plugins("vjob.trackers"):
            message = "is not an installed plug-in of vjob.trackers (docs/plugins.md)"
            yield f"track.plugins.{name}", name, message
    if metrics == "":
        yield "track.openmetrics", "", "must name a file, such as /var/lib/node_exporter/gpt.prom"
    store = mlflow.uri if mlflow is not None and mlflow.uri.startswith("/") else None
    if conf.container.image is None or conf.container.runtime == "none":
        return
    targets = [mount.split(":")[1] for mount in conf.container.mounts if mount.count(":")]
    for key, path in (("track.openmetrics", metrics), ("track.mlflow.uri", store)):
        if path and not any(_is_under(path, Path(target)) for target in targets):
            folder = os.path.dirname(path)
            message = f"is not visible in the container: add {folder}:{folder} to container.mounts"
            yield key, path, message


def _check_mlflow(mlflow: Mlflow) -> Iterator[KeyProblem]:
    scheme, colon, rest = mlflow.uri.partition("://")
    if not mlflow.experiment:
        yield "track.mlflow.experiment", "", "must name an experiment"
    if not mlflow.uri:
        yield "track.mlflow.uri", "", "must be a URL, sqlite:////shared/mlflow.db, or a folder"
    elif colon and "@" in rest.partition("/")[0]:
        message = (
            "contains a password: remove it and set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD in the environment (docs/track.md)"
        )
        yield "track.mlflow.uri", mlflow.uri, message
    elif colon and scheme not in _STORES:
        yield "track.mlflow.uri", mlflow.uri, f"must begin with {'://, '.join(_STORES)}://"


def find_missing_paths(conf: JobConf, base: Path | None) -> Iterator[KeyProblem]:
    """Yield files that the job would miss, except those that the image or nodes may have."""
    program = conf.program
    path = None if program.kind == FUNCTION else program.path
    if path is not None and not _may_be_elsewhere(path, conf.container, base):
        key = f"program.{program.kind}"
        if program.kind == "megatron":
            is_script = path.endswith(".py")
            if not (os.path.isfile if is_script else os.path.isdir)(path):
                message = "does not exist; give a Megatron-LM checkout, or a script in one"
                yield key, path, _explain(message, path)
            elif not is_script and not any(Path(path, name).is_file() for name in SCRIPTS):
                message = f"has no {SCRIPTS[0]}; name a Megatron-LM checkout, or the script in it"
                yield key, path, message
        elif not Path(path).is_file():
            written = os.path.relpath(path, base) if base is not None else path
            better = suggest_program(written) if program.kind == "script" else ""
            yield key, path, _explain("is not a file", path) + better
    if program.module is not None and conf.container.image is None and base is not None:
        entries = conf.env.get("PYTHONPATH", "").split(os.pathsep)
        folders = [Path(conf.workdir or base, entry) for entry in ("", *filter(None, entries))]
        try:
            find_module(program.module, folders)
        except FileNotFoundError as error:
            yield "program.module", program.module, str(error)
    config = program.config
    if (
        config is not None
        and not Path(config).is_file()
        and not _may_be_elsewhere(config, conf.container, base)
    ):
        yield "program.config", config, _explain("is not a file", config)
    yield from _find_missing_data(conf, base)
    image = conf.container.image
    if image and image.startswith("/") and not os.path.exists(image):
        written = _spell_reference(image, base)
        message = f"not found; write an image from a registry as {written}"
        yield "container.image", image, _explain(message, image)
    for index, mount in enumerate(conf.container.mounts):
        source = mount.partition(":")[0]
        # Elsewhere it may be a disk of the nodes; their preflight looks for it.
        if base is not None and _is_under(source, base) and not os.path.exists(source):
            yield f"container.mounts[{index}]", mount, _explain(f"{source} not found", source)


def _find_missing_data(conf: JobConf, base: Path | None) -> Iterator[KeyProblem]:
    data = conf.data
    if data is None or data.synthetic:
        return
    for _, prefix in split_blend(data.prefix) if data.prefix else []:
        missing = [end for end in (".bin", ".idx") if not os.path.isfile(prefix + end)]
        if missing and not _may_be_elsewhere(prefix, conf.container, base):
            message = f"{' and '.join(prefix + end for end in missing)} not found"
            if prefix.endswith((".bin", ".idx")):
                message = "must be written without .bin or .idx"
            yield "data.prefix", prefix, _explain(message, prefix)
    vocab = data.vocab
    if vocab and not Path(vocab).is_file() and not _may_be_elsewhere(vocab, conf.container, base):
        yield "data.vocab", vocab, _explain("is not a file", vocab)


def _spell_reference(image: str, base: Path | None) -> str:
    """Turn a registry reference that was mistaken for a path back into a reference, such as
    `nvcr.io/nvidia/pytorch:25.11`."""
    name = os.path.relpath(image, base) if base is not None else image
    registry, slash, _ = name.partition("/")
    if slash and re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?|localhost(:\d+)?", registry):
        with contextlib.suppress(BadReference):
            return parse_reference(name).enroot
    return "docker://name:tag"


def _explain(message: str, path: str = "") -> str:
    return message + ("; variables are not expanded in paths" if "$" in path else "")


def _is_under(path: str, base: Path) -> bool:
    return Path(path).is_relative_to(base)


def _may_be_elsewhere(path: str, container: Container, base: Path | None) -> bool:
    """Return True for a path outside the conf's folder that may be inside the image."""
    return container.image is not None and (base is None or not _is_under(path, base))


def _check_morph_program(conf: JobConf) -> Iterator[KeyProblem]:
    """Refuse morphing for a program that cannot change its layout or has no checkpoints."""
    key, kind = "morph.enabled", conf.program.kind
    if kind not in (*BUILT_IN, *OWN):
        yield key, True, f"is for {', '.join((*BUILT_IN, *OWN))}, not for {kind}"
    elif kind in BUILT_IN and conf.train.checkpoint.folder is None:
        yield key, True, "needs train.checkpoint.folder, to resume after the loss of a node"
    if conf.container.runtime == "pyxis":
        yield key, True, "is not supported with pyxis: srun starts its container only once"
    if conf.morph.mode == "world":
        yield from _check_morph_world(conf)


def _check_morph_world(conf: JobConf) -> Iterator[KeyProblem]:
    """Refuse `morph.mode: world` for a built-in program, and together with pipeline stages."""
    parallel = conf.parallel
    if conf.program.kind in BUILT_IN:
        yield "morph.mode", "world", f"is for {', '.join(OWN)}; leave it out for {BUILT_IN[0]}"
        return
    asked = {"pipeline": parallel.pipeline, "partition": parallel.partition}
    for name, value in asked.items():
        if value not in (1, "auto"):
            message = "conflicts with morph.mode: world, which has no stages; use pipeline"
            yield f"parallel.{name}", value, message
