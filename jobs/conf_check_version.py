"""What a conf may say and this version of vjob does not do yet. The documents say the same."""

from __future__ import annotations

from collections.abc import Iterator

from containers.registry import RUNTIMES
from jobs.conf import JobConf, ProgramKind
from jobs.conf_paths import Finding

STARTED: frozenset[ProgramKind] = frozenset({"script", "megatron", "deepspeed"})
"""Programs that it can start."""


def check_version(conf: JobConf) -> Iterator[Finding]:
    kind, runtime = conf.program.kind, conf.container.runtime
    if kind not in STARTED:
        message = (
            "cannot be started by this version of vjob; it starts {script: train.py, args: [...]}, "
            "{megatron: ...} and {deepspeed: ...}"
        )
        yield "program", kind, message
    if conf.cluster.scheduler == "machines":
        yield "cluster.scheduler", "machines", "is not in this version of vjob; use slurm or local"
    if conf.morph.enabled:
        yield "morph.enabled", True, "is not in this version of vjob; runs keep their nodes"
    if conf.container.image is not None and runtime not in ("auto", "none", *RUNTIMES):
        message = f"is not in this version of vjob; it has {', '.join(RUNTIMES)} and none"
        yield "container.runtime", runtime, message
