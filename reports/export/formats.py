"""List the forms in which `vjob report --export` writes a job: the built-in ones, then those of
plug-ins.

An exporter is a function that takes a job's tables and a path, and returns the paths that it wrote.
"""

from __future__ import annotations

from varuna_core.plugins import BuiltIn, Seam

EXPORTERS = Seam(
    "vjob.exporters",
    [
        BuiltIn("parquet", "A file for each table.", "vjob.reports.export.tables:write_parquet"),
        BuiltIn("csv", "The same as text.", "vjob.reports.export.tables:write_csv"),
        BuiltIn("perfetto", "A timeline.", "vjob.reports.export.perfetto:write_perfetto"),
    ],
)
