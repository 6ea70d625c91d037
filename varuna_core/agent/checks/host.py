"""Checks of the node itself: paths, program, disks, clock, limits, name, interface, port."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time

from varuna_core.agent.meeting.network import (
    find_route,
    is_own_address,
    is_port_free,
    list_interfaces,
    resolve,
)
from varuna_core.agent.meeting.opening import advise_hosts_line
from varuna_core.agent.setup.container import fill_in
from varuna_core.agent.setup.site import CheckResult, Site
from varuna_core.records.nodes import FAIL, OK, WARN

GIB = 2**30
MIB = 2**20
FULL_BYTES = 4 * MIB
"""Free bytes below which a disk counts as full: a run's own small files may need more."""
LOW_BYTES = 10**9
LOW_SHARE = 0.01
CLOCK_S = 5.0
LOW_FILES = 4096
MOST_FILES = 2**20
LOW_SHM = GIB


def check_paths(site: Site) -> list[CheckResult]:
    """Check that the image, the sources of mounts and the plan's other required paths exist."""
    paths = site.plan.must_exist
    missing = []
    for path in paths:
        try:
            os.stat(path)
        except OSError as error:
            missing.append(f"{path}: {error.strerror}")
    if missing:
        more = f" (and {len(missing) - 5} more)" if len(missing) > 5 else ""
        return [CheckResult(FAIL, "; ".join(missing[:5]) + more)]
    return [CheckResult(OK, f"{len(paths)} there")]


def check_program(site: Site) -> list[CheckResult]:
    """Check that the program is executable, unless it is in a container."""
    if site.plan.containers:
        return []
    asked = {**site.plan.env, **site.node.group.env}
    path = asked.get("PATH") or site.plan.read_path(site.env)
    commands = {site.plan.command_of(rank)[:1] for rank in site.node.ranks}
    words = {word for command in commands | {site.plan.command[:1]} for word in command}
    results = []
    for word in sorted(fill_in(sorted(words), site)):
        # A path with a slash counts from the working folder, a bare word from PATH.
        word = os.path.join(site.plan.workdir, word) if "/" in word else word
        found = shutil.which(word, path=path)
        results.append(
            CheckResult(FAIL, f"{word} does not exist or is not executable")
            if found is None
            else CheckResult(OK, found)
        )
    return results


def check_disk(site: Site) -> list[CheckResult]:
    folders = {"run folder": str(site.run.path), "TMPDIR": site.env.get("TMPDIR", "/tmp")}
    return [result for name, path in folders.items() for result in _check_disk(name, path)]


def check_clock(site: Site) -> list[CheckResult]:
    """Compare this clock with the file server's, since exit times are compared across nodes."""
    probe = site.attempt.path / "nodes" / f".clock.{site.node.index}"
    try:
        probe.write_bytes(b"")
        before = time.time()
        os.utime(probe)  # an NFS server takes its own time here
        after = time.time()
        stamped = os.stat(probe).st_mtime
    except OSError as error:
        return [CheckResult(FAIL, f"the run folder cannot be written to: {error.strerror}")]
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)
    offset = round(stamped - (before + after) / 2, 3)
    site.facts.clock_offset_s = offset
    if abs(offset) > CLOCK_S + (after - before):
        return [CheckResult(WARN, f"{offset:+.1f} s off the file server's clock; check NTP")]
    return [CheckResult(OK, f"{offset:+.3f} s from the file server")]


def check_limits(site: Site) -> list[CheckResult]:
    """Raise the soft limits, which the ranks inherit, up to the hard limits."""
    raised = {
        name: _raise_limit(number)
        for name, number in (
            ("open files", resource.RLIMIT_NOFILE),
            ("locked memory", resource.RLIMIT_MEMLOCK),
        )
    }
    text = ", ".join(f"{name} {_say_limit(value)}" for name, value in raised.items())
    files = raised["open files"]
    if files is not None and files != resource.RLIM_INFINITY and files < LOW_FILES:
        return [CheckResult(WARN, f"{text}: many data workers need more open files")]
    return [CheckResult(OK, text)]


