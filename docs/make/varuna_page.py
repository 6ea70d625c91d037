"""Writes docs/varuna.md, the reference of Varuna's arguments, options and methods, from the code.

Only the text of the modules is read, so torch need not be installed.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import varuna_core

PACKAGE = Path(varuna_core.__file__).parent
MODULE = "runtime/rank_module.py", "RankModule"
HEAD = """# Varuna: arguments, options, methods

Made by `make docs` from the code. [How to port a model](training.md) comes first. Where an
argument or an option is `FROM_CONF`, a run of vjob takes it from the conf
([how](script.md#varuna-takes-its-arguments-from-the-conf)); an explicit one wins, with a warning.
"""


def read_class(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((PACKAGE / file).read_text())
    return next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)


def find_method(kind: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(one for one in list_methods(kind) if one.name == name)


def list_methods(kind: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """The methods of a class, without the overloads that only type checkers read."""
    for one in kind.body:
        is_overload = "@overload" in ast.unparse(one)
        if isinstance(one, ast.FunctionDef) and not is_overload:
            yield one


def link_pages(text: str) -> str:
    """Make links of the pages of this folder that a docstring names, `(zero.md)`."""
    return re.sub(r"\((\w+)\.md\)", r"([\1](\1.md))", text)


def render_options(kind: ast.ClassDef) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field, after in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            default = ast.unparse(field.value) if field.value is not None else ""
            said = " ".join(ast.literal_eval(after.value).split())
            rows.append(f"| `{ast.unparse(field.target)}` | `{default}` | {link_pages(said)} |")
    return "\n".join(rows)


def render_call(name: str, method: ast.FunctionDef) -> str:
    """A call as one would write it: names and defaults, without types."""
    held = method.args
    names = [one.arg for one in held.args if one.arg != "self"]
    defaults = [None] * (len(names) - len(held.defaults)) + [*held.defaults]
    words = [one if value is None else f"{one}={ast.unparse(value)}"
             for one, value in zip(names, defaults, strict=True)]  # fmt: skip
    if held.vararg is not None:
        words.append(f"*{held.vararg.arg}")
    elif held.kwonlyargs:
        words.append("*")
    for one, value in zip(held.kwonlyargs, held.kw_defaults, strict=True):
        words.append(one.arg if value is None else f"{one.arg}={ast.unparse(value)}")
    return f"{name}({', '.join(words)})"


def read_doc(method: ast.FunctionDef) -> str:
    return inspect.cleandoc(ast.get_docstring(method) or "")


def render_page() -> str:
    varuna, module = read_class("varuna.py", "Varuna"), read_class(*MODULE)
    options, init = read_class("runtime/arguments.py", "Options"), find_method(varuna, "__init__")
    parts = [
        HEAD,
        f"## Arguments\n`{render_call('Varuna', init)}`\n\n{read_doc(init)}\n",
        f"## Options\n{ast.get_docstring(options)}\n\n{render_options(options)}\n",
        "## Methods and properties",
    ]
    for method in (*list_methods(varuna), *list_methods(module)):
        if not method.name.startswith("_") and read_doc(method):
            is_call = not any(ast.unparse(one) == "property" for one in method.decorator_list)
            title = render_call(method.name, method) if is_call else method.name
            parts.append(f"**`{title}`**\n\n{read_doc(method)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page())
