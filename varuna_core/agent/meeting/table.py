"""The table of all nodes that node 0 prints before the ranks start. Pure."""

from __future__ import annotations

from varuna_core.records.nodes import FAIL, WARN, NodeReport
from varuna_core.records.plan import Plan

ALL_NODES = 16
"""Beyond so many nodes only those with something to say have a row."""

HEADER = ("node", "host", "group", "address", "interface", "gpus", "state")


def render_table(plan: Plan, attempt: int, reports: dict[int, NodeReport]) -> str:
    rows: list[tuple[tuple[str, ...], list[str]]] = []
    counts = {"ok": 0, "warn": 0, "FAIL": 0, "missing": 0}
    for index in range(plan.num_nodes):
        report = reports.get(index)
        state = _state_of(report)
        counts[state] += 1
        if state != "ok" or plan.num_nodes <= ALL_NODES:
            rows.append((_row(plan, index, report, state), _details(report)))
    parts = [f"{number} {state}" for state, number in counts.items() if number]
    title = f"preflight of attempt {attempt}: {plan.num_nodes} nodes: {', '.join(parts)}"
    if not rows:
        return title + "\n"
    widths = [max(len(row[at]) for row in [HEADER, *(row for row, _ in rows)]) for at in range(7)]
    lines = [title, _align(HEADER, widths)]
    for row, details in rows:
        lines += [_align(row, widths), *details]
    return "\n".join(lines) + "\n"


def _state_of(report: NodeReport | None) -> str:
    if report is None:
        return "missing"
    if not report.ok or not report.ready:
        return "FAIL"
    return "warn" if report.problems(WARN) else "ok"


def _row(plan: Plan, index: int, report: NodeReport | None, state: str) -> tuple[str, ...]:
    if report is None:
        return (str(index), "-", plan.node(index).group.name, "-", "-", "-", state)
    gpus = "-" if report.gpus is None else str(report.gpus)
    where = (report.address or "-", report.interface or "-")
    return (str(index), report.host, report.group, *where, gpus, state)


def _details(report: NodeReport | None) -> list[str]:
    if report is None:
        return ["      no report: the agent did not start, or ended early; see the scheduler's log"]
    problems = report.problems(FAIL) + report.problems(WARN)
    lines = [f"      {item.status} {item.name}: {item.text}" for item in problems]
    return lines if report.ready else [*lines, "      the container is still being prepared"]


def _align(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(row[at].ljust(width) for at, width in enumerate(widths)).rstrip()
