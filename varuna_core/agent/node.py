"""`node`: one node's part of an attempt, from srun to the end of its ranks.

wait for master ─► preflight ─► container ─► wait for all ─► go ─► ranks ─► exit code
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from varuna_core.agent.checks.modules import build_question, check_modules
from varuna_core.agent.checks.preflight import inspect_node
from varuna_core.agent.meeting.meeting import (
    Go,
    check_stop,
    explain_not_ready,
    gather_reports,
    judge_not_ready,
    render_table,
    say_go,
    wait_for_go,
    wait_for_master,
)
from varuna_core.agent.meeting.opening import pick_port
from varuna_core.agent.meeting.watch import write_beat
from varuna_core.agent.processes.process import own_environment
from varuna_core.agent.processes.signals import Signals
from varuna_core.agent.setup.container import (
    choose_container,
    clean_container,
    hold_lease,
    leave_step,
    prepare_container,
)
from varuna_core.agent.setup.forked_ranks import Origin
from varuna_core.agent.setup.holder import hold_container
from varuna_core.agent.setup.ranks import Meeting, build_rank
from varuna_core.agent.setup.site import Refusal, Site, compute_index, host_name
from varuna_core.agent.supervise import Supervisor
from varuna_core.records.exits import NOT_READY
from varuna_core.records.files import write_atomic
from varuna_core.records.nodes import WARN, Check, NodeReport, write_report
from varuna_core.records.plan import Plan
from varuna_core.records.record import append_event
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import RunFolder


def run_node(
    run: RunFolder,
    plan: Plan,
    number: int,
    given_index: int | None,
    tether: int | None = None,
    origin: Origin | None = None,
) -> int:
    """Run this node's share of the attempt, and return its exit code."""
    signals = Signals()
    if tether is not None:
        signals.hold(tether, plan.timing.lost_s)
    node = plan.node(compute_index(plan, given_index, os.environ))
    host = host_name(plan, node.index, os.environ, os.uname().nodename)
    attempt = run.attempt(number)
    site: Site | None = None
    try:
        master = wait_for_master(attempt, signals, plan, host)
        site = Site(
            plan=plan,
            node=node,
            run=run,
            attempt=attempt,
            master=master,
            host=host,
            env=own_environment(),
            stopping=lambda: signals.ending is not None,
        )
        container, problems = choose_container(site)
        if container is not None and container.step:
            site = replace(site, env=leave_step(site.env, os.path.isdir))
        site = replace(site, container=container)
        with contextlib.ExitStack() as leases:
            report = make_ready(site, signals, problems, leases)
            go = meet(site, signals, report, leases)
            site = replace(site, master=replace(master, port=go.port, hosts=go.hosts))
            return Supervisor(site, signals, meeting_of(site), origin).run()
    except Refusal as refusal:
        if refusal.code == NOT_READY and attempt.path.is_dir():
            with contextlib.suppress(OSError):
                write_stop(
                    attempt,
                    "not-ready",
                    NOT_READY,
                    refusal.reason,
                    node=refusal.node,
                    cause=refusal.cause,
                )
        if site is not None:
            write_beat(attempt, node.index, host, 1, "done", {"ranks_alive": 0})
        raise
    finally:
        if site is not None and site.container is not None:
            clean_container(site, site.container, plan.timing.grace_s)


def make_ready(
    site: Site, signals: Signals, problems: list[Check], leases: contextlib.ExitStack
) -> NodeReport:
    """Run the preflight and prepare the container; the report is written before and after that."""
    container = site.container
    report = inspect_node(site).with_check(*problems)
    start = build_rank(site.plan, site.node, 0, meeting_of(site), site.env, container)
    report = replace(report, environment=start.entering)
    if container is not None and report.ok:
        write_report(site.attempt, report)
        report = report.with_check(*prepare_container(site, container))
        if report.ok and container.lease is not None:
            leases.enter_context(hold_lease(site, container.lease))
        if report.ok and container.hold:
            env = {name: start.env[name] for name in start.env if name != container.enter_as}
            check = leases.enter_context(hold_container(site, container, env))
            report = report.with_check(check)
        check_stop(site.attempt, signals, site.master.opened, site.host)
    if report.ok and site.plan.modules:
        question = build_question(site.plan)
        asked = build_rank(question, site.node, 0, meeting_of(site), site.env, container)
        report = report.with_check(*check_modules(site, asked))
    report = replace(report, ready=True)
    # Before the report, so that a node lost right after go has beaten once, and can be missed.
    write_beat(site.attempt, site.node.index, site.host, 0, "ready", {"ranks_alive": 0})
    write_report(site.attempt, report)
    return report


def meet(site: Site, signals: Signals, report: NodeReport, leases: contextlib.ExitStack) -> Go:
    """Wait until every node is ready to start its ranks; return the decision of node 0 to start,
    with the port and the hosts of the ranks. Raise a Refusal if a node is not ready."""
    plan, attempt, opened = site.plan, site.attempt, site.master.opened
    if site.node.index != 0:
        return wait_for_go(attempt, signals, plan, site.host, opened)
    reports = {**gather_reports(attempt, signals, plan, site.host, opened), 0: report}
    table = render_table(plan, attempt.number, reports)
    print(table, end="", flush=True)
    write_atomic(attempt.preflight, table)
    problem = explain_not_ready(plan, reports)
    failed = [item.host for item in reports.values() if not item.ok]
    append_event(
        site.run.events(),
        "preflight",
        attempt=attempt.number,
        ok=problem is None,
        nodes=len(reports),
        warnings=sum(bool(item.problems(WARN)) for item in reports.values()),
        failed=failed,
    )
    if problem is not None:
        node = failed[0] if failed else None
        raise Refusal(NOT_READY, problem, node, judge_not_ready(reports))
    # Preparing a container may take half an hour; another process may have taken the port by now.
    port, holder = pick_port(plan, attempt.number, None, site.master.port)
    leases.enter_context(holder)
    go = Go(port, tuple(reports[index].host for index in range(plan.num_nodes)))
    say_go(attempt, opened, go)
    return go


def meeting_of(site: Site) -> Meeting:
    return Meeting(
        run=site.run.path,
        attempt=site.attempt.number,
        trace=site.attempt.trace(0).parent,
        address=site.master.address,
        port=site.master.port,
        interface=site.facts.interface,
        host=site.host,
        job_id=site.master.job_id,
        hosts=site.master.hosts,
        visible_variable=site.accelerator.visible_variable,
    )
