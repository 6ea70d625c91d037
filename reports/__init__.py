"""Read logs and traces into tables, findings and timelines, with pandas, pyarrow and plotly.

    import vjob

    job = vjob.reports.load_job("log/gpt-20260101-120000")
    job.steps.took_s.describe()
    vjob.reports.losses(job)

docs/notebook.md describes all tables and figures. The libraries are imported with the first use of
a table or figure, not with this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vjob.reports.export.figures import losses as losses
    from vjob.reports.export.figures import memory as memory
    from vjob.reports.export.figures import overview as overview
    from vjob.reports.export.figures import shares as shares
    from vjob.reports.export.figures import stages as stages
    from vjob.reports.export.figures import timers as timers
    from vjob.reports.export.figures import training as training
    from vjob.reports.export.tables import JobTables as JobTables
    from vjob.reports.export.tables import load_job as load_job
    from vjob.reports.load.sources import SourceError as SourceError

_FIGURES = (
    "losses", "memory", "overview", "shares", "stages", "timers", "training",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_FIGURES, "vjob.reports.export.figures"),
    "JobTables": "vjob.reports.export.tables",
    "SourceError": "vjob.reports.load.sources",
    "load_job": "vjob.reports.export.tables",
}
__all__ = [
    "JobTables",
    "SourceError",
    "load_job",
    "losses",
    "memory",
    "overview",
    "shares",
    "stages",
    "timers",
    "training",
]


if not TYPE_CHECKING:  # a type checker that saw it would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'vjob.reports' has no attribute {name!r}")
        from importlib import import_module

        try:
            value = getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("vjob", "varuna_core"):
                raise
            raise ModuleNotFoundError(
                f"vjob.reports needs {error.name}, which is not installed: "
                f"pip install {error.name}",
                name=error.name,
            ) from None
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
