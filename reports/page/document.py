"""Fill templates of pages, with their style sheet and scripts, for reports and live pages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from varuna_core.records.logs.tail import clean

WEB = files("vjob.reports") / "web"


def fill(template: str, **values: Any) -> str:
    """Render a template of the report's pages with `values` and with the style sheet of
    reports/web; return the text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vjob.templates", ""),
        undefined=jinja2.StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    styles = Markup((WEB / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(styles=styles, **values)


def read_scripts(names: Sequence[str]) -> str:
    """Return scripts of reports/web as one text."""
    return "\n".join((WEB / name).read_text(encoding="utf-8") for name in names)


def _clean(value: Any) -> Any:
    """Spell out control characters in text that comes from logs."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "\n".join(map(clean, value.split("\n")))
