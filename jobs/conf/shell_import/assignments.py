"""What an old shell conf or job script assigns, read and never executed.

Understood: `NAME=value` with quotes, `export`, `$NAME`, `${NAME}`, `$((A * B))`, comments, and
`#SBATCH` lines. Everything else is handed back as a line that was not understood.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
