"""Making a lab and removing it, whole or half.

What will be made is recorded first; removal follows the record alone. It refuses to start over
anything unrecorded and to remove anything unrecorded. All data is thrown away at removal, hence
KILL without ceremony.
"""

import contextlib
import ipaddress
import logging
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict

from tests.cluster import config, daemons, network, processes
from tests.cluster.record import (
    LabPaths,
    LabRecord,
    hold_lock,
    load_record,
    read_boot_id,
    save_record,
)
from tests.cluster.shape import Group, LabError, Shape
from tests.cluster.states import IDLE, wait_node_states

logger = logging.getLogger("vjob.lab")

IDLE_TIMEOUT_S = 60
CHANGE_TIMEOUT_S = 120
"""How long to wait for another process that starts or stops the lab."""


def build_shape(record: LabRecord) -> Shape:
    return Shape(groups=record.build_groups(), subnet=ipaddress.IPv4Network(record.subnet))


def read_host_name() -> str:
    """The controller's name: slurmctld compares it with the machine's."""
    return socket.gethostname().split(".")[0]


def is_up(paths: LabPaths, record: LabRecord) -> bool:
    """Tell if all daemons of the record run, save those that a test has stopped on purpose."""
    return (
        record.boot_id == read_boot_id()
        and record.phase == "up"
        and not find_dead_daemons(paths, record)
    )


def find_dead_daemons(paths: LabPaths, record: LabRecord) -> list[str]:
    names = ["munged", *(daemons.ACCOUNTING_DAEMONS if record.accounting else ())]
    if not record.controller_stopped:
        names.append("slurmctld")
    return [name for name in names if not daemons.is_running(paths, name)]


def start_lab(paths: LabPaths, groups: tuple[Group, ...], *, accounting: bool) -> LabRecord:
    """Start it all; a failure, Ctrl-C included, undoes what was made."""
    shape = Shape(groups=groups, subnet=network.pick_subnet())
    links = network.build_link_names(shape.nodes)
    network.refuse_foreign_links(links)
    database = (config.DBD_PORT, config.DATABASE_PORT) if accounting else ()
    network.refuse_ports_in_use((config.CONTROLLER_PORT, *database))
    record = LabRecord(
        boot_id=read_boot_id(),
        subnet=str(shape.subnet),
        groups=[asdict(group) for group in groups],
        accounting=accounting,
        links=links,
    )
    save_record(paths, record)
    try:
        _start_daemons(shape, paths, accounting=accounting)
    except BaseException:
        remove_lab(paths, record)
        raise
    record.phase = "up"
    save_record(paths, record)
    return record


def _start_daemons(shape: Shape, paths: LabPaths, *, accounting: bool) -> None:
    daemons.write_files(shape, paths, host_name=read_host_name(), accounting=accounting)
    with _timed(f"network {shape.subnet}, bridge {network.BRIDGE}"):
        network.create_network(shape, paths)
    with _timed("munged"):
        daemons.start_munged(paths)
    if accounting:
        with _timed("mariadbd"):
            daemons.start_database(paths)
        with _timed("slurmdbd"):
            daemons.start_slurmdbd(paths)
    with _timed("slurmctld"):
        daemons.start_slurmctld(paths)
    with _timed(f"slurmd on {', '.join(shape.nodes)}, until idle"):
        for node in shape.nodes:
            daemons.start_slurmd(node, paths)
        wait_node_states(paths, shape.nodes, IDLE, IDLE_TIMEOUT_S)


def stop_lab(paths: LabPaths | None = None) -> bool:
    """Stop whatever lab is recorded, whole or half; False when there is none."""
    paths = paths or LabPaths()
    with hold_lock("change", timeout_s=CHANGE_TIMEOUT_S):
        record = load_record(paths)
        if record:
            remove_lab(paths, record)
        return record is not None


def remove_lab(paths: LabPaths, record: LabRecord) -> None:
    """Undo what the record says; after a reboot only the files are left to remove."""
    if record.boot_id == read_boot_id():
        for node in build_shape(record).nodes:
            processes.kill_namespace(paths.namespace(node))
        for pid_record in daemons.list_pid_records(paths):
            processes.end(processes.read_record(pid_record))
        network.remove_network(record.links, paths)
    if mounts := network.list_mounts(paths.folder):
        raise LabError(f"still mounted below {paths.folder}: {', '.join(mounts)}; not removed")
    # The record goes last: a removal that is cut off can be run again.
    for entry in paths.folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry != paths.record:
            entry.unlink()
    paths.record.unlink()
    paths.folder.rmdir()


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    logger.info("  %4.1f s  %s", time.monotonic() - start, what)
