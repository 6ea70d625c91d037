"""`open`: make an attempt's folder and publish where its ranks meet.

Runs on the first node of the first group, before srun; that node holds rank 0, so a port tested
here is free where the master will listen. The other jobs of a split run only make their folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import zlib
from typing import Mapping

from varuna_core.agent.meeting.network import (
    find_outside_address,
    hold_port,
    is_own_address,
    list_addresses,
    list_ports,
    resolve,
)
from varuna_core.agent.setup.site import Refusal, group_of, host_name
from varuna_core.facts.cause import EndCause
from varuna_core.records.exits import NOT_READY
from varuna_core.records.files import is_listed, write_json
from varuna_core.records.plan import Plan
from varuna_core.records.record import append_event
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import OPENED, RunFolder


def open_attempt(
    run: RunFolder,
    plan: Plan,
    number: int,
    group_name: str | None,
    job_id: str | None,
    given_address: str | None = None,
) -> None:
    group = group_of(plan, group_name)
    attempt = run.attempt(number)
    attempt.make()
    facts = {"attempt": number, "job_id": job_id, "group": group_name}
    if group is not None:
        if is_listed(attempt.outcome):  # split jobs are not requeued: this try cannot come again
            raise Refusal(NOT_READY, "the run is over: its first job ended before this job began")
        append_event(run.events(group), "started", **facts)
        return
    if attempt.master.exists() or attempt.outcome.exists():
        attempt.set_aside()
    host = host_name(plan, 0, os.environ, os.uname().nodename)
    try:
        address = choose_address(plan, host, os.environ, given_address)
        port, holder = pick_port(plan, number, job_id)
        holder.close()  # the agent of this node takes it, or another
    except Refusal as refusal:
        # Left where `close` and the jobs of other groups will find the reason.
        cause = EndCause.START_FAILED
        write_stop(attempt, "not-ready", refusal.code, refusal.reason, node=host, cause=cause)
        raise
    master = {"address": address, "port": port, "host": host, "attempt": number, "job_id": job_id}
    write_json(attempt.master, {**master, "time": round(time.time(), 6)})
    append_event(run.events(), "started", **facts, host=host, address=address, port=port)
    print(f"attempt {number}: {OPENED} {address}:{port} on {host}", file=sys.stderr)


def choose_address(plan: Plan, host: str, env: Mapping[str, str], given: str | None = None) -> str:
    """Return this host's address for the other nodes; `given` is used if it is an own address."""
    if plan.scheduler == "local":
        return "127.0.0.1"
    for believed in resolve(given) if given else []:
        if is_own_address(believed):
            return believed
    named = resolve(host) or resolve(os.uname().nodename)
    outside = [item for item in named if not item.startswith("127.") and is_own_address(item)]
    if outside:
        return outside[0]
    if plan.num_nodes == 1:
        return "127.0.0.1"
    address = find_outside_address(_scheduler_addresses(env))
    advice = advise_hosts_line(host, named, address)
    if address is None and plan.scheduler == "ssh" and _has_loopback_alone():
        return "127.0.0.1"  # nobody else could be reached over ssh from here either
    if address is None:
        raise Refusal(NOT_READY, f"this host has no address that other nodes can reach: {advice}")
    print(f"warning: {advice}; using {address} of the routed interface", file=sys.stderr)
    return address


def _has_loopback_alone() -> bool:
    return all(address.startswith("127.") for address in list_addresses())


def advise_hosts_line(host: str, named: list[str], address: str | None) -> str:
    """Describe what is wrong with the host's name, and the line of /etc/hosts that fixes it."""
    found = f"resolves to {', '.join(named)}" if named else "does not resolve"
    line = f"{address or '<its address>'} {host}"
    return f"on {host} its name {found}; put the line '{line}' in its /etc/hosts instead"


MOST_HEEDED = 50
"""Number of ports that are tried while names reserved by other users are respected; after that the
ports themselves are tested."""


def pick_port(
    plan: Plan, attempt: int, job_id: str | None, wanted: int | None = None
) -> tuple[int, socket.socket]:
    """Return a port for the master, preferably `wanted`, and a socket that, while open, keeps other
    runs from the port."""
    ports = [*list_ports(_number_of(plan, job_id), attempt)]
    if plan.port is not None:
        ports = [plan.port]
    elif wanted is not None:
        ports = [wanted, *ports]
    # Another user may hold the names of all ports: then the ports themselves decide.
    for heeds_names, few in ((True, ports[:MOST_HEEDED]), (False, ports)):
        for port in few:
            holder = hold_port(port, heeds_names=heeds_names)
            if holder is not None:
                return port, holder
    if plan.port is not None:
        what = f"port {plan.port} is in use on this host"
        raise Refusal(NOT_READY, f"{what}: set cluster.port to auto, or free it")
    raise Refusal(NOT_READY, "every port from 61000 to 65499 is in use on this host")


def _number_of(plan: Plan, job_id: str | None) -> int:
    """Return a number that differs between jobs; tasks of an array, `4711_3`, may share a host."""
    digits = re.match(r"(\d+)(?:_(\d+))?", job_id or "")
    if digits is None:
        return zlib.crc32(plan.run.encode())
    return int(digits[1]) + int(digits[2] or 0)


def _scheduler_addresses(env: Mapping[str, str]) -> list[str]:
    """Return addresses on the cluster's network for which to look up a route."""
    found: list[str] = []
    for name in ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SUBMIT_HOST", "SSH_CONNECTION"):
        with contextlib.suppress(KeyError, IndexError):
            host = env[name].split()[0]  # of an ssh connection, its other end
            found += [item for item in resolve(host) if not item.startswith("127.")]
    return found
