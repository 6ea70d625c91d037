"""What a conf may say and this version of vjob does not do yet. The documents say the same."""

from __future__ import annotations

from collections.abc import Iterator

from containers.registry import RUNTIMES
from jobs.conf import JobConf, ProgramKind
from jobs.conf_paths import Finding
from jobs.conf_reader import BUILT_IN

STARTED: frozenset[ProgramKind] = frozenset({"pretrain_gpt", "pretrain_bert", "script"})
"""Programs that it can start."""


def check_version(conf: JobConf) -> Iterator[Finding]:
    kind, runtime = conf.program.kind, conf.container.runtime
    if kind not in STARTED:
        message = (
            "cannot be started by this version of vjob; it starts pretrain_gpt, pretrain_bert and "
            "{script: train.py, args: [...]}"
        )
        yield "program", kind, message
    if kind in BUILT_IN:
        yield from _check_built_in(conf)
    if conf.cluster.scheduler == "machines":
        yield "cluster.scheduler", "machines", "is not in this version of vjob; use slurm or local"
    if conf.morph.enabled:
        yield "morph.enabled", True, "is not in this version of vjob; runs keep their nodes"
    if conf.container.image is not None and runtime not in ("auto", "none", *RUNTIMES):
        message = f"is not in this version of vjob; it has {', '.join(RUNTIMES)} and none"
        yield "container.runtime", runtime, message


def _check_built_in(conf: JobConf) -> Iterator[Finding]:
    """A script may do these by itself."""
    parallel = conf.parallel
    if parallel.zero:
        message = "the built-in programs of this version have no ZeRO; use 0"
        yield "parallel.zero", parallel.zero, message
    for name in ("nsys", "ncu"):
        if getattr(conf.profile, name):
            yield f"profile.{name}", True, "is not in this version of vjob"
