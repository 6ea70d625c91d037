"""Rendezvous of the nodes of an attempt, before any rank starts.

    open      node 0                          node i
    master ─► wait_for_master                 wait_for_master
              preflight, prepare ─► report    preflight, prepare ─► report
              gather_reports ◄──────────────────────┘
              table, go or stop ─────────────► wait_for_go

No rank starts before `go`, so none hangs in a rendezvous that a broken node never joins.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Callable, Mapping, Tuple, TypeVar

from varuna_core.agent.processes.signals import GONE, SILENT, Signals
from varuna_core.agent.setup.site import STOPPED, Master, Refusal
from varuna_core.facts.cause import EndCause
from varuna_core.records.exits import NODE_LOST, NOT_READY
from varuna_core.records.files import is_listed, list_names, read_json, write_json
from varuna_core.records.nodes import FAIL, WARN, NodeReport, read_report
from varuna_core.records.plan import Plan
from varuna_core.records.requests import read_stop, write_stop
from varuna_core.records.runfolder import AttemptFolder

POLL_S = 0.2
SLOWEST_POLL_S = 1.0
NODES_PER_POLL_S, MOST_POLL_S = 2000.0, 5.0
"""Polls per second that all nodes of a large run make together, to spare the file server, and the
longest pause of a node between two polls."""
LATECOMERS_S = 10.0
"""Seconds that node 0 waits for further reports after one node has reported that it is not ready,
so that the table of problems is as complete as possible."""
T = TypeVar("T")


def find_master(attempt: AttemptFolder) -> Master | None:
    """Return the master of this attempt, as long as the attempt is not over."""
    if not is_listed(attempt.master) or is_listed(attempt.outcome):
        return None
    value = read_json(attempt.master)
    if not isinstance(value, dict) or value.get("attempt") != attempt.number:
        return None
    return Master(
        value["address"], value["port"], value["host"], value["time"], value.get("job_id")
    )


def wait_for_master(attempt: AttemptFolder, signals: Signals, plan: Plan, host: str) -> Master:
    found = _poll(
        lambda: find_master(attempt), attempt, signals, plan, plan.timing.join_s, None, host
    )
    if found is None:
        waited = f"{host} waited {plan.timing.join_s:g} s for {attempt.master}"
        first = plan.groups[0].name
        reason = f"{waited}: did the job of group {first} not start?"
        raise Refusal(NOT_READY, reason, cause=EndCause.NOT_MET)
    return found


@dataclass(frozen=True)
class Go:
    """Content of go.json, which says that all nodes are ready, at which port the ranks meet, and on
    which hosts they run."""

    port: int
    hosts: Tuple[str, ...]
    """Host of each node."""


def find_go(attempt: AttemptFolder, opened: float) -> Go | None:
    """Return node 0's decision for the attempt that was opened at the time `opened`; None if there
    is none yet."""
    value = read_json(attempt.go) if is_listed(attempt.go) else None
    if not isinstance(value, dict) or value.get("opened") != opened:
        return None
    return Go(int(value["port"]), tuple(map(str, value["hosts"])))


def wait_for_go(
    attempt: AttemptFolder, signals: Signals, plan: Plan, host: str, opened: float
) -> Go:
    """Wait for node 0's decision, until after the slowest node's deadline at most."""
    deadline_s = _report_deadline_s(plan) + 2 * LATECOMERS_S
    go = _poll(lambda: find_go(attempt, opened), attempt, signals, plan, deadline_s, opened, host)
    if go is None:
        reason = f"{host} received nothing from node 0 for {deadline_s:g} s"
        raise Refusal(NOT_READY, reason, cause=EndCause.NOT_MET)
    return go


def gather_reports(
    attempt: AttemptFolder, signals: Signals, plan: Plan, host: str, opened: float
) -> dict[int, NodeReport]:
    """Wait for the reports of all nodes, until the deadline or soon after a node has reported that
    it is not ready."""
    found: dict[int, NodeReport] = {}
    begun = time.monotonic()
    failed_at: float | None = None

    def gather() -> bool | None:
        nonlocal failed_at
        _read_new(attempt, found, opened)
        now = time.monotonic()
        if failed_at is None and any(not report.ok for report in found.values()):
            failed_at = now
        is_late = failed_at is not None and now - failed_at > LATECOMERS_S
        # A node that did not even begin is not waited for as long as one that prepares.
        is_lost = now - begun > plan.timing.join_s and len(found) < plan.num_nodes
        ready = sum(report.ready for report in found.values())
        return True if ready == plan.num_nodes or is_late or is_lost else None

    _poll(gather, attempt, signals, plan, _report_deadline_s(plan), opened, host)
    return found


def say_go(attempt: AttemptFolder, opened: float, go: Go) -> None:
    content = {"time": round(time.time(), 3), "opened": opened, **asdict(go)}
    write_json(attempt.go, content)


def explain_not_ready(plan: Plan, reports: dict[int, NodeReport]) -> str | None:
    """Explain why the ranks cannot start, with nodes and remedies; return None if they can."""
    refused = [report for report in reports.values() if not report.ok]
    silent = [index for index in range(plan.num_nodes) if index not in reports]
    busy = [item.host for item in reports.values() if item.ok and not item.ready]
    said: list[str] = []
    for report in refused[:3]:
        texts = "; ".join(f"{check.name}: {check.text}" for check in report.problems("fail"))
        said.append(f"{report.host}: {texts}")
    if len(refused) > 3:
        said.append(f"and {len(refused) - 3} more")
    if silent:
        names = ", ".join(f"{index} ({plan.node(index).group.name})" for index in silent[:8])
        more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
        said.append(f"no report from node {names}{more}: see the scheduler's log")
    if busy and not refused:
        said.append(f"the container was not ready in time on {', '.join(busy[:8])}")
    return f"not ready: {'. '.join(said)}" if said else None


def judge_not_ready(reports: Mapping[int, NodeReport]) -> EndCause:
    """Return the cause of an attempt whose nodes are not all ready: a container, preflight, or that
    the nodes did not meet."""
    failed = [check for report in reports.values() for check in report.problems("fail")]
    if failed:
        is_container = all(check.name == "container" for check in failed)
        return EndCause.CONTAINER if is_container else EndCause.PREFLIGHT
    is_busy = any(item.ok and not item.ready for item in reports.values())
    return EndCause.CONTAINER if is_busy else EndCause.NOT_MET


def _read_new(attempt: AttemptFolder, found: dict[int, NodeReport], opened: float) -> None:
    """Read the reports that are new or not final yet; each file once, for there may be many."""
    for name in list_names(attempt.node_report(0).parent):
        stem = name[: -len(".json")]
        if not name.endswith(".json") or not stem.isdecimal():
            continue
        known = found.get(int(stem))
        if known is None or not known.ready:
            report = read_report(attempt, int(stem))
            if report is not None and report.opened == opened:
                found[report.index] = report


def _report_deadline_s(plan: Plan) -> float:
    return plan.timing.join_s + (plan.timing.prepare_s if plan.containers else 0.0)


def _poll(
    look: Callable[[], T | None],
    attempt: AttemptFolder,
    signals: Signals,
    plan: Plan,
    timeout_s: float,
    opened: float | None,
    host: str,
) -> T | None:
    """Call `look` repeatedly, and return its first result that is not None; None at the deadline. A
    stop or a signal ends the wait as a Refusal."""
    begun = time.monotonic()
    while True:
        check_stop(attempt, signals, opened, host)
        found = look()
        waited = time.monotonic() - begun
        if found is not None or waited >= timeout_s:
            return found
        signals.wait(min(compute_pause_s(plan.num_nodes, waited), timeout_s - waited))


def compute_pause_s(num_nodes: int, waited_s: float) -> float:
    """Return the seconds until a node polls again; each poll makes eight calls on files."""
    least_s = POLL_S if waited_s < 30 else SLOWEST_POLL_S
    return max(least_s, min(num_nodes / NODES_PER_POLL_S, MOST_POLL_S))


def check_stop(attempt: AttemptFolder, signals: Signals, opened: float | None, host: str) -> None:
    """Raise a Refusal if a signal or a recorded stop ends the attempt before its ranks start."""
    if signals.ending is not None:
        kind, code, reason, cause = explain_ending(signals.ending, host)
        # Before the master is there, the attempt is not ours to end.
        if opened is not None:
            write_stop(attempt, kind, code, reason, cause=cause)
        raise Refusal(STOPPED, reason)
    stop = read_stop(attempt, opened)
    if stop is not None and (opened is not None or not is_listed(attempt.outcome)):
        code = int(stop["code"]) if stop["kind"] == "not-ready" else STOPPED
        raise Refusal(code, str(stop["reason"]))


def explain_ending(name: str, host: str) -> Tuple[str, int, str, EndCause]:
    """Return kind, code, reason and cause of the stop of an agent that was asked to end."""
    if name in (GONE, SILENT):  # what became of the master, its own machine knows
        return "lost", NODE_LOST, f"{name}, seen first on {host}", EndCause.STOPPED
    # Who sent it, only the scheduler or the supervisor can say.
    return "signal", STOPPED, f"{name} from outside, seen first on {host}", EndCause.STOPPED


ALL_NODES = 16
"""Number of nodes up to which a table has a row for each node; in a larger table, only nodes with a
problem or a note have a row."""
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
