"""An old `_00_conf.sh`, and the #SBATCH lines of job scripts pasted along, as conf.yaml.

Nothing is executed, and nothing is dropped silently: what has no counterpart, does not fit together
or is not understood, is in the notes. Understood: `NAME=value` with quotes, `export`, `$NAME`,
`${NAME}`, `$((A * B))`, comments, and `#SBATCH` lines.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vjob.jobs.conf.document import render_value
from vjob.jobs.conf.loading.check import check_conf, list_own_env
from vjob.jobs.conf.loading.check_cluster import EPHEMERAL, OWN_SBATCH
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.redact import is_secret, redact_string
from vjob.jobs.errors import ConfError

MODELS: Mapping[str, str] = {"small": "gpt2-small", "xl": "gpt2-xl"}
HEAD = """\
# Translated from an old shell conf. `vjob submit --dry-run` shows what it makes.
"""
_PIECE = re.compile(
    r"""'(?P<single>[^']*)'
      | "(?P<double>(?:\\.|[^"\\])*)"
      | \$\(\((?P<sum>(?:[^()]|\([^()]*\))*)\)\)
      | \$(?P<name>[A-Za-z_]\w*|\{[A-Za-z_]\w*\})
      | \\(?P<escaped>.)
      | (?P<bare>[^\s;#'"$`&|<>()\\]+|(?<=\S)\#)""",
    re.VERBOSE | re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?==)")
_EXPORT = re.compile(r"(export|readonly|declare\s+-x|declare)\s+")
_EXPORT_ONLY = re.compile(r"export(\s+[A-Za-z_][A-Za-z0-9_]*)+\s*(#.*)?", re.ASCII)
_IGNORED = re.compile(r"\.*|(\.|source)\s+\S*_00_?conf\.sh|set\s+[-+].*", re.ASCII)
_SBATCH = re.compile(r"#SBATCH\s+(?P<rest>-.*)")
_OPTION = re.compile(r"--(?P<long>[a-z][a-z0-9-]*)(?:(?:=|\s+)(?P<value>.*))?|-(?P<short>\S.*)")
_SHORT: Mapping[str, str] = {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "p": "partition",
    "c": "cpus-per-task",
    "t": "time",
    "A": "account",
    "q": "qos",
    "x": "exclude",
    "o": "output",
    "e": "error",
    "w": "nodelist",
    "C": "constraint",
    "G": "gpus",
}
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MAX_EXPRESSION = 200
_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*))?:(?P<count>[1-9][0-9]{0,3})")
_TIME = re.compile(r"(?:(?P<d>\d{1,4})-)?(?P<a>\d{1,6})(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")
_MEMORY = re.compile(r"(?P<number>\d{1,9})(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}
_PARTITION = re.compile(r"\d{1,6}(-\d{1,6})*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One `NAME=value`; the value is None where it could not be worked out."""

    name: str
    value: str | None
    raw: str
    line: int
    exported: bool


@dataclass(kw_only=True)
class JobBlock:
    """The #SBATCH lines of one pasted job script, and its GRES."""

    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    gres: str | None = None


@dataclass(kw_only=True)
class ShellConf:
    """Everything found in a text; later assignments win."""

    variables: dict[str, Assignment] = field(default_factory=dict)
    blocks: list[JobBlock] = field(default_factory=list)
    not_understood: list[tuple[int, str]] = field(default_factory=list)


def translate_shell_conf(text: str) -> tuple[str, list[str]]:
    """Text of a conf.yaml, and notes on what the user should know or correct."""
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
    nodes, top = _build_nodes(translator, sbatch)
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
    """Problems of the result, such as numbers that did not fit together before either."""
    try:
        conf, lines = parse_conf_lines(text, "conf.yaml", Path("/"))
    except ConfError as error:
        problems = list(error.problems)
    else:
        problems = check_conf(conf, lines, require_paths=False)
    return [f"to mend: {problem}" for problem in problems]


def _build_nodes(
    translator: Translator, sbatch: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Node groups, one or the master's and the slaves', and the keys that hold for all of them."""
    key = "cluster.nodes"
    same = translator.take_flag("HOMOGENEOUS_CLUSTER", key)
    total = translator.take_number("NNODES", key)
    ranks = translator.take_number("NPROC_PER_NODE", key)
    world = translator.take_number("WORLD_SIZE", key)
    translator.left.pop("GRES", None)
    if translator.left.pop("MASTER_ADDR", None) is not None:
        translator.note("MASTER_ADDR is not needed: it is the first node of the first group")
    translator.comments.pop(key, None)
    blocks = translator.found.blocks
    chosen: list[JobBlock | None]
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
            translator.note(f"a pasted job script is not used: {shown}")
    groups: list[dict[str, Any]] = []
    top: dict[str, Any] = {}
    for name, count, script in zip(names, counts, chosen, strict=True):
        group = _build_group(translator, script, top, sbatch)
        if "gpus" not in group and ranks is not None:
            group["gpus"] = ranks
            message = f"no --gres was found for group {name}: it asks for {ranks} GPUs of any type"
            translator.note(message)
        groups.append({"group": name, "count": count, **group, "ranks": ranks})
        asked = _get_count(script)
        if asked is not None and asked != count:
            message = f"--nodes={asked} of group {name} is not the {count} that NNODES leaves"
            translator.note(message)
    have = sum(counts) * (ranks or 1)
    if world is not None and ranks is not None and world != have:
        translator.note(f"WORLD_SIZE is {world}, but the nodes have {have} ranks")
    return groups, top


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


def _build_group(
    translator: Translator, block: JobBlock | None, top: dict[str, Any], sbatch: dict[str, Any]
) -> dict[str, Any]:
    group: dict[str, Any] = {}
    if block is None:
        return group
    options = dict(block.options)
    if "gres" not in options and block.gres is not None:
        options["gres"] = (block.gres, 0)
    makers: Mapping[str, tuple[dict[str, Any], str, Callable[[str], Any]]] = {
        "partition": (group, "queue", to_word),
        "gres": (group, "gpus", to_gpus),
        "cpus-per-task": (group, "cpus", to_number),
        "mem": (group, "memory_gb", to_gigabytes),
        "job-name": (top, "name", to_name),
        "time": (top, "walltime_min", to_minutes),
        "account": (top, "account", to_word),
        "qos": (top, "qos", to_word),
        "exclude": (top, "exclude", to_node_list),
        "requeue": (top, "requeue", lambda text: True),
        "no-requeue": (top, "requeue", lambda text: False),
    }
    for name, (text, line) in options.items():
        if name in ("nodes", "ntasks-per-node") or (name == "ntasks" and "nodes" in options):
            continue  # counts and ranks come from NNODES and NPROC_PER_NODE
        if name in makers:
            section, key, convert = makers[name]
            value = convert(text)
            if value is None:
                place = f"line {line}: --" if line else ""
                translator.note(f"{place}{name}={redact_string(text)} cannot be used")
            else:
                section.setdefault(key, value)
        elif name in OWN_SBATCH:
            translator.note(f"line {line}: --{name} is left out: {OWN_SBATCH[name]}")
        elif find_text_problem(text) or not text.isprintable():
            translator.note(f"line {line}: --{name} is left out: its value is not printable")
        else:
            sbatch.setdefault(name, text or True)
    return group


class Translator:
    """Takes the known variables one by one; those that nobody takes become notes."""

    def __init__(self, found: ShellConf) -> None:
        self.found = found
        self.left = dict(found.variables)
        self.notes = [
            f"line {line}: not understood, left out: {redact_string(text)}"
            for line, text in found.not_understood
        ]
        self.comments: dict[str, str] = {}

    def note(self, message: str) -> None:
        self.notes.append(message)

    def take(self, name: str, key: str, convert: Callable[[str], Any]) -> Any:
        """The variable's value, converted; None with a note where that is not possible."""
        assignment = self.left.pop(name, None)
        if assignment is None:
            return None
        value = None if assignment.value is None else convert(assignment.value.strip())
        if value is None:
            self.note(
                f"line {assignment.line}: {spell(assignment)} cannot be used for {key}; left out"
            )
        else:
            self.comments[key] = f"was {spell(assignment)}"
        return value

    def take_number(self, name: str, key: str) -> int | None:
        value: int | None = self.take(name, key, to_number)
        return value

    def take_flag(self, name: str, key: str) -> bool | None:
        value: bool | None = self.take(name, key, to_flag)
        return value


def spell(assignment: Assignment) -> str:
    text = f"{assignment.name}={assignment.raw}"
    return "".join(char if char.isprintable() else "?" for char in redact_string(text))


def to_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None


def to_flag(text: str) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False, "": False}.get(text.lower())


def to_gpus(text: str) -> str | int | None:
    match = _GRES.fullmatch(text)
    if match is None:
        return None
    return f"{match['type']}:{match['count']}" if match["type"] else int(match["count"])


def to_minutes(text: str) -> int | None:
    """Slurm's minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s; seconds round up."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in "abc")
    if match["d"] is not None:
        seconds = ((int(match["d"]) * 24 + first) * 60 + second) * 60 + third
    elif match["c"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) or None


def to_gigabytes(text: str) -> int | None:
    match = _MEMORY.fullmatch(text)
    if match is None:
        return None
    return -int(-int(match["number"]) * _UNITS[match["unit"].upper()] // 1)


def to_name(text: str) -> str | None:
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) else None


def to_node_list(text: str) -> list[str] | None:
    """Node names, split at commas outside brackets."""
    names = re.findall(r"(?:\[[^\]]*\]|[^,\[\]\s])+", text)
    return names if names and ",".join(names) == text else None


def to_partition(text: str) -> str | None:
    return text if _PARTITION.fullmatch(text) else None


def to_word(text: str) -> str | None:
    return text if re.fullmatch(r"[\w.,-]+", text, re.ASCII) else None


def parse_shell_conf(text: str) -> ShellConf:
    """Every assignment and #SBATCH line of a text."""
    found = ShellConf()
    for number, raw_line in enumerate(text.splitlines(), 1):
        line = raw_line.strip()
        sbatch = _SBATCH.fullmatch(line)
        if sbatch is not None:
            _add_option(found, sbatch["rest"], number, line)
        elif line.startswith("#") or _IGNORED.fullmatch(line):
            continue
        elif _EXPORT_ONLY.fullmatch(line):
            _mark_exported(found, line)
        else:
            assignments = _parse_assignments(line, number, found.variables)
            if assignments is None:
                found.not_understood.append((number, line))
            for assignment in assignments or ():
                _add_assignment(found, assignment)
    return found


def _add_assignment(found: ShellConf, assignment: Assignment) -> None:
    found.variables[assignment.name] = assignment
    if assignment.name == "GRES" and assignment.value:
        if not found.blocks or found.blocks[-1].gres is not None:
            found.blocks.append(JobBlock())
        found.blocks[-1].gres = assignment.value


def _mark_exported(found: ShellConf, line: str) -> None:
    for name in line.partition("#")[0].split()[1:]:
        old = found.variables.get(name)
        if old is not None:
            found.variables[name] = Assignment(
                name=name, value=old.value, raw=old.raw, line=old.line, exported=True
            )


def _add_option(found: ShellConf, rest: str, number: int, line: str) -> None:
    match = _OPTION.fullmatch(re.sub(r"\s+#.*$", "", rest).strip())
    if match is None:
        found.not_understood.append((number, line))
        return
    if match["short"] is not None:
        name, value = match["short"][0], match["short"][1:].strip()
        if name not in _SHORT:
            found.not_understood.append((number, line))
            return
        name = _SHORT[name]
    else:
        name, value = match["long"], (match["value"] or "").strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if not found.blocks or name in found.blocks[-1].options:  # the next script begins
        found.blocks.append(JobBlock())
    found.blocks[-1].options[name] = (value, number)


def _parse_assignments(
    line: str, number: int, known: Mapping[str, Assignment]
) -> list[Assignment] | None:
    """The assignments of a line, or None where there is anything else on it."""
    export = _EXPORT.match(line)
    position = export.end() if export is not None else 0
    exported = export is not None and export[1] != "readonly" and export[1] != "declare"
    assignments: list[Assignment] = []
    scope = dict(known)
    while position < len(line):
        if line[position] in " \t;":
            position += 1
            continue
        if line[position] == "#" and assignments:
            break
        name = _NAME.match(line, position)
        if name is None:
            return None
        start = position = name.end() + 1
        value: str | None = ""
        while piece := _PIECE.match(line, position):
            part = _expand_piece(piece, scope)
            value = None if value is None or part is None else value + part
            position = piece.end()
        if position < len(line) and line[position] not in " \t;":
            return None
        assignment = Assignment(
            name=name[0], value=value, raw=line[start:position], line=number, exported=exported
        )
        scope[name[0]] = assignment
        assignments.append(assignment)
    return assignments or None


def _expand_piece(piece: re.Match[str], known: Mapping[str, Assignment]) -> str | None:
    kind = piece.lastgroup
    text = piece[kind or 0]
    if kind == "double":
        if re.search(r"\$\(|`|\\\$|\$\{[^}]*[^\w}]", text):
            return None
        return _expand_names(re.sub(r'\\(["\\])', r"\1", text), known)
    if kind == "name":
        return _expand_names(piece[0], known)
    if kind == "sum":
        return _calculate(text, known)
    return text


def _expand_names(text: str, known: Mapping[str, Assignment]) -> str | None:
    missing = False

    def replace(match: re.Match[str]) -> str:
        nonlocal missing
        assignment = known.get(match[1])
        missing = missing or assignment is None or assignment.value is None
        return "" if assignment is None or assignment.value is None else assignment.value

    expanded = re.sub(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", replace, text)
    return None if missing else expanded


def _calculate(text: str, known: Mapping[str, Assignment]) -> str | None:
    """A sum of whole numbers and variables; None for anything else."""
    text = re.sub(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", r"\1", text).strip()
    if len(text) > _MAX_EXPRESSION:
        return None
    try:
        return str(_calculate_node(ast.parse(text, mode="eval").body, known))
    except (SyntaxError, ValueError):  # ValueError: NUL, or a part that is no whole number
        return None


def _calculate_node(node: ast.expr, known: Mapping[str, Assignment]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        value = known[node.id].value or ""
        if re.fullmatch(r"[0-9]{1,9}", value):
            return int(value)
    if isinstance(node, ast.BinOp):
        left, right = _calculate_node(node.left, known), _calculate_node(node.right, known)
        if type(node.op) in _SUMS:
            return _SUMS[type(node.op)](left, right)
        if isinstance(node.op, ast.Div | ast.FloorDiv) and left >= 0 and right > 0:
            return left // right
    raise ValueError("not a sum of whole numbers")
