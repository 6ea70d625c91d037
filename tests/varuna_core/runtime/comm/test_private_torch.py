"""Private names of torch: all that are used are listed with a reason, and are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.varuna_core.runtime.comm.private_names import PRIVATE_NAMES, TRIED

ROOT = Path(__file__).parents[4] / "varuna_core"
NAMES = [name for row in PRIVATE_NAMES for name in row.names.split()]
OWNERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch,
    "Tensor": lambda: torch.zeros(1),
    "Parameter": lambda: nn.Parameter(torch.zeros(1)),
    "Module": nn.Module,
    "Storage": lambda: torch.zeros(1).untyped_storage(),
    "OpOverload": lambda: torch.ops.aten.mm.default,
    "ProcessGroup": lambda: dist.ProcessGroup,
    "Options": lambda: dist.ProcessGroupGloo._Options(),
    "StateDict": lambda: nn.Linear(1, 1).state_dict(),
    "MseLossBackward0": lambda: F.mse_loss(nn.Parameter(torch.zeros(1)), torch.ones(1)).grad_fn,
    "DTensor": lambda: DTensor,
}
"""The object that the first word of a name stands for."""

ELSEWHERE = {"ProcessGroupNCCL", "SGD", "DTensor"}
"""Names that exist only on a GPU, or once torch has set them."""

NOT_TORCHS = {"_exit", "_getframe", "_current_frames", "_asdict"}
OTHERS = ("functions", "plugins", "trace")
"""Rooms whose private names are of other programs, or looked for at run time."""


def list_own(trees: list[ast.Module]) -> set[str]:
    """Names that our own code defines."""
    own: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def list_used(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names that are not ours."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            used |= {word for word in words if is_private(word)}
        elif isinstance(node, ast.Import):
            words = [word for alias in node.names for word in alias.name.split(".")]
            if words[0] == "torch":
                used |= {word for word in words if is_private(word)}
    return used


def test_each_private_name_of_torch_is_listed() -> None:
    files = [f for f in ROOT.rglob("*.py") if f.relative_to(ROOT).parts[0] not in OTHERS]
    trees = [ast.parse(file.read_text()) for file in files]
    own = list_own(trees)
    listed = {word for name in NAMES for word in name.split(".") if is_private(word)}
    used = {word for tree in trees for word in list_used(tree, own)} - NOT_TORCHS
    assert not used - listed, "add these to PRIVATE_NAMES with a reason, or do without"


def test_no_name_is_listed_that_nobody_uses() -> None:
    text = "\n".join(file.read_text() for file in ROOT.rglob("*.py"))
    unused = [n for n in NAMES if not re.search(rf"\b{n.rpartition('.')[2]}\b", text)]
    assert not unused


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there(name: str) -> None:
    """`make newest` asks the newest torch that setup.cfg allows."""
    first, *rest = name.split(".")
    if first in ELSEWHERE or rest[-1] in ELSEWHERE:
        pytest.skip("only on a GPU, or once torch has set it")
    found = OWNERS[first]()
    for number, word in enumerate(rest, 2):
        if isinstance(found, ModuleType) and not hasattr(found, word):
            import_module(".".join(name.split(".")[:number]))
        found = getattr(found, word)


def test_rows_say_why_and_what_happens_without() -> None:
    assert all(row.reason and row.without for row in PRIVATE_NAMES)
    assert len({*NAMES}) == len(NAMES) and all(re.fullmatch(r"\d+\.\d+", v) for v in TRIED)
