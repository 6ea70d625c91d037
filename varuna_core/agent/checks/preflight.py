"""Preflight: checks that are cheap before the ranks start and save hours of a failed run.

All checks run side by side against one deadline, so a dead mount holds up its own check only.
"""

from __future__ import annotations

import threading
import time
from typing import Sequence

from varuna_core.agent.checks.gpus import check_gpus
from varuna_core.agent.checks.host import (
    check_clock,
    check_disk,
    check_interface,
    check_limits,
    check_master,
    check_name,
    check_paths,
    check_program,
    check_shared_memory,
)
from varuna_core.agent.setup.site import Checker, CheckResult, Site
from varuna_core.records.nodes import FAIL, WARN, Check, NodeReport

CHECK_S = 40.0

CHECKS: tuple[tuple[str, Checker], ...] = (
    ("gpus", check_gpus),
    ("paths", check_paths),
    ("program", check_program),
    ("disk", check_disk),
    ("clock", check_clock),
    ("limits", check_limits),
    ("shared memory", check_shared_memory),
    ("host name", check_name),
    ("interface", check_interface),
    ("master", check_master),
)


def inspect_node(site: Site) -> NodeReport:
    """Run all checks; return the node's report, which does not say `ready` yet, since the container
    is still to be prepared."""
    checks = run_checks(site, CHECKS, CHECK_S)
    return NodeReport(
        index=site.node.index,
        host=site.host,
        group=site.node.group.name,
        address=site.facts.address,
        interface=site.facts.interface,
        gpus=site.facts.gpus,
        clock_offset_s=site.facts.clock_offset_s,
        opened=site.master.opened,
        ready=False,
        checks=tuple(checks),
        environment=(),
    )


def run_checks(site: Site, checks: Sequence[tuple[str, Checker]], timeout_s: float) -> list[Check]:
    found: dict[str, list[CheckResult]] = {}

    def look(name: str, check: Checker) -> None:
        try:
            found[name] = check(site)
        except Exception as error:  # a check that breaks is a result, not the end of the agent
            found[name] = [CheckResult(WARN, f"could not check: {type(error).__name__}: {error}")]

    threads = [
        threading.Thread(target=look, args=item, name=f"check {item[0]}", daemon=True)
        for item in checks
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    late = [CheckResult(FAIL, f"no answer within {timeout_s:g} s: is a mount or driver dead?")]
    return [
        Check(name, result.status, result.text)
        for name, _ in checks
        for result in found.get(name, late)
    ]
