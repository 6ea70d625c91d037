"""Checks of the node's name, interface and, on node 0, the master's address and port."""

from __future__ import annotations

import os

from varuna_core.agent.meeting.network import (
    find_route,
    is_own_address,
    is_port_free,
    list_interfaces,
    resolve,
)
from varuna_core.agent.meeting.opening import advise_hosts_line
from varuna_core.agent.setup.site import Finding, Site
from varuna_core.records.nodes import FAIL, OK, WARN


def check_interface(site: Site) -> list[Finding]:
    """By the route to the master: names differ between kinds of node, and docker0 misleads."""
    route = find_route(site.master.address)
    site.facts.address = route.source if route else None
    asked = site.node.group.interface
    if asked is not None:
        site.facts.interface = asked
        if asked not in list_interfaces():
            have = ", ".join(list_interfaces())
            return [Finding(FAIL, f"the plan says {asked}, this node has {have}")]
        return [Finding(OK, f"{asked}, as the plan says")]
    if route is None:
        return [Finding(FAIL, f"no route to the master at {site.master.address}")]
    site.facts.interface = route.interface
    return [Finding(OK, f"{route.interface}, the route to {site.master.address}")]


def check_name(site: Site) -> list[Finding]:
    """A name that resolves to loopback makes gloo tell the others an address of their own."""
    plan = site.plan
    # Over ssh loopback is published where every machine of the list is this one.
    is_one_host = plan.scheduler == "ssh" and site.master.address.startswith("127.")
    if plan.scheduler == "local" or plan.num_nodes == 1 or is_one_host:
        return []
    name = os.uname().nodename
    found = resolve(name)
    if any(not address.startswith("127.") for address in found):
        return [Finding(OK, f"{name} is {', '.join(found)}")]
    route = find_route(site.master.address)
    advice = advise_hosts_line(name, found, route.source if route else None)
    # The ranks are given an interface, so they do not ask for the name.
    return [Finding(WARN, advice)]


def check_master(site: Site) -> list[Finding]:
    """Rank 0 listens on the address that `open` published: it must be this node's own."""
    if site.node.index != 0:
        return []
    master = site.master
    if not is_own_address(master.address):
        what = f"{master.address} was published by {master.host}, but rank 0 runs on {site.host}"
        advice = "the batch script must run on the first node of the first group"
        return [Finding(FAIL, f"{what}: {advice}")]
    if is_port_free(master.port):
        return [Finding(OK, f"{master.address}:{master.port} is free here")]
    if site.plan.port is None:
        return [Finding(OK, f"{master.address}; {master.port} was taken since, another is picked")]
    what = f"port {master.port} was taken since it was tested"
    return [Finding(FAIL, f"{what}: free it, or set cluster.port to auto")]
