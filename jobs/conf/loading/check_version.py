"""What a conf may say and this version of vjob does not do yet. The documents say the same."""

from __future__ import annotations

from collections.abc import Iterator

from vjob.containers.registry import RUNTIMES
from vjob.jobs.conf.paths import Finding
from vjob.jobs.conf.schema import BUILT_IN, JobConf


def check_version(conf: JobConf) -> Iterator[Finding]:
    runtime = conf.container.runtime
    if conf.program.kind in BUILT_IN:
        yield from _check_built_in(conf)
    if conf.cluster.machine_list is not None and not conf.morph.enabled:
        message = (
            "is in this version of vjob for runs that may morph (morph.enabled) alone; "
            "`python -m varuna_core.launch` starts a script on a list of machines"
        )
        yield "cluster.machine_list", conf.cluster.machine_list, message
    if conf.morph.enabled:
        yield from _check_morph(conf)
    if conf.container.image is not None and runtime not in ("auto", "none", *RUNTIMES):
        message = f"is not in this version of vjob; it has {', '.join(RUNTIMES)} and none"
        yield "container.runtime", runtime, message


def _check_built_in(conf: JobConf) -> Iterator[Finding]:
    """Other programs may do these by themselves."""
    parallel = conf.parallel
    if parallel.tensor > 1 and parallel.zero == 3:
        message = "slices of shared layers are not in this version of vjob; use 1 or 2 with tensor"
        yield "parallel.zero", parallel.zero, message


def _check_morph(conf: JobConf) -> Iterator[Finding]:
    """Morphing needs a program that is told another layout, and checkpoints to go on from."""
    key = "morph.enabled"
    if conf.program.kind not in BUILT_IN:
        yield key, True, f"is in this version of vjob for {' and '.join(BUILT_IN)} alone"
    elif conf.train.checkpoint.folder is None:
        yield key, True, "needs train.checkpoint.folder: a run that loses a node goes on from there"
    if conf.container.runtime == "pyxis":
        yield key, True, "is not in this version of vjob with pyxis, which srun starts only once"
