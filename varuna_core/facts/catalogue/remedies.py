"""Remedies that many rows share, and short constructors for remedies of one clause."""

from __future__ import annotations

from typing import Any

from varuna_core.facts.remedy import Action, Remedy, Target


def do(clause: str, **more: Any) -> Remedy:
    """Return a remedy whose clause is the same in every context."""
    return Remedy(Action.INSPECT, detail=clause, **more)


def look_at(command: str, detail: str = "", **more: Any) -> Remedy:
    """Return a remedy that suggests the output of a command that does not belong to vjob."""
    return Remedy(Action.INSPECT, value=command, detail=detail, **more)


def ask_admin(detail: str, **more: Any) -> Remedy:
    return Remedy(Action.ASK_ADMIN, detail=detail, **more)


def tell_admin(detail: str = "") -> Remedy:
    return Remedy(Action.TELL_ADMIN, detail=detail)


def set_env(assignment: str, detail: str = "", **more: Any) -> Remedy:
    return Remedy(Action.SET, Target.ENVIRONMENT, assignment, detail, **more)


TELL_ADMIN = tell_admin()
EXCLUDE = Remedy(Action.EXCLUDE, Target.NODE)
EXCLUDE_IF_ALONE = Remedy(Action.EXCLUDE, Target.NODE, "its node", when="only this GPU has errors")
MORE_MEMORY = Remedy(Action.RAISE, Target.MEMORY, detail="(0 is all)")
FEWER_WORKERS = Remedy(Action.LOWER, Target.WORKERS)
SHOW_KERNEL = set_env("CUDA_LAUNCH_BLOCKING=1", "to see where")
SHOW_STACK = set_env("PYTHONFAULTHANDLER=1", "to see where")
MAKE_ROOM = Remedy(Action.MAKE_ROOM)
MOVE_LOGS = Remedy(Action.MOVE, Target.LOG_FOLDER, instead=True)
MOVE_CHECKPOINTS = Remedy(Action.MOVE, Target.CHECKPOINT, instead=True)
SHARE_LOG_FOLDER = Remedy(
    Action.INSPECT,
    Target.LOG_FOLDER,
    detail=", which the nodes must see and where you must be able to write",
)
