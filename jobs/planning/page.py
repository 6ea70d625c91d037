"""A plan as a page: reports draw it."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from varuna_core.records.files import write_atomic
from vjob.jobs.planning.answer import Answer, describe
from vjob.jobs.planning.text import render
from vjob.jobs.reporting.report import check_libraries


def write_page(path: Path, name: str, answer: Answer, *, cdn: bool) -> None:
    check_libraries("plotly", "jinja2")
    from vjob.reports.page.plan_page import Point, render_plan_page

    steps = answer.question.steps
    front = [
        Point(
            hours=one.step_s * steps / 3600, price=one.price * steps, text=describe(one.candidate)
        )
        for one in (answer.front.offers if answer.front is not None else ())
    ]
    made_at = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    plan = answer.best
    page = render_plan_page(
        name=f"plan of {name}",
        text=render(answer),
        front=front,
        work_s=[stage.work_s for stage in plan.step.stages],
        idle_s=[stage.idle_s for stage in plan.step.stages],
        held_gb=[held / 2**30 for held in plan.memory_bytes],
        limit_gb=[limit / 2**30 for limit in plan.limit_bytes],
        made_at=made_at,
        cdn=cdn,
    )
    write_atomic(path, page)
