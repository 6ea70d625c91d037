"""vjob: train large models with pipeline parallelism on Slurm clusters, mixed or uniform.

    import vjob

    job = vjob.submit("conf.yaml", set={"train.steps": 100})
    job.wait()
    print(job.status().verdict.reason)

docs/python.md has the rest. Importing vjob imports nothing else: its functions come with their
first use. In a checkout its parts are the folders beside this one, reached by relative links:
`vjob.jobs`, `vjob.shelf` (the commands), `vjob.templates`, `vjob.reports` and `vjob.containers`.
No public name here may equal a part's name: importing the part would replace it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vjob.jobs.api.executor import VjobExecutor as VjobExecutor
    from vjob.jobs.api.face import job as job
    from vjob.jobs.api.face import load as load
    from vjob.jobs.api.face import plan as plan
    from vjob.jobs.api.face import runs as runs
    from vjob.jobs.api.face import submit as submit
    from vjob.jobs.api.job import JobStatus as JobStatus
    from vjob.jobs.api.job import VjobJob as Job
    from vjob.jobs.conf.schema import JobConf as Conf
    from vjob.jobs.errors import ConfError as ConfError
    from vjob.jobs.errors import InputError as InputError
    from vjob.jobs.errors import VjobError as VjobError
    from vjob.shelf.compare import compare as compare

_HOMES = {
    "Conf": ("vjob.jobs.conf.schema", "JobConf"),
    "ConfError": ("vjob.jobs.errors", "ConfError"),
    "InputError": ("vjob.jobs.errors", "InputError"),
    "Job": ("vjob.jobs.api.job", "VjobJob"),
    "JobStatus": ("vjob.jobs.api.job", "JobStatus"),
    "VjobError": ("vjob.jobs.errors", "VjobError"),
    "VjobExecutor": ("vjob.jobs.api.executor", "VjobExecutor"),
    "compare": ("vjob.shelf.compare", "compare"),
    "job": ("vjob.jobs.api.face", "job"),
    "load": ("vjob.jobs.api.face", "load"),
    "plan": ("vjob.jobs.api.face", "plan"),
    "runs": ("vjob.jobs.api.face", "runs"),
    "submit": ("vjob.jobs.api.face", "submit"),
}
__all__ = [
    "Conf",
    "ConfError",
    "InputError",
    "Job",
    "JobStatus",
    "VjobError",
    "VjobExecutor",
    "compare",
    "job",
    "load",
    "plan",
    "runs",
    "submit",
]


if not TYPE_CHECKING:  # a type checker that saw it would take any name for one of ours

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name == "reports":  # a part, which `import vjob` alone does not bring
            return import_module("vjob.reports")
        if name not in _HOMES:
            raise AttributeError(f"module 'vjob' has no attribute {name!r}")
        home, own_name = _HOMES[name]
        value = getattr(import_module(home), own_name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