def check_shared_memory(site: Site) -> list[CheckResult]:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return [CheckResult(WARN, "/dev/shm is missing: data workers and NCCL need it")]
    free = stat.f_bavail * stat.f_frsize
    text = f"/dev/shm has {free / GIB:.1f} GiB free"
    if free < LOW_SHM and site.node.group.ranks > 1:
        return [CheckResult(WARN, f"{text}: data workers may die with a bus error (SIGBUS)")]
    return [CheckResult(OK, text)]


def _check_disk(name: str, path: str) -> list[CheckResult]:
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return [CheckResult(FAIL, f"{name} {path}: {error.strerror}")]
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    text = f"{name} {path} has {free / GIB:.1f} GiB free"
    if free < FULL_BYTES:
        return [CheckResult(FAIL, f"{name} {path} is full: {free / MIB:.1f} MiB are free")]
    # File systems without fixed inodes say 0 of 0.
    if stat.f_files and stat.f_favail == 0:
        return [CheckResult(FAIL, f"{name} {path} has no inodes left")]
    if free < LOW_BYTES or free < LOW_SHARE * size:
        return [CheckResult(WARN, text)]
    if stat.f_files and stat.f_favail < LOW_SHARE * stat.f_files:
        return [CheckResult(WARN, f"{name} {path} has only {stat.f_favail} inodes left")]
    return [CheckResult(OK, text)]


def _raise_limit(number: int) -> int | None:
    try:
        soft, hard = resource.getrlimit(number)
        wanted = hard
        if number == resource.RLIMIT_NOFILE:
            # Some programs try to close every possible number; a billion takes them minutes.
            wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != wanted and soft != resource.RLIM_INFINITY:
            resource.setrlimit(number, (wanted, hard))
        return resource.getrlimit(number)[0]
    except (OSError, ValueError):
        return None


def _say_limit(value: int | None) -> str:
    if value is None:
        return "unknown"
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_interface(site: Site) -> list[CheckResult]:
    """Choose the interface by the route to the master, unless the plan names an interface."""
    route = find_route(site.master.address)
    site.facts.address = route.source if route else None
    asked = site.node.group.interface
    if asked is not None:
        site.facts.interface = asked
        if asked not in list_interfaces():
            have = ", ".join(list_interfaces())
            return [CheckResult(FAIL, f"the plan names {asked}, but this node has {have}")]
        return [CheckResult(OK, f"{asked}, as the plan says")]
    if route is None:
        return [CheckResult(FAIL, f"no route to the master at {site.master.address}")]
    site.facts.interface = route.interface
    return [CheckResult(OK, f"{route.interface}, the route to {site.master.address}")]


def check_name(site: Site) -> list[CheckResult]:
    """Warn if the host name resolves to loopback, which gloo would publish to other nodes."""
    plan = site.plan
    # Over ssh loopback is published where every machine of the list is this one.
    is_one_host = plan.scheduler == "ssh" and site.master.address.startswith("127.")
    if plan.scheduler == "local" or plan.num_nodes == 1 or is_one_host:
        return []
    name = os.uname().nodename
    found = resolve(name)
    if any(not address.startswith("127.") for address in found):
        return [CheckResult(OK, f"{name} is {', '.join(found)}")]
    route = find_route(site.master.address)
    advice = advise_hosts_line(name, found, route.source if route else None)
    # The ranks are given an interface, so they do not ask for the name.
    return [CheckResult(WARN, advice)]


def check_master(site: Site) -> list[CheckResult]:
    """Check on node 0 that the address published by `open` is its own and the port is free."""
    if site.node.index != 0:
        return []
    master = site.master
    if not is_own_address(master.address):
        what = f"{master.address} was published by {master.host}, but rank 0 runs on {site.host}"
        advice = "the batch script must run on the first node of the first group"
        return [CheckResult(FAIL, f"{what}: {advice}")]
    if is_port_free(master.port, heeds_names=site.plan.port is None):
        return [CheckResult(OK, f"{master.address}:{master.port} is free here")]
    if site.plan.port is None:
        return [CheckResult(OK, f"{master.address}; {master.port} is taken, a new port is picked")]
    what = f"port {master.port} has been taken since it was tested"
    return [CheckResult(FAIL, f"{what}: free it, or set cluster.port to auto")]
