"""An old `_00_conf.sh`, and the #SBATCH lines of job scripts pasted along, as conf.yaml.

Nothing is executed, and nothing is dropped silently: what has no counterpart, or does not fit
together, is in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vjob.jobs.conf.document import render_value
from vjob.jobs.conf.loading.check import check_conf, list_own_env
from vjob.jobs.conf.loading.check_cluster import EPHEMERAL
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.redact import is_secret
from vjob.jobs.conf.shell_import.assignments import parse_shell_conf
from vjob.jobs.conf.shell_import.nodes import build_nodes
from vjob.jobs.conf.shell_import.values import Translator, spell, to_partition
from vjob.jobs.errors import ConfError

MODELS: Mapping[str, str] = {"small": "gpt2-small", "xl": "gpt2-xl"}
HEAD = """\
# Translated from an old shell conf. `vjob submit --dry-run` shows what it makes.
"""


def translate_shell_conf(text: str) -> tuple[str, list[str]]:
    """conf.yaml's text, and what the user should know or mend."""
    found = parse_shell_conf(text.replace("\0", ""))  # as bash does
    translator = Translator(found)
    conf = _build_conf(translator)
    for assignment in translator.left.values():
        translator.note(f"line {assignment.line}: {spell(assignment)} has no counterpart; left out")
    rendered = HEAD + _render(conf, translator.comments)
    return rendered, [*translator.notes, *_check_result(rendered)]


def _build_conf(translator: Translator) -> dict[str, Any]:
    take, number, flag = translator.take, translator.take_number, translator.take_flag
    model = take("MODEL", "model", lambda text: MODELS.get(text.lower()))
    if model == MODELS["small"]:
        translator.note(
            "MODEL=small is taken for gpt2-small, 12 layers of 768; compare it with NUM_LAYERS and "
            "HIDDEN_SIZE in an old job's output"
        )
    sbatch: dict[str, Any] = {}
    nodes, top = build_nodes(translator, sbatch)
    conf: dict[str, Any] = {"name": top.pop("name", model or "my-run")}
    conf["program"] = {"megatron": ".", "args": []}
    translator.comments["program"] = "the checkout that the shell conf lay in"
    translator.note(
        "program.megatron is the folder of this file, where the shell conf lay; write the path of "
        "your Megatron-LM checkout if it is another, and in args what _01_run_inter.sh passed"
    )
    if model is not None:
        conf["model"] = model
    train = {
        "steps": 50,
        "global_batch_size": number("GLOBAL_BATCH_SIZE", "train.global_batch_size"),
        "micro_batch_size": number("MICRO_BATCH_SIZE", "train.micro_batch_size"),
        "precision": "fp16",
        "log_every": 10,
    }
    for key, option in (("steps", "train-iters 50"), ("precision", "fp16")):
        translator.comments[f"train.{key}"] = f"_01_run_inter.sh passed --{option}"
    translator.comments["train.log_every"] = "_01_run_inter.sh passed --log-interval 10"
    conf["train"] = train
    conf["parallel"] = {
        "pipeline": number("PIPELINE_MP_SIZE", "parallel.pipeline"),
        "data": number("DP_SIZE", "parallel.data"),
        "tensor": number("TENSOR_MP_SIZE", "parallel.tensor"),
        "zero": {True: 1, False: 0, None: None}[flag("ZERO", "parallel.zero")],
        "partition": take("PARTITION", "parallel.partition", to_partition),
    }
    conf["cluster"] = {**top, "port": _take_port(translator), "sbatch": sbatch, "nodes": nodes}
    reload = flag("RELOAD_CONTAINER", "container.reuse")
    if reload:
        translator.note(
            "RELOAD_CONTAINER=true is container.reuse: false: each run unpacks the image anew; "
            "auto does so only for an image that changed"
        )
    image = take("CONTAINER_IMAGE_PATH", "container.image", lambda text: text or None)
    conf["container"] = {"image": image, "reuse": None if reload is None else not reload}
    conf["profile"] = {
        "timeline": flag("PROFILE", "profile.timeline"),
        "nsys": flag("NSYS", "profile.nsys"),
    }
    conf["env"], conf["pass_env"] = _take_env(translator)
    return conf


def _take_port(translator: Translator) -> int | None:
    port = translator.take_number("MASTER_PORT", "cluster.port")
    low, high = EPHEMERAL
    if port is None or (1024 <= port <= 65535 and not low <= port <= high):
        return port
    translator.note(
        f"MASTER_PORT={port} is not used: a port is 1024 to 65535, and outgoing connections may "
        f"take one of {low} to {high}; port: auto picks a free one"
    )
    translator.comments.pop("cluster.port")
    return None


def _take_env(translator: Translator) -> tuple[dict[str, str], list[str]]:
    """Exported variables that we do not know go to every rank, secrets by name only."""
    env: dict[str, str] = {}
    pass_env: list[str] = []
    for name, assignment in list(translator.left.items()):
        value = assignment.value
        if not assignment.exported or value is None or name in list_own_env():
            continue
        if name.startswith("VJOB_") or find_text_problem(value):
            continue
        del translator.left[name]
        if is_secret(name):
            pass_env.append(name)
            translator.note(
                f"line {assignment.line}: {name} looks secret: set it in your shell; pass_env "
                "hands it on"
            )
        else:
            env[name] = value
    return env, pass_env


def _render(conf: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    lines: list[str] = []
    for key, value in conf.items():
        if isinstance(value, dict) and key not in ("program", "env"):
            inner = {name: item for name, item in value.items() if item not in (None, {}, [])}
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


def _check_result(text: str) -> list[str]:
    """What the checks still find, such as numbers that did not fit together before either."""
    try:
        conf, lines = parse_conf_lines(text, "conf.yaml", Path("/"))
    except ConfError as error:
        problems = list(error.problems)
    else:
        problems = check_conf(conf, lines, require_paths=False)
    return [f"to mend: {problem}" for problem in problems]
