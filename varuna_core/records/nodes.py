"""nodes/<index>.json: the results of preflight on a node, and the node's address."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from varuna_core.records.files import as_whole, expect_types, list_names, read_json, write_json
from varuna_core.records.runfolder import AttemptFolder

OK = "ok"
WARN = "warn"
FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One item that preflight checked."""

    name: str
    status: str
    """Result of the check: ok, warn or fail."""
    text: str


@dataclass(frozen=True)
class NodeReport:
    """The state of a node before its ranks start."""

    index: int
    host: str
    group: str
    address: str | None
    """The node's own address on the route to the master."""
    interface: str | None
    gpus: int | None
    """GPUs that the ranks will see; None if they were not counted."""
    clock_offset_s: float | None
    """The file server's clock minus this node's."""
    opened: float
    """The time in the master.json that the node uses."""
    ready: bool
    """False while the container is being prepared."""
    checks: tuple[Check, ...]
    environment: tuple[str, ...]
    """Names of the variables that are passed to the container; never their values."""

    @property
    def ok(self) -> bool:
        return all(check.status != FAIL for check in self.checks)

    def problems(self, status: str) -> list[Check]:
        return [check for check in self.checks if check.status == status]

    def with_check(self, *checks: Check) -> NodeReport:
        return replace(self, checks=self.checks + checks)


def write_report(attempt: AttemptFolder, report: NodeReport) -> None:
    write_json(attempt.node_report(report.index), dict(asdict(report), ok=report.ok))


def read_report(attempt: AttemptFolder, index: int) -> NodeReport | None:
    value = read_json(attempt.node_report(index))
    return _parse_report(value) if isinstance(value, dict) else None


def read_reports(attempt: AttemptFolder) -> dict[int, NodeReport]:
    """Read the reports that have been written, by node index."""
    names = list_names(attempt.node_report(0).parent)
    numbers = (as_whole(name[:-5]) for name in names)
    indices = sorted(index for index in numbers if index is not None)
    found = {index: read_report(attempt, index) for index in indices}
    return {index: report for index, report in found.items() if report is not None}


def _parse_report(value: dict[str, Any]) -> NodeReport | None:
    rest = {key: item for key, item in value.items() if key != "ok"}
    try:
        checks = tuple(expect_types(Check(**check)) for check in rest["checks"])
        environment = tuple(rest["environment"])
        made = NodeReport(**{**rest, "checks": checks, "environment": environment})
        return expect_types(made)
    except (KeyError, TypeError, ValueError):
        return None  # written by another version: as good as missing
