"""Which Megatron-LM lies in a folder: its options changed names and meaning three times.

    v1     1.x, and DeepSpeedExamples' copies: --model-parallel-size, --batch-size, --warmup
    v2     2.0 to 3.0 and the releases named by month: today's names, --data-impl
    core   since Megatron Core (megatron/training): today's; uneven stages from 0.13 on

Read off the checkout's own files, without importing any of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_FLAG = re.compile(r"""["'](--[A-Za-z][A-Za-z0-9_-]*)["']""")
LAYOUT_FILE = "megatron/core/transformer/pipeline_parallel_layer_layout.py"
SCRIPTS = ("pretrain_gpt.py", "pretrain_gpt2.py")


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """What of a Megatron-LM decides how it is called; the defaults are today's."""

    script: str = "pretrain_gpt.py"
    """File to run, relative to the folder or absolute."""
    generation: Literal["v1", "v2", "core"] = "core"
    partition: Literal["layout", "balance"] | None = "layout"
    """How it is told layers per stage: its own layout, the `--balance` of some forks, or not."""
    flags: frozenset[str] = frozenset()
    """Every option of v1 and v2; empty where not known (core makes many of them from types)."""


def find_checkout(path: str) -> Checkout:
    """The checkout at a folder or around a script; today's where it cannot be read from here."""
    given = Path(path)
    is_script = given.suffix == ".py"
    roots = (given.parent, given.parent.parent) if is_script else (given,)
    root = next((root for root in roots if (root / "megatron").is_dir()), None)
    if root is None:
        return Checkout(script=path if is_script else str(given / SCRIPTS[0]))
    found = next((name for name in SCRIPTS if (root / name).is_file()), SCRIPTS[0])
    script = path if is_script else str(root / found)
    if (root / "megatron/training/arguments.py").is_file():
        has_layout = (root / LAYOUT_FILE).is_file()
        return Checkout(script=script, partition="layout" if has_layout else None)
    try:
        text = (root / "megatron/arguments.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Checkout(script=script)
    flags = frozenset(_FLAG.findall(text))
    return Checkout(
        script=script,
        generation="v2" if "--tensor-model-parallel-size" in flags else "v1",
        partition="balance" if "--balance" in flags else None,
        flags=flags,
    )
