"""The list of machines of a run without Slurm, as far as a submit looks at it.

The run itself watches it: varuna_core/launch/watch.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from varuna_core.launch.errors import LaunchError
from varuna_core.launch.machines import Machine, parse_machine_list
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import InputError


def settle_machines(conf: JobConf, *, is_preview: bool) -> JobConf:
    """The conf of a run on a list, which must be well; a preview may be elsewhere.

    There is no queue to wait in, so the run always comes back.
    """
    if conf.cluster.machine_list is None:
        return conf
    if not is_preview:
        read_machines(conf.cluster.machine_list)
    return replace(conf, cluster=replace(conf.cluster, requeue=True))


def read_machines(path: str) -> tuple[Machine, ...]:
    """The machines of a list, or an InputError that says what is wrong with it."""
    try:
        return parse_machine_list(Path(path).read_text(encoding="utf-8-sig"), path)
    except OSError as error:
        problem = f"{path}: {error.strerror}; write a host a line into it, 127.0.0.1 for this one"
    except UnicodeDecodeError:
        problem = f"{path}: this is not text in UTF-8"
    except LaunchError as error:
        problem = str(error)
    raise InputError(f"cluster.machine_list: {problem}")
